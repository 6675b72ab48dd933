"""Which waiting requests run next. Pure bookkeeping: knows no tensors and runs nothing."""

from __future__ import annotations

from collections.abc import Sequence

from worldkv.engine.session import Job
from worldkv.models.base import EncodeRequest, ForwardRequest

PATIENCE_S = 2.0  # a request without a deadline, or with a far one, is due this long after it began to wait


class Scheduler:
    """Picks the request that is due first, and whatever can share its batch within `max_rows` and `max_tokens`.

    A served tick's next request begins to wait anew, so ticks without deadlines take turns, and a tick that joins
    waits for one batch. None starves behind deadlines: a request is due after PATIENCE_S at the latest, and a tick not
    before it was submitted.
    """

    def __init__(self, max_rows: int, max_tokens: int) -> None:
        self.max_rows, self.max_tokens = max_rows, max_tokens

    def next_batch(self, jobs: Sequence[Job]) -> list[Job]:
        """Jobs whose requests run together now; empty when none waits. The one due first is always among them."""
        waiting = sorted((job for job in jobs if job.request is not None), key=_due)
        batch: list[Job] = []
        num_rows = num_tokens = 0
        for job in waiting:
            rows, tokens = _size(job)
            fits = num_rows + rows <= self.max_rows and num_tokens + tokens <= self.max_tokens
            if not batch or (fits and _shares_batch(batch[0].request, job.request)):
                batch.append(job)
                num_rows, num_tokens = num_rows + rows, num_tokens + tokens
        return batch


def _due(job: Job) -> tuple[float, int]:
    due = job.waiting_since + PATIENCE_S
    if job.deadline is not None:
        due = min(due, max(job.deadline, job.submitted))  # a stream of ticks that come late would go first for ever
    return due, job.sequence


def _size(job: Job) -> tuple[int, int]:
    """Rows and current tokens of a request; an encoder's call counts as one row."""
    if isinstance(job.request, ForwardRequest):
        return len(job.request.rows), sum(row.context.num_tokens for row in job.request.rows)
    return 1, 0


def _shares_batch(first: object, other: object) -> bool:
    if isinstance(first, ForwardRequest):
        return isinstance(other, ForwardRequest)
    assert isinstance(first, EncodeRequest)
    return isinstance(other, EncodeRequest) and first.encoder == other.encoder
