"""The console's socket, for programs that look at a server: opened, greeted, its trouble told.

with console_feed("gpu-box:8000", api_key="...") as (socket, hello):
    print(hear(socket, "overview")["sessions"])
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from websockets.exceptions import ConnectionClosed, InvalidHandshake
from websockets.sync.client import ClientConnection

from worldkv_client.address import ServerAddress
from worldkv_client.dialling import AUTO, Route
from worldkv_client.errors import ConnectionLost

_PAGE = "/v1/console"
_OPEN_WITHIN_S = 10
_ANSWER_WITHIN_S = 120.0


@contextmanager
def console_feed(
    url: str, api_key: str | None = None, *, proxy: str | None = AUTO
) -> Iterator[tuple[ClientConnection, dict[str, Any]]]:
    """(socket, the server's hello). `url`: as `ServerAddress` reads it; `proxy`: as `PolicyClient` takes it.

    Raises ValueError for what is no address; ConnectionLost, also where the socket is closed inside.
    """
    address = ServerAddress.parse(url)
    route = Route.to(address, proxy)
    try:
        socket = route.websocket(_PAGE, open_timeout=_OPEN_WITHIN_S, max_size=None)
    except (OSError, InvalidHandshake) as error:  # TimeoutError is an OSError
        raise _lost(route, error) from error
    with socket:
        try:
            socket.send(json.dumps({"key": api_key}))
            yield socket, _hello(socket, address)
        except ConnectionClosed as error:
            raise _lost(route, error) from error


def _lost(route: Route, error: Exception) -> ConnectionLost:
    why = f"{route.address}{route}: {error or 'no answer'}"
    return ConnectionLost(f"{why}; check the address, and that the server runs{route.advice}")


def _hello(socket: ClientConnection, address: ServerAddress) -> dict[str, Any]:
    """Its first message. On a path that a server does not know a robot is greeted, in binary."""
    told = receive(socket)
    if isinstance(told, dict) and told["type"] == "hello":
        return told
    hint = f": leave {address.path!r} out of the address" if address.path else ""
    raise ConnectionLost(f"{address.websocket(_PAGE)} is no console{hint}")


def hear(socket: ClientConnection, *kinds: str) -> dict[str, Any]:
    """The next message of one of these kinds that is JSON; others are passed over."""
    while True:
        message = receive(socket)
        if isinstance(message, dict) and message["type"] in kinds:
            return message


def receive(socket: ClientConnection) -> dict[str, Any] | bytes:
    """The next message. Raises ConnectionLost where the server refuses, or is none of ours."""
    try:
        message = socket.recv(timeout=_ANSWER_WITHIN_S)
    except TimeoutError:
        raise ConnectionLost(f"the console said nothing for {_ANSWER_WITHIN_S:g} s; is the server stuck?") from None
    if isinstance(message, bytes):
        return message
    try:
        told: dict[str, Any] = json.loads(message)
        kind = told["type"]
    except (ValueError, TypeError, KeyError):
        raise ConnectionLost(f"not a message of a console: {message[:80]!r}") from None
    if kind == "refused":
        raise ConnectionLost(told["why"] + ("; give its API key" if told["code"] == "unauthorised" else ""))
    return told
