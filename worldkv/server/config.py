"""What a server can be told. Knows no defaults of the engine or the model."""

from __future__ import annotations

import hmac
import math
from dataclasses import dataclass
from pathlib import Path

from worldkv.errors import Unauthorised
from worldkv.server.hosts import checked_host, checked_origin, host_of, is_loopback, is_own_page, origin_of
from worldkv.wire import DEFAULT_MAX_BYTES

_COUNTS = ("max_connections", "max_sessions", "max_snapshots", "max_requests", "max_sockets_per_address", "max_sockets")


@dataclass(frozen=True)
class Beside:
    """Another server on the same host. `serves`: in a word."""

    serves: str
    port: int


@dataclass(frozen=True)
class ServerConfig:
    """Raises ValueError, naming the field, for a value that makes no sense or is not safe.

    `host`, `port`: where to listen; port 0 takes a free one. Beyond loopback an `api_key` is required.
    `api_key`: one key, or several separated by commas. With several, a session belongs to the key that opened it.
    `max_connections`, `max_sessions`, `max_snapshots`: how many of these one key may have at once; without keys, all
    clients together.
    `max_requests`: how many HTTP requests of one key may be served at once, those who watch a stream included.
    `max_sockets_per_address`, `max_sockets`: how many sockets may be open from one address (of IPv6: one /64), and in
    all; None: as many as the process may open files, less some for itself.
    `silent_s`: how long a client may take for its TLS handshake, for a whole HTTP request, and to read an answer.
    `allowed_hosts`: names under which the server may be asked, beside loopback's and `host`. Without a key there are
    no others; with one, any will do where none is given here.
    `allowed_origins`: pages, such as https://robots.example.org, that may use a server without a key beside its own.
    `tls_cert`, `tls_key`: PEM files; with them the server speaks https:// and wss:// only.
    `health_port`: `/healthz` and `/metrics` there as well, in plain HTTP, from a process of their own; None: not.
    `max_message_bytes`: a longer request is refused with close code 4013.
    `session_grace_s`: how long a session lives that all its sockets have left, by closing or for another id.
    `session_idle_s`: how long any session lives without a request, and a snapshot that nobody asks for.
    `episode_gap_s`: a session that was silent for longer starts a new history; None: it does not.
    `max_video_bytes`: of what was shown of a session, kept on disk for who downloads it; 0: nothing is kept.
    `beside`: servers in the same process, which its page leads to.
    `max_import_bytes`: of one session that is imported; one is read at a time; 0: none is taken.
    `request_timeout_s`: how long a request may take, waiting for warm-up included.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    max_message_bytes: int = DEFAULT_MAX_BYTES
    session_grace_s: float = 60.0
    session_idle_s: float = 1800.0
    episode_gap_s: float | None = None
    request_timeout_s: float = 600.0
    max_connections: int = 256
    max_sessions: int = 256
    max_snapshots: int = 256
    max_requests: int = 256
    max_video_bytes: int = 128 * 1024 * 1024
    max_import_bytes: int = 10**9
    max_sockets_per_address: int = 512
    max_sockets: int | None = None
    silent_s: float = 10.0
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    tls_cert: Path | None = None
    tls_key: Path | None = None
    health_port: int | None = None
    beside: tuple[Beside, ...] = ()

    def __post_init__(self) -> None:
        if not self.host:
            raise ValueError("host: expected a name or an address such as 127.0.0.1, got ''")
        for name, port in (("port", self.port), ("health_port", self.health_port)):
            if port is not None and not 0 <= port <= 65535:
                raise ValueError(f"{name}: expected 0 (any free port) to 65535, got {port}")
        if self.health_port and self.health_port == self.port:
            raise ValueError(f"health_port: expected another port than `port`, got {self.port} for both")
        keys = [] if self.api_key is None else [key.strip() for key in self.api_key.split(",")]
        if not all(key and key.isascii() and key.isprintable() for key in keys):
            raise ValueError("api_key: expected printable ASCII characters, commas between keys, or None for no key")
        if self.api_key is None and not is_loopback(self.host):
            raise ValueError(
                f"host: {self.host} can be reached from other machines; set api_key, or listen on 127.0.0.1"
            )
        if self.max_message_bytes < 1024:
            raise ValueError(f"max_message_bytes: expected at least 1024, got {self.max_message_bytes}")
        for name in ("max_video_bytes", "max_import_bytes"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: expected bytes >= 0, got {getattr(self, name)}")
        if not (math.isfinite(self.session_grace_s) and self.session_grace_s >= 0):
            raise ValueError(f"session_grace_s: expected seconds >= 0, got {self.session_grace_s}")
        for name in _COUNTS:
            count = getattr(self, name)
            if count is not None and count < 1:
                raise ValueError(f"{name}: expected at least 1, got {count}")
        self._check_names()
        for name in ("session_idle_s", "episode_gap_s", "request_timeout_s", "silent_s"):
            seconds = getattr(self, name)
            if seconds is not None and not (math.isfinite(seconds) and seconds > 0):
                raise ValueError(f"{name}: expected seconds > 0, got {seconds}")

    def owner_of(self, authorization: str | None) -> str:
        """Whose the bearer of this `Authorization` header is: a name that reveals no key. Raises Unauthorised."""
        if self.api_key is None:
            return ""
        keys = [key.strip() for key in self.api_key.split(",")]
        came = (authorization or "").encode()
        matches = [hmac.compare_digest(came, f"Api-Key {key}".encode()) for key in keys]  # all, in constant time
        if not any(matches):
            hint = "another one came" if authorization else "none came"
            raise Unauthorised(f"expected the header `Authorization: Api-Key <key>` with a key of this server; {hint}")
        return f"key{matches.index(True) + 1}" if len(keys) > 1 else ""

    def refusal_of_host(self, header: str | None) -> str | None:
        """Why a request with this `Host` is not answered; None: it is. No browser sends none."""
        if header is None or (self.api_key is not None and not self.allowed_hosts):
            return None
        name = host_of(header)
        if name is not None and (is_loopback(name) or name in (self.host.lower(), *self.allowed_hosts)):
            return None
        known = ", ".join(dict.fromkeys(("127.0.0.1", "localhost", self.host, *self.allowed_hosts)))
        meant = name or "NAME"
        return (
            f"host: this server answers under {known}, got {header[:100]!r}; if that name is meant, start the server "
            f"with --allowed-host {meant} (ServerConfig.allowed_hosts)"
        )

    def refusal_of_origin(self, origin: str | None, host: str) -> str | None:
        """Why a page of this `Origin`, which shows no key, is not answered under `host`; None: it is."""
        if origin is None or is_own_page(origin, host) or origin_of(origin) in self.allowed_origins:
            return None
        return (
            f"origin: expected a page of this server, got {origin[:100]!r}; if that page is meant, start the server "
            f"with --allowed-origin {origin_of(origin) or 'ORIGIN'} (ServerConfig.allowed_origins), or with a key, "
            "which the page then sends"
        )

    def _check_names(self) -> None:
        for name, check in (("allowed_hosts", checked_host), ("allowed_origins", checked_origin)):
            given = getattr(self, name)
            if isinstance(given, str):
                raise ValueError(f"{name}: expected several, in a tuple, got one text, {given!r}")
            object.__setattr__(self, name, tuple(check(each) for each in given))
        if (self.tls_cert is None) != (self.tls_key is None):
            given, missing = ("tls_cert", "tls_key") if self.tls_key is None else ("tls_key", "tls_cert")
            raise ValueError(f"{missing}: expected a file, since {given} was given, got none")
