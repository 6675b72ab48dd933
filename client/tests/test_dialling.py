"""Proxies, with a real one: never between programs of one machine, named in errors elsewhere, chosen by an option."""

from __future__ import annotations

import contextlib
import gc
import http.server
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import websockets.version
from fake_proxy import FakeProxy, fake_proxy
from test_console_feed import console
from test_policy_client import ROBOARENA, CountingServer, misbehaving, ticked

from worldkv_client import PolicyClient, ServerAddress
from worldkv_client.console import console_feed
from worldkv_client.dialling import Route
from worldkv_client.errors import ConnectionLost

FAR = "robots.invalid"  # a name that nobody has
IS_OLD = int(websockets.version.version.split(".")[0]) < 15  # knows no proxies
needs_proxies = pytest.mark.skipif(IS_OLD, reason="websockets before 15 knows no proxies")


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeProxy]:
    """One that refuses, and that the environment names."""
    with fake_proxy() as proxy:
        name_in_environment(monkeypatch, proxy.url)
        yield proxy


def name_in_environment(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "ws_proxy"):
        monkeypatch.setenv(name, url)


@contextlib.contextmanager
def pages() -> Iterator[int]:
    """A web server that says which page was asked for; its port."""

    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(503)
            self.end_headers()
            self.wfile.write(f"{self.path} {self.headers.get('Authorization')}".encode())

        def log_message(self, *_: Any) -> None: ...

    with http.server.HTTPServer(("127.0.0.1", 0), Page) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_between_programs_of_one_machine_there_is_no_proxy(proxy: FakeProxy, host: str) -> None:
    with misbehaving(CountingServer()) as port, PolicyClient(host, port) as client:
        assert ticked(client, ROBOARENA) == (1, False)
    with console() as url, console_feed(url, "key") as (_, hello):
        assert hello["version"] == "1"
    with pages() as port:
        assert Route.to(ServerAddress.parse(host, port)).http("/healthz", api_key="k") == (503, b"/healthz Api-Key k")
    assert proxy.asked == []


@needs_proxies
def test_elsewhere_the_proxy_is_taken_and_an_error_names_it_and_the_ways_out(proxy: FakeProxy) -> None:
    ways_out = f"give proxy=None (--proxy none) or set no_proxy={FAR}"
    with pytest.raises(ConnectionLost) as lost:
        PolicyClient(FAR, connect_wait=30).infer(ROBOARENA)
    said = str(lost.value)
    assert f"at ws://{FAR}:8000 through the proxy {proxy.url} (named by ws_proxy)" in said
    assert "403" in said
    assert ways_out in said
    with pytest.raises(ConnectionLost) as lost, console_feed(FAR):
        pass
    assert f"through the proxy {proxy.url}" in str(lost.value)
    assert ways_out in str(lost.value)
    assert proxy.asked == [f"CONNECT {FAR}:8000 HTTP/1.1"] * 2, "a refusal is not asked for again"


# http.client leaves the socket of a tunnel that is refused to be found as garbage (seen in Python 3.9).
@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
def test_a_page_elsewhere_goes_through_the_same_proxy(proxy: FakeProxy) -> None:
    assert Route.to(ServerAddress.parse(FAR)).http("/healthz") == (403, b"denied")

    def refused() -> str:
        with pytest.raises(OSError) as error:
            Route.to(ServerAddress.parse(f"https://{FAR}")).http("/healthz")
        return str(error.value)

    assert f"through the proxy {proxy.url}" in refused()
    for _ in range(3):
        gc.collect()  # here, where it is expected
    assert proxy.asked[0] == f"GET http://{FAR}:8000/healthz HTTP/1.1"
    assert proxy.asked[1].startswith(f"CONNECT {FAR}:443 ")


