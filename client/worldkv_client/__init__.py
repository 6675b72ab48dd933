"""The robot's side of worldkv: `PolicyClient`, `ActionBroker`, `ServerAddress`, and every error.

Nothing is loaded before it is used. Needs Python 3.9, numpy, msgpack and websockets. Knows no server, no model and no
torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from worldkv_client.address import ServerAddress
    from worldkv_client.broker import ActionBroker, Client, frame_offsets
    from worldkv_client.client import PolicyClient
    from worldkv_client.errors import (
        AdmissionRefused,
        BadRequest,
        CheckpointError,
        ConditioningMissing,
        ConnectionLost,
        EngineStopped,
        MessageTooLarge,
        ModelError,
        OutOfBlocks,
        RemoteError,
        RequestTimedOut,
        SessionBusy,
        SessionEnded,
        SessionNotFound,
        SnapshotNotFound,
        Unauthorised,
        WorldKVError,
    )

__version__ = "0.1.0"
__all__ = [
    "ActionBroker",
    "AdmissionRefused",
    "BadRequest",
    "CheckpointError",
    "Client",
    "ConditioningMissing",
    "ConnectionLost",
    "EngineStopped",
    "MessageTooLarge",
    "ModelError",
    "OutOfBlocks",
    "PolicyClient",
    "RemoteError",
    "RequestTimedOut",
    "ServerAddress",
    "SessionBusy",
    "SessionEnded",
    "SessionNotFound",
    "SnapshotNotFound",
    "Unauthorised",
    "WorldKVError",
    "frame_offsets",
]

_MODULES = {
    "ActionBroker": "broker",
    "Client": "broker",
    "PolicyClient": "client",
    "ServerAddress": "address",
    "frame_offsets": "broker",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES.get(name, 'errors')}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
