"""What a server refuses to be told."""

from __future__ import annotations

from typing import Any

import pytest

from worldkv.server.config import ServerConfig


@pytest.mark.parametrize("host", ["127.0.0.1", "127.3.2.1", "::1", "localhost"])
def test_loopback_needs_no_key(host: str) -> None:
    assert ServerConfig(host=host).api_key is None


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.7", "robots.example.org"])
def test_other_hosts_are_refused_without_a_key(host: str) -> None:
    with pytest.raises(ValueError, match=r"can be reached from other machines; set api_key"):
        ServerConfig(host=host)
    assert ServerConfig(host=host, api_key="key").host == host


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("host", ""),
        ("port", -1),
        ("port", 65536),
        ("api_key", ""),
        ("api_key", "line\nbreak"),
        ("api_key", "schlüssel"),
        ("max_message_bytes", 10),
        ("session_grace_s", -1.0),
        ("session_grace_s", float("nan")),
        ("session_idle_s", 0.0),
        ("episode_gap_s", 0.0),
        ("request_timeout_s", float("inf")),
    ],
)
def test_a_value_without_sense_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{field}: expected"):
        ServerConfig(**{field: value})
