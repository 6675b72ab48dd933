"""Embodiment files: a robot as yaml, as docs/embodiments.md describes it. Read, checked, every fault with its line.

Some come with the package; a user's own may stand anywhere. Does not know checkpoints: `dataset` brings a file
and a checkpoint's own words together.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from worldkv.errors import CheckpointError
from worldkv.robots.embodiment import Embodiment, Layout, Normalisation, Quantity
from worldkv.words import reason

_MAX_VIEWS: Mapping[Layout, tuple[int, int]] = {"single": (1, 1), "wrist_over_exteriors": (3, 3), "grid": (2, 4)}
Size = Annotated[int, Field(ge=1)]
Name = Annotated[str, Field(min_length=1)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class CameraEntry(_Strict):
    """`field`: its name in an observation. `optional`: black if it is not sent. `resolution`: height, width."""

    name: Name
    field: Name
    optional: bool = False
    resolution: Annotated[list[Size], Field(min_length=2, max_length=2)] | None = None


class StateEntry(_Strict):
    """`range`: what may come, else a warning that ends in `meaning`; without it the training's range is used.
    `meaning`: its unit, or what the ends of its range are."""

    key: Name
    field: Name
    dim: Size | None = None
    normalisation: Normalisation = "q99"
    range: Annotated[list[float], Field(min_length=2, max_length=2)] | None = None
    meaning: str = ""


class ActionEntry(_Strict):
    """`relative`: to the last observed state of the same key."""

    key: Name
    dim: Size | None = None
    normalisation: Normalisation = "q99"
    relative: bool = False


class RoboArenaEntry(_Strict):
    """The robot's part of the RoboArena dialect's greeting."""

    needs_wrist_camera: bool = False
    n_external_cameras: int = 0
    action_space: str = "joint_position"


class EmbodimentFile(_Strict):
    """One file. What is left out is the checkpoint's: sizes and statistics in metadata.json, horizon in config.json."""

    tags: Annotated[list[Name], Field(min_length=1)]
    description: str = ""
    rate_hz: Annotated[float, Field(gt=0)]
    frames_per_tick: Size = 4
    layout: Layout
    crop_scale: Annotated[float, Field(gt=0, le=1)] = 0.95
    view_size: Annotated[list[Size], Field(min_length=2, max_length=2)]
    cameras: Annotated[list[CameraEntry], Field(min_length=1, max_length=4)]
    state: Annotated[list[StateEntry], Field(min_length=1)]
    actions: Annotated[list[ActionEntry], Field(min_length=1)]
    statistics_per_step: bool = False
    action_horizon: Size | None = None
    prompt: str
    roboarena: RoboArenaEntry = RoboArenaEntry()
    statistics: dict[Literal["state", "action"], dict[str, dict[str, list[Any]]]] = {}

    @model_validator(mode="after")
    def _fits_together(self) -> EmbodimentFile:
        faults = list(_inner_faults(self))
        if faults:
            raise ValueError("; ".join(faults))
        return self


def _inner_faults(file: EmbodimentFile) -> Iterator[str]:
    least, most = _MAX_VIEWS[file.layout]
    if not least <= len(file.cameras) <= most:
        wanted = str(least) if least == most else f"{least} to {most}"
        yield f"layout {file.layout} is for {wanted} cameras, there are {len(file.cameras)}"
    for entry in file.state:
        if entry.range is not None and entry.range[0] >= entry.range[1]:
            yield f"state {entry.key!r}: range: expected low and high, got {entry.range}"
    if "{p}" not in file.prompt:
        yield "prompt: expected {p} where the instruction stands"
    fields = [camera.field for camera in file.cameras] + [entry.field for entry in file.state]
    for names, what in (
        (fields, "field"),
        ([camera.name for camera in file.cameras], "camera"),
        ([entry.key for entry in file.state], "state key"),
        ([entry.key for entry in file.actions], "action key"),
    ):
        if twice := sorted({name for name in names if names.count(name) > 1}):
            yield f"{what} {twice[0]!r} stands there twice"
    known = {entry.key for entry in file.state}
    for action in file.actions:
        if action.relative and action.key not in known:
            yield f"action {action.key!r} is relative, but there is no state of that key; states are {sorted(known)}"


@cache
def packaged() -> Mapping[str, EmbodimentFile]:
    """The files that come with worldkv, by name."""
    folder = resources.files("worldkv.robots") / "embodiments"
    texts = {path.name: path.read_text(encoding="utf-8") for path in folder.iterdir() if path.name.endswith(".yaml")}
    return {name.removesuffix(".yaml"): parse(text, name) for name, text in sorted(texts.items())}


def find_packaged(name: str) -> EmbodimentFile | None:
    """By the file's name or by one of its tags."""
    files = packaged()
    return files.get(name) or next((file for file in files.values() if name in file.tags), None)


