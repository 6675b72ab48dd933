"""`ActionBroker`, from the client's own distribution `worldkv-client`."""

from __future__ import annotations

from worldkv_client.broker import ActionBroker, Client, frame_offsets

__all__ = ["ActionBroker", "Client", "frame_offsets"]
