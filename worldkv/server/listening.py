"""The port, at every address that a host names, in both families. Imports no web server."""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Iterator

from worldkv.server.hosts import is_loopback
from worldkv.words import reason

_BACKLOG = 1024
_TRIES = 10  # to find a port that is free at all addresses
_ABSENT = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


def take_port(host: str, port: int, *, only_loopback: bool = False) -> list[socket.socket]:
    """One socket for each address of `host`, all at one port; `::` takes IPv4 as well. Port 0: a free one.

    Raises OSError where an address cannot be had. `only_loopback`: raises ValueError where `host` names another.
    """
    with _named(host, port):
        addresses = _addresses(host)
    elsewhere = [address for address in addresses if not is_loopback(address.partition("%")[0])]
    if only_loopback and elsewhere:
        raise ValueError(
            f"host: {host} is {elsewhere[0]} here, which other machines can reach; set api_key, or listen on 127.0.0.1"
        )
    for tries_left in reversed(range(_TRIES)):
        try:
            with _named(host, port):
                return _listen(addresses, port)
        except OSError as error:
            if port != 0 or error.errno != errno.EADDRINUSE or not tries_left:
                raise
    raise AssertionError


def _listen(addresses: list[str], port: int) -> list[socket.socket]:
    opened: list[socket.socket] = []
    absent: OSError | None = None
    with contextlib.ExitStack() as undo:
        for address in addresses:
            try:
                opened.append(undo.enter_context(_open(address, port)))
            except OSError as error:
                if error.errno not in _ABSENT:
                    raise
                absent = error  # a family that this machine has not, of a name that has both
                continue
            port = opened[0].getsockname()[1]
        if not opened and absent is not None:
            raise absent
        undo.pop_all()
    return opened


def _open(address: str, port: int) -> socket.socket:
    is_ipv6 = ":" in address
    return socket.create_server(
        (address, port),
        family=socket.AF_INET6 if is_ipv6 else socket.AF_INET,
        backlog=_BACKLOG,
        dualstack_ipv6=address == "::" and socket.has_dualstack_ipv6(),
    )


def _addresses(host: str) -> list[str]:
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    families = (socket.AF_INET, socket.AF_INET6)
    hosts = [str(where[0]) for family in families for kind, *_, where in found if kind == family]
    return list(dict.fromkeys(hosts))


@contextlib.contextmanager
def _named(host: str, port: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, f"cannot listen on {host} port {port}: {reason(error)}") from error
