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


@pytest.mark.parametrize("said", [b"\x80", "unauthorised: none came [error 1f]", "[]", '{"type": "overview"}'])
def test_what_is_no_console_is_told_with_what_to_leave_out(said: Any) -> None:
    def greet(ws: ServerConnection) -> None:
        ws.send(said)
        ws.recv()

    with serve(greet, "127.0.0.1", 0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            port = server.socket.getsockname()[1]
            words = r"no console: leave '/arm' out|not a message of a console"
            with pytest.raises(ConnectionLost, match=words), console_feed(f"127.0.0.1:{port}/arm", "key"):
                pass
        finally:
            server.shutdown()
            thread.join()


def test_an_error_of_the_one_who_looks_is_not_the_server_s() -> None:
    with console() as url, pytest.raises(OSError, match=r"^the disk is full$"), console_feed(url, "key"):
        raise OSError("the disk is full")
