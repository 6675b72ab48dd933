"""`/healthz` and `/metrics` on a port and a thread of their own: they answer whatever the event loop does.

For probes and Prometheus. In plain HTTP also where the server speaks TLS, without a key, a request a socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import threading
from typing import TYPE_CHECKING

from worldkv.server.gate import Gate, GatedSocket
from worldkv.server.http import HEALTH_PATH
from worldkv.server.listening import take_port
from worldkv.server.metrics import CONTENT_TYPE

if TYPE_CHECKING:
    from worldkv.server.service import Service

_MAX_SOCKETS, _PER_ADDRESS = 256, 64
_MAX_HEAD_BYTES = 8192
_WITHIN_S = 5.0
_PHRASES = {200: "OK", 400: "Bad Request", 401: "Unauthorized", 404: "Not Found", 503: "Service Unavailable"}

logger = logging.getLogger(__name__)
Answer = tuple[int, str, bytes]  # status, content type, body


class HealthServer:
    """Listens from the start. `service`: already started when `start` is called."""

    def __init__(self, service: Service, host: str, port: int) -> None:
        gate = Gate(_MAX_SOCKETS, _PER_ADDRESS, _WITHIN_S, tls=False)
        self._gate = gate
        self._sockets = [GatedSocket.around(each, gate) for each in take_port(host, port)]
        self._service = service
        self._thread = threading.Thread(target=self._run, name="worldkv-health", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop = asyncio.Event()

    @property
    def port(self) -> int:
        return self._sockets[0].port

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Safe twice, and before `start`."""
        if self._loop is not None and self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # it ends just now
                self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(_WITHIN_S)
        for each in self._sockets:
            each.close()
        self._gate.close()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
            self._loop = runner.get_loop()
            runner.run(self._serve())

    async def _serve(self) -> None:
        async with contextlib.AsyncExitStack() as stack:
            for each in self._sockets:
                await stack.enter_async_context(
                    await asyncio.start_server(self._converse, sock=each, limit=_MAX_HEAD_BYTES)
                )
            await self._stop.wait()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_WITHIN_S):
                head = await reader.readuntil(b"\r\n\r\n")
                status, kind, body = await self._answer(head.decode("latin-1").split("\r\n"))
                text = (
                    f"HTTP/1.1 {status} {_PHRASES[status]}\r\ncontent-type: {kind}\r\n"
                    f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
                )
                writer.write(text.encode() + (b"" if head.startswith(b"HEAD ") else body))
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except (OSError, EOFError, TimeoutError, asyncio.LimitOverrunError):
            pass  # it did not ask, or does not listen
        finally:
            writer.transport.abort()

    async def _answer(self, lines: list[str]) -> Answer:
        method, _, rest = lines[0].partition(" ")
        path = rest.partition(" ")[0].partition("?")[0]
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
        if method not in ("GET", "HEAD"):
            return _told(400, "expected GET")
        if path == HEALTH_PATH:
            reason = await asyncio.to_thread(self._service.why_not_ready_now)
            ready = {"status": "ready"} if reason is None else {"status": "unready", "reason": reason}
            return 200 if reason is None else 503, "application/json", json.dumps(ready).encode()
        refusal = self._service.config.refusal_of_host(headers.get("host"))
        if refusal is not None:
            return _told(401, refusal)
        if path == "/metrics":
            return 200, CONTENT_TYPE, await asyncio.to_thread(self._service.metrics.exposition)
        return _told(404, "only /healthz and /metrics are here")


def _told(status: int, why: str) -> Answer:
    return status, "text/plain; charset=utf-8", f"{why}\n".encode()
