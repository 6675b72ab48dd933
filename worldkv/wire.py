"""The wire between robots and the policy server: framing, the two dialects, close codes. Pure functions.

Framing: msgpack, byte for byte openpi's. An array is a map with the byte keys `__ndarray__` (true), `data`
(C order), `dtype` (numpy's `.str`), `shape`; a numpy scalar one with `__npgeneric__`, `data`, `dtype`.
`unpack` bounds what a message may cost, and the only error it raises is BadRequest.

Dialects, told apart by the key `endpoint`, which only RoboArena's requests have:

| | openpi | RoboArena |
|---|---|---|
| session | the connection | `session_id`; without one, the connection |
| exterior cameras | one: `observation/exterior_image_1_left` | two: `.._image_0_left`, `.._image_1_left` |
| reply | map: `actions`, `server_timing` | bare array, float32 [horizon, 8] |
| reset | the key `reset: true` in a request | the same, or `endpoint: reset`, answered by a text |

Ours on top, all optional: `sequence` (an int; comes back in a reply that is a map), `reset` (a bool: forget
the history first), `resume` (a bool: an error instead of a new session, should the named one be gone).

Does not know sockets or sessions, nor what a valid observation is: that is the policy's.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Any

import msgpack
import numpy as np

from worldkv.errors import BadRequest, MessageTooLarge, WorldKVError

DEFAULT_MAX_BYTES = 64 * 1024 * 1024
RESET_REPLY = "reset successful"
MAX_SESSION_ID_CHARACTERS = 256
_MAX_ERROR_CHARACTERS = 2000

_MAX_DEPTH = 16
_TOO_DEEP = f"message: expected at most {_MAX_DEPTH} levels of lists and maps, got more"
_MAX_LIST = 4096  # per list: msgpack allocates what a header announces, before it sees the items
_MAX_MAP = 1024
_MAX_VALUES = 65536  # in all lists and maps of a message; arrays count as one value each
_DTYPE = re.compile(r"[<>|=]?(?:b1|[iu][1248]|f(?:2|4|8|16)|[SU][1-9]\d{0,8}|[mM]8(?:\[\w{1,16}\])?)")
_REFUSED_KINDS = "VOc"
_VALUE_TYPES: Mapping[str, tuple[type, ...]] = {
    "b": (bool,),
    "i": (int,),
    "u": (int,),
    "f": (float, int),
    "S": (bytes,),
    "U": (str,),
    "m": (int,),
    "M": (int,),
}


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


_CLOSE_CODES: Mapping[str, CloseCode] = {
    "bad_request": CloseCode.BAD_REQUEST,
    "session_not_found": CloseCode.SESSION_NOT_FOUND,
    "snapshot_not_found": CloseCode.SESSION_NOT_FOUND,
    "session_ended": CloseCode.SESSION_NOT_FOUND,
    "session_busy": CloseCode.SESSION_BUSY,
    "message_too_large": CloseCode.MESSAGE_TOO_LARGE,
    "admission_refused": CloseCode.ADMISSION_REFUSED,
    "unauthorised": CloseCode.UNAUTHORISED,
}


def close_code(error_code: str) -> CloseCode:
    """The websocket close code for a `WorldKVError.code`; INTERNAL for one that is no client's fault."""
    return _CLOSE_CODES.get(error_code, CloseCode.INTERNAL)


# --- framing ---


def pack(obj: Any) -> bytes:
    """`obj` (None, bool, int, float, str, bytes, list, dict, numpy arrays and scalars) as msgpack.

    Raises BadRequest, which names the field, for what cannot be sent.
    """
    try:
        packed: bytes = msgpack.packb(obj, default=_encode)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise BadRequest(f"{_unpackable_field(obj)}cannot be sent: {error}") from None
    return packed


def unpack(data: Any, *, max_bytes: int) -> Any:
    """What `pack` made `data` from; arrays are read-only views. Raises BadRequest, MessageTooLarge."""
    if not isinstance(data, bytes | bytearray | memoryview):
        raise BadRequest(f"message: expected a binary frame of msgpack, got {type(data).__name__}")
    if len(data) > max_bytes:
        raise MessageTooLarge(
            f"message: expected at most {max_bytes} bytes, got {len(data)}; send fewer or smaller frames"
        )
    budget = _Budget()
    try:
        obj = msgpack.unpackb(
            data,
            object_hook=budget.map,
            list_hook=budget.list,
            max_array_len=_MAX_LIST,
            max_map_len=_MAX_MAP,
        )
    except BadRequest:
        raise
    except msgpack.StackError:
        raise BadRequest(_TOO_DEEP) from None
    except (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException) as error:
        detail = str(error) or type(error).__name__
        raise BadRequest(f"message: expected one msgpack value, got {len(data)} bytes: {detail}") from None
    _check_depth(obj)
    return obj


