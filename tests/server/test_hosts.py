"""Under which names a server answers, and whose pages may use it."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from server_fakes import METADATA, FakePolicy, raw_client, receive, serving
from websockets.client import ClientProtocol
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect
from websockets.uri import parse_uri

from worldkv.server.config import ServerConfig
from worldkv.server.hosts import host_of, is_own_page, origin_of
from worldkv.server.server import PolicyServer
from worldkv.wire import unpack

PATHS = ("/", "/console/console.js", "/metrics", "/openapi.json", "/v1/sessions", "/v1/capacity", "/nothing")


def get(server: PolicyServer, path: str, **headers: str) -> tuple[int, str]:
    """With exactly these headers."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    try:
        connection.putrequest("GET", path, skip_host=True)
        for name, value in headers.items():
            connection.putheader(name, value)
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def console(server: PolicyServer, key: str | None = None, **headers: str) -> dict[str, Any]:
    """What a page that gives `key` is told first."""
    uri = f"ws://127.0.0.1:{server.port}/v1/console"
    with connect(uri, compression=None, additional_headers=headers) as ws:
        with contextlib.suppress(ConnectionClosed):  # a page of another site is refused before
            ws.send(json.dumps({"key": key}))
        told: dict[str, Any] = json.loads(ws.recv(timeout=10))
        return told


@pytest.fixture(scope="module")
def keyless() -> Iterator[PolicyServer]:
    policy = FakePolicy()
    with serving(policy, allowed_hosts=("robots.example.org",), allowed_origins=("https://ui.example.org",)) as server:
        yield server


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "192.168.1.7", "localhost.evil.example", "[", ""]
)
def test_a_name_that_somebody_made_point_here_is_not_answered(keyless: PolicyServer, path: str, host: str) -> None:
    status, told = get(keyless, path, Host=host)
    assert status in (400, 401), told
    if host.startswith("evil"):
        assert json.loads(told)["code"] == "unauthorised"
        assert "--allowed-host evil.example" in told, "the message names no remedy"
        assert "robots.example.org" in told


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost:9", "[::1]:80", "arm.localhost", "Robots.Example.Org:443"])
def test_loopbacks_names_and_the_allowed_ones_are_answered(keyless: PolicyServer, host: str) -> None:
    assert get(keyless, "/v1/sessions", Host=host)[0] == 200
    with raw_client(keyless.port, greeted=False, additional_headers={}) as ws:
        assert receive(ws) == METADATA


def test_health_is_told_under_any_name(keyless: PolicyServer) -> None:
    assert get(keyless, "/healthz", Host="10.0.0.7:8000") == (200, '{"status":"ready"}')


def sockets_first_word(server: PolicyServer, host: str, path: str = "/robot") -> Any:
    """With this Host, which no websocket client sends by itself."""
    protocol = ClientProtocol(parse_uri(f"ws://{host}{path}"))
    protocol.send_request(protocol.connect())
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as raw:
        raw.sendall(b"".join(protocol.data_to_send()))
        while not (events := [event for event in protocol.events_received() if hasattr(event, "opcode")]):
            protocol.receive_data(raw.recv(65536))
    return events[0].data


def test_a_websocket_under_another_name_is_told_and_closed(keyless: PolicyServer) -> None:
    assert b"--allowed-host evil.example" in sockets_first_word(keyless, "evil.example")
    assert unpack(bytes(sockets_first_word(keyless, "robots.example.org")), max_bytes=10**6) == METADATA
    assert b"--allowed-host evil.example" in sockets_first_word(keyless, "evil.example", "/v1/console")


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "https://robots.example.org:1", "null", "http://127.0.0.1:1"]
)
def test_a_page_of_another_site_is_told_the_remedy(keyless: PolicyServer, origin: str) -> None:
    status, told = get(keyless, "/v1/sessions", Host="127.0.0.1", Origin=origin)
    assert (status, json.loads(told)["code"]) == (401, "unauthorised")
    assert "--allowed-origin" in told
    assert "--allowed-origin" in console(keyless, origin=origin)["why"]


def test_its_own_page_and_an_allowed_one_use_it(keyless: PolicyServer) -> None:
    for host, origin in [
        ("robots.example.org", "https://robots.example.org"),  # behind a proxy that ends TLS
        ("127.0.0.1:80", "http://127.0.0.1"),
        ("localhost", "https://ui.example.org"),
    ]:
        assert get(keyless, "/v1/sessions", Host=host, Origin=origin)[0] == 200, origin


def test_with_a_valid_key_neither_origin_nor_host_matters() -> None:
    with serving(FakePolicy(), api_key="k") as server:
        foreign = {"Host": "gpu.example.org", "Origin": "https://anywhere.example"}
        assert get(server, "/v1/sessions", Authorization="Api-Key k", **foreign)[0] == 200
        assert get(server, "/v1/sessions", **foreign)[0] == 401
        key = {"Authorization": "Api-Key k"}
        with raw_client(server.port, additional_headers=key, origin="https://anywhere.example"):
            pass
        assert console(server, "no", origin="https://anywhere.example")["type"] == "refused"


def test_hosts_that_are_named_are_the_only_ones_with_a_key_too() -> None:
    with serving(FakePolicy(), api_key="k", allowed_hosts=("gpu.example.org",)) as server:
        assert get(server, "/v1/sessions", Authorization="Api-Key k", Host="gpu.example.org")[0] == 200
        assert get(server, "/v1/sessions", Authorization="Api-Key k", Host="gpu.example.net")[0] == 401


def test_websocket_client_which_sends_an_origin_is_served(keyless: PolicyServer) -> None:
    websocket = pytest.importorskip("websocket", reason="websocket-client is missing")
    for host in ("127.0.0.1", "localhost"):
        ws = websocket.create_connection(f"ws://{host}:{keyless.port}/arm", timeout=10)
        assert unpack(ws.recv(), max_bytes=10**6) == METADATA
        ws.close()


def test_nothing_is_read_of_a_request_whose_sender_is_unknown() -> None:
    with serving(FakePolicy(), api_key="k") as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
        connection.putrequest("POST", "/v1/sessions")
        connection.putheader("content-type", "application/json")
        connection.putheader("content-length", "60000")
        connection.endheaders()  # and no body
        answer = connection.getresponse()
        assert answer.status == 401
        connection.close()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("allowed_hosts", ("http://a",)),
        ("allowed_hosts", ("a:80",)),
        ("allowed_hosts", ("",)),
        ("allowed_hosts", "a"),
        ("allowed_origins", ("a",)),
        ("allowed_origins", ("https://a/path",)),
        ("allowed_origins", ("*",)),
        ("tls_key", None),
        ("health_port", 70000),
        ("max_sockets", 0),
        ("silent_s", 0.0),
    ],
)
def test_a_name_without_sense_is_refused(field: str, value: Any) -> None:
    given = {"tls_cert": "cert.pem"} if field == "tls_key" else {field: value}
    with pytest.raises(ValueError, match=f"^{field}: expected"):
        ServerConfig(**given)


def test_names_are_read_as_browsers_write_them() -> None:
    assert [host_of(text) for text in ("A.b:80", "[::1]:80", "::1", "a/b", "u@a", "a:x", "")] == [
        *("a.b", "::1"),
        *[None] * 5,
    ]
    assert origin_of("HTTPS://A") == "https://a:443"
    assert is_own_page("http://[::1]:8000", "[::1]:8000")
    assert not is_own_page("http://a", "b")
    assert not is_own_page("null", "null")
