"""What a client that errs is told, and that nobody else notices."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from server_fakes import (
    EXTERIOR_0,
    EXTERIOR_1,
    METADATA,
    SECRET,
    WRIST,
    FakePolicy,
    ask,
    eventually,
    http_get,
    infer_message,
    openpi_observation,
    raw_client,
    receive,
    serving,
    told,
)
from websockets.exceptions import ConnectionClosed

from worldkv.server.protocols import LimitedWebSocket
from worldkv.server.server import PolicyServer
from worldkv.wire import CloseCode, pack

LIMIT = 20_000


@pytest.fixture(scope="module")
def server() -> Iterator[PolicyServer]:
    with serving(FakePolicy(capacity=1000), max_message_bytes=LIMIT) as server:
        yield server


def failure(server: PolicyServer, message: Any) -> tuple[str, CloseCode]:
    """The text and the close code that answer `message` on a new socket."""
    with raw_client(server.port) as ws:
        ws.send(message if isinstance(message, bytes | str) else pack(message))
        text = receive(ws)
        with pytest.raises(ConnectionClosed) as closed:
            ws.recv(timeout=5)
    assert isinstance(text, str), text
    assert closed.value.rcvd is not None
    assert re.fullmatch(r"[a-z_]+ \[error [0-9a-f]{8}\]", closed.value.rcvd.reason)
    reason, error_id = closed.value.rcvd.reason.split(" ", 1)
    assert text.startswith(f"{reason}: ")
    assert text.endswith(f" {error_id}"), "an id to look up in the log"
    assert "Traceback" not in text
    return text, CloseCode(closed.value.rcvd.code)


BAD_REQUESTS = {
    "unknown endpoint": (infer_message() | {"endpoint": "dance"}, "endpoint: expected 'infer', 'observe' or 'reset'"),
    "endpoint of another type": (infer_message() | {"endpoint": 3}, "endpoint: expected 'infer', 'observe' or 'reset'"),
    "no map": ([1, 2], "message: expected a map, got list"),
    "field names that are bytes": ({b"prompt": "pick"}, "field names that are str"),
    "missing camera": ({k: v for k, v in infer_message().items() if k != WRIST}, f"{WRIST}: missing"),
    "wrong dtype": (infer_message() | {WRIST: np.zeros((4, 6, 3), np.float32)}, f"{WRIST}: expected uint8"),
    "wrong shape": (infer_message() | {WRIST: np.zeros(3, np.uint8)}, "got uint8 [3]"),
    "no prompt": ({k: v for k, v in infer_message().items() if k != "prompt"}, "prompt: expected a text"),
    "session id of a wrong type": (infer_message() | {"session_id": 1.5}, "session_id: expected a str"),
    "empty session id": (infer_message() | {"session_id": ""}, "session_id: expected 1 to 256"),
    "session id in openpi's dialect": (openpi_observation() | {"session_id": "a"}, "add `endpoint: infer`"),
    "second exterior camera in openpi's dialect": (
        openpi_observation() | {EXTERIOR_0: np.zeros((4, 6, 3), np.uint8)},
        f"has one exterior camera, {EXTERIOR_1}; add `endpoint: infer` to send two",
    ),
    "sequence of a wrong type": (openpi_observation() | {"sequence": "1"}, "sequence: expected an int"),
    "reset of a wrong type": (openpi_observation() | {"reset": "yes"}, "reset: expected a bool"),
}


@pytest.mark.parametrize(("message", "reason"), BAD_REQUESTS.values(), ids=BAD_REQUESTS)
def test_a_bad_request_is_told_what_is_wrong(server: PolicyServer, message: Any, reason: str) -> None:
    text, code = failure(server, message)
    assert reason in text
    assert code == CloseCode.BAD_REQUEST


@pytest.mark.parametrize(
    "garbage",
    [
        b"",
        b"\xc1",
        b"\x81",
        b"\xff" * 100,
        pack(infer_message())[:-1],
        pack(infer_message()) + b"\x00",
        "text",
    ],
    ids=["empty", "reserved byte", "half a map", "numbers", "truncated", "too much", "text frame"],
)
def test_garbage_is_a_bad_request(server: PolicyServer, garbage: bytes | str) -> None:
    text, code = failure(server, garbage)
    assert text.startswith("bad_request: message: expected")
    assert code == CloseCode.BAD_REQUEST


def test_a_message_over_the_limit_is_refused_with_both_sizes(server: PolicyServer) -> None:
    message = pack(infer_message(padding=b"x" * LIMIT))
    text, code = failure(server, message)
    assert f"expected at most {LIMIT} bytes, got {len(message)}" in text
    assert code == CloseCode.MESSAGE_TOO_LARGE


def test_a_message_far_over_the_limit_is_cut_off_before_it_is_read(server: PolicyServer) -> None:
    with raw_client(server.port) as ws, pytest.raises(ConnectionClosed):
        ask(ws, b"x" * 100 * LIMIT)


def test_a_failure_of_the_server_is_logged_with_its_traceback_and_told_without(
    server: PolicyServer, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR, "worldkv.server"):
        text, code = failure(server, infer_message(prompt="fail"))
    assert code == CloseCode.INTERNAL
    assert text.startswith("internal: the server failed on this request [error ")
    assert SECRET not in text
    (record,) = [record for record in caplog.records if "told to" in record.getMessage()]
    error_id = text.rsplit(" ", 1)[1].rstrip("]")
    assert error_id in record.getMessage()
    assert record.exc_info is not None
    assert SECRET in str(record.exc_info[1])


def test_after_an_error_the_next_socket_goes_on_with_the_session(server: PolicyServer) -> None:
    with raw_client(server.port) as ws:
        assert told(ask(ws, infer_message("unharmed")))[0] == 1
        assert "bad_request" in ask(ws, infer_message("unharmed", prompt=3))
    with raw_client(server.port) as ws:
        assert "internal" in ask(ws, infer_message("unharmed", prompt="fail"))
    with raw_client(server.port) as ws:
        assert told(ask(ws, infer_message("unharmed", resume=True)))[0] == 2


def test_one_client_s_errors_do_not_reach_another(server: PolicyServer) -> None:
    with raw_client(server.port) as good:
        for tick in range(1, 5):
            failure(server, (b"\xc1", infer_message("bad", "fail"), [1], b"x" * (LIMIT + 1))[tick - 1])
            assert told(ask(good, openpi_observation())["actions"])[0] == tick


def test_errors_and_requests_are_counted_by_reason() -> None:
    with serving(FakePolicy()) as server:
        failure(server, {"endpoint": "dance"})
        failure(server, infer_message(prompt="fail"))
        with raw_client(server.port) as ws:
            ask(ws, openpi_observation())
        metrics = http_get(server.port, "/metrics")[1]
    for line in (
        'worldkv_errors_total{code="bad_request"} 1.0',
        'worldkv_errors_total{code="internal"} 1.0',
        'worldkv_requests_total{dialect="unknown",outcome="error"} 1.0',
        'worldkv_requests_total{dialect="roboarena",outcome="error"} 1.0',
        'worldkv_requests_total{dialect="openpi",outcome="ok"} 1.0',
    ):
        assert line in metrics


KEY = "open sesame"


@pytest.fixture(scope="module")
def guarded() -> Iterator[PolicyServer]:
    with serving(FakePolicy(), api_key=KEY) as server:
        yield server


@pytest.mark.parametrize(
    "headers",
    [{}, {"Authorization": "Api-Key wrong"}, {"Authorization": f"Bearer {KEY}"}, {"Authorization": KEY}],
    ids=["none", "wrong", "wrong scheme", "no scheme"],
)
def test_without_the_key_a_client_learns_nothing(guarded: PolicyServer, headers: dict[str, str]) -> None:
    with raw_client(guarded.port, greeted=False, additional_headers=headers) as ws:
        text = receive(ws)
        assert isinstance(text, str)
        assert text.startswith("unauthorised: expected the header `Authorization: Api-Key <key>`")
        assert KEY not in text
        with pytest.raises(ConnectionClosed) as closed:
            ws.recv(timeout=5)
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == CloseCode.UNAUTHORISED


def test_with_the_key_it_is_served(guarded: PolicyServer) -> None:
    headers = {"Authorization": f"Api-Key {KEY}"}
    with raw_client(guarded.port, greeted=False, additional_headers=headers) as ws:
        assert receive(ws) == METADATA
        assert told(ask(ws, openpi_observation())["actions"])[0] == 1


@pytest.mark.filterwarnings(r"ignore:connect\(\) must be used as a context manager:DeprecationWarning")
def test_the_stock_openpi_client_can_bring_the_key(guarded: PolicyServer) -> None:
    module = pytest.importorskip("openpi_client.websocket_client_policy", reason="openpi-client is missing")
    client = module.WebsocketClientPolicy("127.0.0.1", guarded.port, api_key=KEY)
    assert told(client.infer(openpi_observation())["actions"])[0] == 1
    client._ws.close()


def test_a_reply_to_a_socket_that_the_web_server_has_closed_is_no_fault_of_the_server_s(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As it does where pings go unanswered. It was counted, and logged with a traceback, as `internal`."""
    send, is_closed = LimitedWebSocket.send, threading.Event()

    async def closed_before(self: LimitedWebSocket, message: Any) -> None:
        self.close_sent = self.close_sent or is_closed.is_set()
        await send(self, message)

    monkeypatch.setattr(LimitedWebSocket, "send", closed_before)
    caplog.set_level(logging.WARNING)
    with serving(FakePolicy()) as server, raw_client(server.port) as ws:
        is_closed.set()
        ws.send(pack(infer_message()))
        abandoned = 'worldkv_requests_total{dialect="roboarena",outcome="abandoned"} 1.0'
        eventually(lambda: abandoned in http_get(server.port, "/metrics")[1])
        assert 'code="internal"' not in http_get(server.port, "/metrics")[1]
    assert [record.getMessage() for record in caplog.records if "told to" in record.getMessage()] == []
