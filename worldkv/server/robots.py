"""The robots' room: their sockets, and the contract that their observations have to keep.

The life of one websocket: greet, then request and reply, until an error or either side ends it.

While a request is served the socket is still read, so a client that leaves is noticed at once and pings are
answered. A second request sent meanwhile waits its turn. Nothing is cancelled when a client leaves: its private
sessions are closed, which ends their ticks; the tick of a named one runs to its end, for the client may come back.

A request's session is the one that it names, or else the socket's own; an `env_id` names one of its environments, each
a session by itself (`names.in_env`). A reset without one is of all of them.

Does not know how sessions are kept (`sessions`), nor what the app computes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import APIRouter, FastAPI
from starlette.routing import WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from worldkv.errors import RequestTimedOut, SessionEnded, WorldKVError
from worldkv.robots.schema import RobotContract
from worldkv.server.ends import SHUTDOWN_TEXT
from worldkv.server.http import owner_of, serve_first
from worldkv.server.memory import forget_frames
from worldkv.server.names import in_env, owned
from worldkv.server.rest import Owner, Served
from worldkv.server.service import Service
from worldkv.server.sessions import Asked
from worldkv.wire import (
    RESET_REPLY,
    CloseCode,
    InferRequest,
    ResetRequest,
    close_code,
    error_text,
    infer_reply,
    observe_reply,
    pack,
    read_request,
    shown_name,
)

if TYPE_CHECKING:
    from worldkv.app import Reply
    from worldkv.server.entry import Entry

_MAX_TOLD = 8  # fields of a socket's resets
_READ_AT_ONCE = 16 * 1024  # bytes; a longer message is unpacked off the event loop

T = TypeVar("T")

logger = logging.getLogger(__name__)
router = APIRouter(prefix="/v1")


@router.get("/embodiment")
async def describe_embodiment(_: Owner, service: Served) -> RobotContract:
    """The robot that is served: fields, sizes, ranges and rates of its observations."""
    return RobotContract.model_validate(service.app.describe())


def add_robots(api: FastAPI, service: Service) -> None:
    """Any path upgrades to a robot's websocket."""

    async def robot(websocket: WebSocket) -> None:
        with service.counting_task():
            await Connection(websocket, service).run()

    api.routes.append(WebSocketRoute("/{path:path}", robot))
    api.include_router(router)


