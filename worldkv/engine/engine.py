"""The engine: sessions over one model and one cache, and the promise that a failed tick changed nothing.

Callers submit ticks from any thread and get futures; the worker's thread runs them in shared forwards. Histories can
be frozen, restored and forked at a commit, for the price of block ids. Knows no robot and no wire.
"""

from __future__ import annotations

import itertools
import logging
import time
import uuid
from collections import Counter
from collections.abc import Generator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from worldkv.engine.admission import Admission, Capacity
from worldkv.engine.residency import Residency
from worldkv.engine.scheduler import Scheduler
from worldkv.engine.session import Job, Session, Snapshot
from worldkv.engine.stats import BlockMap, Stats
from worldkv.engine.worker import Worker
from worldkv.errors import BadRequest, SessionBusy, SessionEnded, SessionNotFound, SnapshotNotFound
from worldkv.kv.cache import KVCache
from worldkv.models.base import EncodeRequest, ForwardRequest

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineConfig:
    """`num_blocks` None: what `max_sessions` sessions can ever hold; if that is None too, all that the GPU has free.

    `max_rows` and `max_tokens` bound one forward (a tick's own rows always fit). `batch_invariant` runs each row's
    products at its own fixed shape, so a session's output is bit-equal whoever shares its batches. `park_when_full`
    moves the longest idle sessions to host memory where another needs their room; `park_after_s` those idle for longer.
    A batch that runs longer than `stuck_after_s` makes the engine unready.
    """

    block_size: int = 128
    max_sessions: int | None = 4
    num_blocks: int | None = None
    attention: str = "auto"
    max_rows: int = 64
    max_tokens: int = 32768
    batch_invariant: bool = False
    park_when_full: bool = True
    park_after_s: float | None = None
    stuck_after_s: float = 120.0

    def __post_init__(self) -> None:
        for name in ("max_sessions", "max_rows", "max_tokens", "stuck_after_s"):
            if getattr(self, name) is not None and getattr(self, name) <= 0:
                raise ValueError(f"{name}: expected more than 0, got {getattr(self, name)}")


@dataclass(frozen=True)
class Health:
    ready: bool
    reason: str


