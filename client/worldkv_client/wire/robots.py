"""What robots ask for, in either dialect. Pure functions.

The dialects are told apart by the key `endpoint`, which only RoboArena's requests have:

| | openpi | RoboArena |
|---|---|---|
| session | the connection | `session_id`; without one, the connection |
| exterior cameras | one: `observation/exterior_image_1_left` | two: `.._image_0_left`, `.._image_1_left` |
| reply | map: `actions`, `server_timing` | bare array, float32 [horizon, 8] |
| reset | the key `reset: true` in a request | the same, or `endpoint: reset`, answered by a text |
| frames ahead of a request | the key `observe: true` | the same, or `endpoint: observe` |

Ours on top, all optional: `sequence` (an int; comes back in a reply that is a map), `reset` (a bool: forget
the history first), `resume` (a bool: an error instead of a new session, should the named one be gone), `details` (a
bool: a map in either dialect, the imagined video included), `env_id` (like `session_id`: which of the environments
of one session, or socket, this is; each has a history of its own).

A message that observes holds the cameras of a request, a frame or several of each, and its prompt where that is known;
all else in it is not read. It is answered at once by a map in either dialect: `frames_ahead`, how many frames of each
camera now wait for the next request, `warnings`, and `sequence`. The request leaves those frames out and says
`frames_ahead`, so many; it may have more of them. Its reply is that of a request with all of them.

Does not know sockets or sessions, nor what a valid observation is: that is the policy's.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import numpy as np

from worldkv_client.errors import BadRequest
from worldkv_client.wire.fields import near_miss, shown_name
from worldkv_client.wire.framing import Encoding, short, unpack_encoded

RESET_REPLY = "reset successful"
MAX_SESSION_ID_CHARACTERS = 256
_MAX_COMPARED = 16  # unknown fields of a message that are looked at closely


class Dialect(str, Enum):
    """Who speaks; its text is its value, as with StrEnum (Python 3.11)."""

    OPENPI = "openpi"
    ROBOARENA = "roboarena"

    def __str__(self) -> str:
        return str(self.value)


@dataclass(frozen=True)
class InferRequest:
    """One tick. `observation`: under RoboArena's names, whatever the dialect. `session_id` None: the
    connection is the session. `restart`: forget the history first. `resume`: the session must exist. `details`:
    reply with a map in either dialect, the imagined video and the cache's state included. `env_id`: one of the
    environments that share the session; None where there is one. `observes`: no tick, but frames ahead of the next one.
    `encoding`: of its arrays, and of the reply's."""

    dialect: Dialect
    observation: Mapping[str, Any]
    session_id: str | None = None
    sequence: int | None = None
    restart: bool = False
    resume: bool = False
    details: bool = False
    env_id: str | None = None
    observes: bool = False
    encoding: Encoding = Encoding.OPENPI

    @property
    def prompt(self) -> Any:
        """As it was sent, unchecked; None where it was not."""
        return self.observation.get("prompt")


@dataclass(frozen=True)
class ResetRequest:
    """Forget a session's history. `session_id` None: the session of the connection's last request. `env_id`: one of
    its environments; None: all of them, and its own. `unread`: fields that nothing reads."""

    session_id: str | None = None
    dialect: Dialect = Dialect.ROBOARENA
    env_id: str | None = None
    unread: tuple[str, ...] = ()


CONTROL_FIELDS = frozenset({"endpoint", "session_id", "env_id", "sequence", "reset", "resume", "details", "observe"})
_ENDPOINTS = ("infer", "observe", "reset")
_EXTERIOR = "observation/exterior_image_"
# openpi's only exterior camera has the name of RoboArena's second one; as the model sees it, it is the first.
_OPENPI_CAMERAS: Mapping[str, str] = {f"{_EXTERIOR}1_left": f"{_EXTERIOR}0_left"}


def read_request(data: Any, *, max_bytes: int) -> InferRequest | ResetRequest:
    """What a message asks for, packed in either encoding. Raises BadRequest, MessageTooLarge."""
    message, encoding = unpack_encoded(data, max_bytes=max_bytes)
    request = parse_request(message)
    return replace(request, encoding=encoding) if isinstance(request, InferRequest) else request


