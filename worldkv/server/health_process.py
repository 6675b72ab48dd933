"""`/healthz` and `/metrics` in a process of their own, which answers whatever the server's process is busy with.

Run as a file by `health`: python -I -S health_process.py CHANNEL PARENT LISTENING... (two descriptors, and a process id
between them). Imports nothing but the standard library, so that it starts in tens of milliseconds and takes 10 MB.
The channel speaks lines of JSON. The server says {"reason": null or text} some times a second and answers {"metrics":
host} by {"status", "kind", "body"}. When the channel ends, or the parent is another one, so does the process.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import sys
import time
from collections import Counter
from collections.abc import Mapping

FIRST_WORD = "loading the model"
STALE_S = 5.0  # an older word is none
WITHIN_S = 5.0  # to ask, to be told, and to read it
_LOOK_S = 0.5
_MAX_SOCKETS = 256
_AT_ONCE = 64  # newcomers, before the others have their turn
_MAX_HEAD_BYTES = 8192
_PHRASES = {200: "OK", 400: "Bad Request", 401: "Unauthorized", 404: "Not Found", 503: "Service Unavailable"}
_TEXT = "text/plain; charset=utf-8"


class Client:
    """One request on a socket of its own. `origin`: whom it counts for."""

    def __init__(self, accepted: socket.socket, origin: bytes) -> None:
        self.socket = accepted
        self.origin = origin
        self.until = time.monotonic() + WITHIN_S
        self.head = b""
        self.left = b""  # of the answer
        self.is_answered = False

    def answer(self, status: int, kind: str, body: bytes) -> None:
        head = (
            f"HTTP/1.1 {status} {_PHRASES[status]}\r\ncontent-type: {kind}\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.left = head.encode() + (b"" if self.head.startswith(b"HEAD ") else body)
        self.is_answered = True


class HealthProcess:
    """Its life is `run`."""

    def __init__(self, channel: socket.socket, parent: int, listening: list[socket.socket]) -> None:
        self._channel = channel
        self._parent = parent
        self._selector = selectors.DefaultSelector()
        self._clients: dict[Client, None] = {}  # the oldest first
        self._num_of: Counter[bytes] = Counter()
        self._reason: str | None = FIRST_WORD
        self._said_at = time.monotonic()
        self._heard = b""
        self._wait_for_metrics: dict[Client, str | None] = {}  # and under which name each has asked
        self._asked_for: Client | None = None
        for each in (channel, *listening):
            each.setblocking(False)
            self._selector.register(each, selectors.EVENT_READ)
        self._listening = frozenset(listening)

    def run(self) -> None:
        """Until the server is gone."""
        while os.getppid() == self._parent and self._turn():
            self._hang_up_on_the_late()
        for client in list(self._clients):
            self._hang_up(client)
        self._selector.close()

    def _turn(self) -> bool:
        """False: the server is gone."""
        for key, _ in self._selector.select(_LOOK_S):
            if key.fileobj is self._channel:
                if not self._listen():
                    return False
            elif key.fileobj in self._listening:
                self._accept(key.fileobj)
            elif key.data in self._clients:
                self._serve(key.data)
        return True

    def _listen(self) -> bool:
        """To the server. False: it is gone."""
        try:
            data = self._channel.recv(1 << 20)
        except BlockingIOError:
            return True
        except OSError:
            return False
        *lines, self._heard = (self._heard + data).split(b"\n")
        for line in lines:
            said = json.loads(line)
            if "reason" in said:
                self._reason, self._said_at = said["reason"], time.monotonic()
            else:
                self._pass_on(said)
        return bool(data)

    def _pass_on(self, said: Mapping[str, str | int]) -> None:
        client, self._asked_for = self._asked_for, None
        if client in self._wait_for_metrics:
            del self._wait_for_metrics[client]
            client.answer(int(said["status"]), str(said["kind"]), str(said["body"]).encode())
            self._send(client)
        self._ask_for_metrics()

    def _ask_for_metrics(self) -> None:
        """For one at a time: so the line is short and finds room in the channel."""
        if self._asked_for is None and self._wait_for_metrics:
            self._asked_for, host = next(iter(self._wait_for_metrics.items()))
            self._channel.send(json.dumps({"metrics": host}).encode() + b"\n")

    def _accept(self, listening: object) -> None:
        assert isinstance(listening, socket.socket)
        for _ in range(_AT_ONCE):
            try:
                accepted, address = listening.accept()
            except BlockingIOError:
                return
            except OSError:  # no more files
                self._make_room()
                return
            accepted.setblocking(False)
            client = Client(accepted, origin_of(address[0]))
            if len(self._clients) >= _MAX_SOCKETS:
                self._make_room()
            self._clients[client] = None
            self._num_of[client.origin] += 1
            self._selector.register(accepted, selectors.EVENT_READ, client)

    def _make_room(self) -> None:
        """The oldest of whoever has most sockets goes."""
        if self._clients:
            most = max(self._num_of, key=self._num_of.__getitem__)
            self._hang_up(next(client for client in self._clients if client.origin == most))

    def _hang_up(self, client: Client) -> None:
        if client in self._clients:
            del self._clients[client]
            self._wait_for_metrics.pop(client, None)
            self._num_of[client.origin] -= 1
            if not self._num_of[client.origin]:
                del self._num_of[client.origin]
            self._selector.unregister(client.socket)
            client.socket.close()

    def _hang_up_on_the_late(self) -> None:
        now = time.monotonic()
        for client in list(self._clients):
            if client.until > now:
                return  # those behind it came later
            if client in self._wait_for_metrics:
                client.answer(503, _TEXT, f"the server did not tell its metrics within {WITHIN_S:g} s\n".encode())
                self._send(client)
            self._hang_up(client)

    def _serve(self, client: Client) -> None:
        if client.is_answered:
            self._send(client)
            return
        try:
            data = client.socket.recv(_MAX_HEAD_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if client in self._wait_for_metrics:
            if not data:
                self._hang_up(client)
            return
        client.head += data
        if not data or len(client.head) > _MAX_HEAD_BYTES:
            self._hang_up(client)
        elif b"\r\n\r\n" in client.head:
            self._answer(client)

    def _answer(self, client: Client) -> None:
        lines = client.head.partition(b"\r\n\r\n")[0].decode("latin-1").split("\r\n")
        method, _, rest = lines[0].partition(" ")
        path = rest.partition(" ")[0].partition("?")[0]
        if method not in ("GET", "HEAD"):
            client.answer(400, _TEXT, b"expected GET\n")
        elif path == "/healthz":
            reason = self._why_not_ready()
            told = {"status": "ready"} if reason is None else {"status": "unready", "reason": reason}
            client.answer(200 if reason is None else 503, "application/json", json.dumps(told).encode())
        elif path == "/metrics":
            named = (line.partition(":") for line in lines[1:])
            hosts = [value.strip() for name, _, value in named if name.lower() == "host"]
            self._wait_for_metrics[client] = ", ".join(hosts) if hosts else None
            self._ask_for_metrics()
            return
        else:
            client.answer(404, _TEXT, b"only /healthz and /metrics are here\n")
        self._send(client)

    def _why_not_ready(self) -> str | None:
        silent_for = time.monotonic() - self._said_at
        return self._reason if silent_for < STALE_S else f"the server has said nothing for {silent_for:.1f} s"

    def _send(self, client: Client) -> None:
        try:
            client.left = client.left[client.socket.send(client.left) :]
        except BlockingIOError:
            pass
        except OSError:
            client.left = b""
        if client.left:
            self._selector.modify(client.socket, selectors.EVENT_WRITE, client)
        else:
            self._hang_up(client)


def origin_of(host: str) -> bytes:
    """An IPv4 address, also where it is written as an IPv6 one, or the /64 of an IPv6 one."""
    if ":" not in host:
        return socket.inet_pton(socket.AF_INET, host)
    packed = socket.inet_pton(socket.AF_INET6, host.partition("%")[0])
    return packed[12:] if packed.startswith(bytes(10) + b"\xff\xff") else packed[:8]


def main(channel: int, parent: int, listening: list[int]) -> None:
    HealthProcess(socket.socket(fileno=channel), parent, [socket.socket(fileno=each) for each in listening]).run()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), [int(each) for each in sys.argv[3:]])
