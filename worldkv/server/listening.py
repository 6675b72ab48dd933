"""The port, taken before there is anything to serve. Imports no web server."""

from __future__ import annotations

import socket

from worldkv.words import reason

_BACKLOG = 128


def take_port(host: str, port: int) -> socket.socket:
    """A socket that listens: nobody else gets the port, and clients wait. Raises OSError that names host and port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise OSError(error.errno, f"cannot listen on {host} port {port}: {reason(error)}") from error
