"""Which sessions are open, who uses them, and when they end.

A session is named by its client (RoboArena's `session_id`) or private to one connection. A connection that asks for
another session has left the one before: what all have left ends after a grace time, unless one comes back. Any ends
when idle for long. Whatever ends a session leaves its id behind with the reason, so that the next request with that id
is told, once, instead of starting an empty history.

Lives on the event loop; whatever of the app may block runs on the threads it is given. Does not know
websockets or messages: a connection is any object.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias, TypeVar
from weakref import WeakValueDictionary

from worldkv.errors import AdmissionRefused, BadRequest, EngineStopped, RequestTimedOut, SessionNotFound
from worldkv.server.config import ServerConfig
from worldkv.server.ends import SHUTDOWN_TEXT, End, EndedSession, EndReason, Ends
from worldkv.server.entry import Asked, Entry
from worldkv.server.metrics import Metrics
from worldkv.server.names import disowned, is_within, owned

if TYPE_CHECKING:
    from worldkv.app import AnyApp, AnySession
    from worldkv.engine.engine import SnapshotHandle

    Source: TypeAlias = "AnySession | SnapshotHandle | Imported"

__all__ = ["Asked", "EndReason", "Entry", "SessionTable", "owned"]

_CLOSE_S = 5.0  # for an engine to give a session's blocks back

R = TypeVar("R")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Imported:
    """An export to go on from. `trusts`, `exact`: see `Engine.import_session`."""

    data: bytearray = field(repr=False)
    trusts: bool
    exact: bool = False


class SessionTable:
    """All sessions of one server."""

    def __init__(self, app: AnyApp, config: ServerConfig, metrics: Metrics, threads: Executor) -> None:
        self._app = app
        self._config = config
        self._metrics = metrics
        self._threads = threads
        self._entries: dict[str, Entry] = {}
        self._latest: dict[object, Entry] = {}  # connection -> the session that it asked for last
        self.ends = Ends()
        self._opening: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # one opening of an id at a time
        self._num_opening: Counter[str] = Counter()  # by owner
        self._leaving: dict[str, Entry] = {}  # ended, but perhaps not closed yet
        self._closed = False

    @asynccontextmanager
    async def use(self, session_id: str, connection: object, asked: Asked, owner: str = "") -> AsyncIterator[Entry]:
        """The session of a request, opened if new, its history dropped if a rule says so.

        It cannot expire inside the `with`. Raises SessionNotFound, once, for an id whose session has ended;
        AdmissionRefused.
        """
        entry, before = self._entries.get(session_id), self._latest.get(connection)
        if before is not None and before is not entry:  # also where this one is refused, which ends the connection
            before.leave(connection, self._now(), for_good=False)
        entry = entry or await self._open(session_id, owner, asked)
        reason = self._restart_reason(entry, asked)
        self._latest[connection] = entry
        entry.come(connection)
        if asked.prompt is not None:  # frames may come without one
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
            self.ends.settle(owner, session_id)  # its client is being told right now
            raise
        finally:
            entry.uses -= 1
            entry.last_used = self._now()

    async def reset(self, session_id: str, owner: str = "") -> None:
        """Drop a session's history. An id that is not open has none: its next tick is its first."""
        self.ends.settle(owner, session_id)
        entry = self._entries.get(session_id)
        if entry is not None:
            entry.last_used = self._now()
            try:
                await self._reset(entry)
            except SessionNotFound as error:  # the engine has ended it: its history is gone, as was asked for
                await self.end(entry, EndReason.FAILED, str(error))
                self.ends.settle(owner, session_id)

    async def reset_all_within(self, name: str, owner: str = "") -> None:
        """The same for the session that its client calls `name`, and those of its environments."""
        known = {owned(name, owner), *self.ends.names(owner), *(entry.session_id for entry in self.of(owner))}
        within = [session_id for session_id in known if is_within(disowned(session_id, owner), name)]
        await asyncio.gather(*(self.reset(session_id, owner) for session_id in within))

    async def detach(self, connection: object, owner: str = "") -> None:
        """`connection` is gone: its private sessions end, the named ones wait for another."""
        self._latest.pop(connection, None)
        entries = [entry for entry in self._entries.values() if connection in entry.connections]
        for entry in entries:
            entry.leave(connection, self._now(), for_good=True)
        reason, text = EndReason.CONNECTION_CLOSED, "its connection was closed"
        await self._end_all((each, reason, text) for each in entries if not each.named and not each.connections)
        self.ends.forget_connection(owner, connection)

    async def end(self, entry: Entry, reason: EndReason, text: str) -> None:
        """Close a session; `text` continues "the session has ended: ". Safe twice."""
        await self._end_all([(entry, reason, text)])

    async def _end_all(self, ends: Iterable[tuple[Entry, EndReason, str]]) -> None:
        """They leave the table at once, and close side by side."""
        ended = [(each, self._take_out(each, reason, text)) for each, reason, text in ends if self.is_open(each)]
        await asyncio.gather(*(self._close(entry, text) for entry, text in ended))

    def _take_out(self, entry: Entry, reason: EndReason, text: str) -> str:
        """Of the table, the end remembered. Returns what is said about it."""
        text = f"{text} ({reason.value})"
        if reason in (EndReason.CONNECTION_CLOSED, EndReason.MADE_ROOM):
            self.ends.settle(entry.owner, entry.session_id)
        else:
            private_to = next(iter(entry.connections)) if not entry.named and len(entry.connections) == 1 else None
            self.ends.add(entry.owner, entry.session_id, End(text, entry.last_used, private_to))
        del self._entries[entry.session_id]
        self._leaving[entry.session_id] = entry
        for tell in entry.at_end:
            tell()
        self._metrics.sessions.set(len(self._entries))
        self._metrics.sessions_ended.labels(reason.value).inc()
        fields = {"event": "session_ended", "session": entry.session_id, "reason": reason.value}
        logger.info("session %s ended: %s", entry.session_id, text, extra=fields)
        self.ends.show(EndedSession(entry.public_id, entry.owner, text, time.time(), entry.history.num_ticks))
        return text

    async def end_all(self, reason: EndReason, text: str) -> None:
        """End every session and open no other one."""
        self._closed = True
        await self._end_all([(entry, reason, text) for entry in self._entries.values()])

    async def sweep(self) -> bool:
        """End the sessions that have been left alone for too long. Returns whether there were any."""
        due = [(entry, *self._why_due(entry)) for entry in self._entries.values() if self._is_due(entry)]
        await self._end_all(due)
        return bool(due)

    def _why_due(self, entry: Entry) -> tuple[EndReason, str]:
        grace, idle = self._config.session_grace_s, self._config.session_idle_s
        if self._now() >= entry.last_used + idle:
            return EndReason.IDLE, f"it had no request for {idle:g} s"
        if entry.connections:
            text = f"its connection went on to other sessions and did not come back within {grace:g} s"
        else:
            text = f"its connection was lost and nobody resumed it within {grace:g} s"
        return EndReason.GRACE_OVER, text

    def _is_due(self, entry: Entry) -> bool:
        return not entry.uses and self._now() >= self._ends_at(entry)

    def _ends_at(self, entry: Entry) -> float:
        return entry.ends_at(self._config.session_grace_s, self._config.session_idle_s)

    def _refuse_silent_restart(self, session_id: str, owner: str, asked: Asked) -> None:
        end, name = self.ends.find(owner, session_id), disowned(session_id, owner)
        gap = self._config.episode_gap_s
        if asked.restart or (end is not None and gap is not None and self._now() - end.last_used > gap):
            return
        if end is not None:
            self.ends.settle(owner, session_id)  # its client is being told right now
            raise SessionNotFound(f"session {name} has ended: {end.text}; the next request for it starts a new history")
        if asked.resume:
            raise SessionNotFound(
                f"session {name} is not known here (was the server restarted?); a request without "
                "`resume` starts a new history"
            )

    def _restart_reason(self, entry: Entry, asked: Asked) -> str | None:
        """Why this request begins an episode; None: it goes on, or there is nothing to forget."""
        silent_for, gap = self._now() - entry.last_used, self._config.episode_gap_s
        if not entry.has_history:
            return None
        if asked.restart:
            return "the request says so"
        if gap is not None and silent_for > gap and not entry.uses and not asked.may_pause:
            return f"{silent_for:.1f} s without a request"
        if not entry.named and _differ(entry.prompt, asked.prompt):
            return "another prompt"
        return None

    async def open(self, session_id: str, owner: str, source: Source | None = None) -> Entry:
        """A named session without a request, or one that goes on from `source`. Raises BadRequest if it is open."""
        return await self._open(session_id, owner, None, source)

    def is_open(self, entry: Entry) -> bool:
        return self._entries.get(entry.session_id) is entry

    def get(self, session_id: str, owner: str = "") -> Entry:
        """An open session. Raises SessionNotFound, with the reason where it has ended."""
        entry = self._entries.get(session_id)
        if entry is None:
            end = self.ends.find(owner, session_id)
            known_as = disowned(session_id, owner)
            raise SessionNotFound(f"session {known_as} " + (f"has ended: {end.text}" if end else "is not known here"))
        return entry

    def of(self, owner: str) -> list[Entry]:
        """All open sessions of one key, in the order in which they were opened."""
        return [entry for entry in self._entries.values() if entry.owner == owner]

    async def ask(self, entry: Entry, begin: Callable[..., Future[R]], *args: object) -> R:
        """What a request of an operator's brings, which may wait its turn; the session cannot expire meanwhile.

        Raises RequestTimedOut where its turn does not come.
        """
        with self.kept(entry):
            return await self._patiently(begin(*args))

    async def _patiently(self, begun: Future[R]) -> R:
        limit = self._config.request_timeout_s
        answer = asyncio.wrap_future(begun)
        try:
            await asyncio.wait({answer}, timeout=limit)
        except asyncio.CancelledError:
            begun.cancel()
            raise
        if not answer.done() and begun.cancel():  # what has begun already comes to its end
            raise RequestTimedOut(f"the session's tick in flight has not ended within {limit:g} s; nothing was done")
        return await answer

    @contextmanager
    def kept(self, entry: Entry) -> Iterator[None]:
        """In the `with` the session neither expires nor makes room."""
        entry.uses += 1
        try:
            yield
        finally:
            entry.uses -= 1
            entry.last_used = self._now()

    async def _open(self, session_id: str, owner: str, asked: Asked | None, source: Source | None = None) -> Entry:
        """For a request, which goes on with a session that another one has opened meanwhile; or for an operator, who
        does not (`asked` None)."""
        async with self._opening.setdefault(session_id, asyncio.Lock()):
            entry = self._entries.get(session_id)
            if entry is not None and asked is None:
                raise BadRequest(
                    f"session_id: {disowned(session_id, owner)!r} is open already; close it or choose another"
                )
            if entry is not None:
                return entry
            if asked is not None:
                self._refuse_silent_restart(session_id, owner, asked)
            if session_id in self._leaving:
                await self._close(self._leaving[session_id], "another session takes its id")
            while self._has_too_many(owner):
                if not await self._make_room(self.of(owner)):
                    most = "the most that one client may have (--max-sessions-per-key); close one"
                    text = f"{self._config.max_sessions} sessions are open, {most}"
                    raise self._refusal(text, self.of(owner))
            self._num_opening[owner] += 1
            try:
                session = await self._admitted(session_id, source)
            finally:
                self._num_opening[owner] -= 1
            entry = Entry(session_id, session, asked is None or asked.named, last_used=self._now(), owner=owner)
            entry.has_history, entry.reserved = source is not None, asked is None
            self._entries[session_id] = entry
            self.ends.settle(owner, session_id)
            self._metrics.sessions.set(len(self._entries))
            logger.info("session %s opened", session_id, extra={"event": "session_opened", "session": session_id})
            if self._closed:  # meanwhile
                await self.end(entry, EndReason.SHUTDOWN, SHUTDOWN_TEXT)
                raise EngineStopped(SHUTDOWN_TEXT)
            return entry

    def _has_too_many(self, owner: str) -> bool:
        return len(self.of(owner)) + self._num_opening[owner] >= self._config.max_sessions

    async def _admitted(self, session_id: str, source: Source | None) -> AnySession:
        """A new session of the app's."""
        while not self._closed:
            try:
                return await self._made(session_id, source)
            except AdmissionRefused as refused:
                if not await self._make_room(self._entries.values()):
                    raise self._full(refused) from refused
        raise EngineStopped(SHUTDOWN_TEXT)

    async def _made(self, session_id: str, source: Source | None) -> AnySession:
        if source is None:
            return await self._in_thread(self._app.open_session, session_id)
        if isinstance(source, Imported):
            begun = self._app.begin_import(source.data, session_id, trusts=source.trusts, exact=source.exact)
            return self._app.imported(await self._patiently(begun))
        handle = await self._patiently(self._app.begin_fork(source, session_id))
        return self._app.forked(handle, source)

    async def _make_room(self, entries: Iterable[Entry]) -> bool:
        """End those whose time is over, or else the one of `entries` that holds a place but no history, for longest:
        opening it again is the same. Returns whether there were any."""
        if await self.sweep():
            return True
        empty = [entry for entry in entries if not (entry.has_history or entry.uses or entry.reserved)]
        if empty:
            oldest = min(empty, key=lambda entry: (not entry.is_left, entry.last_used))
            await self.end(oldest, EndReason.MADE_ROOM, "it had no history and made room for another one")
        return bool(empty)

    def _full(self, refused: AdmissionRefused) -> AdmissionRefused:
        """The engine's refusal, with the time when it will have room. A parked session's end makes none."""
        return self._refusal(str(refused), [entry for entry in self._entries.values() if entry.is_on_device])

    def _refusal(self, text: str, entries: list[Entry]) -> AdmissionRefused:
        """With the time until the next of `entries` ends by itself, should nobody come back to it. One whose connection
        is with it, or that is in use, does not."""
        at = min((self._ends_at(entry) for entry in entries if entry.is_left and not entry.uses), default=None)
        if at is None:
            return AdmissionRefused(f"{text}; no session will make room by itself, so there is no time to try again at")
        return AdmissionRefused(text, retry_after_ms=max(0, math.ceil(1e3 * (at - self._now()))))

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


def _differ(old: object, new: object) -> bool:
    return isinstance(old, str) and isinstance(new, str) and old != new
