"""What server and client tests stand on: a policy that computes nothing, and a server around it.

A tick's actions tell what the server did: see `told`. The prompt steers a tick: "slow ..." waits for
`policy.release`, "fail" raises what a client must never read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from worldkv.app import KeptAhead
from worldkv.engine.admission import Capacity
from worldkv.engine.stats import Stats
from worldkv.errors import AdmissionRefused, BadRequest, SessionBusy, SessionEnded, SessionNotFound
from worldkv.server.server import PolicyServer, ServerConfig
from worldkv.wire import pack, unpack

SECRET = "a secret of the server"
METADATA = {
    "image_resolution": [180, 320],
    "needs_wrist_camera": True,
    "n_external_cameras": 2,
    "needs_stereo_camera": False,
    "needs_session_id": True,
    "action_space": "joint_position",
}
EXTERIOR_0, EXTERIOR_1, WRIST = (
    f"observation/{name}_left" for name in ("exterior_image_0", "exterior_image_1", "wrist_image")
)


@dataclass(frozen=True)
class FakeReply:
    actions: np.ndarray
    timings: dict[str, float]
    warnings: tuple[str, ...]
    facts: Mapping[str, Any] = field(default_factory=lambda: {"restart_reason": None, "frames_cached": 1})
    events: tuple[str, ...] = ()
    seen: Mapping[str, np.ndarray] | None = None

    @property
    def output(self) -> Mapping[str, Any]:
        return {"actions": self.actions}


@dataclass(frozen=True)
class FakeHealth:
    ready: bool
    reason: str


class FakeEngine:
    """Nothing in it, as far as metrics can see."""

    def stats(self) -> Stats:
        return Stats(
            attention="none",
            rows_per_forward={},
            conditioning_hits=0,
            conditioning_misses=0,
            num_sessions=0,
            num_parked=0,
            bytes_parked=0,
            num_ticks_in_flight=0,
            blocks_used=0,
            blocks_shared=0,
            blocks_copied=0,
        )

    def capacity(self) -> Capacity:
        return Capacity(*[0] * len(dataclasses.fields(Capacity)))


class FakePolicy:
    engine = FakeEngine()
    speaks = "robots"
    greeting = METADATA

    def __init__(self, *, capacity: int = 16, warm: bool = True) -> None:
        self.capacity = capacity
        self.live: dict[str | None, FakePolicySession] = {}
        self.closed: list[tuple[str | None, str]] = []
        self.release = threading.Event()  # lets slow ticks end
        self.arrived = threading.Semaphore(0)  # one for every tick that started
        self.may_warm_up = threading.Event()
        self.warm_up_error: Exception | None = None
        self.sick: str | None = None
        if warm:
            self.may_warm_up.set()

    def read(self, observation: Mapping[str, Any]) -> Mapping[str, Any]:
        return observation

    def read_ahead(self, frames: Mapping[str, Any]) -> Mapping[str, Any]:
        return frames

    def open_session(self, session_id: str | None = None) -> FakePolicySession:
        assert session_id not in self.live, "opened twice"
        if len(self.live) >= self.capacity:
            raise AdmissionRefused(f"{self.capacity} sessions are all that fit")
        self.live[session_id] = FakePolicySession(session_id, self)
        return self.live[session_id]

    def warm_up(self) -> None:
        assert self.may_warm_up.wait(20)
        if self.warm_up_error is not None:
            raise self.warm_up_error

    def health(self) -> FakeHealth:
        return FakeHealth(self.sick is None, self.sick or "")


@dataclass(eq=False)
class FakePolicySession:
    session_id: str | None
    policy: FakePolicy
    num_ticks: int = 0  # since it was opened or reset
    num_resets: int = 0
    pending: Future[FakeReply] | None = None
    is_closed: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)
    ahead: dict[str, Any] = field(default_factory=dict)  # the newest frames that came before their request
    num_ahead: int = 0

    def observe(self, frames: Mapping[str, Any]) -> Future[KeptAhead[Any]]:
        self.ahead |= frames
        self.num_ahead += 1
        done: Future[KeptAhead[Any]] = Future()
        done.set_result(KeptAhead(num_frames=self.num_ahead, warnings=(), begin=None))
        return done

    def infer(self, observation: Mapping[str, Any]) -> Future[FakeReply]:
        with self.lock:
            if self.is_closed:
                raise SessionNotFound(f"session {self.session_id} is closed")
            if self.pending is not None:
                raise SessionBusy(f"session {self.session_id} has a tick in flight")
            future: Future[FakeReply] = Future()
            future.set_running_or_notify_cancel()
            self.pending = future
        whole, self.ahead = {**self.ahead, **observation}, {}
        assert observation.get("frames_ahead", 0) in (0, self.num_ahead)
        self.num_ahead = 0
        threading.Thread(target=self._tick, args=(whole, future), daemon=True).start()
        return future

    def _tick(self, observation: dict[str, Any], future: Future[FakeReply]) -> None:
        self.policy.arrived.release()
        outcome: FakeReply | Exception
        try:
            outcome = self._reply(observation)
        except Exception as error:
            outcome = error
        with self.lock:
            if self.pending is not future:
                return
            self.pending = None
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)

    def _reply(self, observation: dict[str, Any]) -> FakeReply:
        prompt = observation.get("prompt")
        if not isinstance(prompt, str):
            raise BadRequest(f"prompt: expected a text, got {type(prompt).__name__}")
        images = [_image(observation, key) for key in (EXTERIOR_0, WRIST)]
        second = _image(observation, EXTERIOR_1) if EXTERIOR_1 in observation else None
        if prompt.startswith("slow"):
            assert self.policy.release.wait(20)
        if prompt == "fail":
            raise RuntimeError(SECRET)
        self.num_ticks += 1
        actions = np.zeros((24, 8), np.float32)
        means = [images[0].mean(), -1 if second is None else second.mean(), images[1].mean()]
        actions[0, :4] = [self.num_ticks, *means]
        timings = {
            "preprocess": 0.5,
            "queue": 1.0,
            "encode": 2.0,
            "commit": 3.0,
            "denoise": 4.0,
            "total": 10.5,
        }
        black = ("observation/exterior_image_1_left is missing: the model sees a black view",)
        return FakeReply(actions, timings, black if second is None and self.num_ticks == 1 else ())

    def describe(self) -> dict[str, Any]:
        if self.is_closed:
            raise SessionNotFound(f"session {self.session_id} is closed")
        busy = self.pending is not None
        return {
            "state": "live",
            "busy": busy,
            "frames_seen": self.num_ticks,
            "blocks": 0,
            "bytes_parked": 0,
            "inexact": None,
        }

    def reset(self) -> Future[None]:
        self._end_tick("was reset")
        self.num_resets += 1
        self.num_ticks = 0
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def close(self, reason: str) -> Future[None]:
        self._end_tick(f"was closed: {reason}")
        if not self.is_closed:
            self.is_closed = True
            self.policy.closed.append((self.session_id, reason))
            del self.policy.live[self.session_id]
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _end_tick(self, how: str) -> None:
        with self.lock:
            future, self.pending = self.pending, None
        if future is not None:
            future.set_exception(SessionEnded(f"session {self.session_id} {how}, during this tick"))


def _image(observation: dict[str, Any], key: str) -> np.ndarray:
    image = observation.get(key)
    if not isinstance(image, np.ndarray):
        raise BadRequest(f"{key}: missing")
    if image.dtype != np.uint8 or image.ndim not in (3, 4):
        raise BadRequest(f"{key}: expected uint8 [H, W, 3], got {image.dtype} {list(image.shape)}")
    return image


def told(actions: Any) -> tuple[int, int, int, int]:
    """(ticks since the history began, the three cameras' grey: exterior 0, exterior 1 or -1, wrist)."""
    first, second, third, fourth = (int(value) for value in actions[0, :4])
    return first, second, third, fourth


def openpi_observation(prompt: str = "pick", exterior: int = 10, wrist: int = 30) -> dict[str, Any]:
    """One small frame each, of one grey."""
    return {
        EXTERIOR_1: np.full((4, 6, 3), exterior, np.uint8),
        WRIST: np.full((4, 6, 3), wrist, np.uint8),
        "observation/joint_position": np.zeros(7),
        "observation/gripper_position": np.zeros(1),
        "prompt": prompt,
    }


def roboarena_observation(prompt: str = "pick", greys: tuple[int, int, int] = (10, 20, 30)) -> dict[str, Any]:
    images = {
        key: np.full((4, 6, 3), grey, np.uint8)
        for key, grey in zip((EXTERIOR_0, EXTERIOR_1, WRIST), greys, strict=True)
    }
    return openpi_observation(prompt) | images


def infer_message(session_id: Any = "s", prompt: str = "pick", **more: Any) -> dict[str, Any]:
    """A RoboArena request; `session_id` None leaves it out."""
    named = {} if session_id is None else {"session_id": session_id}
    return roboarena_observation(prompt) | {"endpoint": "infer"} | named | more


@contextlib.contextmanager
def serving(policy: FakePolicy, *, until_ready: bool = True, **config: Any) -> Iterator[PolicyServer]:
    """A server on a free port."""
    with PolicyServer(policy, ServerConfig(port=0, **config)) as server:
        try:
            if until_ready:
                eventually(lambda: http_get(server.port, "/healthz")[0] == 200)
            yield server
        finally:
            policy.may_warm_up.set()
            policy.release.set()


@contextlib.contextmanager
def raw_client(port: int, *, greeted: bool = True, **options: Any) -> Iterator[ClientConnection]:
    """A bare websocket that has read the metadata."""
    with connect(f"ws://127.0.0.1:{port}/any/path", compression=None, max_size=None, **options) as ws:
        if greeted:
            assert receive(ws) == METADATA
        yield ws


def receive(ws: ClientConnection, timeout: float = 10.0) -> Any:
    """The next message: unpacked, or a text."""
    message = ws.recv(timeout=timeout)
    return message if isinstance(message, str) else unpack(message, max_bytes=1 << 26)


def ask(ws: ClientConnection, message: Any) -> Any:
    ws.send(message if isinstance(message, bytes) else pack(message))
    return receive(ws)


def refusal(ws: ClientConnection, message: Any) -> tuple[str, int]:
    """The text and the close code that answer `message`."""
    text = ask(ws, message)
    assert isinstance(text, str), "it was served"
    return text, closing_code(ws)


def closing_code(ws: ClientConnection) -> int:
    with contextlib.suppress(ConnectionClosed):
        ws.recv(timeout=5)
        raise AssertionError("it was not closed")
    assert ws.close_code is not None
    return ws.close_code


def http_get(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def eventually(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "this did not happen in time"
        time.sleep(0.01)
