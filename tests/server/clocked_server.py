"""A whole server without sockets, threads or waiting: ASGI called by hand, on an event loop whose clock a test moves.

Its app computes nothing: a tick counts, and one with the prompt "slow" ends when a test says so.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import uuid
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future
from typing import Any
from unittest import mock

import numpy as np
from server_fakes import FakeHealth, FakePolicy, FakeReply

from worldkv.errors import AdmissionRefused, SessionBusy, SessionEnded, SessionNotFound
from worldkv.server.app import create_app
from worldkv.server.config import ServerConfig
from worldkv.wire import pack, unpack

_STEP_S = 1.0


class _Inline(Executor):
    """Does everything at once, on the caller's thread."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(fn(*args, **kwargs))
        except Exception as error:
            done.set_exception(error)
        return done


class _ClockedLoop(asyncio.SelectorEventLoop):
    now = 1000.0

    def time(self) -> float:
        return self.now

    def settle(self) -> None:
        """Run until nothing is left to do at this time."""
        for _ in range(3):
            self.run_until_complete(asyncio.sleep(0))
        while self._ready:
            self.run_until_complete(asyncio.sleep(0))


class CountingSession:
    """One session of the app below. What waits for its tick in flight is done in order."""

    def __init__(self, app: CountingApp, session_id: str, num_ticks: int = 0) -> None:
        self.session_id, self.num_ticks = session_id, num_ticks
        self.record = None
        self._app = app
        self._tick: Future[FakeReply] | None = None
        self._waiting: list[Callable[[], None]] = []
        self.ended_by_engine = False

    def infer(self, observation: Mapping[str, Any]) -> Future[FakeReply]:
        answer: Future[FakeReply] = Future()
        answer.set_running_or_notify_cancel()
        if self._app.live.get(self.session_id) is not self or self.ended_by_engine:
            answer.set_exception(SessionNotFound(f"session {self.session_id} is closed"))
        elif self._tick is not None:
            answer.set_exception(SessionBusy(f"session {self.session_id} has a tick in flight"))
        else:
            self._tick = answer
            if observation["prompt"] == "fail":
                self._end_tick(RuntimeError("the model failed"))
            elif observation["prompt"] != "slow":
                self.finish_tick()
        return answer

    def finish_tick(self) -> None:
        self.num_ticks += 1
        self._end_tick(FakeReply(np.full((1, 8), self.num_ticks, np.float32), {"total": 1.0}, ()))

    def _end_tick(self, outcome: FakeReply | Exception) -> None:
        answer, self._tick = self._tick, None
        if answer is not None and isinstance(outcome, Exception):
            answer.set_exception(outcome)
        elif answer is not None:
            answer.set_result(outcome)
        while self._waiting and self._tick is None:
            self._waiting.pop(0)()

    def describe(self) -> dict[str, Any]:
        if self.ended_by_engine:
            raise SessionNotFound(f"session {self.session_id} is closed")
        busy = self._tick is not None
        return {
            "state": "live",
            "busy": busy,
            "frames_seen": self.num_ticks,
            "blocks": 0,
            "bytes_parked": 0,
            "inexact": None,
        }

    def reset(self) -> Future[None]:
        if self.ended_by_engine:
            gone: Future[None] = Future()
            gone.set_exception(SessionNotFound(f"session {self.session_id} is closed"))
            return gone
        self._end_tick(SessionEnded(f"session {self.session_id} was reset, during this tick"))
        self.num_ticks = 0
        return _done(None)

    def close(self, reason: str) -> Future[None]:
        self._end_tick(SessionEnded(f"session {self.session_id} was closed: {reason}, during this tick"))
        if self._app.live.get(self.session_id) is self:
            del self._app.live[self.session_id]
        return _done(None)

    def begin_park(self) -> Future[None]:
        return self._between_ticks(lambda: None)

    def begin_snapshot(self) -> Future[Any]:
        return self._between_ticks(lambda: mock.Mock(num_chunks=self.num_ticks, num_blocks_charged=0))

    def begin_restore(self, snapshot: Any) -> Future[None]:
        def restore() -> None:
            self.num_ticks = snapshot.num_chunks

        return self._between_ticks(restore)

    def _between_ticks(self, do: Callable[[], Any]) -> Future[Any]:
        answer: Future[Any] = Future()
        self._waiting.append(lambda: answer.set_result(do()) if answer.set_running_or_notify_cancel() else None)
        if self._tick is None:
            self._waiting.pop()()
        return answer


