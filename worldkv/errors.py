"""Every error worldkv raises on purpose. They are the client's: a robot that reads an error has no server installed."""

from __future__ import annotations

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

__all__ = [
    "AdmissionRefused",
    "BadRequest",
    "CheckpointError",
    "ConditioningMissing",
    "ConnectionLost",
    "EngineStopped",
    "MessageTooLarge",
    "ModelError",
    "OutOfBlocks",
    "RemoteError",
    "RequestTimedOut",
    "SessionBusy",
    "SessionEnded",
    "SessionNotFound",
    "SnapshotNotFound",
    "Unauthorised",
    "WorldKVError",
]
