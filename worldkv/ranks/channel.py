"""A connection between the leading rank and another: messages of a text and byte strings, each way, with a bound.

The end of either process ends it at once, so nobody waits for the dead; a host that vanishes is found by keep-alives.
"""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Sequence
from contextlib import suppress

Buffer = bytes | bytearray | memoryview
_HEAD = struct.Struct("!II")  # bytes of the text, number of byte strings
_SIZE = struct.Struct("!Q")
_KEEP_ALIVE = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}  # seconds, seconds, times


class Channel:
    """Over a connected socket, which is the channel's own."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._sending = threading.Lock()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEP_ALIVE.items():
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, text: bytes, parts: Sequence[Buffer] = (), timeout_s: float | None = None) -> None:
        """Raises OSError: the other end is gone, or has taken nothing for so long."""
        sizes = b"".join(_SIZE.pack(len(part)) for part in parts)
        with self._sending:
            self._socket.settimeout(timeout_s)
            self._socket.sendall(_HEAD.pack(len(text), len(parts)) + sizes + text)
            for part in parts:
                self._socket.sendall(part)

    def receive(self, timeout_s: float | None = None) -> tuple[bytes, list[bytearray]]:
        """The next message. Raises OSError, as `send` does."""
        self._socket.settimeout(timeout_s)
        length, count = _HEAD.unpack(self._exactly(_HEAD.size))
        sizes = [size for (size,) in _SIZE.iter_unpack(self._exactly(_SIZE.size * count))]
        text = bytes(self._exactly(length))
        return text, [self._exactly(size) for size in sizes]

    def close(self) -> None:
        """Also for a thread that waits for it. Safe twice."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _exactly(self, size: int) -> bytearray:
        data = bytearray(size)
        view = memoryview(data)
        while view:
            count = self._socket.recv_into(view)
            if count == 0:
                raise ConnectionResetError("the connection has ended")
            view = view[count:]
        return data


def plain(text: bytes) -> dict[str, object]:
    """A message's text, where it is a JSON object. Raises OSError for another one: it is not ours."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConnectionRefusedError("a message that is no JSON") from error
    if not isinstance(value, dict):
        raise ConnectionRefusedError("a message that is no JSON object")
    return value