def _encode(obj: Any) -> Any:
    """msgpack's hook for what it does not know."""
    if isinstance(obj, np.ndarray | np.generic) and obj.dtype.kind in _REFUSED_KINDS:
        raise ValueError(f"arrays of dtype {obj.dtype} are not part of the format")
    if isinstance(obj, np.ndarray):
        return {b"__ndarray__": True, b"data": obj.tobytes(), b"dtype": obj.dtype.str, b"shape": obj.shape}
    if isinstance(obj, np.generic):
        return {b"__npgeneric__": True, b"data": obj.item(), b"dtype": obj.dtype.str}
    raise TypeError(f"{type(obj).__module__}.{type(obj).__qualname__} is not part of the format")


def _unpackable_field(obj: Any) -> str:
    """The first field of a map that cannot be packed, as the head of a message."""
    for key, value in obj.items() if isinstance(obj, Mapping) else ():
        try:
            msgpack.packb({key: value}, default=_encode)
        except (ValueError, TypeError, OverflowError, RecursionError):
            return f"{key}: "
    return "message: "


class _Budget:
    """msgpack's hooks for one message: builds arrays, and counts the values of lists and maps."""

    def __init__(self) -> None:
        self._left = _MAX_VALUES

    def list(self, items: list[Any]) -> list[Any]:
        self._spend(len(items))
        return items

    def map(self, items: dict[Any, Any]) -> Any:
        self._spend(1 + len(items))
        for marker, decode in (("__ndarray__", _decode_array), ("__npgeneric__", _decode_scalar)):
            if items.get(marker.encode(), items.get(marker)) is True:
                fields = [items.get(name.encode(), items.get(name)) for name in ("data", "dtype", "shape")]
                return decode(*fields)
        return items

    def _spend(self, num_values: int) -> None:
        self._left -= num_values
        if self._left < 0:
            raise BadRequest(f"message: more than {_MAX_VALUES} values in lists and maps; send numbers as arrays")


def _decode_array(data: Any, dtype_text: Any, shape: Any) -> np.ndarray:
    dtype = _decode_dtype(dtype_text)
    if not isinstance(data, bytes):
        raise BadRequest(f"array: expected bytes as its data, got {type(data).__name__}")
    if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
        raise BadRequest(f"array: expected a list of sizes as its shape, got {_short(shape)}")
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes != len(data):
        raise BadRequest(f"array: {dtype} {_short(shape)} takes {_short(num_bytes)} bytes, got {len(data)}")
    try:
        array: np.ndarray = np.ndarray(shape, dtype, buffer=data)
    except (ValueError, TypeError, OverflowError) as error:  # too many axes, or a huge one beside a zero
        raise BadRequest(f"array: {dtype} {_short(shape)}: {error}") from None
    if dtype.kind == "U" and array.size and array.reshape(-1).view(f"{dtype.str[0]}u4").max() > 0x10FFFF:
        raise BadRequest("array: a text array holds something that is no character")
    return array


def _decode_scalar(data: Any, dtype_text: Any, _shape: Any) -> np.generic:
    dtype = _decode_dtype(dtype_text)
    if type(data) not in _VALUE_TYPES[dtype.kind]:
        raise BadRequest(f"numpy scalar: expected a value for {dtype}, got {type(data).__name__}")
    try:
        with np.errstate(over="ignore"):  # a float that becomes inf here is the receiver's to refuse
            scalar: Any = np.array(data, dtype)[()] if dtype.kind in "mM" else dtype.type(data)
    except (ValueError, TypeError, OverflowError) as error:
        raise BadRequest(f"numpy scalar: expected a value for {dtype}: {error}") from None
    assert isinstance(scalar, np.generic)
    return scalar


def _decode_dtype(text: Any) -> np.dtype[Any]:
    if isinstance(text, str) and _DTYPE.fullmatch(text):
        try:
            return np.dtype(text)
        except (ValueError, TypeError):  # a unit of time or a size that numpy does not have
            pass
    raise BadRequest(
        f"array: expected a dtype such as '|u1' or '<f4' (kinds b, i, u, f, S, U, m, M), got {_short(text)}"
    )


def _check_depth(obj: Any) -> None:
    level = [obj]  # the lists and maps of one depth
    for _ in range(_MAX_DEPTH + 1):
        level = [value for value in level if isinstance(value, dict | list)]
        if not level:
            return
        level = [child for value in level for child in (value.values() if isinstance(value, dict) else value)]
    raise BadRequest(_TOO_DEEP)


def _short(value: Any) -> str:
    """What a client sent, for a message of bounded length."""
    if isinstance(value, np.ndarray):
        return f"an array {value.dtype} {list(value.shape)}"
    if isinstance(value, int) and value.bit_length() > 128:
        return "a number beyond all bounds"
    if isinstance(value, dict) or (isinstance(value, list) and len(value) > 8):
        return f"a {type(value).__name__} of {len(value)}"
    if isinstance(value, str | bytes) and len(value) > 80:
        return f"{value[:80]!r}..."
    return f"[{', '.join(map(_short, value))}]" if isinstance(value, list) else repr(value)[:160]


# --- the dialects ---


class Dialect(StrEnum):
    OPENPI = "openpi"
    ROBOARENA = "roboarena"


