"""`PolicyServer`: one app, one port; for robots, websockets: `worldkv.wire` says what is spoken.

Robots that never say when an episode ends
------------------------------------------
openpi, PolaRiS and sim-eval clients keep one socket over many episodes and send no reset. An episode begins

- with another prompt: always. A session that belongs to its connection forgets its frames with it; one with a
  `session_id` restarts as the model does, which keeps the robot's last frames;
- after a pause: with `ServerConfig.episode_gap_s`, a session that was silent for longer starts afresh;
- on request: a request with the key `reset: true` does.

A new connection without a `session_id`, a new `session_id` and RoboArena's `endpoint: reset` do so as well.

When a request fails
--------------------
Its client gets one text with a reason and an id that finds the traceback in the server's log, then a close
code (`worldkv.wire.CloseCode`). Its session is as it was before the request, and so is everybody else's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

import uvicorn
from fastapi import FastAPI

from worldkv.server.app import create_app
from worldkv.server.certificate import check_certificate
from worldkv.server.config import ServerConfig
from worldkv.server.gate import Gate, GatedSocket
from worldkv.server.health import HealthServer
from worldkv.server.listening import take_port
from worldkv.server.protocols import LimitedConfig
from worldkv.server.service import Service

if TYPE_CHECKING:
    from worldkv.app import AnyApp
    from worldkv.server.tracing import TickTracer

__all__ = ["PolicyServer", "ServerConfig", "create_app"]

_DRAIN_S = 30.0  # for the ticks in flight at shutdown
_FAREWELL_S = 5.0
_PING_INTERVAL_S = 20.0
_PING_TIMEOUT_S = 60.0  # a pong waits behind an upload on a slow link
_POLL_S = 0.1
_ACCEPTED_AT_ONCE = 8

logger = logging.getLogger(__name__)


class PolicyServer:
    """Serves `app` (a Policy, say), which the caller keeps owning, until told to stop. Runs once.

    `run` blocks and ends on SIGINT or SIGTERM; `start` and `stop`, or `with`, run it on a thread.
    """

    def __init__(
        self,
        app: AnyApp,
        config: ServerConfig | None = None,
        listening: Sequence[socket.socket] = (),
        health: HealthServer | None = None,
    ) -> None:
        """`listening`, of `take_port`, and `health`: where the ports were taken before there was an app. Raises
        ValueError for a certificate that nobody would trust, OSError if the health port is taken."""
        self.config = config or ServerConfig()
        api = create_app(app, self.config)
        self._service: Service = api.state.service
        check_certificate(self.config)
        config = self.config
        uses_tls = config.tls_cert is not None
        self._gate = Gate(config.max_sockets, config.max_sockets_per_address, config.silent_s, tls=uses_tls)
        self._sockets = [GatedSocket.around(each, self._gate) for each in listening]
        self._health = health
        if health is None and config.health_port is not None:
            self._health = HealthServer(config.host, config.health_port)
        self._uvicorn = _Uvicorn(_uvicorn_config(api, config, self._gate), self._service, self._health)
        self._thread: threading.Thread | None = None

    @property
    def port(self) -> int:
        """Where it listens, once `listen`, `start` or `run` was called; useful with port 0."""
        if not self._sockets:
            raise ValueError("port: not listening yet; call listen() or start() first")
        return self._sockets[0].port

    @property
    def health_port(self) -> int | None:
        """Where `/healthz` answers as well; None: nowhere."""
        return None if self._health is None else self._health.port

    def trace_with(self, tracer: TickTracer) -> None:
        """Have every tick traced; the tracer is closed with the server."""
        self._service.tracer = tracer

    def listen(self) -> int:
        """Take the port: from now on clients wait instead of being refused. Raises OSError if it is taken."""
        if not self._sockets:
            opened = take_port(self.config.host, self.config.port, only_loopback=self.config.api_key is None)
            self._sockets = [GatedSocket.around(each, self._gate) for each in opened]
        return self.port

    def run(self) -> None:
        """Serve until a signal or `stop`. Raises OSError if the port is taken, and what warm-up raised."""
        self.listen()
        logger.info("listening on %s port %d", self.config.host, self.port)
        with contextlib.ExitStack() as stack:
            stack.callback(self._gate.close)
            for each in self._sockets:
                stack.enter_context(each)
            if self._health is not None:
                stack.enter_context(self._health)
            self._uvicorn.run(sockets=list(self._sockets))
        if self._service.warm_up_error is not None:
            raise self._service.warm_up_error

    def start(self) -> Self:
        """Serve on a thread. Raises OSError if the port is taken."""
        self.listen()
        self._thread = threading.Thread(target=self._run_logged, name="worldkv-server", daemon=True)
        self._thread.start()
        return self

    def stop(self) -> None:
        """Let the ticks in flight end, close every socket with 1001, and wait for all that. Safe twice."""
        self._uvicorn.should_exit = True
        if self._thread is not None:
            self._thread.join()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _run_logged(self) -> None:
        try:
            self.run()
        except Exception:
            logger.exception("the server has ended")


class _Uvicorn(uvicorn.Server):
    """uvicorn, which would end its sockets with 1012 in the middle of a tick, and itself by its signal."""

    def __init__(self, config: LimitedConfig, service: Service, health: HealthServer | None) -> None:
        super().__init__(config)
        self._service = service
        self._health = health

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self._health is not None:
            self._health.tell_of(self._service)

    async def on_tick(self, counter: int) -> bool:
        return await super().on_tick(counter) or self._service.warm_up_error is not None

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        drain = asyncio.create_task(self._service.drain(_DRAIN_S))
        while not drain.done() and not self.force_exit:
            await asyncio.wait({drain}, timeout=_POLL_S)
        if self.force_exit:  # told twice: end the ticks in flight instead of waiting for them
            drain.cancel()
            drain = asyncio.create_task(self._service.drain(0.0))
            await asyncio.wait({drain}, timeout=_FAREWELL_S)
            self.force_exit = False  # or uvicorn would leave its tasks pending
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals while serving, and do not raise them again: the caller has to clean up."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        signals = (signal.SIGINT, signal.SIGTERM)
        previous = {number: signal.signal(number, self.handle_exit) for number in signals}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


def _uvicorn_config(app: FastAPI, config: ServerConfig, gate: Gate) -> LimitedConfig:
    return LimitedConfig(
        app,
        gate,
        config.silent_s,
        host=config.host,
        loop="asyncio",  # whose accept() is ours: see `gate`
        ws_max_size=2 * config.max_message_bytes,  # up to there we answer ourselves; beyond, close code 1009
        ws_ping_interval=_PING_INTERVAL_S,
        ws_ping_timeout=_PING_TIMEOUT_S,
        ws_per_message_deflate=False,
        ssl_certfile=config.tls_cert,
        ssl_keyfile=config.tls_key,
        lifespan="on",
        log_config=None,
        access_log=False,
        backlog=_ACCEPTED_AT_ONCE,
        timeout_graceful_shutdown=int(_FAREWELL_S),
    )
