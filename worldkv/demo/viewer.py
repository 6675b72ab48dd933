"""A viewer of a server's videos, as a program: words out, a film in."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import BinaryIO, TypedDict, cast

from websockets.exceptions import ConnectionClosed, InvalidHandshake
from websockets.sync.client import ClientConnection

from worldkv.errors import ConnectionLost
from worldkv_client.address import ServerAddress
from worldkv_client.dialling import Route

_OPEN_WITHIN_S = 10
_ANSWER_WITHIN_S = 120.0


@dataclass(frozen=True)
class ShownBlock:
    """`at_s`: where in the film it begins. `made_ms`: what the engine took. `words_applied`: with it other words came
    into force."""

    number: int
    num_frames: int
    at_s: float
    made_ms: float
    prompt: str
    words_applied: bool


class _Block(TypedDict):
    """Of the server's message, what is read here."""

    block: int
    num_frames: int
    pts: float
    timings: dict[str, float]
    prompt: str
    applied: list[object]


class Viewer:
    """One socket. What it is sent is written to `film`, block by block: an mp4 at any time."""

    def __init__(self, socket: ClientConnection, film: BinaryIO) -> None:
        self._socket, self._film = socket, film

    def start(self, prompt: str, session_id: str) -> None:
        fields = {"type": "start", "prompt": prompt, "session_id": session_id, "format": "mp4", "pace": "fast"}
        self._socket.send(json.dumps(fields))

    def say(self, prompt: str) -> None:
        """From the next block that is begun on."""
        self._socket.send(json.dumps({"type": "prompt", "prompt": prompt, "id": prompt}))

    def pause(self) -> None:
        self._socket.send(json.dumps({"type": "pause"}))

    def block(self) -> ShownBlock:
        """The next one. Raises ConnectionLost, with what the server said."""
        while True:
            message = self._hear()
            if message["type"] == "error":
                raise ConnectionLost(str(message["message"]))
            if message["type"] == "block":
                told = cast("_Block", message)
                break
        fragment = self._socket.recv(_ANSWER_WITHIN_S)
        assert isinstance(fragment, bytes)
        self._film.write(fragment)
        self._socket.send(json.dumps({"type": "shown", "block": told["block"]}))
        made_ms, applied = told["timings"]["total"], bool(told["applied"])
        return ShownBlock(told["block"], told["num_frames"], told["pts"], made_ms, told["prompt"], applied)

    def _hear(self) -> dict[str, object]:
        message = self._socket.recv(_ANSWER_WITHIN_S)
        told: dict[str, object] = json.loads(message) if isinstance(message, str) else {"type": "bytes"}
        return told


@contextmanager
def viewer(port: int, film: BinaryIO) -> Iterator[Viewer]:
    """Of a server on this machine. Raises ConnectionLost."""
    try:
        with Route(ServerAddress("127.0.0.1", port)).websocket(
            "/v1/video", open_timeout=_OPEN_WITHIN_S, max_size=None
        ) as socket:
            yield Viewer(socket, film)
    except (ConnectionClosed, InvalidHandshake, OSError) as error:
        raise ConnectionLost(f"the server's video socket: {error}") from error
