"""`PolicyClient`, from the client's own distribution `worldkv-client`."""

from __future__ import annotations

from worldkv_client.client import PolicyClient

__all__ = ["PolicyClient"]
