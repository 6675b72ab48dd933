"""The one reading of a server's address: what is dialled for what is given."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from worldkv_client import PolicyClient, ServerAddress

GIVEN = {
    "gpu-box": ("ws://gpu-box:8000", "http://gpu-box:8000"),
    "gpu-box:81": ("ws://gpu-box:81", "http://gpu-box:81"),
    "gpu_box.lab.example.": ("ws://gpu_box.lab.example.:8000", "http://gpu_box.lab.example.:8000"),
    "10.0.0.7": ("ws://10.0.0.7:8000", "http://10.0.0.7:8000"),
    "10.0.0.7:8000": ("ws://10.0.0.7:8000", "http://10.0.0.7:8000"),
    "::1": ("ws://[::1]:8000", "http://[::1]:8000"),
    "::": ("ws://[::]:8000", "http://[::]:8000"),
    "[::1]": ("ws://[::1]:8000", "http://[::1]:8000"),
    "[::1]:81": ("ws://[::1]:81", "http://[::1]:81"),
    "fe80::1%eth0": ("ws://[fe80::1%eth0]:8000", "http://[fe80::1%eth0]:8000"),
    "[fe80::1%25eth0]:81": ("ws://[fe80::1%eth0]:81", "http://[fe80::1%eth0]:81"),
    "2001:db8::1:8000": ("ws://[2001:db8::1:8000]:8000", "http://[2001:db8::1:8000]:8000"),
    "ws://gpu-box": ("ws://gpu-box:8000", "http://gpu-box:8000"),
    "ws://gpu-box:80": ("ws://gpu-box:80", "http://gpu-box:80"),
    "ws://gpu-box:81": ("ws://gpu-box:81", "http://gpu-box:81"),
    "ws://gpu-box:81/": ("ws://gpu-box:81", "http://gpu-box:81"),
    "WS://gpu-box:81": ("ws://gpu-box:81", "http://gpu-box:81"),
    "ws://[::1]:81/arm": ("ws://[::1]:81/arm", "http://[::1]:81/arm"),
    "ws://gpu-box/arm": ("ws://gpu-box:8000/arm", "http://gpu-box:8000/arm"),
    "ws://gpu-box:81/arm/": ("ws://gpu-box:81/arm/", "http://gpu-box:81/arm/"),
    "gpu-box:81/arm": ("ws://gpu-box:81/arm", "http://gpu-box:81/arm"),
    "wss://gpu-box": ("wss://gpu-box", "https://gpu-box"),
    "wss://gpu-box:443": ("wss://gpu-box", "https://gpu-box"),
    "wss://gpu-box:8443/arm": ("wss://gpu-box:8443/arm", "https://gpu-box:8443/arm"),
    "wss://gpu-box/arm?token=a": ("wss://gpu-box/arm?token=a", "https://gpu-box/arm?token=a"),
    "http://gpu-box": ("ws://gpu-box:8000", "http://gpu-box:8000"),
    "http://gpu-box:81/": ("ws://gpu-box:81", "http://gpu-box:81"),
    "http://gpu-box:81/healthz": ("ws://gpu-box:81", "http://gpu-box:81"),
    "http://gpu-box:81/metrics": ("ws://gpu-box:81", "http://gpu-box:81"),
    "ws://gpu-box:81/v1/console": ("ws://gpu-box:81", "http://gpu-box:81"),
    "http://gpu-box:81/#session=arm": ("ws://gpu-box:81", "http://gpu-box:81"),
    "https://gpu-box/arm/healthz": ("wss://gpu-box/arm", "https://gpu-box/arm"),
    "  gpu-box:81\n": ("ws://gpu-box:81", "http://gpu-box:81"),
    "bücher.example": ("ws://xn--bcher-kva.example:8000", "http://xn--bcher-kva.example:8000"),
    "ws://gpu-box/ä": ("ws://gpu-box:8000/%C3%A4", "http://gpu-box:8000/%C3%A4"),
}
REFUSED = {
    "": "address: expected HOST, HOST:PORT, .*, got ''",
    "   ": "address: expected HOST",
    "gpu box": "address: expected HOST, .* got 'gpu box'",
    "ws:// gpu-box": "address: expected HOST",
    "gpu\x1b[31mbox": "address: expected HOST",
    "gpu-box:": "port: expected 1 to 65535 behind the colon, got '' in 'gpu-box:'",
    "gpu-box:http": "port: expected 1 to 65535 behind the colon, got 'http'",
    "gpu-box:0": "port: expected 1 to 65535",
    "gpu-box:65536": "port: expected 1 to 65535",
    "gpu-box:-1": "port: expected 1 to 65535",
    "gpu-box:٨٠": "port: expected 1 to 65535",
    "ws://gpu-box:9" + "9" * 5000: "port: expected 1 to 65535",
    ":8000": "address: ':8000' has no host",
    "ws://": "address: 'ws://' has no host",
    "ws:///arm": "address: 'ws:///arm' has no host",
    "ftp://gpu-box": "address: expected ws://, wss://, http:// or https://, got 'ftp://gpu-box'",
    "tcp://gpu-box:1": "address: expected ws://",
    "gpu-box:81:82": r"an IPv6 address with a port is \[::1\]:8000; got 'gpu-box:81:82'",
    "::1:8000": r"can be read in two ways; write \[::1\]:8000",
    "[::1": "expected an IPv6 address in brackets",
    "[gpu-box]:81": "expected an IPv6 address in brackets",
    "[::1]81": "expected an IPv6 address in brackets",
    "[::1]:": "port: expected 1 to 65535",
    "-gpu": "is no host's name",
    "gpu..box": "is no host's name",
    "gpu\\box": "is no host's name",
    "ws://me:secret@gpu-box": r"a user and a password have no place in 'ws://\*\*\*@gpu-box'; give the server's key",
    "me:secret@gpu-box:81": "a user and a password have no place",
}


@pytest.mark.parametrize(("given", "expected"), GIVEN.items(), ids=GIVEN)
def test_an_address_is_read_in_one_way(given: str, expected: tuple[str, str]) -> None:
    address = ServerAddress.parse(given)
    assert (address.websocket(), address.http()) == expected
    assert PolicyClient(given).uri == str(address) == expected[0]
    assert ServerAddress.parse(str(address)) == ServerAddress.parse(address.http()) == address, "it can be given again"


@pytest.mark.parametrize(("given", "words"), REFUSED.items(), ids=[given[:20] for given in REFUSED])
def test_what_is_no_address_is_refused_without_its_secrets(given: str, words: str) -> None:
    for read in (ServerAddress.parse, PolicyClient):
        with pytest.raises(ValueError, match=words) as refused:
            read(given)
        assert "secret" not in str(refused.value)
        assert str(refused.value).isprintable()
        assert len(str(refused.value)) < 500


@pytest.mark.parametrize(
    ("given", "port", "expected"),
    [
        ("gpu-box", 81, "ws://gpu-box:81"),
        ("gpu-box:81", 81, "ws://gpu-box:81"),
        ("gpu-box:81", None, "ws://gpu-box:81"),
        ("ws://gpu-box/arm", 81, "ws://gpu-box:81/arm"),
        ("wss://gpu-box", 8443, "wss://gpu-box:8443"),
        ("::1", 81, "ws://[::1]:81"),
    ],
)
def test_a_port_may_stand_beside_the_address(given: str, port: int | None, expected: str) -> None:
    assert PolicyClient(given, port).uri == expected


@pytest.mark.parametrize(
    ("given", "port", "words"),
    [
        ("ws://gpu-box:8000", 8001, "port: 'ws://gpu-box:8000' has port 8000, and 8001 was given beside it; leave one"),
        ("[::1]:81", 82, "has port 81, and 82 was given"),
        ("gpu-box", 0, "port: expected 1 to 65535, got 0"),
        ("gpu-box", 65536, "port: expected 1 to 65535"),
        ("gpu-box", "81", "port: expected 1 to 65535, got '81'"),
    ],
)
def test_a_port_that_contradicts_the_address_is_refused(given: str, port: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        PolicyClient(given, port)


@pytest.mark.parametrize("given", [None, 8000, b"gpu-box"])
def test_what_is_no_text_is_no_address(given: Any) -> None:
    with pytest.raises(ValueError, match=r"address: expected HOST, .*, got "):
        ServerAddress.parse(given)


def test_pages_lie_below_the_path() -> None:
    address = ServerAddress.parse("https://gpu-box/arm/?token=a")
    assert address.http("/healthz") == "https://gpu-box/arm/healthz?token=a"
    assert address.websocket("/v1/console") == "wss://gpu-box/arm/v1/console?token=a"
    assert ServerAddress.parse("gpu-box").http("/healthz") == "http://gpu-box:8000/healthz"


def test_this_machine_is_known_by_all_its_names() -> None:
    here = ["127.0.0.1", "127.8.9.10", "127.1", "localhost", "LOCALHOST.", "robot.localhost", "::1", "0.0.0.0", "::"]
    for name in [*here, "::ffff:127.0.0.1", socket.gethostname()]:
        assert ServerAddress.parse(name).is_this_machine, name
    for name in ("10.0.0.7", "gpu-box", "localhost.example", "fe80::1", "128.0.0.1", "1.2.3"):
        assert not ServerAddress.parse(name).is_this_machine, name
