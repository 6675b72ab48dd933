"""The engine: many sessions, one thread that runs the model, and the promise that a failed tick changed nothing.

Callers submit ticks from any thread and get futures. The engine's thread starts their programs, collects what they ask
for, runs it in shared forwards, commits, and answers. All cache state is touched by that thread alone.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
import uuid
from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from worldkv.engine.admission import Admission
from worldkv.engine.scheduler import Scheduler
from worldkv.engine.session import Job, Session
from worldkv.errors import BadRequest, EngineStopped, SessionBusy, SessionEnded, SessionNotFound
from worldkv.kv.cache import KVCache
from worldkv.models.world_model import EncodeRequest, ForwardRequest

logger = logging.getLogger(__name__)
_CLOSE_WAIT_S = 10.0  # how long opening waits for sessions that are just being closed


@dataclass(frozen=True)
class EngineConfig:
    """`num_blocks` None: as many as `max_sessions` sessions can ever hold."""

    block_size: int = 128
    max_sessions: int = 4
    num_blocks: int | None = None
    attention: str = "reference"
    max_rows: int = 16

    def __post_init__(self) -> None:
        if self.max_sessions < 1:
            raise ValueError(f"max_sessions: expected at least 1, got {self.max_sessions}")


@dataclass(frozen=True)
class Health:
    ready: bool
    reason: str


class Engine:
    """`model` is a WorldModel over `cache`. Starts its thread at once; `shutdown` ends it."""

    def __init__(self, model: Any, cache: KVCache, config: EngineConfig | None = None) -> None:
        self.model = model
        self.cache = cache
        self.config = config or EngineConfig()
        self.sessions: dict[str, Session] = {}
        self.admission = Admission(cache.spec, cache.pool.num_blocks, cache.storage.block_size)
        self._scheduler = Scheduler(self.config.max_rows)
        self._sequence = itertools.count()
        self._condition = threading.Condition()  # guards everything below, and `sessions`
        self._jobs: list[Job] = []  # in the order they came; the engine's thread removes them
        self._errands: list[Callable[[], None]] = []  # changes of cache state to make between forwards
        self._num_closing = 0
        self._stopping = False
        self._fault: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="worldkv-engine", daemon=True)
        self._thread.start()

    # callers' side, any thread

    def open_session(self, session_id: str | None = None) -> Session:
        """A new, empty session. Raises AdmissionRefused, before any work, when its worst case does not fit."""
        with self._condition:
            self._require_running()
            session_id = session_id or uuid.uuid4().hex
            if session_id in self.sessions:
                raise BadRequest(f"session_id: {session_id!r} is open already; close it or choose another")
            self._condition.wait_for(lambda: self.admission.has_room() or not self._num_closing, _CLOSE_WAIT_S)
            charge = self.admission.charge()
            session = Session(session_id, self.cache.create_state(), self.model.new_rollout(), charge)
            self.sessions[session_id] = session
            return session

    def submit(self, session: Session, inputs: Any) -> Future[Any]:
        """Start a tick; the future brings a TickResult, or the error after which the session is as it was before."""
        with self._condition:
            self._require_running()
            if session.closed_for is not None:
                raise SessionNotFound(f"session {session.session_id} is closed ({session.closed_for})")
            if session.job is not None:
                raise SessionBusy(f"session {session.session_id} has a tick in flight")
            job = Job(session, inputs)
            job.future.set_running_or_notify_cancel()
            session.job = job
            self._jobs.append(job)
            self._condition.notify_all()
            return job.future

    def reset(self, session: Session) -> None:
        """Drop the session's history; a tick in flight ends with SessionEnded. Returns at once."""
        with self._condition:
            if session.closed_for is not None:
                raise SessionNotFound(f"session {session.session_id} is closed ({session.closed_for})")
            self._cancel(session, "was reset")
            self._errands.append(lambda: self._do_reset(session))
            self._condition.notify_all()

    def close(self, session: Session, reason: str) -> None:
        """End the session and give its blocks back; safe twice. Returns at once, a tick in flight is cancelled."""
        with self._condition:
            if session.closed_for is not None:
                return
            session.closed_for = reason
            self.sessions.pop(session.session_id, None)
            self._cancel(session, f"was closed: {reason}")
            self._num_closing += 1
            self._errands.append(lambda: self._do_close(session))
            self._condition.notify_all()
        logger.info("session %s closed: %s", session.session_id, reason)

    def warm_up(self) -> None:
        """Raises unless the engine's thread answers; the policy's synthetic ticks warm the model itself."""
        done: Future[None] = Future()
        with self._condition:
            self._require_running()
            self._errands.append(lambda: done.set_result(None))
            self._condition.notify_all()
        done.result()

    def health(self) -> Health:
        if self._fault is not None:
            return Health(False, f"engine failed: {self._fault}")
        if self._stopping or not self._thread.is_alive():
            return Health(False, "engine is shut down")
        return Health(True, "ready")

    def shutdown(self) -> None:
        """End all ticks with EngineStopped and stop the thread; safe twice."""
        with self._condition:
            self._stopping = True
            self._condition.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _require_running(self) -> None:
        if self._stopping or self._fault is not None:
            raise EngineStopped(self.health().reason)

    def _cancel(self, session: Session, how: str) -> None:
        if session.job is not None:
            session.job.cancelled = SessionEnded(f"session {session.session_id} {how}, during this tick")

    # the engine's thread

    def _run(self) -> None:
        try:
            while self._step():
                pass
        except BaseException as error:  # our own bug: be unready and say so, rather than hang every caller
            self._fault = error
            logger.exception("the engine's thread failed")
        with self._condition:
            self._stopping = True
            jobs, errands, sessions = list(self._jobs), self._errands, list(self.sessions.values())
        for job in jobs:
            self._finish(job, error=EngineStopped(f"the engine stopped during this tick ({self.health().reason})"))
        for errand in errands:
            errand()
        for session in sessions:
            session.closed_for = "the engine was shut down"
            session.kv.close()

    def _step(self) -> bool:
        """One turn: errands, cancelled ticks, new ticks, one batch. False when the engine is to stop."""
        with self._condition:
            self._condition.wait_for(lambda: self._stopping or self._jobs or self._errands)
            if self._stopping:
                return False
            jobs = list(self._jobs)
            errands, self._errands = self._errands, []
        for job in jobs:
            if job.cancelled is not None:
                self._finish(job, error=job.cancelled)
            elif job.program is None and not errands:
                self._start(job)
        for errand in errands:
            errand()
        batch = self._scheduler.next_batch([job for job in jobs if not job.future.done()])
        if batch:
            self._run_batch(batch)
        return True

    def _start(self, job: Job) -> None:
        session = job.session
        job.started = time.perf_counter()
        job.rollback = session.kv.snapshot()
        job.program = self.model.tick(self.cache, session.kv, session.rollout, job.inputs)
        self._advance(job, partial(_send, result=None))

    def _advance(self, job: Job, resume: Callable[[Any], Any]) -> None:
        """Resume the tick's program up to its next request, its result, or its failure."""
        job.request = None
        try:
            job.request = resume(job.program)
            job.waiting_since = next(self._sequence)
        except StopIteration as stop:
            result, job.session.rollout = stop.value
            self._finish(job, result=result)
        except Exception as error:
            self._finish(job, error=error)

    def _run_batch(self, batch: list[Job]) -> None:
        started = time.perf_counter()
        try:
            results = self._execute([job.request for job in batch])
        except Exception as error:
            self._survive(batch, error)
            return
        seconds = time.perf_counter() - started
        for job, result in zip(batch, results, strict=True):
            stage = job.request.stage
            job.stage_seconds[stage] = job.stage_seconds.get(stage, 0.0) + seconds
            self._advance(job, partial(_send, result=result))

    def _execute(self, requests: list[Any]) -> list[Any]:
        """Run requests of one kind together and make their commits history. All succeed or none has an effect."""
        first = requests[0]
        if isinstance(first, EncodeRequest):
            outputs: list[Any] = self.model.encode(first.encoder, [request.payload for request in requests])
            return outputs
        assert isinstance(first, ForwardRequest)
        rows = [row for request in requests for row in request.rows]
        outputs = self.model.forward(self.cache, rows)
        for row in rows:
            if row.context.commits:
                row.context.commit()
        iterator = iter(outputs)
        return [list(itertools.islice(iterator, len(request.rows))) for request in requests]

    def _survive(self, batch: list[Job], error: Exception) -> None:
        """A batch failed. Alone, its tick fails; in company, each runs again alone, so only the guilty does."""
        if len(batch) > 1:
            for job in batch:
                self._run_batch([job])
            return
        self._advance(batch[0], lambda program: program.throw(error))

    def _finish(self, job: Job, result: Any = None, error: BaseException | None = None) -> None:
        """End a tick: on an error go back to where it began, then answer."""
        session = job.session
        if job.program is not None:
            job.program.close()
        session.kv.abandon()
        if job.rollback is not None:
            if error is not None:
                session.kv.restore(job.rollback)
            job.rollback.release()
            job.rollback = None
        if error is None:
            pool = self.cache.pool
            result = replace(result, timings=job.milliseconds(), blocks_used=pool.num_used, blocks_free=pool.num_free)
        with self._condition:
            if job in self._jobs:
                self._jobs.remove(job)
            if session.job is job:
                session.job = None
        with suppress(Exception):  # a done callback of the caller's must not end the engine
            if error is not None:
                job.future.set_exception(error)
            else:
                job.future.set_result(result)

    def _do_reset(self, session: Session) -> None:
        session.kv.reset()
        session.rollout = self.model.new_rollout()

    def _do_close(self, session: Session) -> None:
        session.kv.close()
        with self._condition:
            self._num_closing -= 1
            self.admission.refund(session.num_blocks_charged)
            self._condition.notify_all()


def _send(program: Generator[Any, Any, Any], result: Any) -> Any:
    return program.send(result)
