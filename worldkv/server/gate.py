"""Who may connect: listening sockets that count what they accept, by address and in all, and refuse the rest.

A newcomer too many takes the place of a socket that has said nothing yet; where there is none it is told so and closed.
So is everybody while the process may open no more files: nobody hangs.
Works with asyncio's selector loop, which calls `accept` of the sockets that it is given.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import logging
import os
import socket
from collections import Counter
from collections.abc import Sequence

from worldkv.server.counts import Bucket
from worldkv.server.hosts import ip_address

_KEPT_FILES = 256  # of the process, for weights, recordings and itself
_MOST_SOCKETS = 16384
_WAITING = 1024  # newcomers, in the kernel: one that finds no room there tries again a second later
_REFUSED_AT_ONCE = 16  # then the loop looks after others
_OUT_OF_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_NO_FILES = (
    "this process may open no more files: newcomers are refused; raise the limit (ulimit -n, LimitNOFILE=), or serve "
    "fewer sockets (--max-sockets)"
)
Address = Sequence[object]  # of a socket: host, port, and more in IPv6

logger = logging.getLogger(__name__)


class Gate:
    """All open sockets of one server. Who has asked for nothing yet is a stranger: the oldest goes when somebody else
    comes and there is no room. `silent_s`: for a TLS handshake. Lives on the event loop."""

    def __init__(self, max_sockets: int | None, per_address: int, silent_s: float, *, tls: bool) -> None:
        self.max_sockets = max_sockets or most_sockets()
        self._per_address = per_address
        self._silent_s = silent_s
        self._tls = tls
        self._num_of: Counter[str] = Counter()
        self.num_open = 0
        self._strangers: dict[object, _Accepted] = {}  # by both ends, the oldest first
        self.last: set[int] = set()  # numbers of files that wait for robots: see `turns`
        self.doors: set[int] = set()  # of listening ones, which do as well
        self._words = Bucket(10, 0.2)  # for the log
        self._spare: int | None = None  # a file that is given up to refuse somebody when there are no more

    def enter(self, newcomer: _Accepted, address: Address) -> str | None:
        """Count a newcomer. The reason where there is no room for it."""
        origin = origin_of(address)
        if self.num_open >= self.max_sockets and not self._hang_up_on_a_stranger():
            return f"{self.num_open} sockets are open, the most that this server serves (--max-sockets)"
        if self._num_of[origin] >= self._per_address and not self._hang_up_on_a_stranger(origin):
            return (
                f"{self._per_address} sockets are open from {origin}, the most that one address may have "
                "(--max-sockets-per-address)"
            )
        self.num_open += 1
        self._num_of[origin] += 1
        newcomer.counted_as = origin
        newcomer.ends = (newcomer.getsockname(), address)
        self._strangers[newcomer.ends] = newcomer
        self.last.add(newcomer.fileno())
        if self._tls:
            newcomer.handshake = asyncio.get_running_loop().call_later(self._silent_s, newcomer.hang_up)
        return None

    def connected(self, transport: asyncio.BaseTransport) -> None:
        """The TLS handshake is done."""
        newcomer = self._strangers.get(_ends(transport))
        if newcomer is not None:
            newcomer.end_handshake()

    def has_asked(self, transport: asyncio.BaseTransport) -> None:
        """It is no stranger from now on. Safe twice."""
        self._strangers.pop(_ends(transport), None)

    def serve_first(self, transport: asyncio.BaseTransport) -> None:
        """It is a robot's: others wait for it from now on."""
        self.last.discard(transport.get_extra_info("socket").fileno())

    def leave(self, accepted: _Accepted) -> None:
        """Safe twice, and for who was not counted."""
        accepted.end_handshake()
        origin, accepted.counted_as = accepted.counted_as, None
        if origin is None:
            return
        self._strangers.pop(accepted.ends, None)
        self.num_open -= 1
        self._num_of[origin] -= 1
        if not self._num_of[origin]:
            del self._num_of[origin]

    def _hang_up_on_a_stranger(self, origin: str | None = None) -> bool:
        """On the oldest one, of `origin` if that is given. Whether there was one."""
        strangers = self._strangers.values()
        oldest = next((each for each in strangers if origin is None or each.counted_as == origin), None)
        if oldest is None:
            return False
        self._tell("a silent socket made room for a newcomer from %s", oldest.counted_as)
        self.leave(oldest)
        oldest.hang_up()
        return True

    def _tell(self, text: str, *values: object) -> None:
        if self._words.take():
            logger.warning(text, *values, extra={"event": "socket_refused"})

    def refuse(self, newcomer: socket.socket, address: Address, why: str) -> None:
        self._tell("refused %s: %s", origin_of(address), why)
        with contextlib.suppress(OSError), newcomer:
            if not self._tls:
                newcomer.setblocking(False)
                newcomer.send(_refusal(why))
                newcomer.shutdown(socket.SHUT_WR)

    def refuse_without_a_file(self, listener: GatedSocket) -> None:
        """Accept the next newcomer with the spare file, and close it. Raises BlockingIOError where there is none."""
        self._tell(_NO_FILES)
        self._hang_up_on_a_stranger()
        if self._spare is not None:
            os.close(self._spare)
            self._spare = None
        try:
            newcomer, _ = socket.socket.accept(listener)
            newcomer.close()
        except OSError as error:
            raise BlockingIOError(errno.EAGAIN, "nobody could be refused") from error
        finally:
            self.keep_spare()

    def keep_spare(self) -> None:
        if self._spare is None:
            with contextlib.suppress(OSError):
                self._spare = os.open(os.devnull, os.O_RDONLY)

    def close(self) -> None:
        if self._spare is not None:
            os.close(self._spare)
            self._spare = None


