"""Checks what a robot sent and reads it: camera frames, joint state, prompt.

Where things stand in an observation is the embodiment's to say. What cannot be served raises BadRequest (field,
expected, got, what to change). What can be served but is probably a mistake, such as a black camera or joints in
degrees, becomes a warning. Does not know sessions: the caller decides which warnings are news.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from worldkv.errors import BadRequest
from worldkv.robots.embodiment import Camera, Embodiment, Quantity
from worldkv.robots.transforms import resize_frames
from worldkv.wire import CONTROL_FIELDS, require_no_near_miss, shown_name

MAX_PROMPT_CHARACTERS = 4096
_IGNORED = frozenset({"observation/cartesian_position"})  # RoboArena's clients send it, and no model here takes it
_MAX_NAMED = 8  # fields, in a message that lists them
_ASPECT_TOLERANCE = 0.01  # relative; 1% forgives sizes that were rounded to even numbers
_RANGE_MARGIN = 0.05  # of the training range's width
_ALLOWED_MARGIN = 0.01  # of the allowed range's width


@dataclass(frozen=True)
class Observation:
    """One valid observation.

    `frames`: by camera name, uint8 [num_frames, H, W, 3]; None for a camera that was not sent. `state`: by
    key, float64 [dim]. `warnings`: subject -> text; the same trouble has the same subject. `unread`: the
    names, as a message shows them, of fields that nothing reads. `frames_ahead`: how many frames of each camera the
    client has sent ahead of it, where it says so; only then may it have none of its own (`num_frames` 0).
    """

    frames: Mapping[str, np.ndarray | None]
    num_frames: int
    state: Mapping[str, np.ndarray]
    prompt: str
    warnings: Mapping[str, str]
    executed_steps: int | None = None  # since the last tick, where the client says so
    unread: tuple[str, ...] = ()
    frames_ahead: int | None = None


@dataclass(frozen=True)
class Frames:
    """Frames that are sent ahead of the request that they are for: fields as of an Observation. `prompt`: None where it
    was not sent."""

    frames: Mapping[str, np.ndarray | None]
    num_frames: int
    prompt: str | None
    warnings: Mapping[str, str]
    unread: tuple[str, ...] = ()


def read_observation(observation: Mapping[str, Any], embodiment: Embodiment) -> Observation:
    """The observation, with at most the newest frames that one tick takes. Raises BadRequest."""
    warnings: dict[str, str] = {}
    unread = _unread(observation, embodiment)
    ahead = _read_whole(observation, "frames_ahead", "how many frames of each camera were sent ahead of this request")
    frames: Mapping[str, np.ndarray | None] = dict.fromkeys(camera.name for camera in embodiment.cameras)
    num_frames = 0
    if not ahead or has_frames(observation, embodiment):
        frames, num_frames = _read_cameras(observation, embodiment, warnings)
    state = {
        quantity.key: _read_state(_require(observation, quantity.field, _numbers(quantity)), quantity, warnings)
        for quantity in embodiment.state
    }
    prompt = _read_prompt(_require(observation, "prompt", "a text"))
    steps = _read_whole(observation, "executed_steps", "how many actions were executed since the last tick")
    return Observation(frames, num_frames, state, prompt, warnings, steps, unread, ahead)


def read_frames(observation: Mapping[str, Any], embodiment: Embodiment) -> Frames:
    """What is sent ahead of a request: its cameras, and its prompt where it has one. Raises BadRequest."""
    warnings: dict[str, str] = {}
    unread = _unread(observation, embodiment)
    frames, num_frames = _read_cameras(observation, embodiment, warnings)
    prompt = None if observation.get("prompt") is None else _read_prompt(observation["prompt"])
    return Frames(frames, num_frames, prompt, warnings, unread)


def has_frames(observation: Mapping[str, object], embodiment: Embodiment) -> bool:
    """Whether it has an image of any camera."""
    return any(observation.get(camera.field) is not None for camera in embodiment.cameras)


def _read_cameras(
    observation: Mapping[str, Any], embodiment: Embodiment, warnings: dict[str, str]
) -> tuple[dict[str, np.ndarray | None], int]:
    """(`frames`, `num_frames`) of an Observation."""
    stacks: dict[Camera, np.ndarray] = {}
    for camera in embodiment.cameras:
        if observation.get(camera.field) is None and camera.optional:
            how = "None" if camera.field in observation else "missing"
            warnings[f"{camera.field} missing"] = f"{camera.field} is {how}: the model sees a black view in its place"
        else:
            image = _require(observation, camera.field, "an array of uint8")
            stacks[camera] = _frame_stack(image, camera.field, camera)
    num_frames = min(embodiment.frames_per_tick, _common_length(stacks, warnings))
    frames: dict[str, np.ndarray | None] = dict.fromkeys(camera.name for camera in embodiment.cameras)
    for camera, stack in stacks.items():
        frames[camera.name] = _usable(stack[-num_frames:], camera.field, camera, warnings)
    return frames, num_frames


def unread_warning(fields: Sequence[str], embodiment: Embodiment) -> str:
    """What is said of fields that nothing reads."""
    which = f"the field {_listed(fields)}" if len(fields) == 1 else f"the fields {_listed(fields)}"
    known = sorted(_known_fields(embodiment))
    return f"nothing reads {which}; this robot's are {_listed(known, len(known))}"


def _known_fields(embodiment: Embodiment) -> set[str]:
    fields = {camera.field for camera in embodiment.cameras} | {quantity.field for quantity in embodiment.state}
    return fields | {"prompt", "executed_steps", "frames_ahead"}


def _unread(observation: Mapping[str, object], embodiment: Embodiment) -> tuple[str, ...]:
    """Fields that nothing reads, as they are shown. Raises BadRequest for a misspelt one."""
    known = _known_fields(embodiment)
    unread = [field for field in observation if field not in known and field not in _IGNORED]
    absent = {field for field in known if observation.get(field) is None}  # what is there is not what was meant
    require_no_near_miss(unread, sorted(absent | CONTROL_FIELDS))
    return tuple(map(shown_name, unread))


def _listed(fields: Sequence[object], most: int = _MAX_NAMED) -> str:
    more = f" and {len(fields) - most} more" if len(fields) > most else ""
    return ", ".join(str(field) for field in fields[:most]) + more


def _require(observation: Mapping[str, Any], field: str, expected: str) -> Any:
    value = observation.get(field)
    if value is None:
        if field in observation:
            raise BadRequest(f"{field}: expected {expected}, got None")
        got = _listed(list(map(shown_name, sorted(observation, key=str)))) or "none"
        raise BadRequest(f"{field}: missing; got the fields {got}")
    return value


def _common_length(stacks: Mapping[Camera, np.ndarray], warnings: dict[str, str]) -> int:
    """How many frames each camera has, counted from its newest.

    Cameras that nobody synchronises differ by one frame now and then: a robot need not stop for that, and the newest
    frames are still of the same moments. What differs by more was sampled in different ways: no frame of one camera
    belongs to a frame of the other.
    """
    lengths = {camera.field: len(stack) for camera, stack in stacks.items()}
    if not lengths:
        raise BadRequest("cameras: expected at least one, got none")
    shortest, longest = min(lengths.values()), max(lengths.values())
    if shortest == longest:
        return shortest
    counts = ", ".join(f"{field} has {length}" for field, length in lengths.items())
    if longest - shortest > 1:
        raise BadRequest(
            f"cameras: expected the same number of frames from each, got: {counts}; take a frame of every camera at "
            "the same steps, or send the newest one only, [H, W, 3]"
        )
    warnings["cameras uneven"] = (
        f"the cameras sent different numbers of frames, and the newest {shortest} of each are used: {counts}; take a "
        "frame of every camera at the same steps"
    )
    return shortest


def _frame_stack(image: Any, field: str, camera: Camera) -> np.ndarray:
    """uint8 [T, H, W, 3], T at least 1, of any resolution."""
    size = f"{camera.height}, {camera.width}, 3]"
    expected = f"uint8 [{size} or [T, {size}"
    if not isinstance(image, np.ndarray):
        raise BadRequest(f"{field}: expected an array, {expected}, got {type(image).__name__}")
    got = f"{image.dtype} {list(image.shape)}"
    if image.ndim not in (3, 4) or image.shape[-1] != 3:
        hint = "; move the channels last" if image.ndim in (3, 4) and image.shape[-3] == 3 else ""
        raise BadRequest(f"{field}: expected {expected}, got {got}{hint}")
    if image.size == 0:
        raise BadRequest(f"{field}: expected at least one frame, {expected}, got {got}")
    if image.dtype != np.uint8:
        raise BadRequest(f"{field}: expected {expected}, got {got}; {_how_to_uint8(image)}")
    return image if image.ndim == 4 else image[None]


def _how_to_uint8(image: np.ndarray) -> str:
    """By its values. They are not converted here: dark frames of 0..255 look like bright ones of 0..1, and a guess that
    changes from frame to frame would be seen by the model only."""
    if image.dtype.kind not in "fiub":
        return "send real numbers, as uint8"
    with np.errstate(invalid="ignore"):
        low, high = image.min(), image.max()
    if not (np.isfinite(low) and np.isfinite(high)):
        return "some of its values are not finite"
    if image.dtype.kind == "b" or (image.dtype.kind == "f" and low >= 0 and high <= 1):
        return "these are 0..1: send np.round(255 * x).astype(np.uint8)" if high else "these are all 0: send uint8"
    if low >= 0 and high <= 255:
        convert = "np.round(x).astype(np.uint8)" if image.dtype.kind == "f" else "x.astype(np.uint8)"
        return f"these are 0..255 as {image.dtype}: send them as uint8, {convert}, and do not scale them"
    if image.dtype.kind == "f" and low >= -1 and high <= 1:
        return "these are -1..1: send np.round(127.5 * (x + 1)).astype(np.uint8)"
    return f"these go from {low:g} to {high:g}: bring them to 0..255, then to uint8"


def _usable(frames: np.ndarray, field: str, camera: Camera, warnings: dict[str, str]) -> np.ndarray:
    """`frames` at the camera's resolution, resized where the field of view can be the same."""
    brightest = frames.max()
    if brightest == 0:
        warnings[f"{field} black"] = f"{field} is all black: is the camera connected?"
    elif brightest == 1:
        warnings[f"{field} black"] = f"{field} has no value above 1: was it scaled to 0..1 before it became uint8?"
    height, width = frames.shape[1:3]
    if (height, width) == (camera.height, camera.width):
        return frames
    recorded = (height, width) == (camera.recorded_height, camera.recorded_width)
    aspect_error = abs(width * camera.height / (height * camera.width) - 1)
    if not recorded and aspect_error > _ASPECT_TOLERANCE:
        raise BadRequest(
            f"{field}: expected {camera.height}x{camera.width} (height x width) or a size of that aspect, "
            f"got {height}x{width}; crop or pad the image, do not stretch it"
        )
    warnings[f"{field} resolution"] = (
        f"{field} is {height}x{width} and is resized to {camera.height}x{camera.width} here; "
        "send that size to save bandwidth and get the training's pixels"
    )
    return resize_frames(frames, camera.height, camera.width)


