"""One open session as the server knows it: whose it is, who asks for it, and until when it lives.

Lives on the event loop, whose clock its times are on. A connection is any object.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from worldkv.errors import SessionNotFound
from worldkv.server.console.history import SessionHistory
from worldkv.server.names import disowned

if TYPE_CHECKING:
    from worldkv.app import AnySession


@dataclass(frozen=True)
class Asked:
    """What a request says about its session. `named`: its client chose the id, so it outlives the socket. `restart`:
    forget the history first. `resume`: it must exist. `may_pause`: a silence begins no new episode, whatever
    `episode_gap_s` says. `prompt`: another one is another episode, where it is unnamed."""

    named: bool = False
    restart: bool = False
    resume: bool = False
    prompt: object = None
    may_pause: bool = False


@dataclass(eq=False)
class Entry:
    """One open session. `connections`: all that have asked for it and are open; `left_by`: of which, those that have
    asked for another session since. `orphaned_since`: when the last one left. `last_used`: when the last request ended,
    an operator's included. `at_end`: called once it has left the table."""

    session_id: str
    session: AnySession
    named: bool
    last_used: float
    connections: set[object] = field(default_factory=set)
    left_by: set[object] = field(default_factory=set)
    orphaned_since: float | None = None
    uses: int = 0  # requests being served
    has_history: bool = False  # since it was opened or reset
    reserved: bool = False  # opened before its first request: it keeps its place
    prompt: object = None
    owner: str = ""
    history: SessionHistory = field(default_factory=SessionHistory)
    at_end: list[Callable[[], None]] = field(default_factory=list)

    @property
    def public_id(self) -> str:
        """What its client calls it."""
        return disowned(self.session_id, self.owner)

    @property
    def is_left(self) -> bool:
        """Whether no connection is with it now."""
        return self.connections <= self.left_by

    @property
    def is_on_device(self) -> bool:
        """Whether its end makes room there."""
        try:
            return bool(self.session.describe()["state"] == "live")
        except SessionNotFound:  # the engine has ended it
            return False

    def come(self, connection: object) -> None:
        self.connections.add(connection)
        self.left_by.discard(connection)
        self.orphaned_since = None

    def leave(self, connection: object, now: float, *, for_good: bool) -> None:
        """`for_good`: the connection is closed; else it asks for another session."""
        if for_good:
            self.connections.discard(connection)
            self.left_by.discard(connection)
        elif connection in self.connections:
            self.left_by.add(connection)
        if self.is_left and self.orphaned_since is None:
            self.orphaned_since = now

    def ends_at(self, grace_s: float, idle_s: float) -> float:
        """When it ends if nobody asks for it again."""
        idle_at = self.last_used + idle_s
        return (
            idle_at if self.orphaned_since is None else min(idle_at, max(self.orphaned_since, self.last_used) + grace_s)
        )
