"""The wire between robots and the policy server: framing, the robots' two dialects, errors as a client reads them."""

from __future__ import annotations

from worldkv_client.wire.errors import CloseCode, close_code, error_text, public_error
from worldkv_client.wire.fields import shown_name
from worldkv_client.wire.framing import DEFAULT_MAX_BYTES, Encoding, pack, unpack, unpack_encoded
from worldkv_client.wire.robots import (
    CONTROL_FIELDS,
    MAX_SESSION_ID_CHARACTERS,
    RESET_REPLY,
    Dialect,
    InferRequest,
    ResetRequest,
    infer_reply,
    normalise_session_id,
    observe_reply,
    parse_request,
    read_request,
    require_no_near_miss,
)

__all__ = [
    "CONTROL_FIELDS",
    "DEFAULT_MAX_BYTES",
    "MAX_SESSION_ID_CHARACTERS",
    "RESET_REPLY",
    "CloseCode",
    "Dialect",
    "Encoding",
    "InferRequest",
    "ResetRequest",
    "close_code",
    "error_text",
    "infer_reply",
    "normalise_session_id",
    "observe_reply",
    "pack",
    "parse_request",
    "public_error",
    "read_request",
    "require_no_near_miss",
    "shown_name",
    "unpack",
    "unpack_encoded",
]