@dataclass(frozen=True)
class InferRequest:
    """One tick. `observation`: under RoboArena's names, whatever the dialect. `session_id` None: the
    connection is the session. `restart`: forget the history first. `resume`: the session must exist. `details`:
    reply with a map in either dialect, the imagined video and the cache's state included."""

    dialect: Dialect
    observation: Mapping[str, Any]
    session_id: str | None = None
    sequence: int | None = None
    restart: bool = False
    resume: bool = False
    details: bool = False


@dataclass(frozen=True)
class ResetRequest:
    """Forget a session's history. `session_id` None: the session of the connection's last request."""

    session_id: str | None = None
    dialect: Dialect = Dialect.ROBOARENA


_CONTROL_KEYS = frozenset({"endpoint", "session_id", "sequence", "reset", "resume", "details"})
_EXTERIOR = "observation/exterior_image_"
# openpi's only exterior camera has the name of RoboArena's second one; as the model sees it, it is the first.
_OPENPI_CAMERAS: Mapping[str, str] = {f"{_EXTERIOR}1_left": f"{_EXTERIOR}0_left"}


def parse_request(message: Any) -> InferRequest | ResetRequest:
    """What an unpacked message asks for. Raises BadRequest."""
    if not isinstance(message, dict):
        raise BadRequest(f"message: expected a map, got {type(message).__name__}")
    for key in message:
        if not isinstance(key, str):
            raise BadRequest(f"message: expected field names that are str, got {_short(key)}")
    session_id = message.get("session_id")
    if session_id is not None:
        session_id = normalise_session_id(session_id)
    if "endpoint" not in message:
        return _openpi_request(message, session_id)
    endpoint = message["endpoint"]
    if not isinstance(endpoint, str) or endpoint not in ("infer", "reset"):
        raise BadRequest(f"endpoint: expected 'infer' or 'reset', got {_short(endpoint)}")
    if endpoint == "reset":
        return ResetRequest(session_id)
    return InferRequest(Dialect.ROBOARENA, _observation(message), session_id, **_controls(message))


def _openpi_request(message: dict[str, Any], session_id: str | None) -> InferRequest:
    if session_id is not None:
        raise BadRequest(
            "session_id: without the field `endpoint` this is an openpi request, whose session is the "
            "connection; add `endpoint: infer` or leave session_id out"
        )
    cameras = [key for key in message if key.startswith(_EXTERIOR) and key not in _OPENPI_CAMERAS]
    if cameras:
        raise BadRequest(
            f"{cameras[0]}: without the field `endpoint` this is an openpi request, which has one exterior "
            f"camera, {', '.join(_OPENPI_CAMERAS)}; add `endpoint: infer` to send two"
        )
    observation = {_OPENPI_CAMERAS.get(key, key): value for key, value in _observation(message).items()}
    return InferRequest(Dialect.OPENPI, observation, **_controls(message))


def _observation(message: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in message.items() if key not in _CONTROL_KEYS}


def _controls(message: dict[str, Any]) -> dict[str, Any]:
    sequence = message.get("sequence")
    if sequence is not None and type(sequence) is not int:
        raise BadRequest(f"sequence: expected an int, got {_short(sequence)}")
    flags = {"restart": message.get("reset", False)}
    flags |= {name: message.get(name, False) for name in ("resume", "details")}
    for name, value in flags.items():
        if not isinstance(value, bool | np.bool_):
            raise BadRequest(f"{name.replace('restart', 'reset')}: expected a bool, got {_short(value)}")
    return {"sequence": sequence, **{name: bool(value) for name, value in flags.items()}}


def normalise_session_id(value: Any) -> str:
    """The text of an id that came as str, bytes, int, numpy scalar or array of one. Raises BadRequest."""
    if isinstance(value, np.ndarray | np.generic) and value.size == 1 and value.dtype.kind in "iuSU":
        value = value.item()
    if isinstance(value, bytes):
        try:
            value = value.decode()
        except UnicodeDecodeError:
            raise BadRequest(f"session_id: expected UTF-8, got {_short(value)}") from None
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str):
        raise BadRequest(f"session_id: expected a str, bytes, an int or an array of one of these, got {_short(value)}")
    if not 0 < len(value) <= MAX_SESSION_ID_CHARACTERS or not value.isprintable():
        raise BadRequest(
            f"session_id: expected 1 to {MAX_SESSION_ID_CHARACTERS} printable characters, got {_short(value)}"
        )
    return value


def infer_reply(
    request: InferRequest,
    actions: np.ndarray,
    server_timing: Mapping[str, float],
    warnings: tuple[str, ...] = (),
    details: Mapping[str, Any] | None = None,
) -> Any:
    """What answers `request`, before packing. `actions` float32 [horizon, dim]; timing in milliseconds.

    `details`: what a request with `details` gets beside that.
    """
    if request.dialect is Dialect.ROBOARENA and not request.details:
        return actions
    reply: dict[str, Any] = {"actions": actions, "server_timing": dict(server_timing), **(details or {})}
    if request.sequence is not None:
        reply["sequence"] = request.sequence
    if warnings:
        reply["warnings"] = list(warnings)
    return reply


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
