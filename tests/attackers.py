"""Bad clients, for `server/test_attacks.py`: python attackers.py NAME PORT SECONDS. Sends to this machine only, stops
by itself, and prints how much it sent. Imports nothing but the standard library, so that it starts at once.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator
from urllib.parse import quote

NUM_SOCKETS = 8
FORGED = "x\n2026-01-01 00:00:00,000 I worldkv: key accepted\x1b[2J"
TEXT, BINARY, PING, CONT = 1, 2, 9, 0


def frame(kind: int, payload: bytes = b"", *, last: bool = True) -> bytes:
    head = bytes([kind | (0x80 if last else 0)])
    if len(payload) < 126:
        size = bytes([0x80 | len(payload)])
    elif len(payload) < 65536:
        size = b"\xfe" + struct.pack("!H", len(payload))
    else:
        size = b"\xff" + struct.pack("!Q", len(payload))
    return head + size + b"\0\0\0\0" + payload  # masked with zeros


def opened(port: int, path: str = "/robot") -> socket.socket:
    request = (
        f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
    )
    with contextlib.ExitStack() as undo:
        raw = undo.enter_context(connected(port))
        raw.sendall(request.encode())
        if not raw.recv(4096).startswith(b"HTTP/1.1 101"):
            raise ConnectionRefusedError
        undo.pop_all()
    return raw


def connected(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=2)


def floods(make: Callable[[int], socket.socket], data: bytes) -> Callable[[int], Iterator[int]]:
    """On several sockets at once, `data` again and again; a socket that is closed is opened again."""

    def attack(port: int) -> Iterator[int]:
        sockets: list[socket.socket | None] = [None] * NUM_SOCKETS
        for turn in range(10**6):
            index = turn % NUM_SOCKETS
            try:
                raw = sockets[index] = sockets[index] or make(port)
                raw.settimeout(0.2)
                raw.sendall(data)
                yield len(data)
            except OSError:
                if (closed := sockets[index]) is not None:
                    closed.close()
                sockets[index] = None
                yield 0

    return attack


def asks(*requests: bytes) -> Callable[[int], Iterator[int]]:
    """Requests on sockets of their own, many at once."""

    def attack(port: int) -> Iterator[int]:
        waiting: list[socket.socket] = []
        for turn in range(10**6):
            request = requests[turn % len(requests)]
            with contextlib.suppress(OSError):
                waiting.append(connected(port))
                waiting[-1].sendall(request)
            if len(waiting) >= 20 * NUM_SOCKETS:
                with contextlib.suppress(OSError), waiting.pop(0) as oldest:
                    while oldest.recv(65536):
                        pass
            yield len(request)

    return attack


def idle(port: int) -> Iterator[int]:
    """Sockets that never say anything: those that are closed are opened again."""
    kept: dict[int, socket.socket] = {}
    for turn in range(10**9):
        index = turn % 1000
        try:
            kept[index] = kept.get(index) or connected(port)
            if not kept[index].recv(4096, socket.MSG_DONTWAIT):
                kept.pop(index).close()
        except BlockingIOError:  # it is open
            time.sleep(0.0005)
        except OSError:
            if index in kept:
                kept.pop(index).close()
        yield 0


def get(path: str, host: str = "127.0.0.1", method: str = "GET", more: str = "", body: bytes = b"") -> bytes:
    length = f"content-length: {len(body)}\r\n" if body else ""
    return f"{method} {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n{more}{length}\r\n".encode() + body


DEEP_JSON = b"[" * (8 << 20)
DEEP_MSGPACK = b"\x91" * (8 << 20)
WIDE_MSGPACK = b"\xdc\x0f\xff" + (b"\xdc\x0f\xff" + b"\xc0" * 4095) * 4095  # 16 million values
LONG_MSGPACK = b"\xdb" + struct.pack("!I", 32 << 20) + b"x" * (32 << 20)
CRUMBS = get("/v1/sessions", method="POST", more="transfer-encoding: chunked\r\n") + b"1\r\n{\r\n" * 40_000

ATTACKS: dict[str, Callable[[int], Iterator[int]]] = {
    "idle sockets": idle,
    "empty fragments": floods(opened, frame(BINARY, last=False) + frame(CONT, last=False) * 40_000),
    "pings": floods(opened, frame(PING, b"x") * 40_000),
    "small messages": floods(opened, frame(BINARY, b"\xc0") * 40_000),
    "console messages": floods(lambda port: opened(port, "/v1/console"), frame(TEXT, b'{"watch": ["a"]}') * 10_000),
    "JSON bombs": floods(lambda port: opened(port, "/v1/console"), frame(TEXT, DEEP_JSON)),
    "deep msgpack": floods(opened, frame(BINARY, DEEP_MSGPACK)),
    "wide msgpack": floods(opened, frame(BINARY, WIDE_MSGPACK)),
    "long msgpack": floods(opened, frame(BINARY, LONG_MSGPACK)),
    "bodies in crumbs": floods(connected, CRUMBS),
    "JSON bodies": asks(
        get("/v1/sessions", method="POST", more="content-type: application/json\r\n", body=b"[" * 60_000)
    ),
    "pipelined requests": floods(connected, get("/healthz").replace(b"close", b"keep-alive") * 500),
    "rebinding": asks(get("/v1/sessions", "evil.example"), get("/metrics", "evil.example")),
    "forged paths": asks(get(f"/v1/{quote(FORGED)}"), get(f"/v1/sessions/{quote(FORGED)}/park", method="POST")),
    "parks": asks(get("/v1/sessions/robot-0/park", method="POST"), get("/v1/sessions/robot-1/park", method="POST")),
}


def main(name: str, port: int, seconds: float) -> None:
    print("ready", flush=True)
    sys.stdin.readline()
    end, num_bytes = time.monotonic() + seconds, 0
    for sent in ATTACKS[name](port):
        num_bytes += sent
        if time.monotonic() > end:
            break
    print(num_bytes, flush=True)
    os._exit(0)  # sockets that block are not waited for


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
