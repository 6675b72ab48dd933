"""The core's answer to each message, between two batches. Engine thread only.

Operators' requests (snapshot, restore, fork, park) want a session without a tick, and wait their turn. An operation
that needs blocks, or a session on the device, stakes a claim and goes on when the claim is granted. K/V are frozen then
and not before, so that no block is held that was not charged: where room has to be made first, ticks that begin
meanwhile belong to the history.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from worldkv.engine import messages as m
from worldkv.engine.alone import start_alone
from worldkv.engine.exports import Exports
from worldkv.engine.residency import Claim
from worldkv.engine.session import Session, SessionHandle, Snapshot, SnapshotHandle, Tick
from worldkv.engine.turns import Turns
from worldkv.errors import BadRequest, EngineStopped, SessionEnded, SessionNotFound, SnapshotNotFound, WorldKVError

if TYPE_CHECKING:
    from worldkv.engine.core import EngineCore

logger = logging.getLogger(__name__)
_REMEMBERED = 4096  # reasons of closed sessions, for those who still hold their handles


class Operations:
    """`handle` answers a message at once, or later if it has to wait for room or for a copy."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self.turns = Turns(core.sessions)
        self._exports = Exports(core)
        self._closed: dict[SessionHandle, str] = {}  # the newest ones, and why each was closed
        self._handlers: Mapping[type, Callable[..., None]] = {
            m.Open: self._open,
            m.Submit: self._submit,
            m.WorkAhead: self._work_ahead,
            m.Reset: self._reset,
            m.Close: self._close,
            m.TakeSnapshot: self._take_snapshot,
            m.Restore: self._restore,
            m.Fork: self._fork,
            m.Release: self._release,
            m.Park: self._park,
            m.Resume: self._resume,
            m.Export: self._export,
            m.Import: self._import,
            m.Compute: self._compute,
            m.Inspect: self._inspect,
            m.Stop: self._stop,
        }

    def handle(self, letter: m.Letter) -> None:
        """Do what a message asks for, now or when its session's turn comes."""
        if isinstance(letter.message, m.HostDone):
            letter.message.function()
        elif not self.turns.keeps(letter):
            self._do(letter)

    def resume(self) -> None:
        """Do what waited for a tick that has ended since."""
        for letter in self.turns.next_letters():
            self._do(letter)

    def _do(self, letter: m.Letter) -> None:
        """Run a message's operation. Its sender gets the error, should there be one."""
        message, answer = letter.message, letter.answer
        if not answer.set_running_or_notify_cancel():
            return
        try:
            self._handlers[type(message)](message, answer)
        except Exception as error:
            self._core.answer(answer, error=error)

    def park_idle(self) -> None:
        """Park the sessions that have idled for too long."""
        config = self._core.config
        if config.park_after_s is None:
            return
        now = time.monotonic()
        for session in list(self._core.sessions.values()):
            idle_since, idles = session.last_used, session.tick is None and session.on_device
            if idles and idle_since < now - config.park_after_s and session.no_parking_before < now:
                try:
                    self._core.residency.park(session)
                except (WorldKVError, MemoryError, RuntimeError) as error:  # no host memory, say: nothing has changed
                    session.no_parking_before = now + config.park_after_s
                    logger.warning("session %s is not parked: %s", session.handle.session_id, error)

    def end_all(self) -> None:
        """The thread ends: nothing is left waiting, and every block goes back."""
        core = self._core
        stopped = EngineStopped(f"the engine stopped during this tick ({core.why_ended})")
        with suppress(Exception):
            core.executor.shutdown()
        core.ended = True
        self.turn_away_rest()
        for tick in [*core.ticks, *(s.tick for s in core.sessions.values() if s.tick is not None)]:
            try:
                core.finish(tick, error=stopped)
            except Exception:  # the cause of the end may strike again: the caller must not wait for ever
                logger.exception("a tick could not be settled")
                core.answer(tick.future, error=stopped)
        for claim in core.residency.claims:
            if not claim.is_tick:
                claim.refused(EngineStopped(core.why_ended))
        for session in list(core.sessions.values()):
            with suppress(Exception):
                session.forget()
            core.touch(session)
        for snapshot in core.snapshots.values():
            snapshot.kv.release()
        core.sessions.clear()
        core.names.clear()
        core.snapshots.clear()
        core.publish()

    def turn_away_rest(self) -> None:
        """Answer the messages that came after the end."""
        for letter in [*self.turns.take_all(), *self._core.inbox.take(0.0)]:
            if isinstance(letter.message, m.HostDone):  # a copy has ended: its session can be closed
                with suppress(Exception):
                    letter.message.function()
            elif not letter.answer.set_running_or_notify_cancel():
                continue
            elif isinstance(letter.message, m.Stop | m.Close | m.Release):
                letter.answer.set_result(None)
            else:
                letter.answer.set_exception(EngineStopped(self._core.why_ended))

    # sessions

    def _open(self, message: m.Open, answer: Future[object]) -> None:
        self._admit(self._new(message.session_id), answer)

    def _new(self, session_id: str | None, num_blocks_extra: int = 0) -> Session:
        if session_id is not None and session_id in self._core.names:
            raise BadRequest(f"session_id: {session_id!r} is open already; close it or choose another")
        core, handle = self._core, SessionHandle(session_id or uuid.uuid4().hex, self._core.new_serial())
        core.names[handle.session_id] = handle
        return Session(handle, core.cache.create_state(), core.model.new_state(), num_blocks_extra=num_blocks_extra)

    def _admit(
        self,
        session: Session,
        answer: Future[object],
        *,
        parent: Session | None = None,
        fill: Callable[[], None] = lambda: None,
    ) -> None:
        """Charge a new session, `fill` it while its parent rests on the device, and hand it out."""
        core = self._core
        num_blocks = core.residency.cost_of(session)

        def granted() -> None:
            session.num_blocks_charged = num_blocks
            try:
                fill()
            except Exception as error:
                core.residency.refund(session)
                refused(error)
                return
            core.sessions[session.handle] = session
            core.touch(session)
            if parent is not None:
                core.touch(parent)
            core.answer(answer, session.handle)

        def refused(error: Exception) -> None:
            session.kv.close()
            del core.names[session.handle.session_id]
            core.answer(answer, error=error)

        core.residency.claims.append(Claim("another session", granted, refused, parent, lambda: num_blocks))

    def _submit(self, message: m.Submit, answer: Future[object]) -> None:
        session = self._find(message.session)
        self.turns.require_no_other_tick(session)
        tick = Tick(session, answer, message.inputs, message.deadline, message.submitted, message.waits_its_turn)
        self._core.want(tick)

    def _work_ahead(self, message: m.WorkAhead, answer: Future[object]) -> None:
        session = self._find(message.session)
        self._core.want(Tick(session, answer, message.inputs, waits_its_turn=True, is_ahead=True))

    def _reset(self, message: m.Reset, answer: Future[object]) -> None:
        session, core = self._find(message.session), self._core
        self._end_ticks(session, "was reset")
        for letter in self.turns.next_letters(session.handle):  # they were asked for before
            self._do(letter)

        def forget() -> None:
            session.forget()
            session.state, session.inexact = core.model.new_state(session.state), None
            core.touch(session)
            core.answer(answer)

        core.residency.after_claims(session, forget)

    def _close(self, message: m.Close, answer: Future[object]) -> None:
        core = self._core
        session = core.sessions.pop(message.session, None)
        if session is None:
            core.answer(answer)
            return
        session.closed_for = message.reason
        self._closed[message.session] = message.reason
        if len(self._closed) > _REMEMBERED:
            del self._closed[next(iter(self._closed))]
        del core.names[message.session.session_id]
        self._end_ticks(session, f"was closed: {message.reason}")
        core.residency.refuse_all(session, self._gone(message.session))
        logger.info("session %s closed: %s", message.session.session_id, message.reason)

        def give_back() -> None:
            session.forget()
            core.residency.refund(session)
            core.answer(answer)

        session.when_settled(give_back)
        core.touch(session)

    def _end_ticks(self, session: Session, how: str) -> None:
        """The one in flight, and those that wait their turn."""
        self._core.cancel(session, how)
        for letter in self.turns.take_ticks(session.handle):
            if letter.answer.set_running_or_notify_cancel():
                error = SessionEnded(f"session {session.handle.session_id} {how}, before this tick")
                self._core.answer(letter.answer, error=error)

    # histories

    def _take_snapshot(self, message: m.TakeSnapshot, answer: Future[object]) -> None:
        session, core = self._find(message.session), self._core
        charge, refused = core.admission.blocks_of_snapshot, partial(_end, core, answer)

        def granted() -> None:
            kv = session.kv.snapshot()
            handle = SnapshotHandle(core.new_serial(), session.kv.num_chunks, charge(kv.num_blocks))
            core.snapshots[handle] = Snapshot(handle, kv, session.state, session.num_blocks_extra)
            core.touch(session)
            core.answer(answer, handle)

        core.residency.claims.append(
            Claim("a snapshot", granted, refused, session, lambda: charge(session.kv.num_held()))
        )

    def _restore(self, message: m.Restore, answer: Future[object]) -> None:
        session, frozen = self._find(message.session), self._require(message.snapshot)

        def extra() -> int:
            return max(0, frozen.num_blocks_extra - session.num_blocks_extra)

        def granted() -> None:
            session.num_blocks_charged += extra()
            session.num_blocks_extra += extra()
            try:
                snapshot = self._require(message.snapshot)
                session.kv.restore(snapshot.kv)
            except Exception as error:  # the session is as it was, on the host or here
                if session.parked is not None:
                    self._core.residency.refund(session)
                self._core.answer(answer, error=error)
                return
            session.parked, session.state = None, snapshot.state
            self._core.touch(session)
            self._core.answer(answer)

        self._on_device(session, answer, granted, extra, bring_back=False)

    def _fork(self, message: m.Fork, answer: Future[object]) -> None:
        if isinstance(message.source, SnapshotHandle):
            snapshot = self._require(message.source)
            fork = self._new(message.session_id, snapshot.num_blocks_extra)

            def from_snapshot() -> None:
                fork.kv.restore(self._require(snapshot.handle).kv)
                fork.state = snapshot.state

            self._admit(fork, answer, fill=from_snapshot)
            return
        parent = self._find(message.source)
        fork = self._new(message.session_id, parent.num_blocks_extra)

        def from_parent() -> None:
            frozen = parent.kv.snapshot()
            try:
                fork.kv.restore(frozen)
            finally:
                frozen.release()
            fork.state = parent.state

        self._admit(fork, answer, parent=parent, fill=from_parent)

    def _release(self, message: m.Release, answer: Future[object]) -> None:
        snapshot = self._core.snapshots.pop(message.snapshot, None)
        if snapshot is not None:
            snapshot.kv.release()
            self._core.admission.refund(message.snapshot.num_blocks_charged)
        self._core.answer(answer)

    def _park(self, message: m.Park, answer: Future[object]) -> None:
        session = self._find(message.session)

        def settled() -> None:
            if not session.on_device or session.closed_for is not None:
                self._core.answer(answer)
                return
            try:
                self._core.residency.park(session, partial(_end, self._core, answer))
            except Exception as error:
                self._core.answer(answer, error=error)

        session.when_settled(settled)

    def _resume(self, message: m.Resume, answer: Future[object]) -> None:
        session = self._find(message.session)

        def back() -> None:
            session.last_used = time.monotonic()  # or it would be parked again at once
            self._core.answer(answer)

        self._on_device(session, answer, back)

    def _export(self, message: m.Export, answer: Future[object]) -> None:
        self._exports.leave(self._find(message.session), answer, compact=message.compact)

    def _import(self, message: m.Import, answer: Future[object]) -> None:
        self._exports.enter(self._new(message.session_id), message, answer)

    def _on_device(
        self,
        session: Session,
        answer: Future[object],
        then: Callable[[], None],
        extra: Callable[[], int] = lambda: 0,
        *,
        bring_back: bool = True,
    ) -> None:
        """Call `then` as soon as the session is charged, with `extra` blocks beside its own, and its K/V on the device
        if that matters: as its last tick left it."""

        def granted() -> None:
            try:
                self._core.touch(session)
                then()
            except Exception as error:
                self._core.answer(answer, error=error)

        claim = Claim("a session", granted, partial(_end, self._core, answer), session, extra, bring_back=bring_back)
        self._core.residency.claims.append(claim)

    # the rest

    def _compute(self, message: m.Compute, answer: Future[object]) -> None:
        start_alone(self._core, message.request, answer)

    def _inspect(self, message: m.Inspect, answer: Future[object]) -> None:
        self._core.answer(answer, message.function(self._core))

    def _stop(self, _: m.Stop, answer: Future[object]) -> None:
        self._core.stopping = True
        answer.set_result(None)

    def _find(self, handle: SessionHandle) -> Session:
        session = self._core.sessions.get(handle)
        if session is None:
            raise self._gone(handle)
        return session

    def _gone(self, handle: SessionHandle) -> SessionNotFound:
        return SessionNotFound(f"session {handle.session_id} is closed ({self._closed.get(handle, 'long ago')})")

    def _require(self, handle: SnapshotHandle) -> Snapshot:
        snapshot = self._core.snapshots.get(handle)
        if snapshot is None:
            raise SnapshotNotFound("this snapshot was released; take a new one")
        return snapshot


def _end(core: EngineCore, answer: Future[object], error: Exception | None) -> None:
    core.answer(answer, error=error)
