"""Where a server is: the one reading of an address, for robots and commands alike. Pure; opens nothing.

| given | dialled |
|---|---|
| `gpu-box`, `10.0.0.7`, `::1`, `[::1]`, `ws://gpu-box`, `http://gpu-box` | port 8000, worldkv's own |
| `gpu-box:81`, `[::1]:81`, `ws://gpu-box:81/`, `http://gpu-box:81/healthz` | port 81 |
| `wss://gpu-box`, `https://gpu-box` | port 443, a proxy's; with `--tls-cert` it is `wss://gpu-box:8000` |
| `ws://gpu-box:81/arm`, `https://gpu-box/arm` | the same, for a server below `/arm`; its pages lie under `/arm/v1` |
"""

from __future__ import annotations

import ipaddress
import re
import socket
from dataclasses import dataclass
from urllib.parse import quote

DEFAULT_PORT = 8000
_TLS_PORT = 443
_SECURE = {"": False, "ws": False, "http": False, "wss": True, "https": True}
_OWN_PAGES = ("/healthz", "/metrics", "/v1/console")  # of the addresses that a server prints of itself
_NAME = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?:\.[A-Za-z0-9_-]{1,63})*\.?")
_EXPECTED = "expected HOST, HOST:PORT, or either behind ws://, wss://, http:// or https://"


@dataclass(frozen=True)
class ServerAddress:
    """A server's address; `parse` makes it. `host`: without brackets. `path`: empty, or where the server lies."""

    host: str
    port: int
    secure: bool = False
    path: str = ""
    query: str = ""  # with its question mark

    @classmethod
    def parse(cls, text: str, port: int | None = None) -> ServerAddress:
        """`text`: as in the module's table. `port`: must not contradict it. Raises ValueError."""
        if not isinstance(text, str):
            raise ValueError(f"address: {_EXPECTED}, got {type(text).__name__}")
        text = text.strip()
        shown = _without_secrets(text)
        if not text or not text.isprintable() or " " in text:
            raise ValueError(f"address: {_EXPECTED}, got {shown!r}")
        scheme, rest = _split_scheme(text, shown)
        place, path, query = _split_path(rest)
        if "@" in place:
            raise ValueError(
                f"address: a user and a password have no place in {shown!r}; give the server's key as api_key "
                "(--api-key, WORLDKV_API_KEY)"
            )
        host, own_port = _split_port(place, shown)
        if port is not None and not (isinstance(port, int) and 0 < port < 65536):
            raise ValueError(f"port: expected 1 to 65535, got {port!r}")
        if None not in (port, own_port) and port != own_port:
            raise ValueError(f"port: {shown!r} has port {own_port}, and {port} was given beside it; leave one out")
        secure = _SECURE[scheme]
        default = _TLS_PORT if secure else DEFAULT_PORT
        return cls(_checked_host(host, shown), own_port or port or default, secure, path, query)

    def __str__(self) -> str:
        return self.websocket()

    def websocket(self, page: str = "") -> str:
        """For robots, or of a page that is a websocket, such as `/v1/console`."""
        return self._url("wss" if self.secure else "ws", page)

    def http(self, page: str = "") -> str:
        """Of a page, such as `/healthz`."""
        return self._url("https" if self.secure else "http", page)

    @property
    def is_this_machine(self) -> bool:
        """Whether it is dialled without a network: no proxy elsewhere could reach it."""
        name = self.host.lower().rstrip(".")
        if name == "localhost" or name.endswith(".localhost") or name == socket.gethostname().lower():
            return True
        number = _ip_address(self.host)
        if isinstance(number, ipaddress.IPv6Address) and number.ipv4_mapped is not None:
            number = number.ipv4_mapped
        return number is not None and (number.is_loopback or number.is_unspecified)

    @property
    def location(self) -> str:
        """HOST:PORT."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def _url(self, scheme: str, page: str) -> str:
        place = self.location
        if self.secure and self.port == _TLS_PORT:
            place = place.rpartition(":")[0]
        path = self.path.rstrip("/") + page if page else self.path
        return f"{scheme}://{place}{path}{self.query}"


def _split_scheme(text: str, shown: str) -> tuple[str, str]:
    scheme, separator, rest = text.partition("://")
    if not separator:
        return "", text
    if scheme.lower() not in _SECURE:
        raise ValueError(f"address: expected ws://, wss://, http:// or https://, got {shown!r}")
    return scheme.lower(), rest


def _split_path(rest: str) -> tuple[str, str, str]:
    """(host and port, path, query); what follows a # stays in a browser."""
    place, hash_or_path, tail = _partition_first(rest.partition("#")[0], "/?")
    path, _, query = (hash_or_path + tail).partition("?")
    for page in _OWN_PAGES:
        if path.rstrip("/").endswith(page):
            path = path.rstrip("/")[: -len(page)]
    path = "" if path == "/" else quote(path, safe="/%:@!$&'()*+,;=~-._")
    return place, path, f"?{quote(query, safe='/%:@!$&()*+,;=~-._?')}" if query else ""


