"""The videos' room: the socket on which a viewer gets a world block by block, and the file of what it was shown.

A socket is read, played to and written to by a task each: words are heard while a block is made, a block is encoded
while the next one is made, and none of them is held in more copies than the stream lets the viewer lag behind.

Does not know how sessions are kept (`sessions`), when blocks are made (`video_stream`), nor what is spoken
(`worldkv.videos.dialects`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from fastapi import APIRouter, FastAPI, Request
from starlette.responses import StreamingResponse
from starlette.routing import WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from worldkv.errors import BadRequest, EngineStopped, RequestTimedOut, Unauthorised, WorldKVError
from worldkv.server.http import owner_of, require_own_name, sender_is_known
from worldkv.server.memory import forget_frames
from worldkv.server.rest import Owner, Served
from worldkv.server.sessions import owned
from worldkv.server.video_stream import Made, Stream
from worldkv.server.video_worlds import Worlds
from worldkv.videos.dialects import Dialect, Native, Pictures, Realtime
from worldkv.videos.messages import parse
from worldkv.videos.muxer import Mp4, mp4_of, packed_jpegs
from worldkv.videos.program import FRAMES_PER_SECOND
from worldkv.wire import CloseCode, close_code, normalise_session_id, public_error

if TYPE_CHECKING:
    from worldkv.server.service import Service

_DIALECTS: Mapping[str, Callable[[], Dialect]] = {"/v1/video": Native, "/v1/realtime/video": Realtime}  # by path
_KEY_WITHIN_S = 10.0
_FAREWELL_S = 2.0  # for a viewer to take the last words
_MAX_BAD = 100  # messages of one socket that made no sense

logger = logging.getLogger(__name__)
router = APIRouter(prefix="/v1")


@router.get("/videos/{session_id:path}.mp4", response_class=StreamingResponse)
async def download_video(session_id: str, request: Request, owner: Owner, service: Served) -> StreamingResponse:
    """What was shown of it so far, of all its viewers. `x-worldkv-first-frame` is 0, unless its beginning had to go."""
    worlds: Worlds = request.app.state.worlds
    entry = service.sessions.get(owned(normalise_session_id(session_id), owner), owner)
    world = worlds.known(entry)
    film = None if world is None else await service.in_thread(world.reel.film)
    if film is None:
        kept = service.config.max_video_bytes > 0
        raise BadRequest(f"video: {'nothing was shown of this session yet' if kept else 'this server keeps none'}")
    name = re.sub(r"[^\w.-]", "_", entry.public_id, flags=re.ASCII)[:80]
    headers = {
        "content-disposition": f'attachment; filename="{name}.mp4"',
        "content-length": str(film.num_bytes),
        "x-worldkv-first-frame": str(film.first_frame),
        "x-worldkv-frames": str(film.num_frames),
        "x-worldkv-beginning-dropped": "yes" if film.first_frame else "no",
    }
    return StreamingResponse(film.parts(), media_type="video/mp4", headers=headers)


def add_videos(api: FastAPI, service: Service) -> None:
    """A socket a dialect, and the download."""
    worlds = api.state.worlds = Worlds(service.config.max_video_bytes)

    def socket(dialect: Callable[[], Dialect]) -> Callable[[WebSocket], Awaitable[None]]:
        async def video(websocket: WebSocket) -> None:
            with service.counting_task():
                await Connection(websocket, service, worlds, dialect()).run()

        return video

    api.routes.extend(WebSocketRoute(path, socket(dialect)) for path, dialect in _DIALECTS.items())
    api.include_router(router)


class Connection:
    """One websocket, served by `run`."""

    def __init__(self, websocket: WebSocket, service: Service, worlds: Worlds, dialect: Dialect) -> None:
        self._websocket = websocket
        self._service = service
        self._worlds = worlds
        self._dialect = dialect
        self._owner = ""
        self._num_bad = 0
        self._first: str | None = None  # the message that brought the key, where it may say more
        self._keeping: asyncio.Task[None] | None = None
        self._sending = asyncio.Lock()  # what belongs together comes together

    async def run(self) -> None:
        """Until the socket is closed and the last block is made."""
        with self._service.metrics.connections.track_inprogress():
            try:
                await self._websocket.accept()
                await self._authorise()
                await self._converse()
            except WebSocketDisconnect as gone:
                forget_frames(gone)
            except Exception as error:
                await self._refuse(error)
                forget_frames(error)
            finally:
                self._service.sockets.forget(self)

    async def _authorise(self) -> None:
        """By the header, or else by the key in the first message, since a browser's socket cannot send a header. Raises
        Unauthorised, or AdmissionRefused where its key has too many sockets."""
        if self._service.config.api_key is None or "authorization" in self._websocket.headers:
            self._owner = owner_of(self._websocket, self._service)
            self._service.sockets.add(self, self._owner)
            return
        require_own_name(self._websocket, self._service)
        try:
            text = await asyncio.wait_for(self._receive(), _KEY_WITHIN_S)
        except TimeoutError:
            raise Unauthorised(f"the key did not come within {_KEY_WITHIN_S:g} s") from None
        key = parse(text).get("key")
        self._owner = self._service.config.owner_of(f"Api-Key {key}" if key else None)
        sender_is_known(self._websocket)
        self._service.sockets.add(self, self._owner)
        self._first = text

    async def _converse(self) -> None:
        stream = Stream(self._service, self._worlds, self._owner, self, self._dialect.label)
        await self._send_all(self._dialect.greet(self._service.app.greeting))
        playing = asyncio.create_task(stream.run())
        tasks = [asyncio.create_task(self._read(stream)), asyncio.create_task(self._write(stream)), playing]
        try:
            await asyncio.wait({*tasks, self._service.closing}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stream.end()
            await self._settle(stream, playing)
            for task in tasks:
                task.cancel()
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
            stream.surrender()
            if self._keeping is not None:
                await self._keeping
        if self._service.draining:
            await self._close(CloseCode.GOING_AWAY, "the server is shutting down")
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome

    async def _settle(self, stream: Stream, playing: asyncio.Task[None]) -> None:
        """Wait for the block that is being made, and let go what nobody will take out of the queue any more."""
        while not playing.done():
            while not stream.outbox.empty():
                stream.outbox.get_nowait()
            await asyncio.wait({playing}, timeout=0.05)

    async def _read(self, stream: Stream) -> None:
        if self._first is not None:
            await self._hear(stream, self._first)
        limit = self._service.config.session_idle_s
        try:
            await self._hear(stream, await asyncio.wait_for(self._receive(), limit))
        except TimeoutError:
            raise RequestTimedOut(
                f"no first request came within {limit:g} s; connect again when there is one"
            ) from None
        while True:
            await self._hear(stream, await self._receive())

    async def _hear(self, stream: Stream, text: str) -> None:
        try:
            messages, answers = self._dialect.hear(text)
            for message in messages:
                stream.hear(message)
        except BadRequest as error:
            self._num_bad += 1
            if self._num_bad > _MAX_BAD:
                raise BadRequest(f"message: {_MAX_BAD} of this socket made no sense, the last one: {error}") from None
            await stream.fail(error)
        else:
            await self._send_all(answers)

    async def _receive(self) -> str:
        """The next text; one in bytes is no message, and is told so."""
        message = await self._websocket.receive()
        if message["type"] == "websocket.disconnect":
            raise WebSocketDisconnect(message.get("code") or 1005)
        text: str | None = message.get("text")
        return f"{len(message['bytes'])} bytes" if text is None else text

    async def _write(self, stream: Stream) -> None:
        while True:
            item = await stream.outbox.get()
            if isinstance(item, Made):
                if stream.is_wanted(item):
                    await self._show(stream, item)
            else:
                await self._send_all(self._dialect.tell(item))

    async def _show(self, stream: Stream, made: Made) -> None:
        """The viewer first, then the file."""
        frames, film = made.reply.block.frames, None
        if made.format == "mp4":
            film = await self._service.for_viewers(mp4_of, frames, made.at_frame, FRAMES_PER_SECOND)
            pictures = Pictures(film.fragment, film.init, film.mime)
        else:
            pictures = Pictures(await self._service.for_viewers(packed_jpegs, frames))
        await self._send_all(self._dialect.show(made.header, pictures))
        stream.taken(made)
        self._keeping = asyncio.create_task(self._keep(made, film))
        await asyncio.shield(self._keeping)

    async def _keep(self, made: Made, film: Mp4 | None) -> None:
        """What was shown, also if the viewer leaves meanwhile."""
        frames, reel = made.reply.block.frames, made.world.reel
        async with made.world.film_lock:
            if not reel.keeps:
                return
            film = film or await self._service.for_viewers(mp4_of, frames, made.at_frame, FRAMES_PER_SECOND)
            try:
                await self._service.for_viewers(reel.add, film, made.at_frame, len(frames))
            except OSError as error:
                logger.warning("session %s: a block could not be kept: %s", made.world.entry.session_id, error)

    async def _send_all(self, messages: Iterable[str | bytes]) -> None:
        """Raises WebSocketDisconnect where the socket is no more, also if it was the web server that closed it."""
        try:
            async with self._sending:
                for message in messages:
                    if isinstance(message, str):
                        await self._websocket.send_text(message)
                    else:
                        await self._websocket.send_bytes(message)
        except RuntimeError as closed:
            raise WebSocketDisconnect(1006) from closed

    async def _refuse(self, error: Exception) -> None:
        """For good: tell why, and close."""
        code, message = public_error(error)
        self._service.metrics.errors.labels(code).inc()
        level = logging.ERROR if code == WorldKVError.code else logging.WARNING
        fields = {"event": "error", "code": code}
        logger.log(level, "a viewer's socket is closed: %s", error, exc_info=error, extra=fields)
        if not isinstance(error, EngineStopped):
            event = {"type": "error", "code": code, "message": message, "field": None, "playing": False}
            with contextlib.suppress(WebSocketDisconnect, TimeoutError):
                await asyncio.wait_for(self._send_all(self._dialect.tell(event)), _FAREWELL_S)
        await self._close(close_code(code), code)

    async def _close(self, code: CloseCode, reason: str) -> None:
        with contextlib.suppress(
            WebSocketDisconnect, RuntimeError, TimeoutError
        ):  # the client was faster, or reads no more
            await asyncio.wait_for(self._websocket.close(code, reason), _FAREWELL_S)
