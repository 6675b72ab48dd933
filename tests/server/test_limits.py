"""Limits of one client: HTTP requests at once, and how long a socket may be greeted and say nothing."""

from __future__ import annotations

import http.client
import json
import logging
import threading
from concurrent.futures import Future
from typing import Any

import pytest
from server_fakes import (
    FakePolicy,
    FakePolicySession,
    ask,
    eventually,
    http_get,
    infer_message,
    raw_client,
    serving,
    told,
)
from websockets.exceptions import ConnectionClosed

from worldkv.wire import CloseCode


def call(port: int, method: str, path: str, key: str) -> tuple[int, Any, http.client.HTTPMessage]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        connection.request(method, path, headers={"authorization": f"Api-Key {key}"})
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read()), answer.headers
    finally:
        connection.close()


def test_one_key_has_so_many_requests_at_once_and_others_do_not_suffer(monkeypatch: pytest.MonkeyPatch) -> None:
    parking: list[Future[None]] = []

    def begin_park(_: FakePolicySession) -> Future[None]:
        parking.append(Future())
        return parking[-1]

    monkeypatch.setattr(FakePolicySession, "begin_park", begin_park, raising=False)
    with serving(FakePolicy(), api_key="ours,theirs", max_requests=2) as server:
        headers = {"Authorization": "Api-Key ours"}
        with raw_client(server.port, additional_headers=headers) as ws:
            assert told(ask(ws, infer_message("arm")))[0] == 1
            done: list[int] = []
            asks = [
                threading.Thread(
                    target=lambda: done.append(call(server.port, "POST", "/v1/sessions/arm/park", "ours")[0])
                )
                for _ in range(2)
            ]
            for each in asks:
                each.start()
            eventually(lambda: len(parking) == 2)
            status, body, answered = call(server.port, "GET", "/v1/sessions", "ours")
            assert (status, body["code"]) == (429, "admission_refused")
            assert body["message"].startswith("2 requests are being served, the most that one client may have; try")
            assert (answered["retry-after"], body.get("retry_after_ms")) == (None, None), "nobody knows when one ends"
            assert call(server.port, "GET", "/v1/sessions", "theirs")[0] == 200, "another key's requests are counted"
            assert call(server.port, "GET", "/v1/sessions", "nobody's")[0] == 401
            assert http_get(server.port, "/healthz")[0] == 200
            assert http_get(server.port, "/metrics")[0] == 200
            assert told(ask(ws, infer_message("arm")))[0] == 2, "a robot's tick is no HTTP request"
            for future in parking:
                future.set_result(None)
            for each in asks:
                each.join()
            assert done == [200, 200]
            assert call(server.port, "GET", "/v1/sessions", "ours")[0] == 200, "ended requests are still counted"


def test_a_request_that_is_refused_or_given_up_is_counted_no_more() -> None:
    with serving(FakePolicy(), max_requests=1) as server:
        for path in ("/v1/nothing", "/v1/sessions/none", "/v1/sessions") * 3:
            assert http_get(server.port, path)[0] in (200, 404)
        assert http_get(server.port, "/v1/sessions")[0] == 200


def test_a_socket_that_never_asks_is_told_and_closed_and_one_that_has_asked_may_be_silent(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    with serving(FakePolicy(), session_idle_s=0.4) as server, raw_client(server.port) as robot:
        assert told(ask(robot, infer_message("arm")))[0] == 1
        with raw_client(server.port) as ws:
            text = ws.recv(timeout=5)
            assert isinstance(text, str)
            assert text.startswith("request_timed_out: no first request came within 0.4 s; connect again")
            with pytest.raises(ConnectionClosed) as closed:
                ws.recv(timeout=5)
            assert closed.value.rcvd is not None
            assert closed.value.rcvd.code == CloseCode.REQUEST_TIMED_OUT
        told_of = [record for record in caplog.records if "no first request came" in record.getMessage()]
        assert [record.levelname for record in told_of] == ["WARNING"], "a client's silence is no fault of the server's"
        eventually(lambda: not server._service.sessions.of(""), 5)  # its session was idle for as long
        assert "has ended" in str(ask(robot, infer_message("arm"))), "the socket was closed with its session"
