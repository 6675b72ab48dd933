"""Who waits for a session's tick to end. Operators' requests, and ticks of theirs, come between two of its robot's
ticks: in order, before the robot's next one begins, and without costing it one.

Engine thread only. Does not know what a request does once it has its turn.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping

from worldkv.engine import messages as m
from worldkv.engine.session import Session, SessionHandle
from worldkv.errors import SessionBusy


class Turns:
    """`sessions`: all open ones, as the core keeps them."""

    def __init__(self, sessions: Mapping[SessionHandle, Session]) -> None:
        self._sessions = sessions
        self._waiting: dict[SessionHandle, deque[m.Letter]] = {}

    @property
    def is_somebodys(self) -> bool:
        """Whether one can go on now."""
        return any(self._is_free(handle) for handle in self._waiting)

    def keeps(self, letter: m.Letter) -> bool:
        """Whether it has to wait; then it is kept until `next_letters` brings it.

        Its sender may give up meanwhile, by cancelling the answer. A client's tick beside another one is not kept: see
        `require_no_other_tick`.
        """
        handle = _session_of(letter.message)
        session = None if handle is None else self._sessions.get(handle)
        if handle is None or session is None or (session.tick is None and handle not in self._waiting):
            return False
        if _is_clients_tick(letter.message) and self._has_clients_tick(session):
            return False
        self._waiting.setdefault(handle, deque()).append(letter)
        if session.tick is not None and isinstance(letter.message, m.Submit):
            session.tick.hurry(letter.message.deadline)
        return True

    def earliest_deadline(self, handle: SessionHandle) -> float | None:
        """Of the ticks that wait for their turn."""
        messages = [letter.message for letter in self._waiting.get(handle, ())]
        deadlines = [each.deadline for each in messages if isinstance(each, m.Submit) and each.deadline is not None]
        return min(deadlines, default=None)

    def require_no_other_tick(self, session: Session) -> None:
        """A robot asks for one tick after the other. Raises SessionBusy."""
        if session.tick is not None or self._has_clients_tick(session):
            raise SessionBusy(f"session {session.handle.session_id} has a tick in flight; wait for its reply")

    def next_letters(self, handle: SessionHandle | None = None) -> Iterator[m.Letter]:
        """Those whose turn it is, of one session or of all. A tick among them ends its session's turn."""
        for waiter in [handle] if handle is not None else list(self._waiting):
            queue = self._waiting.get(waiter)
            while queue and self._is_free(waiter):
                yield queue.popleft()
            if not queue:
                self._waiting.pop(waiter, None)

    def take_ticks(self, handle: SessionHandle) -> list[m.Letter]:
        """The ticks that wait for their turn, which is never to come."""
        queue = self._waiting.pop(handle, deque())
        others = deque(letter for letter in queue if not isinstance(letter.message, m.Submit | m.WorkAhead))
        if others:
            self._waiting[handle] = others
        return [letter for letter in queue if isinstance(letter.message, m.Submit | m.WorkAhead)]

    def take_all(self) -> list[m.Letter]:
        """All that wait: the engine ends."""
        letters = [letter for queue in self._waiting.values() for letter in queue]
        self._waiting.clear()
        return letters

    def _is_free(self, handle: SessionHandle) -> bool:
        """Of a closed one too: whoever waits is to be told."""
        session = self._sessions.get(handle)
        return session is None or session.tick is None

    def _has_clients_tick(self, session: Session) -> bool:
        waiting = self._waiting.get(session.handle, ())
        in_flight = session.tick is not None and not session.tick.waits_its_turn
        return in_flight or any(_is_clients_tick(letter.message) for letter in waiting)


def _session_of(message: m.Message) -> SessionHandle | None:
    """The session that a request wants without a tick in flight."""
    if isinstance(message, m.Fork):
        return message.source if isinstance(message.source, SessionHandle) else None
    if isinstance(message, m.Submit | m.WorkAhead | m.TakeSnapshot | m.Restore | m.Park | m.Resume | m.Export):
        return message.session
    return None


def _is_clients_tick(message: m.Message) -> bool:
    return isinstance(message, m.Submit) and not message.waits_its_turn
