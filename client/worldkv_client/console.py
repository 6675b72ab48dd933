"""The console's socket, for programs that look at a server: opened, greeted, its trouble told.

with console_feed("ws://gpu-box:8000", api_key="...") as (socket, hello):
    print(hear(socket, "overview")["sessions"])
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from websockets.exceptions import ConnectionClosed, InvalidHandshake
from websockets.sync.client import ClientConnection, connect

from worldkv_client.errors import ConnectionLost

_OPEN_WITHIN_S = 10
_ANSWER_WITHIN_S = 120.0


@contextmanager
def console_feed(url: str, api_key: str | None = None) -> Iterator[tuple[ClientConnection, dict[str, Any]]]:
    """(socket, the server's hello). `url` may lack its `ws://`. Raises ConnectionLost, also for what fails inside."""
    url = url if "://" in url else f"ws://{url}"
    try:
        with connect(f"{url.rstrip('/')}/v1/console", open_timeout=_OPEN_WITHIN_S, max_size=None) as socket:
            socket.send(json.dumps({"key": api_key}))
            yield socket, hear(socket, "hello")
    except (OSError, InvalidHandshake, ConnectionClosed) as error:  # TimeoutError is an OSError
        raise ConnectionLost(f"{url}: {error or 'no answer'}; check the address, and that the server runs") from error


def hear(socket: ClientConnection, *kinds: str) -> dict[str, Any]:
    """The next message of one of these kinds that is JSON; others are passed over."""
    while True:
        message = receive(socket)
        if isinstance(message, dict) and message["type"] in kinds:
            return message


def receive(socket: ClientConnection) -> dict[str, Any] | bytes:
    """The next message. Raises ConnectionLost where the server refuses."""
    message = socket.recv(timeout=_ANSWER_WITHIN_S)
    if isinstance(message, bytes):
        return message
    told: dict[str, Any] = json.loads(message)
    if told["type"] == "refused":
        raise ConnectionLost(told["why"] + ("; give its API key" if told["code"] == "unauthorised" else ""))
    return told
