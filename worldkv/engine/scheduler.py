"""Which waiting requests run next. Pure bookkeeping: knows no tensors and runs nothing."""

from __future__ import annotations

from collections.abc import Sequence

from worldkv.engine.session import Job
from worldkv.models.world_model import EncodeRequest, ForwardRequest


class Scheduler:
    """Picks what has waited longest, and whatever can share its batch, up to `max_rows` rows.

    A tick that was served goes to the back, so one that joins waits for at most one batch of each kind in between.
    """

    def __init__(self, max_rows: int) -> None:
        if max_rows < 1:
            raise ValueError(f"max_rows: expected at least 1, got {max_rows}")
        self.max_rows = max_rows

    def next_batch(self, jobs: Sequence[Job]) -> list[Job]:
        """Jobs whose requests run together now; empty when none waits. The longest waiting always is among them."""
        waiting = sorted((job for job in jobs if job.request is not None), key=lambda job: job.waiting_since)
        if not waiting:
            return []
        batch, num_rows = [waiting[0]], _num_rows(waiting[0])
        for job in waiting[1:]:
            if _shares_batch(batch[0].request, job.request) and num_rows + _num_rows(job) <= self.max_rows:
                batch.append(job)
                num_rows += _num_rows(job)
        return batch


def _num_rows(job: Job) -> int:
    return len(job.request.rows) if isinstance(job.request, ForwardRequest) else 1


def _shares_batch(first: object, other: object) -> bool:
    if isinstance(first, ForwardRequest):
        return isinstance(other, ForwardRequest)
    assert isinstance(first, EncodeRequest)
    return isinstance(other, EncodeRequest) and first.encoder == other.encoder