class CountingApp(FakePolicy):
    """`made`: its sessions that anybody still holds."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity=capacity)
        del self.release  # an event there
        self.live: dict[str, CountingSession] = {}  # type: ignore[assignment]
        self.made: weakref.WeakSet[CountingSession] = weakref.WeakSet()
        self.released: list[Any] = []

    def open_session(self, session_id: str | None = None, num_ticks: int = 0) -> CountingSession:  # type: ignore[override]
        assert session_id is not None
        assert session_id not in self.live, "opened twice"
        if len(self.live) >= self.capacity:
            raise AdmissionRefused(f"{self.capacity} sessions are all that fit")
        session = self.live[session_id] = CountingSession(self, session_id, num_ticks)
        self.made.add(session)
        return session

    def begin_fork(self, source: Any, session_id: str) -> Future[CountingSession]:
        answer: Future[CountingSession] = Future()
        num_ticks = source.num_ticks if isinstance(source, CountingSession) else source.num_chunks
        try:
            answer.set_result(self.open_session(session_id, num_ticks))
        except AdmissionRefused as refused:
            answer.set_exception(refused)
        return answer

    def forked(self, handle: CountingSession, source: object) -> CountingSession:
        return handle

    def release(self, snapshot: object) -> None:  # type: ignore[override]
        self.released.append(snapshot)

    def health(self) -> FakeHealth:
        return FakeHealth(True, "")


class Socket:
    """A robot's websocket. `own_name`: of its session, where it names none."""

    def __init__(self, server: ClockedServer, key: str) -> None:
        self.key = key
        self._answers: list[Any] = []
        self.closed_by_server = False
        self._inbox: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._server = server
        self._inbox.put_nowait({"type": "websocket.connect"})
        server.loop.create_task(server.api(server.scope("websocket", "/", key), self._inbox.get, self._take))
        server.loop.settle()
        self.own_name = f"connection-{server.newest_id}"
        self._answers.clear()  # the greeting

    def send(self, message: Mapping[str, Any]) -> None:
        self._inbox.put_nowait({"type": "websocket.receive", "bytes": pack(message)})
        self._server.loop.settle()

    def close(self) -> None:
        self._inbox.put_nowait({"type": "websocket.disconnect", "code": 1005})
        self._server.loop.settle()

    def read(self) -> Any:
        """The only answer: an array, or a text. None: there is none yet."""
        answers, self._answers = self._answers, []
        assert len(answers) <= 1, answers
        return answers[0] if answers else None

    async def _take(self, message: Mapping[str, Any]) -> None:
        if message["type"] == "websocket.send":
            text = message.get("text")
            self._answers.append(unpack(message["bytes"], max_bytes=1 << 20) if text is None else text)
        elif message["type"] == "websocket.close":
            self.closed_by_server = True


class ClockedServer:
    """`keys`: of the clients; with several, each has sessions of its own."""

    def __init__(self, app: CountingApp, keys: list[str], **config: Any) -> None:
        self.loop = _ClockedLoop()
        self._num_ids = itertools.count(1)
        self.newest_id = ""
        self._patches = [
            mock.patch("worldkv.server.service.ThreadPoolExecutor", _Inline),
            mock.patch("worldkv.server.robots.uuid.uuid4", self._new_id),
        ]
        for patch in self._patches:
            patch.start()
        self.api = create_app(app, ServerConfig(api_key=",".join(keys), **config))
        self.service = self.api.state.service
        self.loop.run_until_complete(self._start())

    async def _start(self) -> None:
        self.service.start()
        await self.service.until_ready()

    @property
    def now(self) -> float:
        return self.loop.now

    def pass_time(self, seconds: float) -> None:
        """Little by little, as time passes."""
        end = self.loop.now + seconds
        while self.loop.now < end:
            self.loop.now = min(end, self.loop.now + _STEP_S)
            self.loop.settle()

    def http(self, key: str, method: str, path: str, body: Mapping[str, Any] | None = None) -> asyncio.Task[Any]:
        """Done, with (status, JSON), unless the request waits for something."""
        task = self.loop.create_task(self._http(self.scope("http", path, key, method), body))
        self.loop.settle()
        return task

    async def _http(self, scope: dict[str, Any], body: Mapping[str, Any] | None) -> tuple[int, Any]:
        said: list[Mapping[str, Any]] = []
        content = b"" if body is None else json.dumps(body).encode()

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": content, "more_body": False}

        async def send(message: Mapping[str, Any]) -> None:
            said.append(message)

        await self.api(scope, receive, send)
        return said[0]["status"], json.loads(b"".join(part["body"] for part in said[1:]))

    def scope(self, kind: str, path: str, key: str, method: str = "GET") -> dict[str, Any]:
        headers = {"host": "127.0.0.1", "authorization": f"Api-Key {key}", "content-type": "application/json"}
        scope = {
            "type": kind,
            "path": path,
            "query_string": b"",
            "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
            "client": ("127.0.0.1", 1),
        }
        return scope | ({"subprotocols": []} if kind == "websocket" else {"method": method, "scheme": "http"})

    def stop(self) -> None:
        self.loop.run_until_complete(self._stop())
        self.loop.settle()
        self.loop.close()
        for patch in self._patches:
            patch.stop()

    def _new_id(self) -> uuid.UUID:
        new = uuid.UUID(int=next(self._num_ids))
        self.newest_id = new.hex
        return new

    async def _stop(self) -> None:
        await self.service.drain(0)
        await self.service.stop()


def _done(value: Any) -> Future[Any]:
    done: Future[Any] = Future()
    done.set_result(value)
    return done
