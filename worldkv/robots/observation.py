"""Checks what a robot sent and reads it: camera frames, joint state, prompt.

Where things stand in an observation is the embodiment's to say. What cannot be served raises BadRequest (field,
expected, got, what to change). What can be served but is probably a mistake, such as a black camera or joints in
degrees, becomes a warning. Does not know sessions: the caller decides which warnings are news.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from worldkv.errors import BadRequest
from worldkv.robots.embodiment import Camera, Embodiment, Quantity
from worldkv.robots.transforms import resize_frames

MAX_PROMPT_CHARACTERS = 4096
_ASPECT_TOLERANCE = 0.01  # relative; 1% forgives sizes that were rounded to even numbers
_RANGE_MARGIN = 0.05  # of the training range's width
_ALLOWED_MARGIN = 0.01  # of the allowed range's width


@dataclass(frozen=True)
class Observation:
    """One valid observation.

    `frames`: by camera name, uint8 [num_frames, H, W, 3]; None for a camera that was not sent. `state`: by
    key, float64 [dim]. `warnings`: subject -> text; the same trouble has the same subject.
    """

    frames: Mapping[str, np.ndarray | None]
    num_frames: int
    state: Mapping[str, np.ndarray]
    prompt: str
    warnings: Mapping[str, str]
    executed_steps: int | None = None  # since the last tick, where the client says so


def read_observation(observation: Mapping[str, Any], embodiment: Embodiment) -> Observation:
    """The observation, with at most the newest frames that one tick takes. Raises BadRequest."""
    warnings: dict[str, str] = {}
    stacks: dict[Camera, np.ndarray] = {}
    for camera in embodiment.cameras:
        if observation.get(camera.field) is None and camera.optional:
            warnings[f"{camera.field} missing"] = f"{camera.field} is missing: the model sees a black view in its place"
        else:
            stacks[camera] = _frame_stack(_require(observation, camera.field), camera.field, camera)
    lengths = {camera.field: len(stack) for camera, stack in stacks.items()}
    if len(set(lengths.values())) != 1:
        raise BadRequest(f"cameras: expected the same number of frames from each, got {lengths}")

    max_frames = embodiment.frames_per_tick
    frames: dict[str, np.ndarray | None] = dict.fromkeys(camera.name for camera in embodiment.cameras)
    for camera, stack in stacks.items():
        frames[camera.name] = _usable(stack[-max_frames:], camera.field, camera, warnings)
    state = {
        quantity.key: _read_state(_require(observation, quantity.field), quantity, warnings)
        for quantity in embodiment.state
    }
    prompt = _read_prompt(_require(observation, "prompt"))
    num_frames = min(max_frames, *lengths.values())
    return Observation(frames, num_frames, state, prompt, warnings, _read_steps(observation.get("executed_steps")))


def _require(observation: Mapping[str, Any], field: str) -> Any:
    value = observation.get(field)
    if value is None:
        got = ", ".join(sorted(map(str, observation))) or "none"
        raise BadRequest(f"{field}: missing; got the fields {got}")
    return value


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
    if image.dtype != np.uint8:
        hint = "scale [0, 1] by 255 and convert" if image.dtype.kind == "f" else "convert"
        raise BadRequest(f"{field}: expected {expected}, got {got}; {hint} to uint8")
    if image.size == 0:
        raise BadRequest(f"{field}: expected at least one frame, {expected}, got {got}")
    return image if image.ndim == 4 else image[None]


def _usable(frames: np.ndarray, field: str, camera: Camera, warnings: dict[str, str]) -> np.ndarray:
    """`frames` at the camera's resolution, resized where the field of view can be the same."""
    if not frames.any():
        warnings[f"{field} black"] = f"{field} is all black: is the camera connected?"
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
    expected = f"{quantity.dim} finite number{'s' if quantity.dim > 1 else ''}"
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


def _read_steps(value: Any) -> int | None:
    if value is None:
        return None
    steps = value.item() if isinstance(value, np.ndarray | np.generic) and value.size == 1 else value
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
        raise BadRequest(f"executed_steps: expected how many actions were executed since the last tick, got {value!r}")
    return steps


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