def _read_state(value: Any, quantity: Quantity, warnings: dict[str, str]) -> np.ndarray:
    """float64 [dim], finite, also as float32."""
    field = quantity.field
    expected = _numbers(quantity)
    try:
        array = np.asarray(value)
    except ValueError:  # a ragged list
        raise BadRequest(f"{field}: expected {expected}, got a ragged {type(value).__name__}") from None
    if array.dtype.kind not in "fiu":
        raise BadRequest(f"{field}: expected {expected}, got {type(value).__name__} of {array.dtype}")
    if array.size != quantity.dim or (array.ndim and array.shape[-1] != quantity.dim):
        raise BadRequest(f"{field}: expected {expected}, got shape {list(array.shape)}; send the newest state only")
    with np.errstate(over="ignore"):  # actions, which these are added to, are sent as float32
        numbers = array.astype(np.float64).reshape(quantity.dim)
        singles = numbers.astype(np.float32)
    if not np.isfinite(singles).all():
        raise BadRequest(f"{field}: expected {expected}, got {singles.tolist()} as float32")
    if quantity.allowed is not None:
        low, high = quantity.allowed
        margin = _ALLOWED_MARGIN * (high - low)
        outside = numbers[(numbers < low - margin) | (numbers > high + margin)]
        if len(outside):
            expected = quantity.meaning or f"{low:g} to {high:g}"
            warnings[f"{field} range"] = f"{field} is {outside[0]:g}: expected {expected}"
    elif quantity.training_range is not None:
        _check_range(numbers, field, *quantity.training_range, warnings)
    return numbers


