"""The console: a page for people, and the socket that feeds it while somebody looks.

The page sends its key first, then which sessions it watches; it gets an overview twice a second and, of watched
sessions, each tick's numbers, frames and imagined video. Nothing is collected for a page that nobody has open.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Hashable
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import BaseRoute, Mount, Route, WebSocketRoute
from starlette.staticfiles import StaticFiles
from starlette.websockets import WebSocket, WebSocketDisconnect

from worldkv.errors import AdmissionRefused, EngineStopped, Unauthorised, WorldKVError
from worldkv.server.console import state
from worldkv.server.ends import SHUTDOWN_TEXT
from worldkv.server.http import require_own_name, require_own_page
from worldkv.server.sessions import Entry, owned
from worldkv.wire import CloseCode, close_code, public_error

if TYPE_CHECKING:
    from worldkv.engine.stats import BlockMap
    from worldkv.server.service import Service

PERIOD_S = 0.5
_KEY_WITHIN_S = 10.0
_MAX_WATCHED = 4
_MAX_MESSAGE_CHARACTERS = 4096  # a key, or a few ids
_BREATH_S = 0.1  # between two overviews, however often the page asks for another session
_FOLDER = Path(__file__).parent / "page"
_HEADERS = {
    "content-security-policy": "default-src 'self'; connect-src 'self' ws: wss:; img-src 'self' data:; media-src blob:",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",
}

logger = logging.getLogger(__name__)


def console_routes(service: Service) -> list[BaseRoute]:
    """The page at /, its files, its socket."""
    feeds = _Feeds(service)

    async def page(request: Request) -> Response:
        if "text/html" not in request.headers.get("accept", ""):
            message = "a policy server; robots speak websocket, people open this in a browser"
            body = {"code": "not_found", "message": message}
            return JSONResponse(body, 404)
        return FileResponse(_FOLDER / "index.html", headers=_HEADERS)

    async def feed(websocket: WebSocket) -> None:
        await _Viewer(websocket, service, feeds).run()

    files = StaticFiles(directory=_FOLDER)
    return [Route("/", page), Mount("/console", files), WebSocketRoute("/v1/console", feed)]


class _Feeds:
    """What all viewers share: one look at the blocks for all of them."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._blocks: BlockMap | None = None
        self._looked_at = 0.0
        self._lock = asyncio.Lock()

    async def blocks(self) -> BlockMap:
        async with self._lock:
            if self._blocks is None or time.monotonic() - self._looked_at > PERIOD_S / 2:
                self._blocks = await self._service.in_thread(self._service.app.engine.block_map)
                self._looked_at = time.monotonic()
            return self._blocks


class _Viewer:
    """One open page."""

    def __init__(self, websocket: WebSocket, service: Service, feeds: _Feeds) -> None:
        self._websocket = websocket
        self._service = service
        self._feeds = feeds
        self._owner = ""
        self._watched: dict[str, tuple[Entry, Hashable]] = {}  # id -> the session, and what of it was sent
        self._wanted: list[str] = []
        self._changed = asyncio.Event()

    async def run(self) -> None:
        """Until the page is closed, or the server shuts down."""
        await self._websocket.accept()
        try:
            await self._authorise()
            await self._websocket.send_json(state.hello(self._service))
            async with asyncio.TaskGroup() as tasks:
                reading = tasks.create_task(self._read())
                sending = tasks.create_task(self._send())
                stop = tasks.create_task(self._stop_with_the_server())
                await asyncio.wait({reading, sending, stop}, return_when=asyncio.FIRST_COMPLETED)
                for task in (reading, sending, stop):
                    task.cancel()
        except* (Unauthorised, AdmissionRefused, EngineStopped) as refused:
            await self._refuse(*public_error(refused.exceptions[0]))
        except* (ValueError, KeyError):
            await self._refuse("bad_request", "expected a JSON object: a key first, then what to watch")
        except* (WebSocketDisconnect, RuntimeError):
            pass  # the page is gone
        finally:
            self._service.sockets.forget(self)
            self._watch([])

    async def _authorise(self) -> None:
        """The key is the first message, since a browser's socket cannot send a header."""
        require_own_name(self._websocket, self._service)
        if self._service.config.api_key is None:
            require_own_page(self._websocket, self._service)
        try:
            first = await asyncio.wait_for(self._hear(), _KEY_WITHIN_S)
        except TimeoutError:
            raise Unauthorised(f"the key did not come within {_KEY_WITHIN_S:g} s") from None
        key = first.get("key")
        self._owner = self._service.config.owner_of(f"Api-Key {key}" if key else None)
        self._service.sockets.add(self, self._owner)

    async def _hear(self) -> dict[str, object]:
        """The next message. Raises ValueError, before it is parsed, for one that is longer than any of a page's."""
        text = await self._websocket.receive_text()
        if len(text) > _MAX_MESSAGE_CHARACTERS:
            raise ValueError
        try:
            message = json.loads(text)
        except RecursionError:  # brackets, thousands deep
            raise ValueError from None
        return message if isinstance(message, dict) else {}

    async def _refuse(self, code: str, why: str) -> None:
        with contextlib.suppress(WebSocketDisconnect, RuntimeError):
            await self._websocket.send_json({"type": "refused", "code": code, "why": why})
            await self._websocket.close(close_code(code), code)

    async def _read(self) -> None:
        """Which sessions the page looks at."""
        while True:
            watched = (await self._hear()).get("watch")
            if isinstance(watched, list):
                self._wanted = [str(name) for name in watched[:_MAX_WATCHED]]
                self._changed.set()

    def _watch(self, public_ids: list[str]) -> None:
        entries = {}
        for name in public_ids:
            with contextlib.suppress(WorldKVError):
                entries[name] = self._service.sessions.get(owned(name, self._owner))
        for name, (entry, _) in self._watched.items():
            if entries.get(name) is not entry:
                entry.history.left()
        for name, entry in entries.items():
            if name not in self._watched or self._watched[name][0] is not entry:
                entry.history.looked_at()
        self._watched = {
            name: self._watched[name] if name in self._watched and self._watched[name][0] is entry else (entry, None)
            for name, entry in entries.items()
        }

    async def _send(self) -> None:
        while True:
            self._changed.clear()
            await self._service.until_ready()
            blocks = await self._feeds.blocks()
            await self._websocket.send_json(state.overview(self._service, self._owner, blocks))
            self._watch(self._wanted)  # again: one of them may have opened, or ended and opened anew
            for name, (entry, sent) in list(self._watched.items()):
                await self._send_session(name, entry, sent)
            await asyncio.sleep(_BREATH_S)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), PERIOD_S - _BREATH_S)

    async def _send_session(self, name: str, entry: Entry, sent: Hashable) -> None:
        state_now = entry.history.mark
        if state_now == sent:
            return
        self._watched[name] = (entry, state_now)
        await self._websocket.send_json(state.detail(entry, self._service.app.period_s))
        latest = entry.history.latest
        if latest is None:
            return
        observed = state.frames(entry)
        if observed is not None:
            await self._websocket.send_bytes(observed)
        try:
            video = await self._service.for_people(state.imagined, entry.public_id, latest)
        except Exception:
            logger.exception("session %s: its imagined video could not be decoded", name)
            return
        await self._websocket.send_bytes(video)

    async def _stop_with_the_server(self) -> None:
        await asyncio.wait({self._service.closing})
        await self._websocket.close(CloseCode.GOING_AWAY, SHUTDOWN_TEXT)
