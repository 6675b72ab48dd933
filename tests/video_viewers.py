"""What the tests of the videos' sockets share: a server of a tiny model, viewers, and what the app makes by itself."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from causal import SIZE, TINY, random_folder
from console_page import call
from server_fakes import eventually, http_get
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from worldkv.engine.engine import EngineConfig
from worldkv.load import load_app
from worldkv.models.causal_wan.config import CausalSettings
from worldkv.models.causal_wan.folder import Choices
from worldkv.server.server import PolicyServer, ServerConfig
from worldkv.videos.app import VideoApp
from worldkv.videos.muxer import packed_jpegs

__all__ = ["Block", "Viewer", "call", "expected", "running_app", "same", "serving", "viewer"]
PATIENCE_S = 30.0


@contextmanager
def running_app(settings: CausalSettings = TINY, **options: Any) -> Iterator[VideoApp]:
    """Closed at the end, when every block has come back."""
    config = EngineConfig(block_size=16, **{"max_sessions": 8, **options})
    app = load_app(random_folder(settings), config, choices=Choices(**SIZE))
    assert isinstance(app, VideoApp)
    try:
        yield app
    finally:
        app.close()
        app.engine.shutdown()
    pool = app.engine.core.cache.pool
    pool.check()
    assert pool.num_used == 0, "blocks leaked past shutdown"


@contextmanager
def serving(app: VideoApp, **config: Any) -> Iterator[PolicyServer]:
    with PolicyServer(app, ServerConfig(**{"port": 0, **config})) as server:
        eventually(lambda: http_get(server.port, "/healthz")[0] == 200, PATIENCE_S)
        yield server


@dataclass
class Block:
    """A header, and what came with it."""

    header: dict[str, Any]
    data: bytes

    @property
    def number(self) -> int:
        return int(self.header["block"])


@dataclass
class Viewer:
    """One socket. Blocks that come are shown at once where `shows`."""

    socket: ClientConnection
    shows: bool = True
    hello: dict[str, Any] = field(default_factory=dict)

    def say(self, kind: str, **fields: Any) -> None:
        self.socket.send(json.dumps({"type": kind, **fields}))

    def next(self, timeout: float = PATIENCE_S) -> Block | dict[str, Any]:
        text = self.socket.recv(timeout=timeout)
        assert isinstance(text, str), f"{len(text)} bytes without a header"
        message: dict[str, Any] = json.loads(text)
        if message["type"] != "block":
            return message
        data = self.socket.recv(timeout=PATIENCE_S)
        assert isinstance(data, bytes), "a header without bytes"
        assert len(data) == message["bytes"]
        if self.shows:
            self.say("shown", block=message["block"])
        return Block(message, data)

    def hear(self, kind: str) -> dict[str, Any]:
        """The next message, which has to be of that type."""
        message = self.next()
        assert isinstance(message, dict), f"expected {kind}, got block {message.header}"
        assert message["type"] == kind, f"expected {kind}, got {message}"
        return message

    def hear_after_blocks(self, kind: str) -> dict[str, Any]:
        while isinstance(message := self.next(), Block):
            pass
        assert message["type"] == kind, message
        return message

    def block(self) -> Block:
        message = self.next()
        assert isinstance(message, Block), f"expected a block, got {message}"
        return message

    def close_code(self) -> int | None:
        """Once the server has closed it, whatever it says before."""
        with suppress(ConnectionClosed):
            while True:
                self.socket.recv(timeout=PATIENCE_S)
        return self.socket.close_code

    def blocks(self, count: int) -> list[Block]:
        return [self.block() for _ in range(count)]

    def start(self, **fields: Any) -> dict[str, Any]:
        self.say("start", **{"pace": "fast", **fields})
        return self.hear("started")


@contextmanager
def viewer(server: PolicyServer, *, shows: bool = True, greeted: bool = True, **options: Any) -> Iterator[Viewer]:
    address = f"ws://127.0.0.1:{server.port}/v1/video"
    with connect(address, compression=None, max_size=None, **options) as socket:
        made = Viewer(socket, shows)
        if greeted:
            made.hello = made.hear("hello")
        yield made


def expected(app: VideoApp, *calls: dict[str, Any]) -> list[np.ndarray]:
    """Frames of one block each, asked of the app itself."""
    session = app.open_session()
    frames = [session.infer(app.read(call)).result(PATIENCE_S).block.frames for call in calls]
    session.close("the test has seen it").result(PATIENCE_S)
    return frames


def same(block: Block, frames: np.ndarray) -> bool:
    """Bit for bit: the same pictures are the same JPEGs."""
    return block.data == packed_jpegs(frames)