def _partition_first(text: str, marks: str) -> tuple[str, str, str]:
    at = min((index for index in map(text.find, marks) if index >= 0), default=len(text))
    return text[:at], text[at : at + 1], text[at + 1 :]


def _split_port(place: str, shown: str) -> tuple[str, int | None]:
    """(host without brackets, port where one is said)."""
    place = place.replace("%25", "%")  # before an IPv6 address's interface
    if place.startswith("["):
        host, closed, rest = place[1:].partition("]")
        if not closed or not isinstance(_ip_address(host), ipaddress.IPv6Address) or rest[:1] not in ("", ":"):
            raise ValueError(f"address: expected an IPv6 address in brackets, such as [::1]:8000, got {shown!r}")
        return host, _port(rest[1:], shown) if rest else None
    if place.count(":") > 1:
        front, _, back = place.rpartition(":")
        if not isinstance(_ip_address(place), ipaddress.IPv6Address):
            raise ValueError(f"address: {_EXPECTED}; an IPv6 address with a port is [::1]:8000; got {shown!r}")
        if front == "::1" and back.isdecimal():  # a legal address that nobody means
            raise ValueError(f"address: {shown!r} can be read in two ways; write [::1]:{back}")
        return place, None
    host, colon, port = place.partition(":")
    return host, _port(port, shown) if colon else None


def _port(text: str, shown: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 6 and 0 < int(text) < 65536):
        raise ValueError(f"port: expected 1 to 65535 behind the colon, got {text[:20]!r} in {shown!r}")
    return int(text)


def _checked_host(host: str, shown: str) -> str:
    if ":" in host:
        return host
    if not host:
        raise ValueError(f"address: {shown!r} has no host; {_EXPECTED}")
    name = host
    if not host.isascii():
        try:
            name = host.encode("idna").decode()
        except UnicodeError:
            name = ""
    if not _NAME.fullmatch(name):
        raise ValueError(f"address: {host!r} is no host's name, in {shown!r}; {_EXPECTED}")
    return name


def _ip_address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        pass
    try:  # 127.1 and the like, which a socket takes
        return ipaddress.IPv4Address(socket.inet_aton(host)) if host[:1].isdigit() and host.isascii() else None
    except OSError:
        return None


def _without_secrets(text: str) -> str:
    """As an error may show it: what stands before an @ may be a password, what stands behind a ? a token."""
    head, mark, _ = text.partition("?")
    scheme, separator, rest = head.partition("://") if "://" in head else ("", "", head)
    if "@" in head:
        scheme, rest = scheme.rpartition("@")[2], f"***@{rest.rpartition('@')[2]}"
    return f"{scheme}{separator}{rest}{'?***' if mark else ''}"[:200]