class Connection:
    """One websocket, served by `run`."""

    def __init__(self, websocket: WebSocket, service: Service) -> None:
        self._websocket = websocket
        self._service = service
        self._own_name = f"connection-{uuid.uuid4().hex}"
        self._owner = ""
        self._current_name = self._own_name  # of the last request's session, environments left aside
        self._current_id = self._own_name  # the last request's session, as the table knows it
        self._told_of_resets: set[str] = set()  # fields that nothing reads
        self._incoming: asyncio.Task[Any] | None = None  # the next message, asked for ahead of its turn
        self._work: asyncio.Task[bytes | str] | None = None
        self._label = "unknown"  # the dialect of the last request
        self._previous_total_ms: float | None = None
        self._serving = False
        self._has_asked = False
        self._gone = False

    async def run(self) -> None:
        """Until the socket is closed and the last tick is over."""
        with self._service.metrics.connections.track_inprogress():
            try:
                await self._converse()
            except WebSocketDisconnect as gone:
                if self._serving:
                    self._count("abandoned")
                forget_frames(gone)
            except Exception as error:
                await self._refuse(error)
                forget_frames(error)
            finally:
                self._gone = True
                self._service.sockets.forget(self)
                await self._service.sessions.detach(self, self._owner)
        await self._finish()

    async def _converse(self) -> None:
        await self._websocket.accept()
        self._authorise()
        await self._send(self._service.greeting)
        while (message := await self._next_message()) is not None:
            await self._serve(message)
        await self._close(CloseCode.GOING_AWAY, SHUTDOWN_TEXT)

    def _authorise(self) -> None:
        """Raises Unauthorised, or AdmissionRefused where its key has too many sockets."""
        self._owner = owner_of(self._websocket, self._service)
        self._current_id = owned(self._own_name, self._owner)
        self._service.sockets.add(self, self._owner)

    async def _next_message(self) -> bytes | str | None:
        """Of any size that the web server lets through; None: the server shuts down."""
        incoming, closing = self._incoming or self._ask_for_message(), self._service.closing
        limit = None if self._has_asked else self._service.config.session_idle_s
        done, _ = await asyncio.wait({incoming, closing}, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
        if closing.done():
            return None
        if not done:
            raise RequestTimedOut(f"no first request came within {limit:g} s; connect again when there is one")
        self._incoming = None
        _raise_if_gone(incoming)
        message: dict[str, Any] = incoming.result()
        data: bytes | str | None = message.get("bytes")
        return message["text"] if data is None else data

    def _ask_for_message(self) -> asyncio.Task[Any]:
        self._incoming = asyncio.create_task(self._websocket.receive())
        return self._incoming

    async def _serve(self, message: bytes | str) -> None:
        """One request and its reply."""
        start = time.perf_counter()
        self._serving, self._has_asked, self._label = True, True, "unknown"
        request = await self._read(message)
        self._label = request.dialect.value
        await self._send(await self._attend(self._answer_to(request)))
        self._serving = False
        if not (isinstance(request, InferRequest) and request.observes):
            self._previous_total_ms = (time.perf_counter() - start) * 1e3
        self._count("ok")

    async def _answer_to(self, request: InferRequest | ResetRequest) -> bytes | str:
        if isinstance(request, ResetRequest):
            return await self._reset(request)
        return await (self._observe(request) if request.observes else self._infer(request))

    async def _send(self, message: bytes | str) -> None:
        """Raises WebSocketDisconnect where the socket is no more, also if it was the web server that closed it."""
        try:
            if isinstance(message, str):
                await self._websocket.send_text(message)
            else:
                await self._websocket.send_bytes(message)
        except RuntimeError as closed:  # after a flood, a broken frame, or pings without an answer
            raise WebSocketDisconnect(1006) from closed

    async def _read(self, message: bytes | str) -> InferRequest | ResetRequest:
        read = partial(read_request, message, max_bytes=self._service.config.max_message_bytes)
        return read() if len(message) <= _READ_AT_ONCE else await self._service.in_thread(read)

    async def _attend(self, coroutine: Coroutine[Any, Any, bytes | str]) -> bytes | str:
        """The reply that `coroutine` makes. Raises WebSocketDisconnect as soon as the client is gone."""
        loop = asyncio.get_running_loop()
        limit = self._service.config.request_timeout_s
        deadline = loop.time() + limit
        self._work = work = asyncio.create_task(coroutine)
        while not work.done():
            incoming = self._incoming or self._ask_for_message()
            _raise_if_gone(incoming)
            waiting = {work} if incoming.done() else {work, incoming}
            left = deadline - loop.time()
            done, _ = await asyncio.wait(waiting, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                raise RequestTimedOut(f"no answer within {limit:g} s; the tick may still be running")
        self._work = None
        return work.result()

    async def _infer(self, request: InferRequest) -> bytes:
        received = time.perf_counter()
        observation = await self._read_fields(self._service.app.read, request)
        async with self._session_of(request) as entry:
            reply = await self._outcome(entry, entry.session.infer(observation))
        self._service.ticked(entry, reply)
        serve_first(self._websocket)
        timing = self._server_timing(reply, (time.perf_counter() - received) * 1e3)
        details = await asyncio.to_thread(_details, reply) if request.details else None
        return pack(infer_reply(request, reply.output["actions"], timing, reply.warnings, details), request.encoding)

    async def _observe(self, request: InferRequest) -> bytes:
        """Answered as soon as the frames are kept; nobody waits for what is done with them ahead of their tick."""
        frames = await self._read_fields(self._service.app.read_ahead, request)
        async with self._session_of(request) as entry:
            kept = await self._outcome(entry, entry.session.observe(frames))
        return pack(observe_reply(request, kept.num_frames, kept.warnings), request.encoding)

    async def _read_fields(self, read: Callable[[Mapping[str, object]], T], request: InferRequest) -> T:
        """What the app makes of a request, before any session is touched for it."""
        await self._service.until_ready()
        inputs = await self._service.in_thread(read, request.observation)
        if self._gone:  # meanwhile: nobody would hear of a session's end, which is told once
            raise WebSocketDisconnect(1005)
        return inputs

    @contextlib.asynccontextmanager
    async def _session_of(self, request: InferRequest) -> AsyncIterator[Entry]:
        name = request.session_id or self._own_name
        self._current_id = owned(in_env(name, request.env_id), self._owner)
        self._current_name = name
        async with self._service.sessions.use(self._current_id, self, _asked(request), self._owner) as entry:
            if self._gone:  # while it was being opened
                raise WebSocketDisconnect(1005)
            yield entry

    async def _outcome(self, entry: Entry, asked: Future[T]) -> T:
        entry.has_history = True
        future = asyncio.wrap_future(asked)
        try:
            return await future
        except asyncio.CancelledError:
            if not future.cancelled():
                raise  # we were, at a shutdown that does not wait
            raise SessionEnded(f"session {entry.session_id}: the tick was cancelled") from None

    def _server_timing(self, reply: Reply, infer_ms: float) -> dict[str, float]:
        read_ms = max(0.0, infer_ms - reply.timings["total"])  # before the tick was asked for, and after it
        stages = {f"{stage}_ms": float(ms) for stage, ms in reply.timings.items() if stage != "total"}
        previous = self._previous_total_ms
        return {
            "infer_ms": infer_ms,
            "read_ms": read_ms,
            **stages,
            **({} if previous is None else {"prev_total_ms": previous}),
        }

    async def _reset(self, request: ResetRequest) -> str:
        sessions, name = self._service.sessions, request.session_id or self._current_name
        news = [field for field in map(shown_name, request.unread) if field not in self._told_of_resets][:_MAX_TOLD]
        if news and len(self._told_of_resets) < _MAX_TOLD:
            self._told_of_resets.update(news)
            which = ", ".join(news)
            fields = {"event": "fields_unread", "session": self._current_id}  # no warning: many send all they have
            logger.info("session %s: a reset's fields that nothing reads: %s", self._current_id, which, extra=fields)
        if request.env_id is None:
            await sessions.reset_all_within(name, self._owner)
        else:
            await sessions.reset(owned(in_env(name, request.env_id), self._owner), self._owner)
        return RESET_REPLY

    async def _refuse(self, error: Exception) -> None:
        """Tell the client: a text with an id that finds the traceback in the log, then a close code."""
        code = error.code if isinstance(error, WorldKVError) else WorldKVError.code
        close, error_id = close_code(code), uuid.uuid4().hex[:8]
        self._service.metrics.errors.labels(code).inc()
        if self._serving:
            self._count("error")
        is_late_or_worse = close in (CloseCode.INTERNAL, CloseCode.REQUEST_TIMED_OUT)
        is_ours = code == WorldKVError.code or (self._serving and is_late_or_worse)  # not a client's silence
        level = logging.ERROR if is_ours else logging.WARNING
        fields = {"event": "error", "code": code, "error_id": error_id, "session": self._current_id}
        logger.log(level, "error %s told to %s: %s", error_id, self._peer(), error, exc_info=error, extra=fields)
        with contextlib.suppress(WebSocketDisconnect):
            await self._send(error_text(error, error_id))
        await self._close(close, f"{code} [error {error_id}]")

    def _count(self, outcome: str) -> None:
        self._service.metrics.requests.labels(self._label, outcome).inc()

    async def _close(self, code: CloseCode, reason: str) -> None:
        with contextlib.suppress(WebSocketDisconnect, RuntimeError):  # the client was faster
            await self._websocket.close(code, reason)

    async def _finish(self) -> None:
        """Wait for what still runs on behalf of this connection."""
        if self._incoming is not None:
            self._incoming.cancel()
        if self._work is not None:
            await asyncio.wait({self._work})
            if not self._work.cancelled() and (error := self._work.exception()) is not None:
                logger.info("a request that nobody waited for failed: %s", error)
            await self._service.sessions.detach(self, self._owner)  # from a session that was being opened
        self._incoming = self._work = None  # whose errors' tracebacks hold this connection

    def _peer(self) -> str:
        client = self._websocket.client
        return f"{client.host}:{client.port}" if client else "a client"


def _asked(request: InferRequest) -> Asked:
    named = request.session_id is not None
    return Asked(named, request.restart, request.resume, request.observation.get("prompt"))


def _details(reply: Reply) -> dict[str, Any]:
    """What a robot does not need but people look at: the imagined frames and how full the cache is."""
    return {"predicted_video": reply.decode_video(), "cache": dict(reply.facts)}


def _raise_if_gone(incoming: asyncio.Task[Any]) -> None:
    if incoming.done() and incoming.result()["type"] == "websocket.disconnect":
        raise WebSocketDisconnect(incoming.result().get("code") or 1005)