@needs_proxies
@pytest.mark.parametrize("how", ["environment", "without its scheme", "option"])
def test_a_proxy_that_connects_carries_a_session_and_pages(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with misbehaving(CountingServer()) as port, fake_proxy(port) as proxy:
        if how == "option":
            client = PolicyClient(FAR, proxy=proxy.url)
        else:
            name_in_environment(monkeypatch, proxy.url if how == "environment" else f"127.0.0.1:{proxy.port}")
            client = PolicyClient(FAR)
        with client:
            assert [ticked(client, ROBOARENA) for _ in range(2)] == [(1, False), (2, False)]
        assert proxy.asked == [f"CONNECT {FAR}:8000 HTTP/1.1"]
    with pages() as port, fake_proxy(port) as proxy:
        route = Route.to(ServerAddress.parse(FAR), proxy.url.replace("//", "//me:a%40b@"))
        assert route.http("/healthz") == (503, b"/healthz None")
        assert "Proxy-Authorization: Basic bWU6YUBi\r\n" in proxy.heads[0]


@needs_proxies
def test_an_option_may_send_even_loopback_through_a_proxy() -> None:
    with misbehaving(CountingServer()) as port, fake_proxy(port) as proxy:
        with PolicyClient("127.0.0.1", 9, proxy=proxy.url) as client:  # the far end's loopback, say
            assert ticked(client, ROBOARENA) == (1, False)
        assert proxy.asked == ["CONNECT 127.0.0.1:9 HTTP/1.1"]


@pytest.mark.parametrize("way_out", ["option", "no_proxy", "no_proxy with port"])
def test_a_proxy_can_be_left_out(way_out: str, proxy: FakeProxy, monkeypatch: pytest.MonkeyPatch) -> None:
    if way_out != "option":
        monkeypatch.setenv("no_proxy", FAR if way_out == "no_proxy" else f"{FAR}:8000")
    option = None if way_out == "option" else "auto"
    for _ in range(2):
        with pytest.raises(ConnectionLost) as lost:
            PolicyClient(FAR, connect_wait=0, proxy=option).infer(ROBOARENA)
        assert "proxy" not in str(lost.value)
    with pytest.raises(ConnectionLost) as lost, console_feed(FAR, proxy=option):
        pass
    with pytest.raises(OSError) as failed:
        Route.to(ServerAddress.parse(FAR), option).http("/healthz")
    assert "proxy" not in f"{lost.value} {failed.value}"
    assert proxy.asked == []


@pytest.mark.skipif(not IS_OLD, reason="websockets 15 and newer goes through proxies")
def test_an_old_websockets_goes_directly_and_says_so(proxy: FakeProxy) -> None:
    with pytest.raises(ConnectionLost, match=r"directly, since websockets .*named by ws_proxy.*install websockets 15"):
        PolicyClient(FAR, connect_wait=0).infer(ROBOARENA)
    with pytest.raises(ImportError, match=f"websockets 15 or newer is needed to go through the proxy {proxy.url}"):
        PolicyClient(FAR, connect_wait=0, proxy=proxy.url).infer(ROBOARENA)
    assert proxy.asked == []


def test_what_is_no_proxy_is_refused_without_its_password(monkeypatch: pytest.MonkeyPatch) -> None:
    for given in (
        "ftp://proxy:1",
        "http://",
        "http://me:secret@:1",
        "http://proxy:0",
        "http://proxy:99999",
        "http://p/x",
    ):
        with pytest.raises(ValueError, match=r"^proxy: expected a proxy such as http://proxy:3128, got") as refused:
            PolicyClient(FAR, proxy=given)
        assert "secret" not in str(refused.value)
    with pytest.raises(ValueError, match="proxy: expected None, 'auto' or a URL, got int"):
        PolicyClient(FAR, proxy=3128)  # type: ignore[arg-type]
    name_in_environment(monkeypatch, "ftp://me:secret@proxy")
    with pytest.raises(ValueError, match=r"^ws_proxy: expected a proxy such as .*, got 'ftp://\*\*\*@proxy'"):
        PolicyClient(FAR)
    PolicyClient("127.0.0.1")


def test_a_proxy_s_password_is_in_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_proxy() as proxy:
        name_in_environment(monkeypatch, proxy.url.replace("//", "//me:secret@"))
        with pytest.raises(ConnectionLost) as lost:
            PolicyClient(FAR, connect_wait=0).infer(ROBOARENA)
    assert "secret" not in str(lost.value)
    assert f"http://***@127.0.0.1:{proxy.port}" in str(lost.value)


def test_who_expects_tls_of_a_server_without_it_is_told() -> None:
    with misbehaving(CountingServer()) as port:
        with pytest.raises(
            ConnectionLost, match=r"without --tls-cert worldkv speaks no TLS: is it ws:// that you mean\?"
        ):
            PolicyClient("wss://127.0.0.1", port, connect_wait=0).infer(ROBOARENA)
        with pytest.raises(OSError, match=r"SSL.*without --tls-cert worldkv speaks no TLS"):
            Route.to(ServerAddress.parse("https://127.0.0.1", port)).http("/healthz")


@pytest.mark.parametrize("given", ["socks://127.0.0.1:1", "socks5h://127.0.0.1:1"])
def test_a_socks_proxy_carries_websockets_only(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("all_proxy", given)
    route = Route.to(ServerAddress.parse(FAR))
    assert (route.proxy, route.said_by) == ("socks5h://127.0.0.1:1", "all_proxy")
    with pytest.raises(OSError, match=r"only websockets can go through the proxy socks5h://127.0.0.1:1"):
        route.http("/healthz")


@pytest.mark.parametrize("answer", [b"", b"220 mail.example ESMTP\r\n\r\n", b"HTTP/1.1 what\r\n\r\n"])
def test_what_answers_and_speaks_no_http_is_no_policy_server(answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with contextlib.suppress(OSError):  # closed at the end
                while True:
                    with listener.accept()[0] as peer:
                        peer.recv(4096)
                        peer.sendall(answer)

        threading.Thread(target=serve, daemon=True).start()
        client = PolicyClient("127.0.0.1", listener.getsockname()[1], connect_wait=0)
        with pytest.raises(ConnectionLost, match="no policy server answers"), client:
            pass
        listener.shutdown(socket.SHUT_RDWR)
