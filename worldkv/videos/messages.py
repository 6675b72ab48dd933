"""What a viewer may say on `/v1/video`, message by message. Pure functions; knows no socket and no session."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from worldkv.errors import BadRequest
from worldkv.wire import normalise_session_id

Format = Literal["jpeg", "mp4"]
Pace = Literal["live", "fast"]

MAX_MESSAGE_CHARACTERS = 1 << 20  # of a known sender's: an image of 768 KiB; no model sees more pixels than that
MAX_FORKS = 4
_MAX_ID_CHARACTERS = 200
_MAX_NAME_CHARACTERS = 100
_FIELD = re.compile(r"([a-z_]+): ")


@dataclass(frozen=True)
class Start:
    """Begin a world, or attach to a session. `from_mark`: begin, or go on, from there. `num_frames`: stop after so
    many; None: go on. `acknowledges`: the viewer says what it has shown; else what it has taken counts as shown."""

    prompt: str | None = None
    switch: str | None = None
    seed: int | None = None
    format: Format = "jpeg"
    session_id: str | None = None
    pace: Pace = "live"
    from_mark: str | None = None
    num_frames: int | None = None
    acknowledges: bool = True
    blend_blocks: int | None = None
    image: str | None = None  # base64 of a file: what a new world begins with


@dataclass(frozen=True)
class NewPrompt:
    """From the next block on. `id`: the client's own, told with that block."""

    prompt: str
    switch: str | None = None
    seed: int | None = None
    id: object = None
    blend_blocks: int | None = None


@dataclass(frozen=True)
class Play:
    pass


@dataclass(frozen=True)
class Pause:
    pass


@dataclass(frozen=True)
class Mark:
    name: str = ""


@dataclass(frozen=True)
class Seek:
    mark: str


@dataclass(frozen=True)
class Fork:
    count: int


@dataclass(frozen=True)
class Shown:
    block: int


@dataclass(frozen=True)
class Stop:
    pass


Message: TypeAlias = Start | NewPrompt | Play | Pause | Mark | Seek | Fork | Shown | Stop
Fields: TypeAlias = Mapping[str, object]


def parse(text: str) -> dict[str, object]:
    """A message's fields. Raises BadRequest for what is no JSON object, or longer than any message."""
    if len(text) > MAX_MESSAGE_CHARACTERS:
        raise BadRequest(f"message: expected at most {MAX_MESSAGE_CHARACTERS} characters, got {len(text)}")
    try:
        fields = json.loads(text, parse_constant=_refuse)  # NaN: no browser reads it back
    except (ValueError, RecursionError):
        raise BadRequest(f"message: expected a JSON object, got {shown(text)}") from None
    if not isinstance(fields, dict):
        raise BadRequest(f"message: expected a JSON object, got {shown(text)}")
    return fields


def read_message(fields: Fields) -> Message:
    """Raises BadRequest that names the field. What a prompt and a seed may be, the app knows."""
    kind = fields.get("type")
    if not isinstance(kind, str) or kind not in _READERS:
        raise BadRequest(f"type: expected one of {', '.join(_READERS)}, got {shown(kind)}")
    allowed, read = _READERS[kind]
    for name in fields:
        if name not in ("type", *allowed):
            known = ", ".join(allowed) or "no fields"
            raise BadRequest(f"{shown(name)} is not known; {kind} takes {known}")
    return read(fields)


def field_of(error: BaseException) -> str | None:
    """The field that an error's text begins with."""
    found = _FIELD.match(str(error))
    return found[1] if isinstance(error, BadRequest) and found else None


def shown(value: object) -> str:
    """A value that a client sent, short enough for an error's text."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


def _refuse(constant: str) -> None:
    raise ValueError(constant)


def _start(fields: Fields) -> Start:
    name, mark = fields.get("session_id"), fields.get("from_mark")
    return Start(
        prompt=None if fields.get("prompt") is None else _text(fields, "prompt"),
        switch=_switch(fields),
        seed=_seed(fields),
        blend_blocks=_blend_blocks(fields),
        image=None if fields.get("image") is None else _text(fields, "image"),
        format="mp4" if _one_of(fields, "format", get_args(Format)) == "mp4" else "jpeg",
        session_id=None if name is None else normalise_session_id(name),
        pace="fast" if _one_of(fields, "pace", get_args(Pace)) == "fast" else "live",
        from_mark=None if mark is None else _name(fields, "from_mark"),
    )


def _prompt(fields: Fields) -> NewPrompt:
    own = fields.get("id")
    if len(json.dumps(own)) > _MAX_ID_CHARACTERS:
        raise BadRequest(f"id: expected at most {_MAX_ID_CHARACTERS} characters of JSON, got more")
    return NewPrompt(_text(fields, "prompt"), _switch(fields), _seed(fields), own, _blend_blocks(fields))


def _fork(fields: Fields) -> Fork:
    count = fields.get("count", 2)
    if type(count) is not int or not 1 <= count <= MAX_FORKS:
        raise BadRequest(f"count: expected 1 to {MAX_FORKS}, got {shown(count)}")
    return Fork(count)


def _shown(fields: Fields) -> Shown:
    block = fields.get("block")
    if type(block) is not int or block < 0:
        raise BadRequest(f"block: expected the number of a block, got {shown(block)}")
    return Shown(block)


def _text(fields: Fields, name: str) -> str:
    """Of any length and content that can be written down."""
    value = fields.get(name)
    if not isinstance(value, str):
        raise BadRequest(f"{name}: expected words, got {shown(value)}")
    try:
        value.encode()
    except UnicodeEncodeError:  # half a character
        raise BadRequest(f"{name}: expected Unicode, got a lone surrogate") from None
    return value


def _name(fields: Fields, name: str) -> str:
    value = _text(fields, name)
    if not 0 < len(value) <= _MAX_NAME_CHARACTERS:
        raise BadRequest(f"{name}: expected 1 to {_MAX_NAME_CHARACTERS} characters, got {len(value)}")
    return value


def _switch(fields: Fields) -> str | None:
    return None if fields.get("switch") is None else _text(fields, "switch")


def _seed(fields: Fields) -> int | None:
    seed = fields.get("seed")
    if seed is not None and type(seed) is not int:
        raise BadRequest(f"seed: expected a whole number, got {shown(seed)}")
    return seed


def _blend_blocks(fields: Fields) -> int | None:
    number = fields.get("blend_blocks")
    if number is not None and type(number) is not int:
        raise BadRequest(f"blend_blocks: expected a whole number, got {shown(number)}")
    return number


def _one_of(fields: Fields, name: str, known: tuple[str, ...]) -> str:
    value = fields.get(name)
    if value is None:
        return known[0]
    if not isinstance(value, str) or value not in known:
        raise BadRequest(f"{name}: expected {' or '.join(map(repr, known))}, got {shown(value)}")
    return value


_WORDS = ("prompt", "switch", "blend_blocks", "seed")
# Type of a message -> the fields that it may have, and what reads them.
_READERS: Mapping[str, tuple[tuple[str, ...], Callable[[Fields], Message]]] = {
    "start": (("key", *_WORDS, "image", "format", "session_id", "pace", "from_mark"), _start),
    "prompt": ((*_WORDS, "id"), _prompt),
    "play": ((), lambda _: Play()),
    "pause": ((), lambda _: Pause()),
    "mark": (("name",), lambda fields: Mark(_name(fields, "name") if fields.get("name") else "")),
    "seek": (("mark",), lambda fields: Seek(_name(fields, "mark"))),
    "fork": (("count",), _fork),
    "shown": (("block",), _shown),
    "stop": ((), lambda _: Stop()),
}
