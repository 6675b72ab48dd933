"""What a server can be told. Knows no defaults of the engine or the model."""

from __future__ import annotations

import hmac
import ipaddress
import math
from dataclasses import dataclass

from worldkv.errors import Unauthorised
from worldkv.wire import DEFAULT_MAX_BYTES


@dataclass(frozen=True)
class ServerConfig:
    """Raises ValueError, naming the field, for a value that makes no sense or is not safe.

    `host`, `port`: where to listen; port 0 takes a free one. Beyond loopback an `api_key` is required.
    `api_key`: one key, or several separated by commas. With several, a session belongs to the key that opened it.
    `max_connections`, `max_sessions`, `max_snapshots`: how many of these one key may have at once; without keys, all
    clients together.
    `max_message_bytes`: a longer request is refused with close code 4013.
    `session_grace_s`: how long a session lives that all its sockets have left, by closing or for another id.
    `session_idle_s`: how long any session lives without a request, and a snapshot that nobody asks for.
    `episode_gap_s`: a session that was silent for longer starts a new history; None: it does not.
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

    def __post_init__(self) -> None:
        if not self.host:
            raise ValueError("host: expected a name or an address such as 127.0.0.1, got ''")
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port: expected 0 (any free port) to 65535, got {self.port}")
        keys = [] if self.api_key is None else [key.strip() for key in self.api_key.split(",")]
        if not all(key and key.isascii() and key.isprintable() for key in keys):
            raise ValueError("api_key: expected printable ASCII characters, commas between keys, or None for no key")
        if self.api_key is None and not _is_loopback(self.host):
            raise ValueError(
                f"host: {self.host} can be reached from other machines; set api_key, or listen on 127.0.0.1"
            )
        if self.max_message_bytes < 1024:
            raise ValueError(f"max_message_bytes: expected at least 1024, got {self.max_message_bytes}")
        if not (math.isfinite(self.session_grace_s) and self.session_grace_s >= 0):
            raise ValueError(f"session_grace_s: expected seconds >= 0, got {self.session_grace_s}")
        for name in ("max_connections", "max_sessions", "max_snapshots"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")
        for name in ("session_idle_s", "episode_gap_s", "request_timeout_s"):
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


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
