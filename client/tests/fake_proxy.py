"""A real HTTP proxy of a few lines: writes down what it is asked, then refuses, or connects to where it is told."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

PROXY_VARIABLES = ("http_proxy", "https_proxy", "all_proxy", "ws_proxy", "wss_proxy", "socks_proxy", "no_proxy")


class FakeProxy:
    """`target`: the port of this machine to which whatever is asked for is connected; None: it refuses with 403."""

    def __init__(self, target: int | None) -> None:
        self.asked: list[str] = []  # first lines
        self.heads: list[str] = []
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(10)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._threads.append(threading.Thread(target=self._serve, args=(connection,)))
            self._threads[-1].start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            head = b""
            while not head.endswith(b"\r\n\r\n"):
                head += connection.recv(1)
            self.heads.append(head.decode())
            self.asked.append(self.heads[-1].split("\r\n")[0])
            if self._target is None:
                connection.sendall(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 6\r\nConnection: close\r\n\r\ndenied")
                return
            with socket.create_connection(("127.0.0.1", self._target)) as server:
                if head.startswith(b"CONNECT"):
                    connection.sendall(b"HTTP/1.1 200 Connected\r\n\r\n")
                else:  # a page, asked for with its whole address
                    method, url, rest = head.decode().split(" ", 2)
                    server.sendall(f"{method} /{url.split('/', 3)[3]} {rest}".encode())
                back = threading.Thread(target=_pass_on, args=(server, connection))
                back.start()
                _pass_on(connection, server)
                back.join()


def _pass_on(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)
    with contextlib.suppress(OSError):
        sink.shutdown(socket.SHUT_WR)


@contextlib.contextmanager
def fake_proxy(target: int | None = None) -> Iterator[FakeProxy]:
    proxy = FakeProxy(target)
    try:
        yield proxy
    finally:
        proxy.close()
