"""Sessions that leave one server and go on in another, over `/v1`."""

from __future__ import annotations

import socket
import time
import urllib.error
import urllib.request
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("diffusers")
pytest.importorskip("fastapi")

from test_rest import call, delete, serving, tick

from worldkv.server.server import PolicyServer

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def export(server: PolicyServer, session_id: str, key: str | None = None) -> bytes:
    headers = {} if key is None else {"authorization": f"Api-Key {key}"}
    path = f"http://127.0.0.1:{server.port}/v1/sessions/{session_id}/export"
    with urllib.request.urlopen(urllib.request.Request(path, headers=headers), timeout=30) as response:
        data: bytes = response.read()
        assert len(data) == int(response.headers["content-length"])
        return data


def bring(server: PolicyServer, data: bytes, session_id: str, key: str | None = None) -> tuple[int, Any]:
    return call(server, "POST", f"/v1/sessions/import?session_id={session_id}", data, key=key)


def test_a_session_goes_on_in_another_server() -> None:
    with serving() as here, serving(api_key="one,two") as there:
        for number in range(3):
            tick(here, "arm", number)
        data = export(here, "arm")
        assert len(data) > 256 * 1024, "no longer than the web server lets strangers' requests be"
        expected = tick(here, "arm", 3)
        for key in ("one", "two"):
            status, state = bring(there, data, "moved", key)
            assert (status, state["session_id"], state["frames_seen"]) == (201, "moved", 5), state
            assert np.array_equal(tick(there, "moved", 3, key), expected)
            assert call(there, "GET", "/v1/sessions/moved/export", key="none of them")[0] == 401
        status, told = bring(there, data, "moved", "one")
        assert (status, told["code"]) == (400, "bad_request")
        assert "is open already" in told["message"]
        for damaged, words in ((data[:-1], "truncated"), (data[:-1] + b"!", "checksum"), (b"", "not even a header")):
            status, told = bring(there, damaged, "other", "one")
            assert (status, words in told["message"]) == (400, True), told
        assert call(there, "GET", "/v1/sessions/other", key="one")[0] == 404
        for key in ("one", "two"):
            delete(there, "moved", key=key)
        delete(here, "arm")


def test_a_compact_export_goes_on_exactly_and_a_kind_that_is_none_is_refused() -> None:
    with serving() as here:
        for number in range(3):
            tick(here, "arm", number)
        pages = export(here, "arm")
        path = f"http://127.0.0.1:{here.port}/v1/sessions/arm/export?kind=compact"
        with urllib.request.urlopen(path, timeout=30) as response:
            compact: bytes = response.read()
        assert len(compact) < len(pages)
        status, state = call(here, "POST", "/v1/sessions/import?session_id=moved&exact=true", compact)
        assert (status, state["inexact"], state["frames_seen"]) == (201, None, 5), state
        assert np.array_equal(tick(here, "moved", 3), tick(here, "arm", 3))
        assert call(here, "GET", "/v1/sessions/arm/export?kind=other")[0] == 400
        status, told = call(here, "POST", "/v1/sessions/import?session_id=cut&exact=true", compact[:-1])
        assert (status, "truncated" in told["message"]) == (400, True), told
        for name in ("arm", "moved"):
            delete(here, name)


def answer_to(server: PolicyServer, head: str, num_bytes: int) -> bytes:
    """To a request whose body is never sent whole."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(head.encode() + b"\r\n\r\n")
        came = b""
        try:
            for _ in range(num_bytes // 4096):
                connection.sendall(bytes(4096))
            time.sleep(0.3)
            while b"\r\n" not in came and (piece := connection.recv(4096)):
                came += piece
        except OSError:
            pass
        return came


def test_a_body_is_read_up_to_the_limit_and_of_those_with_a_key_only() -> None:
    post = "POST /v1/sessions/import HTTP/1.1\r\nhost: 127.0.0.1\r\n"
    key = "authorization: Api-Key one\r\n"
    with serving(api_key="one", max_import_bytes=200_000) as server:
        refused = answer_to(server, f"{post}content-length: 100000000", 4096)
        assert b" 401 " in refused.splitlines()[0], refused
        refused = answer_to(server, f"{post}{key}content-length: 100000000", 4096)
        assert b" 413 " in refused.splitlines()[0], refused
        status, told = bring(server, bytes(200_001), "long", "one")
        assert (status, "at most 200000 bytes" in told["message"]) == (413, True), told
        status, told = bring(server, bytes(200_000), "long", "one")
        assert (status, told["code"]) == (400, "bad_request"), told
        assert call(server, "POST", "/v1/sessions", b" " * 100_000, key="one")[0] == 413, "of imports only"


def test_an_import_whose_sender_falls_silent_is_given_up() -> None:
    with serving(silent_s=0.5) as server:
        head = "POST /v1/sessions/import HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 1000000"
        began = time.monotonic()
        assert answer_to(server, head, 4096) == b""
        assert time.monotonic() - began < 5
        status, told = bring(server, bytes(100_000), "next")
        assert (status, told["code"]) == (400, "bad_request"), "the one that was given up stands in the way"
