"""The choice of the requests that run next. Pure bookkeeping: knows no tensors and runs nothing."""

from __future__ import annotations

from collections.abc import Iterable

from worldkv.engine.session import Tick
from worldkv.models.base import Encode, Forward, OnHost, Request

PATIENCE_S = 2.0  # a request without a deadline, or with a far one, is due this long after it began to wait
LEAST_URGENT_S = 20.0  # a request without a session is due this long after


class Scheduler:
    """Picks the request that is due first, and whatever can share its batch within `max_rows` and `max_tokens`.

    A served tick's next request begins to wait anew, so ticks without deadlines take turns, and a tick that joins
    waits for one batch. None starves behind deadlines: a request is due after PATIENCE_S at the latest, and a tick not
    before it was submitted, otherwise sessions that always submit past their deadline would starve the rest.
    """

    def __init__(self, max_rows: int, max_tokens: int) -> None:
        self.max_rows, self.max_tokens = max_rows, max_tokens

    def next_batch(self, ticks: Iterable[Tick]) -> list[Tick]:
        """Ticks whose requests run together now; empty when none waits. The one due first is always among them."""
        waiting = sorted((t for t in ticks if t.request is not None and not isinstance(t.request, OnHost)), key=_due)
        batch: list[Tick] = []
        num_rows = num_tokens = 0
        for tick in waiting:
            rows, tokens = _size(tick.request)
            fits = num_rows + rows <= self.max_rows and num_tokens + tokens <= self.max_tokens
            if not batch or (fits and _shares_batch(batch[0].request, tick.request)):
                batch.append(tick)
                num_rows, num_tokens = num_rows + rows, num_tokens + tokens
        return batch


def _due(tick: Tick) -> tuple[float, int]:
    due = tick.waiting_since + (PATIENCE_S if tick.session is not None else LEAST_URGENT_S)
    if tick.deadline is not None:
        due = min(due, max(tick.deadline, tick.submitted))
    return due, tick.sequence


def _size(request: Request | None) -> tuple[int, int]:
    """Rows and current tokens of a request; an encoder's call counts as one row."""
    if isinstance(request, Forward):
        return len(request.rows), sum(row.context.num_tokens for row in request.rows)
    return 1, 0


def _shares_batch(first: object, other: object) -> bool:
    if isinstance(first, Forward):
        return isinstance(other, Forward)
    assert isinstance(first, Encode)
    return isinstance(other, Encode) and first.encoder == other.encoder
