"""The choice of the requests that run next. Pure bookkeeping: knows no tensors and runs nothing."""

from __future__ import annotations

from collections.abc import Iterable

from worldkv.engine.session import Tick
from worldkv.models.base import BatchLimits, Encode, Forward, OnHost, Request

PATIENCE_S = 2.0  # a tick without a deadline, or with a far one, is due this long after it was submitted
LEAST_URGENT_S = 20.0  # a request without a session is due this long after


class Scheduler:
    """Picks the request of the tick that is due first, and whatever else can share its batch within `limits`.

    The earliest deadline goes first through all its stages: a GPU that is full gains nothing by more rows, so ticks
    that were all carried on together would all end late, and stay together. A tick without a deadline is due after
    PATIENCE_S, and one that is submitted past its deadline when it was submitted, so nobody starves behind others.
    """

    def __init__(self, limits: BatchLimits) -> None:
        self.limits = limits

    def next_batch(self, ticks: Iterable[Tick]) -> list[Tick]:
        """Ticks whose requests run together now; empty when none waits. The one due first is always among them."""
        waiting = sorted((t for t in ticks if t.request is not None and not isinstance(t.request, OnHost)), key=_due)
        batch: list[Tick] = []
        num_rows = num_tokens = 0
        for tick in waiting:
            rows, tokens = _size(tick.request)
            num_rows, num_tokens = num_rows + rows, num_tokens + tokens
            if not batch or (_shares_batch(batch[0].request, tick.request) and self._fits(num_rows, num_tokens, batch)):
                batch.append(tick)
            else:
                num_rows, num_tokens = num_rows - rows, num_tokens - tokens
        return batch

    def _fits(self, num_rows: int, num_tokens: int, batch: list[Tick]) -> bool:
        if isinstance(batch[0].request, Encode):
            return len(batch) < self.limits.max_encodes
        return num_rows <= self.limits.max_rows and num_tokens <= self.limits.max_tokens


def _due(tick: Tick) -> tuple[float, int]:
    due = tick.submitted + (PATIENCE_S if tick.session is not None else LEAST_URGENT_S)
    if tick.deadline is not None:
        due = min(due, max(tick.deadline, tick.submitted))
    return due, tick.sequence


def _size(request: Request | None) -> tuple[int, int]:
    """Rows and current tokens of a forward."""
    if isinstance(request, Forward):
        return len(request.rows), sum(row.context.num_tokens + row.num_draft_tokens for row in request.rows)
    return 0, 0


def _shares_batch(first: object, other: object) -> bool:
    if isinstance(first, Forward):
        return isinstance(other, Forward)
    assert isinstance(first, Encode)
    return isinstance(other, Encode) and first.encoder == other.encoder
