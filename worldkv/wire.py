"""The wire between robots and the policy server, as the client's distribution has it."""

from __future__ import annotations

from worldkv_client.wire import (
    DEFAULT_MAX_BYTES,
    MAX_SESSION_ID_CHARACTERS,
    RESET_REPLY,
    CloseCode,
    Dialect,
    InferRequest,
    ResetRequest,
    close_code,
    error_text,
    infer_reply,
    normalise_session_id,
    pack,
    parse_request,
    public_error,
    unpack,
)

__all__ = [
    "DEFAULT_MAX_BYTES",
    "MAX_SESSION_ID_CHARACTERS",
    "RESET_REPLY",
    "CloseCode",
    "Dialect",
    "InferRequest",
    "ResetRequest",
    "close_code",
    "error_text",
    "infer_reply",
    "normalise_session_id",
    "pack",
    "parse_request",
    "public_error",
    "unpack",
]
