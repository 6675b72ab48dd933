"""How a server is reached: directly, or through a proxy. The client, and every command that dials, does it here.

`proxy` is "auto", None or a proxy's URL. "auto" takes what the environment names (`ws_proxy`, `https_proxy`,
`http_proxy`, `all_proxy`, and `no_proxy` for exceptions), but never for this machine; None takes none. Whatever goes
wrong behind a proxy names the proxy.
"""

from __future__ import annotations

import base64
import inspect
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from http.client import HTTPException
from typing import Any, Protocol, cast
from urllib.parse import unquote, urlsplit

from websockets.exceptions import InvalidHandshake
from websockets.sync.client import ClientConnection, connect
from websockets.version import version as websockets_version

from worldkv_client.address import ServerAddress

AUTO = "auto"
_SCHEMES = ("http", "https", "socks4", "socks4a", "socks5", "socks5h")
_TAKES_PROXY = "proxy" in inspect.signature(connect).parameters  # since websockets 15, which then asks the environment


class Body(Protocol):
    """What is sent: a file, say."""

    def read(self, size: int = -1, /) -> bytes: ...


class Answer:
    """What came over a route, to be read once."""

    def __init__(self, response: Any, route: Route) -> None:
        self._response, self._route = response, route
        self.status: int = response.status
        length = response.headers.get("content-length")
        self.num_bytes: int | None = None if length is None else int(length)

    def read(self, size: int | None = None) -> bytes:
        """The next bytes, up to `size`; empty at the end. Raises OSError where the connection breaks."""
        try:
            data: bytes = self._response.read(size)
        except (OSError, HTTPException) as error:
            raise self._route._broken(error) from error
        return data


