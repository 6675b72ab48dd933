"""How an error reaches a client: as a websocket close code, and as a text that tells nothing of the server's inside."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum

from worldkv_client.errors import WorldKVError

_MAX_ERROR_CHARACTERS = 2000


class CloseCode(IntEnum):
    """Why the server closes a websocket."""

    GOING_AWAY = 1001
    INTERNAL = 1011
    BAD_REQUEST = 4001
    SESSION_NOT_FOUND = 4008
    SESSION_BUSY = 4009
    MESSAGE_TOO_LARGE = 4013
    ADMISSION_REFUSED = 4029
    UNAUTHORISED = 4401
    REQUEST_TIMED_OUT = 4504


_CLOSE_CODES: Mapping[str, CloseCode] = {
    "bad_request": CloseCode.BAD_REQUEST,
    "session_not_found": CloseCode.SESSION_NOT_FOUND,
    "snapshot_not_found": CloseCode.SESSION_NOT_FOUND,
    "session_ended": CloseCode.SESSION_NOT_FOUND,
    "session_busy": CloseCode.SESSION_BUSY,
    "message_too_large": CloseCode.MESSAGE_TOO_LARGE,
    "admission_refused": CloseCode.ADMISSION_REFUSED,
    "unauthorised": CloseCode.UNAUTHORISED,
    "request_timed_out": CloseCode.REQUEST_TIMED_OUT,
}


def close_code(error_code: str) -> CloseCode:
    """The websocket close code for a `WorldKVError.code`; INTERNAL for one that is no client's fault."""
    return _CLOSE_CODES.get(error_code, CloseCode.INTERNAL)


def public_error(error: Exception) -> tuple[str, str]:
    """(code, message) as a client may read them: what went wrong, never how."""
    if not isinstance(error, WorldKVError):
        return WorldKVError.code, "the server failed on this request"
    return error.code, str(error)[:_MAX_ERROR_CHARACTERS]


def error_text(error: Exception, error_id: str) -> str:
    """The text frame for a failed request; `error_id` finds its traceback in the log."""
    code, message = public_error(error)
    retry_after_ms = getattr(error, "retry_after_ms", None)
    retry = f" (retry_after_ms={retry_after_ms})" if retry_after_ms is not None else ""
    return f"{code}: {message}{retry} [error {error_id}]"