def _numbers(quantity: Quantity) -> str:
    return f"{quantity.dim} finite number{'s' if quantity.dim > 1 else ''}"


def _check_range(numbers: np.ndarray, field: str, low: np.ndarray, high: np.ndarray, warnings: dict[str, str]) -> None:
    margin = _RANGE_MARGIN * (high - low)
    outside = np.flatnonzero((numbers < low - margin) | (numbers > high + margin))
    if len(outside):
        first = outside[0]
        warnings[f"{field} range"] = (
            f"{field}[{first}] is {numbers[first]:g}; the training data has {low[first]:g} to {high[first]:g}"
            + (f" ({len(outside)} of {len(numbers)} numbers are outside)" if len(outside) > 1 else "")
            + ": check units and joint order"
        )


def _read_whole(observation: Mapping[str, Any], field: str, meaning: str) -> int | None:
    value = observation.get(field)
    if value is None:
        return None
    number = value.item() if isinstance(value, np.ndarray | np.generic) and value.size == 1 else value
    if isinstance(number, bool) or not isinstance(number, int) or number < 0:
        raise BadRequest(f"{field}: expected {meaning}, got {value!r}")
    return number


def _read_prompt(value: Any) -> str:
    if isinstance(value, np.ndarray | np.generic):
        value = value.item() if value.size == 1 else value
    if isinstance(value, bytes):
        value = value.decode("utf-8", errors="replace")
    if not isinstance(value, str):
        raise BadRequest(f"prompt: expected a text, got {type(value).__name__}")
    if not value.strip():
        raise BadRequest("prompt: expected an instruction such as 'pick up the red block', got an empty text")
    if len(value) > MAX_PROMPT_CHARACTERS:
        raise BadRequest(f"prompt: expected at most {MAX_PROMPT_CHARACTERS} characters, got {len(value)}")
    return value
