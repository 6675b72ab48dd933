"""The core: one thread owns the sessions, the cache and the books, and needs no lock. Read `step` first.

Others put messages into its inbox and get futures; what they read of it (statistics, sessions) are values that it
publishes after each turn. A tick that fails, is reset or closed leaves its session at its last commit. Knows no robot,
no wire, and of a model only its programs.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import TypeVar

from worldkv.engine.admission import Admission, Capacity
from worldkv.engine.config import EngineConfig
from worldkv.engine.executor import Executor
from worldkv.engine.messages import Inbox
from worldkv.engine.operations import Operations
from worldkv.engine.residency import Claim, Residency
from worldkv.engine.scheduler import Scheduler
from worldkv.engine.session import (
    QUEUE,
    Ahead,
    Session,
    SessionHandle,
    SessionInfo,
    Snapshot,
    SnapshotHandle,
    Tick,
    TickInfo,
    TickReply,
)
from worldkv.engine.sharing import SharedDevice
from worldkv.engine.states import States
from worldkv.engine.stats import Stats
from worldkv.errors import EngineStopped, ModelError, SessionEnded
from worldkv.kv.cache import KVCache
from worldkv.kv.state import KVState
from worldkv.models.base import Encode, Forward, OnHost, Outcome, Program, Request, WorksAhead, WorldModel

logger = logging.getLogger(__name__)
_IDLE_TURN_S = 0.5

Observer = Callable[[KVState, Request, object], None]  # told of a program's request that has run, and its result
Model = WorldModel[object, object, object]
T = TypeVar("T")


@dataclass(frozen=True)
class Published:
    """A state of the books, for everybody to read at any time."""

    stats: Stats
    capacity: Capacity
    sessions: Mapping[SessionHandle, SessionInfo]


class EngineCore:
    """`run` it on a thread of its own."""

    def __init__(
        self,
        model: Model,
        cache: KVCache,
        executor: Executor,
        config: EngineConfig,
        observer: Observer | None = None,
        device: SharedDevice | None = None,
    ) -> None:
        self.model, self.cache, self.config, self.executor = model, cache, config, executor
        self.observer = observer
        self._device = device or SharedDevice()  # with nobody else
        self.inbox = Inbox(self._device.wake)
        self.sessions: dict[SessionHandle, Session] = {}
        self.names: dict[str, SessionHandle] = {}  # of open sessions
        self.snapshots: dict[SnapshotHandle, Snapshot] = {}
        self.ticks: list[Tick] = []  # the running ones, oldest first
        states = States(model, cache)
        self.admission = Admission(
            cache.spec, cache.pool.num_blocks, cache.storage.block_size, states.blocks_per_session
        )
        self.residency = Residency(
            cache, self.admission, states, self.sessions.values(), self.on_host, self.touch, config
        )
        self.scheduler = Scheduler(config.limits(cache.spec))
        self.operations = Operations(self)
        self.stopping = False
        self.ended = False
        self.fault: BaseException | None = None
        self.busy_since: float | None = None  # since when the turn has worked, in seconds of time.monotonic
        self._sequence = itertools.count()
        self._serial = itertools.count()
        self._answers: list[Callable[[], None]] = []  # to be given after the next `publish`
        self._touched: set[Session] = set()
        self._infos: dict[SessionHandle, SessionInfo] = {}
        self.publish()

    # the turn

    def run(self) -> None:
        """Take turns until a Stop message comes. However it ends, every waiting caller gets an answer."""
        try:
            while not self.stopping:
                self.step()
        except BaseException as error:  # our own bug: say so, rather than hang every caller
            self.fault = error
            logger.exception("the engine's thread failed")
        self._device.leave(self)
        self.operations.end_all()

    def step(self) -> None:
        """One turn: messages, who may begin, one batch."""
        self.executor.check()  # before letters are taken: those that are, are answered by nobody else
        has_work = self._has_work()
        if not has_work:
            self._device.leave(self)
        letters = self.inbox.take(0.0 if has_work else _IDLE_TURN_S)
        self.busy_since = time.monotonic()
        for letter in letters:
            self.operations.handle(letter)
        self.operations.resume()  # what waited for a tick that has ended
        self.residency.settle()  # claims on room; a granted tick begins
        self.publish()

        due = None if self.stopping else self.scheduler.due(self.ticks)
        with self._device.turn(self, due, lambda: self.inbox.has_letters) as is_ours:
            batch = self.scheduler.next_batch(self.ticks) if is_ours else []
            for tick, result in zip(batch, self._results(batch), strict=True):
                self._advance(tick, result)
        self.operations.park_idle()
        self.publish()
        self.busy_since = None

    def _has_work(self) -> bool:
        running = any(tick.request is not None and not tick.on_host for tick in self.ticks)
        return running or self.operations.turns.is_somebodys

    def _results(self, batch: list[Tick]) -> list[object]:
        """A result for each tick, or the Exception that only this tick failed with. Committing rows become history."""
        if not batch:
            return []
        for tick in batch:
            tick.lap(QUEUE)
        requests = [tick.request for tick in batch]
        results = self.executor.run([request for request in requests if isinstance(request, Forward | Encode)])
        return [
            _committed(request, result) if isinstance(request, Forward) else result
            for request, result in zip(requests, results, strict=True)
        ]

    @property
    def why_ended(self) -> str:
        return "engine is shut down" if self.fault is None else f"engine failed: {self.fault}"

    # ticks

    def want(self, tick: Tick) -> None:
        """Begin the tick as soon as its session is on the device."""
        session = tick.session
        assert session is not None
        session.tick = tick
        tick.hurry(self.operations.turns.earliest_deadline(session.handle))
        self.touch(session)
        end = partial(self.finish, tick)
        begin = partial(self._begin, tick)
        claim = Claim("a tick", begin, lambda e: end(error=e), session, is_tick=True, since=tick.submitted)
        self.residency.claims.append(claim)

    def _begin(self, tick: Tick) -> None:
        """Take the rollback point, and run the program up to its first request; or go on with what was done ahead."""
        session = tick.session
        assert session is not None
        try:
            state = session.state
            if session.ahead is not None and self._goes_on(session.ahead, tick):
                ahead, session.ahead = session.ahead, None
                tick.rollback, state = ahead.rollback, ahead.state
            else:
                session.take_back()
                tick.rollback = session.kv.snapshot()
            program = self._ahead_program if tick.is_ahead else self.model.program
            self.start(tick, program(session.kv, state, tick.inputs))
        except Exception as error:
            self.finish(tick, error=error)

    def _goes_on(self, ahead: Ahead, tick: Tick) -> bool:
        return not tick.is_ahead and isinstance(self.model, WorksAhead) and self.model.goes_on(ahead.state, tick.inputs)

    def _ahead_program(self, kv: KVState, state: object, inputs: object) -> Program[object, object]:
        if not isinstance(self.model, WorksAhead):
            raise ModelError(f"{type(self.model).__name__}: its ticks cannot begin before they are asked for")
        return self.model.ahead(kv, state, inputs)

    def start(self, tick: Tick, program: Program[object, object]) -> None:
        if not isinstance(program, Generator):
            raise ModelError(
                f"{type(self.model).__name__}.program: expected a generator that yields requests and returns an "
                f"Outcome, got {type(program).__name__}; write `yield` where a request is made"
            )
        tick.program = program
        self.ticks.append(tick)
        tick.lap(QUEUE)
        self._advance(tick, None)

    def _advance(self, tick: Tick, result: object) -> None:
        """Resume the program with its request's result, up to its next request, its outcome, or its failure."""
        if tick.ended:
            return
        program, request = tick.program, tick.request
        assert program is not None
        stage = QUEUE if request is None else request.stage
        tick.request, tick.on_host = None, False
        try:
            if request is not None and self.observer is not None and tick.session is not None:
                self.observer(tick.session.kv, request, result)
            following = program.throw(result) if isinstance(result, Exception) else program.send(result)
            self._ask(tick, following)
            tick.lap(stage)
        except StopIteration as stop:
            tick.lap(stage)
            self._conclude(tick, stop.value)
        except Exception as error:
            tick.lap(stage)
            self.finish(tick, error=error)

    def _ask(self, tick: Tick, request: Request) -> None:
        """Let the tick wait for this request."""
        if not isinstance(request, Forward | Encode | OnHost):
            raise ModelError(
                f"{type(self.model).__name__}.program: expected to be asked for a Forward, an Encode or OnHost, "
                f"got {type(request).__name__}"
            )
        tick.request = request
        tick.sequence = next(self._sequence)
        if isinstance(request, OnHost):
            tick.on_host = True
            self.on_host(request.function, partial(self._advance, tick))

    def _conclude(self, tick: Tick, outcome: object) -> None:
        if isinstance(outcome, Outcome):
            self.finish(tick, outcome=outcome)
        else:
            self.finish(
                tick,
                error=ModelError(
                    f"{type(self.model).__name__}.program: expected to return Outcome(result, state), got "
                    f"{type(outcome).__name__}"
                ),
            )

    def finish(
        self, tick: Tick, outcome: Outcome[object, object] | None = None, error: BaseException | None = None
    ) -> None:
        """Settle a tick: keep its outcome, or go back to its beginning on an error. Safe twice."""
        if tick.ended:
            return
        tick.ended = True
        if tick.program is not None:
            if isinstance(tick.program, Generator):
                tick.program.close()
            with suppress(ValueError):
                self.ticks.remove(tick)
        if tick.session is not None:
            self._settle(tick, tick.session, outcome)
        if outcome is None:
            self.answer(tick.future, error=error)
        else:
            self.answer(tick.future, TickReply(outcome.result, self._info(tick)))

    def _settle(self, tick: Tick, session: Session, outcome: Outcome[object, object] | None) -> None:
        if tick.rollback is not None:
            session.kv.abandon()
            if outcome is None:
                session.kv.restore(tick.rollback)
            if outcome is not None and tick.is_ahead:
                session.ahead = Ahead(outcome.state, tick.rollback)
            else:
                tick.rollback.release()
        if outcome is not None and not tick.is_ahead:
            session.state = outcome.state
        if session.tick is tick:
            session.tick = None
            session.last_used = time.monotonic()
        self.touch(session)

    def _info(self, tick: Tick) -> TickInfo:
        pool, session = self.cache.pool, tick.session
        num_chunks = 0 if session is None else session.info().num_chunks
        return TickInfo(tick.milliseconds(), num_chunks, pool.num_used, pool.num_blocks - pool.num_used)

    def cancel(self, session: Session, how: str) -> None:
        """End the session's tick, running or waiting."""
        if session.tick is not None:
            self.residency.drop(session)
            error = SessionEnded(f"session {session.handle.session_id} {how}, during this tick")
            self.finish(session.tick, error=error)

    # answers, and what everybody may read

    def answer(self, future: Future[object], value: object = None, error: BaseException | None = None) -> None:
        """Answer after the next `publish`: the books show then what the answer says."""
        self._answers.append(partial(_set, future, value, error))

    def touch(self, session: Session) -> None:
        """Publish the session anew at the end of this turn."""
        self._touched.add(session)

    def publish(self) -> None:
        """Publish new values for readers, then give the answers that wait for them."""
        for session in self._touched:
            if session.handle in self.sessions:
                self._infos[session.handle] = session.info()
            else:
                self._infos.pop(session.handle, None)
        self._touched.clear()
        pool, store, sessions = self.cache.pool, self.cache.conditioning, self.sessions
        parked = [info.bytes_parked for info in self._infos.values() if info.parked]
        self.published = Published(
            Stats(
                self.cache.backend.name,
                dict(self.executor.rows_per_forward),
                store.num_hits,
                store.num_misses,
                len(sessions),
                len(parked),
                sum(parked),
                sum(info.busy for info in self._infos.values()),
                pool.num_used,
                pool.num_shared,
                self.cache.storage.num_copied,
            ),
            self.admission.capacity(self.cache.bytes_per_block, len(sessions), pool.num_used),
            MappingProxyType(dict(self._infos)),
        )
        answers, self._answers = self._answers, []
        for give in answers:
            with suppress(Exception):  # a caller's done callback must not end the engine
                give()

    def new_serial(self) -> int:
        return next(self._serial)

    def on_host(self, function: Callable[[], T], done: Callable[[T | Exception], None]) -> None:
        """Call it on a host thread, then `done` with its result or Exception on ours."""
        self.inbox.forward(self.executor.on_host(function), partial(_report, done))

    def session(self, handle: SessionHandle) -> Session:
        """An open session, for tests that look inside. Raises KeyError."""
        return self.sessions[handle]


def _committed(request: Forward, result: object) -> object:
    """Commit the rows that do. Returns the result, or the Exception that this commit failed with."""
    if isinstance(result, Exception):
        return result
    try:
        for row in request.rows:
            if row.context.commits:
                row.context.commit()
    except Exception as error:
        return error
    return result


def _report(done: Callable[[T | Exception], None], future: Future[T]) -> None:
    """Call `done` with the result of a done future, or with the Exception in its place."""
    error = future.exception()
    if error is None:
        done(future.result())
    else:
        done(error if isinstance(error, Exception) else EngineStopped(repr(error)))


def _set(future: Future[object], value: object, error: BaseException | None) -> None:
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(value)
