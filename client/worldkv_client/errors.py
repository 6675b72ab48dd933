"""Every error worldkv raises on purpose. A user's mistake is a ValueError too, so plain `except ValueError` works."""

from __future__ import annotations


class WorldKVError(Exception):
    """Base of all errors of this package. `code` is a stable, machine-readable reason."""

    code = "internal"


class BadRequest(WorldKVError, ValueError):
    """The caller sent something that cannot be served; the message names the field, what was expected, what came."""

    code = "bad_request"


class MessageTooLarge(BadRequest):
    """One message on the wire is over the receiver's limit; says both sizes."""

    code = "message_too_large"


class Unauthorised(WorldKVError, PermissionError):
    """The server wants an API key, and none or another one came."""

    code = "unauthorised"


class RequestTimedOut(WorldKVError, TimeoutError):
    """The server gave up waiting for an answer; the tick may still be running."""

    code = "request_timed_out"


class ModelError(WorldKVError, RuntimeError):
    """A model broke its contract with the engine: says what was expected and what came; only its own tick failed."""

    code = "model_error"


class CheckpointError(WorldKVError, ValueError):
    """A checkpoint folder that is missing, incomplete or contradicts itself; the message lists everything wrong."""

    code = "bad_checkpoint"


class ConditioningMissing(WorldKVError, RuntimeError):
    """Conditioning K/V was read before it was published; names the branch and the missing kind."""

    code = "conditioning_missing"


class OutOfBlocks(WorldKVError, RuntimeError):
    """The pool has no room now for what a forward or a projection needs. Nothing was changed."""

    code = "out_of_blocks"


class AdmissionRefused(WorldKVError, RuntimeError):
    """Opening the session would exceed what the pool holds. Says what is needed, what is free, what would help."""

    code = "admission_refused"

    def __init__(self, message: str, retry_after_ms: int | None = None) -> None:
        super().__init__(message)
        self.retry_after_ms = retry_after_ms


class SessionNotFound(WorldKVError, LookupError):
    """No such session: never opened, closed or expired. Never a silent fresh start."""

    code = "session_not_found"


class SnapshotNotFound(WorldKVError, LookupError):
    """No such snapshot: never taken, or released."""

    code = "snapshot_not_found"


class SessionBusy(WorldKVError, RuntimeError):
    """The session already has a tick in flight."""

    code = "session_busy"


class SessionEnded(WorldKVError, RuntimeError):
    """The session was reset or closed while this tick was waiting or running."""

    code = "session_ended"


class EngineStopped(WorldKVError, RuntimeError):
    """The engine is shut down or stuck and takes no work."""

    code = "engine_stopped"


class ConnectionLost(WorldKVError, ConnectionError):
    """The connection to the server went away or timed out; the socket is closed and the reply, if any, is dropped."""

    code = "connection_lost"


class RemoteError(WorldKVError, RuntimeError):
    """The server answered a request with an error; `close_code` is its websocket close code, if it sent one."""

    code = "remote_error"

    def __init__(self, message: str, close_code: int | None = None) -> None:
        super().__init__(message)
        self.close_code = close_code