def load_embodiment_file(path: str | Path) -> EmbodimentFile:
    """Raises CheckpointError that names the file, the line and what was expected there."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        why = reason(error) if isinstance(error, OSError) else str(error)
        raise CheckpointError(
            f"embodiment file {path}: {why}; packaged ones are {', '.join(packaged())} (see `worldkv embodiments`)"
        ) from error
    return parse(text, str(path))


def parse(text: str, name: str) -> EmbodimentFile:
    """`name`: for messages. Raises like `load_embodiment_file`."""
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f":{mark.line + 1}" if mark is not None else ""
        raise CheckpointError(f"{name}{where}: not readable YAML: {getattr(error, 'problem', error)}") from error
    faults = [f"{name}:{line}: {key!r} stands there twice" for line, key in _duplicates(root)]
    if not isinstance(value, dict):
        faults.append(
            f"{name}:1: expected a mapping with tags, cameras, state, actions, ..., got {type(value).__name__}"
        )
    if not faults:
        try:
            return EmbodimentFile.model_validate(value)
        except ValidationError as error:
            faults = [_fault(name, root, value, detail) for detail in error.errors()]
    raise CheckpointError("\n  ".join(["this embodiment file cannot be used:", *faults]))


def from_mapping(value: Any, name: str) -> EmbodimentFile:
    """An embodiment that stands inside another file, at `name`. Raises CheckpointError."""
    try:
        return EmbodimentFile.model_validate(value)
    except ValidationError as error:
        faults = [f"{name}: {'.'.join(map(str, detail['loc']))}: {detail['msg']}" for detail in error.errors()]
    raise CheckpointError("\n  ".join(["this embodiment cannot be used:", *faults]))


def describe(robot: Embodiment) -> dict[str, Any]:
    """An embodiment as a file that needs nothing beside it: `read_embodiment` makes the same of it."""
    state, actions = ([_plain_quantity(quantity) for quantity in part] for part in (robot.state, robot.actions))
    for entry, quantity in zip(state, robot.state, strict=True):
        entry |= {"field": quantity.field, "meaning": quantity.meaning}
        if quantity.allowed is not None:
            entry["range"] = list(quantity.allowed)
    for entry, quantity in zip(actions, robot.actions, strict=True):
        entry["relative"] = quantity.relative
    cameras = [
        {"name": c.name, "field": c.field, "optional": c.optional, "resolution": [c.recorded_height, c.recorded_width]}
        for c in robot.cameras
    ]
    per_step = any(s.ndim == 2 for quantity in robot.actions for s in quantity.statistics.values())
    statistics = {"state": _plain_statistics(robot.state), "action": _plain_statistics(robot.actions)}
    return {
        "tags": [robot.tag],
        "rate_hz": robot.fps,
        "frames_per_tick": robot.frames_per_tick,
        "layout": robot.layout,
        "crop_scale": robot.crop_scale,
        "view_size": [robot.view_height, robot.view_width],
        "cameras": cameras,
        "state": state,
        "actions": actions,
        "statistics_per_step": per_step,
        "action_horizon": robot.action_horizon,
        "prompt": robot.prompt_template,
        "roboarena": asdict(robot.roboarena),
        "statistics": statistics,
    }


def _plain_quantity(quantity: Quantity) -> dict[str, Any]:
    return {"key": quantity.key, "dim": quantity.dim, "normalisation": quantity.normalisation}


def _plain_statistics(quantities: Iterable[Quantity]) -> dict[str, dict[str, Any]]:
    plain = {}
    for quantity in quantities:
        numbers = dict(quantity.statistics)
        if quantity.training_range is not None:
            numbers |= dict(zip(("min", "max"), quantity.training_range, strict=True))
        plain[quantity.key] = {name: array.tolist() for name, array in numbers.items()}
    return plain


def _fault(name: str, root: Any, value: Any, detail: Any) -> str:
    path = [part for part in detail["loc"] if isinstance(part, int) or part in _keys(value, detail["loc"])]
    where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in detail["loc"]).lstrip(".")
    got = detail["input"]
    if detail["type"] == "extra_forbidden":
        owner: Any = {(): EmbodimentFile, ("cameras",): CameraEntry, ("state",): StateEntry, ("actions",): ActionEntry}
        known = owner.get(tuple(p for p in detail["loc"][:-1] if isinstance(p, str)), RoboArenaEntry).model_fields
        close = difflib.get_close_matches(str(detail["loc"][-1]), known, n=1)
        text = f"is not known; {'did you mean ' + close[0] if close else 'known are ' + ', '.join(known)}?"
    elif detail["type"] == "missing":
        text = "is missing"
    elif detail["type"] == "value_error":
        return f"{name}: {detail['msg'].removeprefix('Value error, ')}"
    else:
        text = f"{detail['msg'][0].lower()}{detail['msg'][1:]}, got {got!r}"
    return f"{name}:{_line(root, path)}: {where}: {text}"


def _keys(value: Any, path: tuple[Any, ...]) -> set[Any]:
    """All keys met on the way down `path`: what pydantic adds of its own is not among them."""
    keys: set[Any] = set()
    for part in path:
        if isinstance(value, dict):
            keys |= set(value)
        try:
            value = value[part]
        except (KeyError, IndexError, TypeError):
            break
    return keys


def _line(node: Any, path: list[Any]) -> int:
    """The line of what stands at `path`, or of the innermost part of it that is there."""
    line: int = node.start_mark.line + 1
    for part in path:
        if isinstance(node, yaml.MappingNode):
            found = [(key, child) for key, child in node.value if key.value == part]
            if not found:
                break
            key, node = found[0]
            line = key.start_mark.line + 1
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
            node = node.value[part]
            line = node.start_mark.line + 1
        else:
            break
    return line


def _duplicates(node: Any) -> Iterator[tuple[int, str]]:
    """yaml takes the last of two equal keys in silence."""
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, child in node.value:
            if key.value in seen:
                yield key.start_mark.line + 1, key.value
            seen.add(key.value)
            yield from _duplicates(child)
    elif isinstance(node, yaml.SequenceNode):
        for child in node.value:
            yield from _duplicates(child)