class Engine:
    """`model` is a WorldModel over `cache`. Its thread starts at once; `shutdown` ends it."""

    def __init__(self, model: Any, cache: KVCache, config: EngineConfig | None = None) -> None:
        self.model = model
        self.cache = cache
        self.config = config or EngineConfig()
        self.sessions: dict[str, Session] = {}
        self._snapshots: set[Snapshot] = set()
        self.admission = Admission(cache.spec, cache.pool.num_blocks, cache.storage.block_size)
        self._rows_per_forward: Counter[int] = Counter()
        self._worker = Worker(self, Scheduler(self.config.max_rows, self.config.max_tokens), self.config.stuck_after_s)
        self._condition = self._worker.condition
        self._residency = Residency(cache, self.admission, self.sessions, self._condition, self.config.park_when_full)

    # sessions, from any thread

    def open_session(self, session_id: str | None = None) -> Session:
        """A new, empty session. Raises AdmissionRefused, before any work, when its worst case does not fit.

        Where others have to be parked or closed first, it waits for the forward under way.
        """
        self._worker.require_running()
        admit = partial(self._admit, session_id)
        with self._condition:
            if self._residency.has_room():
                return admit()
        return self._worker.wait(self._worker.errand(admit))

    def submit(self, session: Session, inputs: Any, deadline: float | None = None) -> Future[Any]:
        """Start a tick; the future brings a TickResult, or the error after which the session is as it was before.

        `deadline`, in seconds of time.perf_counter, moves the tick ahead of those with later ones. A parked session
        comes back first, as soon as ticks that came earlier leave room; the future brings AdmissionRefused where
        none of them will.
        """
        with self._condition:
            self._worker.require_running()
            self._require_open(session)
            if session.job is not None and session.job.cancelled is None:  # a cancelled one ends before this begins
                self._require_free(session)
            job = Job(session, inputs, deadline=deadline)
            job.future.set_running_or_notify_cancel()
            session.job = job
            self._worker.submit(job)
            return job.future

    def reset(self, session: Session) -> None:
        """Drop the session's history; a tick in flight ends with SessionEnded. Returns at once."""
        with self._condition:
            self._require_open(session)
            self._cancel(session, "was reset")
            session.num_resets_due += 1
            self._worker.errand(lambda: self._do_reset(session))

    def close(self, session: Session, reason: str) -> None:
        """End the session and give its blocks back; safe twice. Returns at once, a tick in flight is cancelled."""
        with self._condition:
            if session.closed_for is not None:
                return
            session.closed_for = reason
            self.sessions.pop(session.session_id, None)
            self._cancel(session, f"was closed: {reason}")
            self._worker.errand(lambda: self._do_close(session))
        logger.info("session %s closed: %s", session.session_id, reason)

    # histories, from any thread; these wait for the forward under way

    def snapshot(self, session: Session) -> Snapshot:
        """Freeze the session at its last commit; no K/V is copied. `release` it when it is no longer needed.

        Raises SessionBusy during a tick, AdmissionRefused where the blocks it may come to hold alone do not fit.
        """
        with self._condition:
            self._worker.require_running()
            self._require_free(session)
            done = self._worker.errand(lambda: self._do_snapshot(session))
        return self._worker.wait(done)

    def restore(self, session: Session, snapshot: Snapshot) -> None:
        """Rewind the session to a snapshot, which stays valid, also past evictions. Raises SessionBusy in a tick."""
        with self._condition:
            self._worker.require_running()
            self._require_free(session)
            done = self._worker.errand(lambda: self._do_restore(session, snapshot))
        self._worker.wait(done)

    def fork(self, source: Session | Snapshot, session_id: str | None = None) -> Session:
        """A new session that continues from a session's last commit, or from a snapshot; no K/V is copied.

        It is charged like any other, since it may come to need a full window of its own.
        """
        with self._condition:
            self._worker.require_running()
            if isinstance(source, Session):
                self._require_free(source)
            done = self._worker.errand(lambda: self._do_fork(source, session_id))
        return self._worker.wait(done)

    def release(self, snapshot: Snapshot) -> None:
        """Give a snapshot's references back; safe twice. Returns at once."""
        self._worker.errand(lambda: self._do_release(snapshot))

    def park(self, session: Session) -> None:
        """Move an idle session's K/V to host memory; its next tick brings it back, bit for bit. Safe twice."""
        with self._condition:
            self._worker.require_running()
            self._require_free(session)
            done = self._worker.errand(lambda: self._residency.park(session))
        self._worker.wait(done)

    # the whole

    def warm_up(self) -> None:
        """Raises unless the engine's thread answers; the policy's synthetic ticks warm the model itself."""
        self._worker.require_running()
        self._worker.wait(self._worker.errand(lambda: None))

    def health(self) -> Health:
        trouble = self._worker.trouble()
        return Health(trouble is None, trouble or "ready")

    def capacity(self) -> Capacity:
        """What a session costs, in blocks and bytes, and how many more fit."""
        storage = self.cache.storage
        bytes_per_block = self.cache.spec.bytes_per_block(storage.block_size, storage.dtype.itemsize)
        with self._condition:
            return self.admission.capacity(bytes_per_block, len(self.sessions), self.cache.pool.num_used)

    def block_map(self) -> BlockMap:
        """Who holds which block. Waits for the forward under way; takes as long as the blocks in use are many."""
        return self._worker.wait(self._worker.errand(self._do_block_map))

    def stats(self) -> Stats:
        """Counters for metrics; reading them stops nothing."""
        store, pool = self.cache.conditioning, self.cache.pool
        with self._condition:
            sessions = list(self.sessions.values())
        parked = [session.parked for session in sessions if session.parked is not None]
        return Stats(
            self.cache.backend.name,
            dict(self._rows_per_forward),
            store.num_hits,
            store.num_misses,
            len(sessions),
            len(parked),
            sum(kv.num_bytes for kv in parked),
            sum(session.job is not None for session in sessions),
            pool.num_used,
            pool.num_shared,
            self.cache.storage.num_copied,
        )

    def shutdown(self) -> None:
        """End all ticks with EngineStopped, close all sessions and snapshots, stop the thread; safe twice."""
        self._worker.stop()
        for session in list(self.sessions.values()):
            session.closed_for = "the engine was shut down"
            session.kv.close()
        for snapshot in self._snapshots:
            snapshot.kv.release()
        self.sessions.clear()
        self._snapshots.clear()

    def _require_open(self, session: Session) -> None:
        if session.closed_for is not None:
            raise SessionNotFound(f"session {session.session_id} is closed ({session.closed_for})")

    def _require_free(self, session: Session) -> None:
        self._require_open(session)
        if session.job is not None:
            raise SessionBusy(f"session {session.session_id} has a tick in flight")

    def _cancel(self, session: Session, how: str) -> None:
        if session.job is not None:
            session.job.cancelled = SessionEnded(f"session {session.session_id} {how}, during this tick")

    # what the worker's thread runs

    def execute(self, requests: list[Any]) -> list[Any]:
        """One batch: encoders, or a forward whose commits become history once all of it has been computed."""
        first = requests[0]
        alone = self.config.batch_invariant
        if isinstance(first, EncodeRequest):
            payloads = [request.payload for request in requests]
            groups = [[payload] for payload in payloads] if alone else [payloads]
            return [output for group in groups for output in self.model.encode(first.encoder, group)]
        assert isinstance(first, ForwardRequest)
        rows = [row for request in requests for row in request.rows]
        forwards = [[row] for row in rows] if alone else [rows]
        outputs = [output for forward in forwards for output in self.model.forward(self.cache, forward)]
        self._rows_per_forward.update(len(forward) for forward in forwards)
        iterator = iter(outputs)
        return [self._commit(request, list(itertools.islice(iterator, len(request.rows)))) for request in requests]

    def _commit(self, request: ForwardRequest, outputs: list[Any]) -> list[Any] | Exception:
        """The request's outputs, its committing rows being history now; or why that failed, for its tick alone."""
        try:
            for row in request.rows:
                if row.context.commits:
                    row.context.commit()
        except Exception as error:
            return error
        return outputs

    def begin(self, job: Job) -> Generator[Any, Any, Any] | None:
        session = job.session
        if not self._residency.bring_back_for(job):
            return None
        job.rollback = session.kv.snapshot()
        program: Generator[Any, Any, Any] = self.model.tick(self.cache, session.kv, session.rollout, job.inputs)
        return program

    def end(self, job: Job, result: Any, error: BaseException | None) -> Any:
        kv = job.session.kv
        kv.abandon()
        if error is not None and job.rollback is not None:
            kv.restore(job.rollback)
        if job.rollback is not None:
            job.rollback.release()
        if error is not None:
            return None
        result, job.session.rollout = result
        pool = self.cache.pool
        return replace(result, timings=job.milliseconds(), blocks_used=pool.num_used, blocks_free=pool.num_free)

    def between_batches(self) -> None:
        """Park what has been idle for too long."""
        if self.config.park_after_s is None:
            return
        limit = time.monotonic() - self.config.park_after_s
        for session in list(self.sessions.values()):
            if session.last_used < limit and session.parked is None:
                try:
                    self._residency.park(session)
                except (MemoryError, RuntimeError) as error:  # no host memory, say: nothing has changed
                    session.last_used = time.monotonic()  # later
                    logger.warning("session %s is not parked: %s", session.session_id, error)

    def _admit(self, session_id: str | None, keep: Session | None = None) -> Session:
        """Off the worker's thread only where there is room: nothing may be parked then."""
        with self._condition:
            session_id = session_id or uuid.uuid4().hex
            if session_id in self.sessions:
                raise BadRequest(f"session_id: {session_id!r} is open already; close it or choose another")
            session = Session(session_id)
            self._residency.admit(session, keep)
            session.kv, session.rollout = self.cache.create_state(), self.model.new_rollout()
            self.sessions[session_id] = session
            return session

    def _do_block_map(self) -> BlockMap:
        pool = self.cache.pool
        with self._condition:
            sessions = dict(self.sessions)
        return BlockMap(
            pool.num_blocks,
            {
                name: {branch: list(state.table.blocks) for branch, state in session.kv.branches.items()}
                for name, session in sessions.items()
                if session.parked is None
            },
            self.cache.conditioning.blocks(),
            sorted({block for snapshot in self._snapshots for block in snapshot.kv.blocks()}),
            [block for block in range(pool.num_blocks) if pool.num_references(block) > 1],
        )

    def _do_reset(self, session: Session) -> None:
        with self._condition:
            session.num_resets_due -= 1
        session.parked = None
        session.kv.reset()
        session.rollout = self.model.new_rollout()

    def _do_close(self, session: Session) -> None:
        session.parked = None
        session.kv.close()
        with self._condition:
            self.admission.refund(session.num_blocks_charged)

    def _do_snapshot(self, session: Session) -> Snapshot:
        self._residency.bring_back(session)
        kv = session.kv.snapshot()
        try:
            with self._condition:
                self._residency.park_others(kv.num_blocks, {session})
                charge = self.admission.charge(kv.num_blocks, "a snapshot")
        except BaseException:
            kv.release()
            raise
        snapshot = Snapshot(kv, session.rollout, charge)
        self._snapshots.add(snapshot)
        return snapshot

    def _do_restore(self, session: Session, snapshot: Snapshot) -> None:
        self._require_valid(snapshot)
        self._residency.charge(session)
        session.parked = None
        session.kv.restore(snapshot.kv)
        session.rollout = snapshot.rollout

    def _do_fork(self, source: Session | Snapshot, session_id: str | None) -> Session:
        parent = source if isinstance(source, Session) else None
        if parent is not None:
            self._residency.bring_back(parent)
        session = self._admit(session_id, keep=parent)
        try:
            if isinstance(source, Snapshot):
                self._do_restore(session, source)
            else:
                frozen = source.kv.snapshot()
                session.kv.restore(frozen)
                session.rollout = source.rollout
                frozen.release()
        except BaseException:
            self.close(session, "its fork failed")
            raise
        return session

    def _do_release(self, snapshot: Snapshot) -> None:
        if snapshot.kv.is_released:
            return
        snapshot.kv.release()
        self._snapshots.discard(snapshot)
        with self._condition:
            self.admission.refund(snapshot.num_blocks_charged)

    def _require_valid(self, snapshot: Snapshot) -> None:
        if snapshot.kv.is_released:
            raise SnapshotNotFound("this snapshot was released; take a new one")
