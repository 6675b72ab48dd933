"""What a server can be told. Knows no defaults of the engine or the model."""

from __future__ import annotations

import ipaddress
import math
from dataclasses import dataclass

from worldkv.wire import DEFAULT_MAX_BYTES


@dataclass(frozen=True)
class ServerConfig:
    """Raises ValueError, naming the field, for a value that makes no sense or is not safe.

    `host`, `port`: where to listen; port 0 takes a free one. Beyond loopback an `api_key` is required.
    `max_message_bytes`: a longer request is refused with close code 4013.
    `session_grace_s`: how long a session with an id outlives its last socket.
    `session_idle_s`: how long any session lives without a request.
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

    def __post_init__(self) -> None:
        if not self.host:
            raise ValueError("host: expected a name or an address such as 127.0.0.1, got ''")
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port: expected 0 (any free port) to 65535, got {self.port}")
        if self.api_key is not None and not (self.api_key and self.api_key.isascii() and self.api_key.isprintable()):
            raise ValueError("api_key: expected printable ASCII characters, or None for no key")
        if self.api_key is None and not _is_loopback(self.host):
            raise ValueError(
                f"host: {self.host} can be reached from other machines; set api_key, or listen on 127.0.0.1"
            )
        if self.max_message_bytes < 1024:
            raise ValueError(f"max_message_bytes: expected at least 1024, got {self.max_message_bytes}")
        if not (math.isfinite(self.session_grace_s) and self.session_grace_s >= 0):
            raise ValueError(f"session_grace_s: expected seconds >= 0, got {self.session_grace_s}")
        for name in ("session_idle_s", "episode_gap_s", "request_timeout_s"):
            seconds = getattr(self, name)
            if seconds is not None and not (math.isfinite(seconds) and seconds > 0):
                raise ValueError(f"{name}: expected seconds > 0, got {seconds}")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