def parse_request(message: Any) -> InferRequest | ResetRequest:
    """What an unpacked message asks for. Raises BadRequest."""
    if not isinstance(message, dict):
        raise BadRequest(f"message: expected a map, got {type(message).__name__}")
    for key in message:
        if not isinstance(key, str):
            raise BadRequest(f"message: expected field names that are str, got {short(key)}")
    session_id = message.get("session_id")
    if session_id is not None:
        session_id = normalise_session_id(session_id)
    if "endpoint" not in message:
        _require_no_misspelt_endpoint(message)
        return _openpi_request(message, session_id)
    endpoint = message["endpoint"]
    if not isinstance(endpoint, str) or endpoint not in _ENDPOINTS:
        raise BadRequest(f"endpoint: expected 'infer', 'observe' or 'reset', got {short(endpoint)}")
    if endpoint == "reset":
        unread = tuple(_observation(message))
        require_no_near_miss(unread, CONTROL_FIELDS)  # or another session would be reset
        return ResetRequest(session_id, env_id=_env_id(message), unread=unread)
    request = InferRequest(Dialect.ROBOARENA, _observation(message), session_id, **_controls(message))
    return replace(request, observes=True) if endpoint == "observe" else request


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
    return {key: value for key, value in message.items() if key not in CONTROL_FIELDS}


def require_no_near_miss(fields: Iterable[str], known: Collection[str]) -> None:
    """`fields`: that nothing reads. Raises BadRequest for one that is a known name, misspelt."""
    for field in itertools.islice(fields, _MAX_COMPARED):
        meant = near_miss(field, known)
        if meant is not None:
            raise BadRequest(f"{shown_name(field)}: nothing reads this field; did you mean {meant}?")


def _require_no_misspelt_endpoint(message: dict[str, Any]) -> None:
    """An endpoint decides about everything else, so a misspelt one is told first."""
    candidates = [key for key, value in message.items() if isinstance(value, str) and value in _ENDPOINTS]
    require_no_near_miss(candidates, ["endpoint"])


def _env_id(message: dict[str, Any]) -> str | None:
    value = message.get("env_id")
    return None if value is None else normalise_session_id(value, "env_id")


def _controls(message: dict[str, Any]) -> dict[str, Any]:
    sequence = message.get("sequence")
    if sequence is not None and type(sequence) is not int:
        raise BadRequest(f"sequence: expected an int, got {short(sequence)}")
    flags = {"restart": message.get("reset", False)}
    flags |= {name: message.get(name, False) for name in ("resume", "details")}
    flags |= {"observes": message.get("observe", False)}
    for name, value in flags.items():
        if not isinstance(value, (bool, np.bool_)):
            field = {"restart": "reset", "observes": "observe"}.get(name, name)
            raise BadRequest(f"{field}: expected a bool, got {short(value)}")
    bools = {name: bool(value) for name, value in flags.items()}
    return {"sequence": sequence, "env_id": _env_id(message), **bools}


def normalise_session_id(value: Any, field: str = "session_id") -> str:
    """The text of an id that came as str, bytes, int, numpy scalar or array of one. Raises BadRequest."""
    if isinstance(value, (np.ndarray, np.generic)) and value.size == 1 and value.dtype.kind in "iuSU":
        value = value.item()
    if isinstance(value, bytes):
        try:
            value = value.decode()
        except UnicodeDecodeError:
            raise BadRequest(f"{field}: expected UTF-8, got {short(value)}") from None
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str):
        raise BadRequest(f"{field}: expected a str, bytes, an int or an array of one of these, got {short(value)}")
    if not 0 < len(value) <= MAX_SESSION_ID_CHARACTERS or not value.isprintable():
        raise BadRequest(f"{field}: expected 1 to {MAX_SESSION_ID_CHARACTERS} printable characters, got {short(value)}")
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


def observe_reply(request: InferRequest, num_frames: int, warnings: tuple[str, ...] = ()) -> dict[str, Any]:
    """What answers a request that observes, before packing. `num_frames`: of each camera, that wait for the next."""
    reply: dict[str, Any] = {"frames_ahead": num_frames}
    if request.sequence is not None:
        reply["sequence"] = request.sequence
    if warnings:
        reply["warnings"] = list(warnings)
    return reply
