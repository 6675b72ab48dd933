"""Names by which a server is reached (`Host`), and pages that use it (`Origin`). Pure functions.

A page of another site can make a browser send requests here. Under its own name, which it lets resolve to this
machine (DNS rebinding), only `Host` tells; under the server's name, only `Origin`.
"""

from __future__ import annotations

import ipaddress
import re
from urllib.parse import urlsplit

_PORTS = {"http": 80, "https": 443, "ws": 80, "wss": 443}
_NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,252})")

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address


def ip_address(text: str) -> IPAddress | None:
    """None where `text` is none. An IPv4 address that is written as an IPv6 one is an IPv4 address."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


def is_loopback(host: str) -> bool:
    address = ip_address(host)
    if address is not None:
        return address.is_loopback
    name = host.lower().rstrip(".")
    return name == "localhost" or name.endswith(".localhost")


def host_of(header: str) -> str | None:
    """The name in a `Host` header, in small letters, without port and brackets; None where it is none."""
    try:
        parts = urlsplit(f"//{header}")
        name, _ = parts.hostname, parts.port
    except ValueError:
        return None
    is_whole = parts.netloc == header and "@" not in header
    return name.rstrip(".") if name and is_whole else None


def origin_of(text: str) -> str | None:
    """`scheme://host:port` in full; None for what names no page, such as `null`."""
    try:
        parts = urlsplit(text)
        name, port = parts.hostname, parts.port or _PORTS.get(parts.scheme)
    except ValueError:
        return None
    if not name or port is None or "@" in parts.netloc or parts.path not in ("", "/") or parts.query or parts.fragment:
        return None
    return f"{parts.scheme}://{f'[{name}]' if ':' in name else name}:{port}"


def is_own_page(origin: str, host: str) -> bool:
    """Whether a page of `origin` came from the server that was asked as `host` (the header)."""
    page = origin_of(origin)
    if page is None:
        return False
    scheme, _, place = page.partition("://")
    return place == (origin_of(f"{scheme}://{host}") or "").partition("://")[2]


def checked_host(name: str) -> str:
    """A name of `allowed_hosts`, in small letters. Raises ValueError."""
    bare = name.strip().strip("[]").lower().rstrip(".")
    if ip_address(bare) is None and not _NAME.fullmatch(bare):
        raise ValueError(
            f"allowed_hosts: expected names or addresses such as robots.example.org, without scheme, port or path, "
            f"got {name!r}"
        )
    return bare


def checked_origin(origin: str) -> str:
    """One of `allowed_origins`, in full. Raises ValueError."""
    whole = origin_of(origin.strip())
    if whole is None:
        raise ValueError(
            f"allowed_origins: expected scheme and host such as https://robots.example.org, without a path, "
            f"got {origin!r}"
        )
    return whole
