"""The robot's side of the wire: one `PolicyClient` per robot. Needs numpy, msgpack and websockets, no torch.

    with PolicyClient("gpu-box", 8000, api_key="...") as policy:
        actions = policy.infer({"observation/exterior_image_0_left": frames, ..., "prompt": "fold the towel"})

A lost connection is opened again by the next call. An observation is sent twice only if the first copy
certainly did not arrive, since a tick may have run although its reply was lost. RoboArena's session outlives
the socket for a while (the server's grace time); if it is gone, the next call raises RemoteError (4008). In
openpi's dialect it ends with the socket, which raises ConnectionLost once. Either way the call after that
starts a new history: never silently.

Does not know what an observation must hold, nor the engine behind the server. Not thread-safe.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import socket
import struct
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
from websockets.exceptions import ConnectionClosed, InvalidHandshake
from websockets.sync.client import ClientConnection

from worldkv_client.address import ServerAddress
from worldkv_client.dialling import AUTO, Route
from worldkv_client.errors import BadRequest, ConnectionLost, RemoteError
from worldkv_client.wire import (
    DEFAULT_MAX_BYTES,
    RESET_REPLY,
    CloseCode,
    Dialect,
    normalise_session_id,
    pack,
    unpack,
)

if TYPE_CHECKING:
    from typing_extensions import Self

_FIRST_BACKOFF_S, _LAST_BACKOFF_S = 0.05, 1.0
_OPEN_TIMEOUT_S = 10.0
_CLOSE_TIMEOUT_S = 1.0

logger = logging.getLogger(__name__)


class PolicyClient:
    """A robot's connection to a policy server, in either dialect.

    `host`: a name or address, with or without its port, or a URI such as `wss://robots.example.org`, as
    `ServerAddress` reads them. `port`: None is the address's own, or its default (8000). `timeout`: seconds for one
    call to be answered; after that the socket is closed, so that a late reply cannot be taken for the next one.
    `session_id`: RoboArena only; a fresh one if left out. `connect_wait`: seconds to keep trying while no
    server answers, at first and after a loss; `on_wait(seconds_so_far, reason)` is called before each retry.
    `proxy`: "auto" takes the one that the environment names, but never to this machine; None takes none; or a URL.
    `ca_file`: for wss://, the PEM file of who is trusted, such as the server's own certificate; None: the system's.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int | None = None,
        *,
        dialect: str = "roboarena",
        api_key: str | None = None,
        timeout: float = 120.0,
        session_id: object = None,
        connect_wait: float = 10.0,
        on_wait: Callable[[float, str], None] | None = None,
        max_message_bytes: int = DEFAULT_MAX_BYTES,
        proxy: str | None = AUTO,
        ca_file: str | None = None,
    ) -> None:
        """Opens nothing yet. Raises ValueError for what can never work."""
        if dialect not in tuple(Dialect):
            raise ValueError(f"dialect: expected one of {', '.join(Dialect)}, got {dialect!r}")
        if timeout <= 0 or connect_wait < 0:
            raise ValueError(f"timeout and connect_wait: expected seconds > 0 and >= 0, got {timeout}, {connect_wait}")
        self.dialect = Dialect(dialect)
        if session_id is not None and self.dialect is Dialect.OPENPI:
            raise ValueError("session_id: expected None, since in openpi's dialect the connection is the session")
        self.session_id = uuid.uuid4().hex if session_id is None else normalise_session_id(session_id)
        self.address = ServerAddress.parse(host, port)
        self.uri = str(self.address)
        self._route = Route.to(self.address, proxy, ca_file)
        self._headers = {"Authorization": f"Api-Key {api_key}"} if api_key else None
        self._timeout = timeout
        self._connect_wait = connect_wait
        self._on_wait = on_wait
        self._max_message_bytes = max_message_bytes
        self._sequence = itertools.count()
        self._frames_ahead: dict[object, int] = {}  # by env_id: sent by `observe` since the last reply
        self._metadata: dict[str, Any] = {}
        self._socket: ClientConnection | None = None
        self._cleanup = contextlib.ExitStack()
        self._has_history = False  # the server's session holds frames that we sent
        self._reconnected = False  # on this socket no request was answered yet
        self._forget_first = False  # openpi's reset travels with the next request

    def __enter__(self) -> Self:
        self._connected()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def metadata(self) -> dict[str, Any]:
        """What the server says of itself before anything else."""
        self._connected()
        return self._metadata

    def infer(self, observation: Mapping[str, Any], *, details: bool = False) -> np.ndarray | dict[str, Any]:
        """One tick: actions for what the robot sees now.

        RoboArena: float32 [horizon, 8]. openpi: a map with `actions` and `server_timing`. With `details` a map
        in either dialect, with `predicted_video` uint8 [T, H, W, 3] and `cache` as well, for people who look.
        Arrays are read-only. Raises BadRequest for what cannot be sent, RemoteError for what the server refuses (its
        text, and the close code), ConnectionLost (also on timeout).
        """
        ahead = self._frames_ahead.get(_environment(observation), 0)
        told = {"frames_ahead": ahead} if ahead else {}
        answer = self._ask({**told, **observation, **({"details": True} if details else {})}, "infer")
        self._frames_ahead.pop(_environment(observation), None)
        return answer

    def observe(self, observation: Mapping[str, Any]) -> int:
        """Send frames as they are taken, ahead of the next `infer`, which then leaves them out.

        `observation`: the cameras, a frame or several of each, and the prompt where it is known; all else is not read.
        The server encodes a tick's frames as soon as all of them are there, so that the reply to `infer` waits for
        denoising only; it is the reply to a request with all of them. Returns how many frames of each camera wait now.
        At most a tick's may (4 for DROID). Whatever raises in between, the next `infer` needs all of its frames again.
        Raises like `infer`.
        """
        answer = self._ask(observation, "observe")
        ahead = answer.get("frames_ahead") if isinstance(answer, dict) else None
        if not isinstance(ahead, int):
            self._lose()
            raise ConnectionLost(f"{self.uri} knows no frames ahead of a request: it is older than this client")
        self._frames_ahead[_environment(observation)] = ahead
        return ahead

    def _ask(self, fields: Mapping[str, Any], endpoint: str) -> np.ndarray | dict[str, Any]:
        sequence = next(self._sequence)
        request = {**fields, **self._controls(sequence, endpoint)}
        reply = self._reply_to(lambda: {**request, **({"resume": True} if self._must_resume() else {})})
        if isinstance(reply, str):
            raise self._remote_error(reply)
        answer = self._checked_answer(reply, sequence)
        self._has_history = True
        self._reconnected = self._forget_first = False
        return answer

    def reset(self) -> None:
        """Make the next `infer` start a new history. Raises like `infer`."""
        self._frames_ahead.clear()
        if self.dialect is Dialect.OPENPI:
            self._forget_first = True
            self._has_history = False
            return
        request = {"endpoint": "reset", "session_id": self.session_id}
        reply = self._reply_to(lambda: request)
        if reply != RESET_REPLY:
            raise self._remote_error(reply if isinstance(reply, str) else "a binary reply to a reset")
        self._has_history = self._reconnected = False

    def close(self) -> None:
        """Close the socket. Safe twice; a later call opens a new one."""
        self._socket = None
        self._cleanup.close()

    def _controls(self, sequence: int, endpoint: str) -> dict[str, Any]:
        if self.dialect is Dialect.ROBOARENA:
            return {"endpoint": endpoint, "session_id": self.session_id}
        observes = {"observe": True} if endpoint == "observe" else {}
        return {"sequence": sequence, **observes, **({"reset": True} if self._forget_first else {})}

    def _must_resume(self) -> bool:
        return self.dialect is Dialect.ROBOARENA and self._has_history and self._reconnected

    def _reply_to(self, request: Callable[[], dict[str, Any]]) -> bytes | str:
        """Send and wait; the socket stays open only if a reply came. `request` is asked once connected."""
        ws, deadline = self._send(request)
        try:
            return ws.recv(timeout=max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            self._lose()
            raise ConnectionLost(
                f"{self.uri} did not answer within {self._timeout:g} s; the socket is closed, and the tick "
                "may have run nevertheless"
            ) from None
        except ConnectionClosed as error:
            self._lose()
            raise ConnectionLost(f"{self.uri} closed the connection before a reply: {error}") from error
        except BaseException:  # Ctrl-C, say: the reply must not wait for the next call
            self._lose()
            raise

    def _send(self, request: Callable[[], dict[str, Any]]) -> tuple[ClientConnection, float]:
        """The socket that took the whole request, and when its time is up; a dead one is replaced once."""
        for retry in (True, False):
            ws = self._connected()
            data = pack(request())
            deadline = time.monotonic() + self._timeout
            try:
                ws.send(data)
                return ws, deadline
            except ConnectionClosed as error:  # so the server cannot have the whole request
                self._drop()
                if not retry or time.monotonic() >= deadline:
                    self._lose()
                    raise ConnectionLost(f"{self.uri} did not take the request: {error}") from error
                if self.dialect is Dialect.OPENPI and self._has_history:
                    self._lose()
                    raise ConnectionLost(
                        f"{self.uri}: the connection was lost between two requests, and with it the "
                        f"session's history ({error}); the next request starts a new one"
                    ) from error
            except BaseException:  # part of a frame may be on its way
                self._lose()
                raise
        raise AssertionError

    def _checked_answer(self, reply: bytes, sequence: int) -> np.ndarray | dict[str, Any]:
        try:
            answer = unpack(reply, max_bytes=self._max_message_bytes)
            if isinstance(answer, np.ndarray):
                return answer
            if not isinstance(answer, dict):
                raise BadRequest(f"expected actions, got {type(answer).__name__}")
            if answer.get("sequence", sequence) != sequence:
                raise BadRequest(f"it answers request {answer['sequence']}, not {sequence}")
        except BadRequest as error:
            self._lose()
            raise ConnectionLost(f"{self.uri} sent a reply that cannot be used: {error}") from error
        for warning in answer.get("warnings", ()):
            logger.warning("%s: %s", self.uri, warning)
        return answer

    def _remote_error(self, text: str) -> RemoteError:
        """What the server refused; it closes the socket, and its code says why."""
        code = None
        if self._socket is not None:
            with contextlib.suppress(TimeoutError):
                try:
                    self._socket.recv(timeout=_CLOSE_TIMEOUT_S)
                except ConnectionClosed as closed:
                    code = closed.rcvd.code if closed.rcvd else None
        self._lose(session_too=code == CloseCode.SESSION_NOT_FOUND)
        return RemoteError(text, code)

    def _lose(self, *, session_too: bool = False) -> None:
        """The caller is about to be told that the connection is gone."""
        self._drop()
        self._frames_ahead.clear()  # nobody knows which of them a session still has
        if session_too or self.dialect is Dialect.OPENPI:
            self._has_history = False

    def _drop(self) -> None:
        """Close the socket without waiting for the peer."""
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.socket.shutdown(socket.SHUT_RDWR)
        self.close()

    def _connected(self) -> ClientConnection:
        """The open socket, after the server's greeting."""
        if self._socket is None:
            self._socket = self._keep_trying()
            self._reconnected = True
        return self._socket

    def _keep_trying(self) -> ClientConnection:
        start = time.monotonic()
        backoff = _FIRST_BACKOFF_S
        while True:
            try:
                return self._open()
            except (OSError, InvalidHandshake, ConnectionClosed) as error:
                self._cleanup.close()
                waited = time.monotonic() - start
                answer = getattr(error, "response", None)  # of the server, or of a proxy
                refused = answer is not None and answer.status_code < 500
                if refused or waited + backoff > self._connect_wait:
                    raise ConnectionLost(
                        f"no policy server answers at {self.uri}{self._route} (tried for {waited:.1f} s): {error}; "
                        f"check host and port, and that the server runs{self._route.advice}"
                    ) from error
                if self._on_wait is not None:
                    self._on_wait(waited, str(error))
                time.sleep(backoff)
                backoff = min(2 * backoff, _LAST_BACKOFF_S)

    def _open(self) -> ClientConnection:
        ws = self._cleanup.enter_context(
            self._route.websocket(
                compression=None,
                max_size=self._max_message_bytes,
                additional_headers=self._headers,
                open_timeout=_OPEN_TIMEOUT_S,
                close_timeout=_CLOSE_TIMEOUT_S,
            )
        )
        _limit_send_time(ws.socket, self._timeout)
        greeting = ws.recv(timeout=_OPEN_TIMEOUT_S)
        if isinstance(greeting, str):
            self._socket = ws
            raise self._remote_error(greeting)
        try:
            metadata = unpack(greeting, max_bytes=self._max_message_bytes)
        except BadRequest as error:
            raise ConnectionError(f"its greeting cannot be read ({error})") from error
        if not isinstance(metadata, dict):
            raise ConnectionError(f"its greeting is a {type(metadata).__name__}, not a map")
        self._metadata = metadata
        return ws


def _environment(observation: Mapping[str, Any]) -> object:
    """Whose frames these are, where several environments share the session."""
    env_id = observation.get("env_id")
    return None if env_id is None else str(env_id)


def _limit_send_time(sock: socket.socket, seconds: float) -> None:
    """Let a send fail that makes no progress for so long: websockets' own waits for ever.

    `socket.settimeout` would do the same to websockets' reading thread.
    """
    if sys.platform != "win32":
        whole = int(seconds)
        value = struct.pack("@ll", whole, int((seconds - whole) * 1e6))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)
