"""Which sessions are open, who uses them, and when they end.

A session is named by its client (RoboArena's `session_id`) or private to one connection. A named one outlives
its last socket for a grace time; any ends when idle for long. Whatever ends a session leaves its id behind
with the reason, so that the next request with that id is told, once, instead of starting an empty history.

Lives on the event loop; whatever of the app may block runs on the threads it is given. Does not know
websockets or messages: a connection is any object.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Executor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, TypeVar
from weakref import WeakValueDictionary

from worldkv.errors import AdmissionRefused, BadRequest, EngineStopped, SessionNotFound
from worldkv.server.config import ServerConfig
from worldkv.server.console.history import SessionHistory
from worldkv.server.metrics import Metrics

if TYPE_CHECKING:
    from worldkv.app import AnyApp, AnySession
    from worldkv.engine.engine import SnapshotHandle

_REMEMBERED_ENDS = 4096
_CLOSE_S = 5.0  # for an engine to give a session's blocks back
_SHOWN_ENDS = 50

R = TypeVar("R")

logger = logging.getLogger(__name__)


def owned(session_id: str, owner: str) -> str:
    """The table's name for a client's session: every key has ids of its own, so those of others do not exist for it."""
    return f"{session_id}@{owner}" if owner else session_id


class EndReason(StrEnum):
    IDLE = "idle"
    GRACE_OVER = "grace_over"
    CONNECTION_CLOSED = "connection_closed"
    DELETED = "deleted"
    MADE_ROOM = "made_room"  # a session without a history; nothing is lost
    FAILED = "failed"
    SHUTDOWN = "shutdown"


@dataclass(frozen=True)
class Asked:
    """What a request says about its session. `named`: its client chose the id, so it outlives the socket. `restart`:
    forget the history first. `resume`: it must exist. `prompt`: another one is another episode, where it is unnamed."""

    named: bool = False
    restart: bool = False
    resume: bool = False
    prompt: object = None


@dataclass(eq=False)
class Entry:
    """One open session."""

    session_id: str
    session: AnySession
    named: bool
    last_used: float  # event loop's clock
    connections: set[object] = field(default_factory=set)
    orphaned_since: float | None = None
    uses: int = 0  # requests being served
    has_history: bool = False  # since it was opened or reset
    reserved: bool = False  # opened before its first request: it keeps its place
    prompt: object = None
    owner: str = ""
    history: SessionHistory = field(default_factory=SessionHistory)

    @property
    def public_id(self) -> str:
        """What its client calls it."""
        return self.session_id.removesuffix(f"@{self.owner}") if self.owner else self.session_id


@dataclass(frozen=True)
class EndedSession:
    """For people who look: one that is gone. `at`: seconds since 1970."""

    public_id: str
    owner: str
    text: str
    at: float
    num_ticks: int


@dataclass(frozen=True)
class _End:
    text: str
    last_used: float


class SessionTable:
    """All sessions of one server."""

    def __init__(self, app: AnyApp, config: ServerConfig, metrics: Metrics, threads: Executor) -> None:
        self._app = app
        self._config = config
        self._metrics = metrics
        self._threads = threads
        self._entries: dict[str, Entry] = {}
        self._ended: OrderedDict[str, _End] = OrderedDict()
        self._opening: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # one opening of an id at a time
        self._num_opening: Counter[str] = Counter()  # by owner
        self._leaving: dict[str, Entry] = {}  # ended, but perhaps not closed yet
        self._closed = False
        self.recent_ends: deque[EndedSession] = deque(maxlen=_SHOWN_ENDS)

    @asynccontextmanager
    async def use(self, session_id: str, connection: object, asked: Asked, owner: str = "") -> AsyncIterator[Entry]:
        """The session of a request, opened if new, its history dropped if a rule says so.

        It cannot expire inside the `with`. Raises SessionNotFound, once, for an id whose session has ended;
        AdmissionRefused.
        """
        entry = self._entries.get(session_id)
        if entry is None:
            self._refuse_silent_restart(session_id, asked)
            entry = await self._open(session_id, named=asked.named, owner=owner)
        reason = self._restart_reason(entry, asked)
        entry.connections.add(connection)
        entry.orphaned_since = None
        entry.prompt = asked.prompt
        entry.uses += 1
        try:
            if reason is not None:
                fields = {"event": "session_restarted", "session": session_id, "reason": reason}
                logger.info("session %s starts afresh: %s", session_id, reason, extra=fields)
                entry.history.happened(f"starts afresh: {reason}")
                await self._reset(entry)
            yield entry
        except SessionNotFound as error:  # the engine has ended it
            await self.end(entry, EndReason.FAILED, str(error))
            self._ended.pop(session_id, None)  # its client is being told right now
            raise
        finally:
            entry.uses -= 1
            entry.last_used = self._now()

    async def reset(self, session_id: str) -> None:
        """Drop a session's history. An id that is not open has none: its next tick is its first."""
        self._ended.pop(session_id, None)
        entry = self._entries.get(session_id)
        if entry is not None:
            entry.last_used = self._now()
            await self._reset(entry)

    async def detach(self, connection: object) -> None:
        """`connection` is gone: its private session ends, the named ones wait for another."""
        for entry in [entry for entry in self._entries.values() if connection in entry.connections]:
            entry.connections.discard(connection)
            if not entry.named:
                await self.end(entry, EndReason.CONNECTION_CLOSED, "its connection was closed")
            elif not entry.connections:
                entry.orphaned_since = self._now()

    async def end(self, entry: Entry, reason: EndReason, text: str) -> None:
        """Close a session; `text` continues "the session has ended: ". Safe twice."""
        if self._entries.get(entry.session_id) is not entry:
            return
        text = f"{text} ({reason.value})"
        if reason not in (EndReason.CONNECTION_CLOSED, EndReason.MADE_ROOM):
            self._ended[entry.session_id] = _End(text, entry.last_used)
            while len(self._ended) > _REMEMBERED_ENDS:
                self._ended.popitem(last=False)
        del self._entries[entry.session_id]
        self._leaving[entry.session_id] = entry
        self._metrics.sessions.set(len(self._entries))
        self._metrics.sessions_ended.labels(reason.value).inc()
        fields = {"event": "session_ended", "session": entry.session_id, "reason": reason.value}
        logger.info("session %s ended: %s", entry.session_id, text, extra=fields)
        ticks = entry.history.num_ticks
        self.recent_ends.append(EndedSession(entry.public_id, entry.owner, text, time.time(), ticks))
        await self._close(entry, text)

    async def end_all(self, reason: EndReason, text: str) -> None:
        """End every session and open no other one."""
        self._closed = True
        for entry in list(self._entries.values()):
            await self.end(entry, reason, text)

    async def sweep(self) -> None:
        """End the sessions that have been left alone for too long."""
        now, grace, idle = self._now(), self._config.session_grace_s, self._config.session_idle_s
        for entry in list(self._entries.values()):
            if entry.uses:
                continue
            if entry.orphaned_since is not None and now - entry.orphaned_since > grace:
                text = f"its connection was lost and nobody resumed it within {grace:g} s"
                await self.end(entry, EndReason.GRACE_OVER, text)
            elif now - entry.last_used > idle:
                await self.end(entry, EndReason.IDLE, f"it had no request for {idle:g} s")

    def _refuse_silent_restart(self, session_id: str, asked: Asked) -> None:
        end = self._ended.pop(session_id, None)
        gap = self._config.episode_gap_s
        if asked.restart or (end is not None and gap is not None and self._now() - end.last_used > gap):
            return
        if end is not None:
            raise SessionNotFound(
                f"session {session_id} has ended: {end.text}; the next request for it starts a new history"
            )
        if asked.resume:
            raise SessionNotFound(
                f"session {session_id} is not known here (was the server restarted?); a request without "
                "`resume` starts a new history"
            )

    def _restart_reason(self, entry: Entry, asked: Asked) -> str | None:
        """Why this request begins an episode; None: it goes on, or there is nothing to forget."""
        silent_for, gap = self._now() - entry.last_used, self._config.episode_gap_s
        if not entry.has_history:
            return None
        if asked.restart:
            return "the request says so"
        if gap is not None and silent_for > gap and not entry.uses:
            return f"{silent_for:.1f} s without a request"
        if not entry.named and _differ(entry.prompt, asked.prompt):
            return "another prompt"
        return None

    async def open(self, session_id: str, owner: str, source: AnySession | SnapshotHandle | None = None) -> Entry:
        """A named session before its first request, or a fork of `source`. Raises BadRequest if the id is taken."""
        if session_id in self._entries:
            raise BadRequest(_taken(session_id))
        self._ended.pop(session_id, None)
        return await self._open(session_id, named=True, owner=owner, source=source, taken_is_wrong=True)

    def is_open(self, entry: Entry) -> bool:
        return self._entries.get(entry.session_id) is entry

    def get(self, session_id: str) -> Entry:
        """An open session. Raises SessionNotFound, with the reason where it has ended."""
        entry = self._entries.get(session_id)
        if entry is None:
            end = self._ended.get(session_id)
            raise SessionNotFound(f"session {session_id} " + (f"has ended: {end.text}" if end else "is not known here"))
        return entry

    def of(self, owner: str) -> list[Entry]:
        """All open sessions of one key, in the order in which they were opened."""
        return [entry for entry in self._entries.values() if entry.owner == owner]

    async def run(self, entry: Entry, function: Callable[..., R], *args: object) -> R:
        """Call something of the entry's that may wait, on a thread; the session cannot expire meanwhile."""
        with self.kept(entry):
            return await self._in_thread(function, *args)

    @contextmanager
    def kept(self, entry: Entry) -> Iterator[None]:
        """In the `with` the session neither expires nor makes room."""
        entry.uses += 1
        try:
            yield
        finally:
            entry.uses -= 1
            entry.last_used = self._now()

    async def _open(
        self,
        session_id: str,
        *,
        named: bool,
        owner: str,
        source: AnySession | SnapshotHandle | None = None,
        taken_is_wrong: bool = False,
    ) -> Entry:
        async with self._opening.setdefault(session_id, asyncio.Lock()):
            entry = self._entries.get(session_id)
            if entry is not None:  # another one was first
                if taken_is_wrong:
                    raise BadRequest(_taken(session_id))
                return entry
            if session_id in self._leaving:
                await self._close(self._leaving[session_id], "another session takes its id")
            if len(self.of(owner)) + self._num_opening[owner] >= self._config.max_sessions:
                raise AdmissionRefused(
                    f"{self._config.max_sessions} sessions are open, the most that one client may have; close one",
                    retry_after_ms=1000,
                )
            self._num_opening[owner] += 1
            try:
                session = await self._admitted(session_id, source)
            finally:
                self._num_opening[owner] -= 1
            entry = Entry(session_id, session, named, last_used=self._now(), owner=owner)
            entry.has_history, entry.reserved = source is not None, taken_is_wrong
            self._entries[session_id] = entry
            self._metrics.sessions.set(len(self._entries))
            logger.info("session %s opened", session_id, extra={"event": "session_opened", "session": session_id})
            if self._closed:  # meanwhile
                await self.end(entry, EndReason.SHUTDOWN, "the server is shutting down")
                raise EngineStopped("the server is shutting down")
            return entry

    async def _admitted(self, session_id: str, source: AnySession | SnapshotHandle | None) -> AnySession:
        """A new session of the app's. Sessions that hold a place but no history give it up first."""
        if self._closed:
            raise EngineStopped("the server is shutting down")
        make = self._app.open_session if source is None else partial(self._app.fork, source)
        try:
            return await self._in_thread(make, session_id)
        except AdmissionRefused as refused:
            if not await self._make_room():
                raise self._with_retry_time(refused) from refused
            return await self._in_thread(make, session_id)

    async def _make_room(self) -> bool:
        """Close the sessions that hold a place but no history: opening them again is the same."""
        made_room = False
        for entry in list(self._entries.values()):
            if (
                not entry.has_history and not entry.uses and not entry.reserved
            ):  # now: it may have come to use while another one was closed
                made_room = True
                await self.end(entry, EndReason.MADE_ROOM, "it had no history and made room for another one")
        return made_room

    def _with_retry_time(self, refused: AdmissionRefused) -> AdmissionRefused:
        """The refusal with the time until the next abandoned session ends, unless the engine knows better.

        With none abandoned it is a guess: that one of the live ones leaves now.
        """
        if refused.retry_after_ms is not None:
            return refused
        orphaned = [entry.orphaned_since for entry in self._entries.values() if entry.orphaned_since is not None]
        wait_s = min(orphaned, default=self._now()) + self._config.session_grace_s - self._now()
        return AdmissionRefused(str(refused), retry_after_ms=max(0, round(1e3 * wait_s)))

    async def _reset(self, entry: Entry) -> None:
        if entry.has_history:
            entry.has_history = False
            entry.history.happened("was reset")
            await asyncio.wrap_future(entry.session.reset())

    async def _close(self, entry: Entry, text: str) -> None:
        try:
            given_back = asyncio.wrap_future(await self._in_thread(entry.session.close, text))
            await asyncio.wait({given_back}, timeout=_CLOSE_S)  # a stuck engine gives nothing back
        except Exception:
            logger.exception("session %s did not close", entry.session_id)
        if self._leaving.get(entry.session_id) is entry:
            del self._leaving[entry.session_id]

    async def _in_thread(self, function: Callable[..., R], *args: object) -> R:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *args)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


def _taken(session_id: str) -> str:
    return f"session_id: {session_id!r} is open already; close it or choose another"


def _differ(old: object, new: object) -> bool:
    return isinstance(old, str) and isinstance(new, str) and old != new
