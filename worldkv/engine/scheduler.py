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
        waiting = sorted(filter(_waits, ticks), key=_due)
        batch: list[Tick] = []
        size = 0
        for tick in waiting:
            size_with_it = size + _size(tick.request)
            if not batch or (
                _shares_batch(batch[0].request, tick.request) and size_with_it <= self._most(tick.request)
            ):
                batch.append(tick)
                size = size_with_it
        return batch

    def due(self, ticks: Iterable[Tick]) -> float | None:
        """When the one that `next_batch` would serve first is due; None: nobody waits."""
        return min((_due(tick)[0] for tick in ticks if _waits(tick)), default=None)

    def _most(self, request: Request | None) -> int:
        return self.limits.max_rows if isinstance(request, Forward) else self.limits.max_encodes


def _waits(tick: Tick) -> bool:
    return tick.request is not None and not isinstance(tick.request, OnHost)


def _due(tick: Tick) -> tuple[float, int]:
    due = tick.submitted + (PATIENCE_S if tick.session is not None else LEAST_URGENT_S)
    if tick.deadline is not None:
        due = min(due, max(tick.deadline, tick.submitted))
    return due, tick.sequence


def _size(request: Request | None) -> int:
    """Rows of a forward; an encoder's call is one."""
    return len(request.rows) if isinstance(request, Forward) else 1


def _shares_batch(first: object, other: object) -> bool:
    if isinstance(first, Forward):
        return isinstance(other, Forward)
    assert isinstance(first, Encode)
    return isinstance(other, Encode) and first.encoder == other.encoder
