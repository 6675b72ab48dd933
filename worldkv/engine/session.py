"""A session, one episode of one robot, as the engine keeps it; its tick in flight; a frozen session. No tensors."""

from __future__ import annotations

import time
from collections.abc import Generator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from worldkv.kv.state import KVSnapshot, KVState
from worldkv.kv.transfer import ParkedKV


@dataclass(eq=False)
class Session:
    """State of one episode. Its K/V and rollout are touched by the engine's thread only."""

    session_id: str
    num_blocks_charged: int = 0
    kv: KVState = field(init=False)
    rollout: Any = None
    closed_for: str | None = None
    job: Job | None = None  # the tick in flight
    parked: ParkedKV | None = None  # its history on the host; then it is charged nothing
    last_used: float = field(default_factory=time.monotonic)
    num_resets_due: int = 0  # told to forget, and not yet done so

    def idles(self, since: float) -> bool:
        """No tick of it runs, nor waits to begin from before `since`, in seconds of time.perf_counter."""
        return self.job is None or (self.job.program is None and self.job.submitted > since)

    @property
    def num_chunks(self) -> int:
        """Committed since its window began, here or on the host; none from the moment it is told to forget them."""
        return 0 if self.num_resets_due else _num_chunks(self.kv if self.parked is None else self.parked)


@dataclass(frozen=True, eq=False)
class Snapshot:
    """A session frozen at a commit: history, conditioning, and all else its next tick depends on."""

    kv: KVSnapshot
    rollout: Any
    num_blocks_charged: int

    @property
    def num_chunks(self) -> int:
        return _num_chunks(self.kv)


def _num_chunks(kv: KVState | KVSnapshot | ParkedKV) -> int:
    return max((branch.num_chunks for branch in kv.branches.values()), default=0)


@dataclass(eq=False)
class Job:
    """One tick in flight: its generator, what it asks for next, and the way back should it fail."""

    session: Session
    inputs: Any
    deadline: float | None = None  # seconds of time.perf_counter
    future: Future[Any] = field(default_factory=Future)
    submitted: float = field(default_factory=time.perf_counter)
    started: float | None = None
    program: Generator[Any, Any, Any] | None = None
    request: Any = None  # what the tick waits for
    waiting_since: float = 0.0
    sequence: int = 0  # of the request, over all ticks
    rollback: KVSnapshot | None = None
    cancelled: BaseException | None = None
    stage_seconds: dict[str, float] = field(default_factory=dict)

    def milliseconds(self) -> dict[str, float]:
        """Time in the queue, per stage, and in all. A stage's time is that of the batches this tick took part in."""
        now = time.perf_counter()
        started = self.started if self.started is not None else now
        timings = {"queue": started - self.submitted, "encode": 0.0, "commit": 0.0, "denoise": 0.0}
        timings |= self.stage_seconds
        timings["total"] = now - self.submitted
        return {stage: seconds * 1e3 for stage, seconds in timings.items()}