@dataclass(frozen=True)
class Route:
    """To one server. `proxy`: its URL; None is directly. `said_by`: who named it. `ca_file`: PEM; None: the system's
    authorities, or those that the variable SSL_CERT_FILE names."""

    address: ServerAddress
    proxy: str | None = None
    said_by: str = ""
    ca_file: str | None = None

    @classmethod
    def to(cls, address: ServerAddress, proxy: str | None = AUTO, ca_file: str | None = None) -> Route:
        """`proxy`: see the module. Raises ValueError for what is no proxy's URL, or no file of certificates."""
        route = cls._by(address, proxy)
        if ca_file is not None:
            route = replace(route, ca_file=ca_file)
            route._trust()
        return route

    @classmethod
    def _by(cls, address: ServerAddress, proxy: str | None) -> Route:
        if proxy == AUTO:
            named = None if address.is_this_machine else _of_environment(address)
            return cls(address) if named is None else cls(address, *_checked(named[1], named[0]))
        if proxy is None:
            return cls(address)
        if not isinstance(proxy, str):
            raise ValueError(f"proxy: expected None, 'auto' or a URL, got {type(proxy).__name__}")
        return cls(address, *_checked(proxy, "proxy"))

    def __str__(self) -> str:
        """What an error adds to a websocket's address: empty without a proxy."""
        if self._is_beyond_websockets:
            return f" directly, since websockets {websockets_version} cannot use {self._named}"
        return self._way

    @property
    def advice(self) -> str:
        """What to try where this route fails, behind a semicolon; may be empty."""
        if self.proxy is None:
            return (
                "; without --tls-cert worldkv speaks no TLS: is it ws:// that you mean?" if self.address.secure else ""
            )
        if self.said_by == "proxy":
            return "; check the proxy, or go without"
        if self._is_beyond_websockets:
            return "; to take the proxy, install websockets 15 or newer"
        return f"; to go without the proxy, give proxy=None (--proxy none) or set no_proxy={self.address.host}"

    def websocket(self, page: str = "", **options: Any) -> ClientConnection:
        """Open. `options`: of websockets. Raises what websockets raises; ImportError where a package is missing."""
        if _TAKES_PROXY:
            options["proxy"] = self.proxy
        elif self.said_by == "proxy":
            raise ImportError(f"websockets 15 or newer is needed to go{self._way}")
        if self.address.secure:
            options["ssl"] = self._trust()
        try:
            opened: ClientConnection = connect(self.address.websocket(page), **options)
        except ImportError as error:  # python-socks
            raise ImportError(f"{error}; it is needed to go{self._way}") from error
        except OSError:  # of which some, wrong certificates for one, are ValueErrors as well
            raise
        except (EOFError, ValueError, LookupError) as error:  # websockets 13 and 14, where what answers speaks no HTTP
            raise InvalidHandshake(str(error)) from error
        return opened

    def http(
        self, page: str, *, api_key: str | None = None, method: str = "GET", timeout: float = 10.0
    ) -> tuple[int, bytes]:
        """(status, body), whatever the status. Raises OSError where nothing answers."""
        with self.exchange(page, api_key=api_key, method=method, timeout=timeout) as answer:
            return answer.status, answer.read()

    @contextmanager
    def exchange(
        self,
        page: str,
        *,
        api_key: str | None = None,
        method: str = "GET",
        body: Body | None = None,
        num_bytes: int = 0,
        timeout: float = 10.0,
    ) -> Iterator[Answer]:
        """The answer, whatever its status, to be read piece by piece. `body`: of `num_bytes`, read as it is sent.
        `timeout`: in seconds, of each wait. Raises OSError where nothing answers, or the connection breaks inside."""
        request = urllib.request.Request(self.address.http(page), data=cast(Any, body), method=method)
        if body is not None:
            request.add_header("Content-Type", "application/octet-stream")
            request.add_header("Content-Length", str(num_bytes))
        if api_key:
            request.add_header("Authorization", f"Api-Key {api_key}")
        if self.proxy is not None:
            self._set_proxy(request, self.proxy)
        handlers = [urllib.request.HTTPSHandler(context=self._trust())] if self.address.secure else []
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), *handlers)
        try:
            answer = opener.open(request, timeout=timeout)
        except urllib.error.HTTPError as error:
            answer = error
        except (OSError, HTTPException) as error:
            raise self._broken(error) from error
        with answer:
            yield Answer(answer, self)

    def _broken(self, error: Exception) -> OSError:
        reason = getattr(error, "reason", None) or error or type(error).__name__
        return OSError(f"{reason}{self._way}{self.advice}")

    def _trust(self) -> ssl.SSLContext:
        try:
            return ssl.create_default_context(cafile=self.ca_file)
        except OSError as error:  # an SSLError is one
            raise ValueError(f"ca_file: expected a PEM file of certificates, got {self.ca_file}: {error}") from error

    @property
    def _way(self) -> str:
        return "" if self.proxy is None else f" through {self._named}"

    @property
    def _named(self) -> str:
        return "" if self.proxy is None else f"the proxy {_shown(self.proxy)} (named by {self.said_by})"

    @property
    def _is_beyond_websockets(self) -> bool:
        """An old websockets goes directly, as it always did, whatever the environment names."""
        return self.proxy is not None and self.said_by != "proxy" and not _TAKES_PROXY

    def _set_proxy(self, request: urllib.request.Request, proxy: str) -> None:
        parts = urlsplit(proxy)
        if parts.scheme not in ("http", "https"):
            raise OSError(f"only websockets can go{self._way}: HTTP needs an HTTP proxy{self.advice}")
        if parts.username is not None:
            user = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            request.add_header("Proxy-Authorization", f"Basic {base64.b64encode(user.encode()).decode()}")
        request.set_proxy(parts.netloc.rpartition("@")[2], parts.scheme)


def _of_environment(address: ServerAddress) -> tuple[str, str] | None:
    """(variable, value) of the proxy for this address; None: there is none."""
    if urllib.request.proxy_bypass(address.location):
        return None
    proxies = urllib.request.getproxies()
    # As websockets chooses: a proxy for https lets any connection through, one for http perhaps not.
    kinds = ("wss", "socks", "https", "all") if address.secure else ("ws", "socks", "https", "http", "all")
    return next(((f"{kind}_proxy", proxies[kind]) for kind in kinds if proxies.get(kind)), None)


def _checked(proxy: str, said_by: str) -> tuple[str, str]:
    """`proxy` with a scheme. Raises ValueError."""
    url = proxy.strip()
    if "://" not in url:
        url = f"http://{url}"
    if said_by == "socks_proxy" or url.startswith("socks://"):  # as desktops write it
        url = f"socks5h://{url.partition('://')[2]}"
    try:
        parts = urlsplit(url)
        is_proxy = parts.scheme in _SCHEMES and bool(parts.hostname) and parts.port != 0 and parts.path in ("", "/")
    except ValueError:
        is_proxy = False
    if not is_proxy:
        raise ValueError(f"{said_by}: expected a proxy such as http://proxy:3128, got {_shown(url)!r}")
    return url, said_by


def _shown(proxy: str) -> str:
    """Without its password."""
    scheme, separator, rest = proxy.partition("://")
    return f"{scheme}{separator}{'***@' if '@' in rest else ''}{rest.rpartition('@')[2]}"
