"""The console's feed, from a server of a few lines."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from websockets.sync.server import ServerConnection, serve

from worldkv_client.console import console_feed, hear, receive
from worldkv_client.errors import ConnectionLost


@contextlib.contextmanager
def console() -> Iterator[str]:
    """A console that knows the key "key": its address, without ws://."""

    def handle(ws: ServerConnection) -> None:
        said: dict[str, Any] = json.loads(ws.recv())
        if said["key"] != "key":
            ws.send(json.dumps({"type": "refused", "code": "unauthorised", "why": "another key"}))
            return
        for message in ({"type": "hello", "version": "1"}, {"type": "other"}, {"type": "overview", "sessions": []}):
            ws.send(json.dumps(message))
        ws.send(b"pixels")

    with serve(handle, "127.0.0.1", 0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"127.0.0.1:{server.socket.getsockname()[1]}"
        server.shutdown()
        thread.join()


def test_the_feed_greets_and_other_messages_are_passed_over() -> None:
    with console() as url, console_feed(url, "key") as (socket, hello):
        assert hello["version"] == "1"
        assert hear(socket, "overview")["sessions"] == []
        assert receive(socket) == b"pixels"


def test_a_refusal_says_what_to_give_and_an_end_says_what_to_check() -> None:
    with console() as url:
        with pytest.raises(ConnectionLost, match="another key; give its API key"), console_feed(f"ws://{url}", None):
            pass
        with pytest.raises(ConnectionLost, match="check the address"), console_feed(url, "key") as (socket, _):
            hear(socket, "what never comes")