class GatedSocket(socket.socket):
    """Listens. `port`: is known after it is closed as well."""

    gate: Gate
    port: int

    @classmethod
    def around(cls, listening: socket.socket, gate: Gate) -> GatedSocket:
        """Takes `listening` over."""
        gated = cls(listening.family, listening.type, listening.proto, listening.detach())
        gated.gate = gate
        gated.port = int(gated.getsockname()[1])
        gate.doors.add(gated.fileno())
        gate.keep_spare()
        return gated

    def listen(self, backlog: int = _WAITING, /) -> None:
        """asyncio accepts as many at a turn as it says here; more than that may wait for the next turn."""
        super().listen(max(backlog, _WAITING))

    def accept(self) -> tuple[socket.socket, Address]:
        for _ in range(_REFUSED_AT_ONCE):
            try:
                accepted, address = super().accept()
            except OSError as error:
                if error.errno not in _OUT_OF_FILES:
                    raise
                self.gate.refuse_without_a_file(self)
                break  # for the loop to close who made room
            newcomer = _Accepted(accepted.family, accepted.type, accepted.proto, accepted.detach())
            newcomer.gate = self.gate
            why = self.gate.enter(newcomer, address)
            if why is None:
                return newcomer, address
            self.gate.refuse(newcomer, address, why)
        raise BlockingIOError(errno.EAGAIN, "enough for now")


class _Accepted(socket.socket):
    """Counted until it is closed, or hung up on."""

    gate: Gate
    counted_as: str | None = None
    ends: object = None
    handshake: asyncio.TimerHandle | None = None

    def close(self) -> None:
        self.gate.leave(self)
        self.gate.last.discard(self.fileno())
        super().close()

    def hang_up(self) -> None:
        with contextlib.suppress(OSError):
            self.shutdown(socket.SHUT_RDWR)

    def end_handshake(self) -> None:
        if self.handshake is not None:
            self.handshake.cancel()
            self.handshake = None


def _ends(transport: asyncio.BaseTransport) -> object:
    return transport.get_extra_info("sockname"), transport.get_extra_info("peername")


def most_sockets() -> int:
    """As many as the process may open files, less some."""
    try:
        import resource
    except ImportError:  # Windows
        return _MOST_SOCKETS
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return _MOST_SOCKETS
    return max(min(limit - _KEPT_FILES, _MOST_SOCKETS), limit // 2)


def origin_of(address: Address) -> str:
    """Where a socket comes from: an IPv4 address, or the /64 of an IPv6 one, of which one person has as many as he
    likes."""
    text = str(address[0]).partition("%")[0]
    number = ip_address(text)
    if isinstance(number, ipaddress.IPv6Address) and not number.is_loopback:
        return str(ipaddress.ip_network(f"{number}/64", strict=False))
    return str(number or text)


def _refusal(why: str) -> bytes:
    body = f"503: {why}\n".encode()
    head = (
        "HTTP/1.1 503 Service Unavailable\r\ncontent-type: text/plain; charset=utf-8\r\n"
        f"content-length: {len(body)}\r\nretry-after: 1\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + body
