"""`/healthz` and `/metrics` on a port and a process of their own: they answer whatever this process is busy with.

For probes and Prometheus. In plain HTTP also where the server speaks TLS, without a key, a request a socket. Here is
the server's side: it starts the process (`health_process`), tells it ten times a second whether the server is ready,
and makes the metrics that it is asked for.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from types import TracebackType
from typing import TYPE_CHECKING, Self

from worldkv.server import health_process
from worldkv.server.health_process import FIRST_WORD, STALE_S
from worldkv.server.listening import take_port
from worldkv.server.metrics import CONTENT_TYPE

if TYPE_CHECKING:
    from worldkv.server.service import Service

_PERIOD_S = 0.1
_METRICS_FOR_S = 0.2  # the same ones are told, however many ask
_ANOTHER_AFTER_S = 1.0
_END_S = 5.0

logger = logging.getLogger(__name__)


class HealthServer:
    """Takes its port at once, and answers from `start` or `with` on: "loading", until it is told of a service."""

    def __init__(self, host: str, port: int) -> None:
        """Raises OSError if the port is taken, ValueError where there are no such processes."""
        if os.name != "posix":
            raise ValueError("health_port: needs Linux or macOS; leave it out, /healthz is on the server's port too")
        self._listening = take_port(host, port)
        self.port = int(self._listening[0].getsockname()[1])
        self._service: Service | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_asked_at: float | None = None  # to make a turn; None: it has made it
        self._metrics: tuple[float, str] = (0.0, "")
        self._saying = threading.Lock()
        self._ends = threading.Event()
        self._threads: list[threading.Thread] = []

    @property
    def pid(self) -> int:
        """Of the process that answers, once there is one."""
        return self._process.pid

    def start(self) -> Self:
        """Safe twice."""
        if not self._threads:
            self._begin_process()
            for run in (self._tell_for_ever, self._answer_for_ever):
                thread = threading.Thread(target=run, name="worldkv-health", daemon=True)
                self._threads.append(thread)
                thread.start()
        return self

    def tell_of(self, service: Service) -> None:
        """From now on its state is told. On the event loop that it runs on."""
        self._loop = asyncio.get_running_loop()
        self._service = service

    def stop(self) -> None:
        """Safe twice, and before `start`."""
        self._ends.set()
        if self._threads:
            self._hang_up()
            for thread in self._threads:
                thread.join(_END_S)
            self._end_process()
        for each in self._listening:
            each.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _begin_process(self) -> None:
        self._channel, theirs = socket.socketpair()
        given = [theirs.fileno(), *(each.fileno() for each in self._listening)]
        command = [sys.executable, "-I", "-S", health_process.__file__, str(given[0]), str(os.getpid())]
        signals = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
        before = signal.pthread_sigmask(
            signal.SIG_BLOCK, signals
        )  # the process inherits that: it ends when this one has
        try:
            self._process = subprocess.Popen(
                [*command, *map(str, given[1:])], pass_fds=given, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()

    def _end_process(self) -> None:
        self._channel.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _hang_up(self) -> None:
        with contextlib.suppress(OSError):
            self._channel.shutdown(socket.SHUT_RDWR)

    def _say(self, what: dict[str, object]) -> None:
        with self._saying, contextlib.suppress(OSError):  # who reads nothing has ended, and is begun again
            self._channel.sendall(json.dumps(what).encode() + b"\n")

    def _tell_for_ever(self) -> None:
        while not self._ends.is_set():
            self._say({"reason": self._why_not_ready()})
            self._ends.wait(_PERIOD_S)

    def _why_not_ready(self) -> str | None:
        if self._service is None or self._loop is None:
            return FIRST_WORD
        try:
            return self._service.why_not_ready_now() or self._why_the_loop_stands()
        except Exception as error:
            return f"its health cannot be told: {type(error).__name__}"

    def _why_the_loop_stands(self) -> str | None:
        """It serves everybody else: while it stands nobody is served, whatever the engine says."""
        assert self._loop is not None
        asked_at, now = self._loop_asked_at, time.monotonic()
        if asked_at is None:
            self._loop_asked_at = now
            self._loop.call_soon_threadsafe(self._loop_turns)
        elif now - asked_at > STALE_S:
            return f"the event loop has stood still for {now - asked_at:.1f} s"
        return None

    def _loop_turns(self) -> None:
        self._loop_asked_at = None

    def _answer_for_ever(self) -> None:
        """And begin the process again should it end, which it does when somebody kills it."""
        while True:
            with contextlib.suppress(OSError), self._channel.makefile("rb") as lines:
                for line in lines:
                    self._say(self._answer(json.loads(line)["metrics"]))
            if self._ends.wait(_ANOTHER_AFTER_S):
                return
            logger.warning(
                "the process of the health port has ended; it is begun again", extra={"event": "health_ended"}
            )
            with self._saying:
                self._end_process()
                self._begin_process()

    def _answer(self, host: str | None) -> dict[str, object]:
        if self._service is None:
            return _told(503, FIRST_WORD)
        refusal = self._service.config.refusal_of_host(host)
        if refusal is not None:
            return _told(401, refusal)
        try:
            return {"status": 200, "kind": CONTENT_TYPE, "body": self._exposition(self._service)}
        except Exception:
            logger.exception("metrics could not be made")
            return _told(503, "metrics could not be made; the server's log says why")

    def _exposition(self, service: Service) -> str:
        made_at, body = self._metrics
        if time.monotonic() - made_at > _METRICS_FOR_S:
            body = service.metrics.exposition().decode()
            self._metrics = (time.monotonic(), body)
        return body


def _told(status: int, why: str) -> dict[str, object]:
    return {"status": status, "kind": "text/plain; charset=utf-8", "body": f"{why}\n"}
