"""The engine's thread: it advances ticks, runs what they ask for in shared batches, and does errands in between.

All cache state is changed on this thread alone. Knows ticks as generators and batches as lists of requests; what a
request means is the `execute` it is given. Never imports torch.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from typing import Any, Protocol, TypeVar

from worldkv.engine.scheduler import Scheduler
from worldkv.engine.session import Job
from worldkv.errors import EngineStopped

logger = logging.getLogger(__name__)
T = TypeVar("T")
_IDLE_TURN_S = 0.5


class Host(Protocol):
    """Whose ticks the worker runs. All are called on the worker's thread."""

    def execute(self, requests: list[Any]) -> list[Any]:
        """Run requests of one kind together. Raises, with no effect, if that fails as a whole.

        Else a result for each; an Exception in a result's place is that tick's own failure.
        """
        ...

    def begin(self, job: Job) -> Generator[Any, Any, Any] | None:
        """Take the rollback point of a tick and return its program; None: not before another tick has ended."""
        ...

    def between_batches(self) -> None:
        """Housekeeping, at least once every _IDLE_TURN_S seconds."""
        ...

    def end(self, job: Job, result: Any, error: BaseException | None) -> Any:
        """Settle a tick's state: keep it, or go back where it began on an error. Returns the result to hand out."""
        ...


class Worker:
    """Starts at once; `stop` ends every tick in flight with EngineStopped."""

    def __init__(self, host: Host, scheduler: Scheduler, stuck_after_s: float) -> None:
        self.condition = threading.Condition()  # guards what follows, and whatever else the host guards with it
        self._host = host
        self._scheduler = scheduler
        self._stuck_after_s = stuck_after_s
        self._jobs: list[Job] = []  # in the order they came
        self._errands: list[Callable[[], None]] = []
        self._sequence = itertools.count()
        self._stopping = False
        self._fault: BaseException | None = None
        self._batch_started: float | None = None
        self._thread = threading.Thread(target=self._run, name="worldkv-engine", daemon=True)
        self._thread.start()

    # any thread

    def trouble(self) -> str | None:
        """Why no work can be taken now: shut down, failed, or stuck in one batch; None when all is well."""
        if self._fault is not None:
            return f"engine failed: {self._fault}"
        if self._stopping or not self._thread.is_alive():
            return "engine is shut down"
        started = self._batch_started
        if started is not None and time.monotonic() - started > self._stuck_after_s:
            return f"engine is stuck: one batch has run for {time.monotonic() - started:.0f} s"
        return None

    def require_running(self) -> None:
        trouble = self.trouble()
        if trouble is not None:
            raise EngineStopped(trouble)

    def submit(self, job: Job) -> None:
        """Start a tick's program between two batches. The condition must be held."""
        self._jobs.append(job)
        self.condition.notify_all()

    def errand(self, change: Callable[[], T]) -> Future[T]:
        """Do `change` on the worker's thread between two batches; at once when called from there."""
        done: Future[T] = Future()

        def run() -> None:
            if not done.set_running_or_notify_cancel():
                return
            try:
                done.set_result(change())
            except Exception as error:
                done.set_exception(error)

        if threading.current_thread() is self._thread:
            run()
            return done
        with self.condition:
            self._errands.append(run)
            self.condition.notify_all()
        return done

    def wait(self, done: Future[T]) -> T:
        """What an errand returns. Raises EngineStopped once the engine is stuck; then the errand is never done."""
        while not wait({done}, _IDLE_TURN_S).done:
            trouble = self.trouble()
            if trouble is not None and done.cancel():
                raise EngineStopped(trouble)
        return done.result()

    def stop(self) -> None:
        """Safe to call twice, and from the worker's own thread."""
        with self.condition:
            self._stopping = True
            self.condition.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # the worker's thread

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except BaseException as error:  # our own bug: be unready and say so, rather than hang every caller
            self._fault = error
            logger.exception("the engine's thread failed")
        with self.condition:
            self._stopping = True
            jobs, errands = list(self._jobs), self._errands
        for job in jobs:
            stopped = EngineStopped(f"the engine stopped during this tick ({self.trouble()})")
            try:
                self._finish(job, error=stopped)
            except Exception:  # whatever ended the thread may end this too: the caller must not wait for ever
                logger.exception("a tick could not be settled")
                with suppress(Exception):
                    job.future.set_exception(stopped)
        for errand in errands:
            errand()

    def _turn(self) -> bool:
        """Errands, cancelled ticks, new ticks, then one batch. False when the worker is to stop."""
        with self.condition:
            self.condition.wait_for(lambda: self._stopping or self._jobs or self._errands, _IDLE_TURN_S)
            if self._stopping:
                return False
            jobs = list(self._jobs)
            errands, self._errands = self._errands, []
        for job in jobs:
            if job.cancelled is not None:
                self._finish(job, error=job.cancelled)
        for errand in errands:
            errand()
        for job in jobs:
            if job.program is None and not job.future.done():  # after the errands: one may concern its session
                self._start(job)
        batch = self._scheduler.next_batch([job for job in jobs if job.request is not None and not job.future.done()])
        if batch:
            self._run_batch(batch)
        self._host.between_batches()
        return True

    def _start(self, job: Job) -> None:
        started = time.perf_counter()
        try:
            job.program = self._host.begin(job)
        except Exception as error:
            self._finish(job, error=error)
        if job.program is not None:
            job.started = started
            self._advance(job, partial(_send, result=None))

    def _advance(self, job: Job, resume: Callable[[Any], Any]) -> None:
        """Resume the tick's program up to its next request, its result, or its failure."""
        job.request = None
        try:
            job.request = resume(job.program)
            job.waiting_since, job.sequence = time.perf_counter(), next(self._sequence)
        except StopIteration as stop:
            self._finish(job, result=stop.value)
        except Exception as error:
            self._finish(job, error=error)

    def _run_batch(self, batch: list[Job]) -> None:
        started = time.perf_counter()
        self._batch_started = time.monotonic()
        try:
            results = self._host.execute([job.request for job in batch])
        except Exception as error:
            self._survive(batch, error)
            return
        finally:
            self._batch_started = None
        seconds = time.perf_counter() - started
        for job, result in zip(batch, results, strict=True):
            stage = job.request.stage
            job.stage_seconds[stage] = job.stage_seconds.get(stage, 0.0) + seconds
            self._advance(job, partial(_throw if isinstance(result, Exception) else _send, result=result))

    def _survive(self, batch: list[Job], error: Exception) -> None:
        """A batch failed. Alone, its tick fails; in company, each runs again alone, so only the guilty does."""
        if len(batch) > 1:
            for job in batch:
                self._run_batch([job])
            return
        self._advance(batch[0], partial(_throw, result=error))

    def _finish(self, job: Job, result: Any = None, error: BaseException | None = None) -> None:
        if job.program is not None:
            job.program.close()
        result = self._host.end(job, result, error)
        with self.condition:
            self._jobs.remove(job)
            if job.session.job is job:
                job.session.job = None
                job.session.last_used = time.monotonic()
        with suppress(Exception):  # a done callback of the caller's must not end the engine
            if error is not None:
                job.future.set_exception(error)
            else:
                job.future.set_result(result)


def _throw(program: Generator[Any, Any, Any], result: Exception) -> Any:
    return program.throw(result)


def _send(program: Generator[Any, Any, Any], result: Any) -> Any:
    return program.send(result)
