"""What all connections of a server share: the app, its sessions, whether it is ready or shuts down.

Does not know websockets or HTTP, nor what the app is for. Does not own the app: who made it closes it.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, TypeVar

from worldkv.errors import EngineStopped
from worldkv.server.config import ServerConfig
from worldkv.server.counts import PerKey
from worldkv.server.ends import SHUTDOWN_TEXT
from worldkv.server.logs import TICKS
from worldkv.server.metrics import Metrics
from worldkv.server.sessions import EndReason, SessionTable
from worldkv.server.snapshots import SnapshotTable
from worldkv.wire import pack

if TYPE_CHECKING:
    from worldkv.app import AnyApp, Reply
    from worldkv.engine.engine import Health
    from worldkv.server.sessions import Entry
    from worldkv.server.tracing import TickTracer

_LONGEST_SWEEP_PERIOD_S = 5.0
_THREADS = 32  # for opening, resetting and closing sessions: short work that may wait for the forward under way
_READERS = 8  # for messages: never behind what waits for a forward, nor behind pictures
_PAINTERS = 2
_ENCODERS = 4  # for what viewers are sent: a core each while they are busy
_HEALTH_TIMEOUT_S = 2.0
_FAREWELL_S = 5.0  # for telling clients whose ticks were ended

logger = logging.getLogger(__name__)
ticks = logging.getLogger(TICKS)
R = TypeVar("R")


class Service:
    """One server's. `start`, `drain` and `stop` run on its event loop."""

    closing: asyncio.Future[None]  # done once no new request is served

    def __init__(self, app: AnyApp, config: ServerConfig) -> None:
        self.config = config
        self.metrics = Metrics(app.engine)
        self.connections: set[asyncio.Task[None]] = set()
        self.warm_up_error: Exception | None = None
        self.app = app
        self.tracer: TickTracer | None = None
        self.sockets = PerKey(
            "sockets are open", config.max_connections, "close one: none closes by itself", "--max-sockets-per-key"
        )
        waiting = "try again when one of them is answered, or end a stream"  # who sent them all knows when that is
        self.requests = PerKey("requests are being served", config.max_requests, waiting)
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="worldkv-server")
        self._readers = ThreadPoolExecutor(_READERS, thread_name_prefix="worldkv-reader")
        self._painters = ThreadPoolExecutor(_PAINTERS, thread_name_prefix="worldkv-painter")
        self._encoders = ThreadPoolExecutor(_ENCODERS, thread_name_prefix="worldkv-encoder")
        self._asking = threading.Lock()
        self._asked: Future[Health] | None = None
        self._checks = ThreadPoolExecutor(1, thread_name_prefix="worldkv-health")
        self.importing = asyncio.Lock()  # one at a time: its bytes are held whole
        self.sessions = SessionTable(app, config, self.metrics, self._threads)
        self.snapshots = SnapshotTable(app, config.max_snapshots, config.session_idle_s, self.metrics)

    @property
    def greeting(self) -> bytes:
        """The first message of every connection."""
        return pack(self.app.greeting)

    @property
    def draining(self) -> bool:
        return self.closing.done()

    def ticked(self, entry: Entry, reply: Reply) -> None:
        """A tick was answered: remembered for people, counted, logged and traced."""
        self.metrics.observe_tick(reply.timings)
        row = entry.history.ticked(reply)
        ticks.info(
            "session %s tick %d: %.0f ms",
            entry.session_id,
            row.number,
            row.timings.get("total", 0.0),
            extra={
                **row.facts,
                "event": "tick",
                "session": entry.session_id,
                "tick": row.number,
                "milliseconds": {stage: round(value, 2) for stage, value in row.timings.items()},
            },
        )
        if self.tracer is not None:
            self.tracer.tick(entry.session_id, row)

    @contextmanager
    def counting_task(self) -> Iterator[None]:
        """In the `with` the current task serves a client: a shutdown waits for it."""
        task = asyncio.current_task()
        assert task is not None
        self.connections.add(task)
        try:
            yield
        finally:
            self.connections.discard(task)

    async def in_thread(self, function: Callable[..., R], *args: object) -> R:
        """Read something of a robot's off the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._readers, function, *args)

    async def for_people(self, function: Callable[..., R], *args: object) -> R:
        """Draw something, off the event loop and out of the robots' way."""
        return await asyncio.get_running_loop().run_in_executor(self._painters, function, *args)

    async def for_viewers(self, function: Callable[..., R], *args: object) -> R:
        """Encode what a viewer waits for, off the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._encoders, function, *args)

    def start(self) -> None:
        """Begin to warm the app up, in the background."""
        loop = asyncio.get_running_loop()
        self.closing = loop.create_future()
        self._warm: asyncio.Future[None] = loop.create_future()  # done when warm-up has ended, well or not
        self._sweeper = loop.create_task(self._sweep_for_ever())
        threading.Thread(target=self._warm_up, args=(loop,), name="worldkv-warm-up", daemon=True).start()

    async def until_ready(self) -> None:
        """Wait for the end of warm-up. Raises EngineStopped if it failed, or if the server shuts down."""
        await asyncio.wait({self._warm, self.closing}, return_when=asyncio.FIRST_COMPLETED)
        if self.draining:
            raise EngineStopped(SHUTDOWN_TEXT)
        if self.warm_up_error is not None:
            raise EngineStopped("warm-up failed; the server's log says why")

    async def why_not_ready(self) -> str | None:
        """None: ready for robots."""
        reason = self._why_never_asked()
        if reason is not None:
            return reason
        asked = asyncio.wrap_future(self._ask_health())
        await asyncio.wait({asked}, timeout=_HEALTH_TIMEOUT_S)
        return _told(asked.result() if asked.done() else None)

    def why_not_ready_now(self) -> str | None:
        """`why_not_ready` for threads other than the event loop's."""
        reason = self._why_never_asked()
        if reason is not None:
            return reason
        with suppress(TimeoutError):
            return _told(self._ask_health().result(_HEALTH_TIMEOUT_S))
        return _told(None)

    def _why_never_asked(self) -> str | None:
        if self.draining:
            return SHUTDOWN_TEXT
        if not self._warm.done():
            return "warming up"
        if self.warm_up_error is not None:
            return f"warm-up failed: {type(self.warm_up_error).__name__}; the server's log says more"
        return None

    def _ask_health(self) -> Future[Health]:
        """One question at a time, however many wait for the answer."""
        with self._asking:
            if self._asked is None or self._asked.done():
                self._asked = self._checks.submit(self.app.health)
            return self._asked

    async def drain(self, limit_s: float) -> None:
        """Serve no new request; give the ticks in flight some time; close all sessions and connections."""
        if not self.closing.done():
            self.closing.set_result(None)
            self.metrics.ready.set(0)
        await self._connections_end(limit_s)
        await self.sessions.end_all(EndReason.SHUTDOWN, SHUTDOWN_TEXT)
        self.snapshots.release_all(SHUTDOWN_TEXT)
        await self._connections_end(_FAREWELL_S)

    async def stop(self) -> None:
        """After `drain`: end what still runs in the background."""
        self._sweeper.cancel()
        if self.tracer is not None:
            self.tracer.close()
        for pool in (self._threads, self._readers, self._painters, self._encoders, self._checks):
            pool.shutdown(wait=False, cancel_futures=True)

    async def _sweep_for_ever(self) -> None:
        """End what has not been used for too long."""
        shortest = min(self.config.session_grace_s, self.config.session_idle_s)
        period = min(max(shortest / 4, 0.02), _LONGEST_SWEEP_PERIOD_S)
        while True:
            await asyncio.sleep(period)
            try:
                await self.sessions.sweep()
                self.snapshots.release_unused()
            except Exception:  # of one session's: the others are still to end
                logger.exception("the sweep for unused sessions failed")

    async def _connections_end(self, limit_s: float) -> None:
        if self.connections:
            await asyncio.wait(self.connections, timeout=limit_s)

    def _warm_up(self, loop: asyncio.AbstractEventLoop) -> None:
        """On a thread of its own: it may take minutes."""
        error = None
        try:
            self.app.warm_up()
        except Exception as caught:
            error = caught
        with suppress(RuntimeError):  # the server has stopped meanwhile
            loop.call_soon_threadsafe(self._end_warm_up, error)

    def _end_warm_up(self, error: Exception | None) -> None:
        self.warm_up_error = error
        self._warm.set_result(None)
        if error is not None:
            logger.error("warm-up failed", exc_info=error, extra={"event": "warm_up_failed"})
        elif not self.draining:
            self.metrics.ready.set(1)
            logger.info("ready", extra={"event": "ready"})


def _told(health: Health | None) -> str | None:
    """None: the engine is ready. `health` None: it said nothing."""
    if health is None:
        return f"the engine did not answer within {_HEALTH_TIMEOUT_S:g} s"
    return None if health.ready else health.reason
