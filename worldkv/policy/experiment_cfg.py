"""Reads an `Embodiment` from a checkpoint's `experiment_cfg`: DreamZero's conf.yaml and metadata.json.

Everything missing or contradictory is listed, with its path, in one CheckpointError. Does not open files.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from worldkv.errors import CheckpointError
from worldkv.policy.embodiment import Camera, Embodiment, Normalisation, Quantity
from worldkv.policy.prompts import PROMPT_TEMPLATES

Kind = Literal["video", "state", "action"]

_STATISTICS_OF: Mapping[Normalisation, tuple[str, ...]] = {
    "none": (),
    "q99": ("q01", "q99"),
    "mean_std": ("mean", "std"),
    "min_max": ("min", "max"),
    "scale": ("min", "max"),
    "binary": (),
}
_DEFAULT_TEXT_LEN = 512  # DreamTransform's own default; configs may leave it out
_DROID_VIEWS = 3
_MAX_VIEWS = 4


def read_embodiment(
    conf: Mapping[str, Any],
    metadata: Mapping[str, Any],
    tag: str = "oxe_droid",
    *,
    camera_size: tuple[int, int] | None = None,
) -> Embodiment:
    """The embodiment `tag` of conf.yaml and metadata.json, given as dictionaries.

    `camera_size`: (height, width) that config.json's target_video_height and target_video_width demand of
    clients in place of the recorded resolution. Raises CheckpointError that lists every fault with its path.
    """
    files = _Files(conf, metadata, tag)
    if tag not in PROMPT_TEMPLATES:
        files.fault(f"no prompt template is known for {tag!r}; known: {', '.join(sorted(PROMPT_TEMPLATES))}")
    if files.readable():
        embodiment = _read(files, camera_size)
        if not files.faults:
            return embodiment
    listing = "\n".join(f"  - {fault}" for fault in files.faults)
    raise CheckpointError(f"experiment_cfg does not describe the embodiment {tag!r}:\n{listing}")


class _Files:
    """The two files, read by path. Faults are noted, not raised, so that one run finds them all."""

    def __init__(self, conf: Mapping[str, Any], metadata: Mapping[str, Any], tag: str) -> None:
        self.roots = {"conf.yaml": conf, "metadata.json": metadata}
        self.tag = tag
        self.faults: list[str] = []

    def fault(self, text: str) -> None:
        if text not in self.faults:
            self.faults.append(text)

    def readable(self) -> bool:
        """Whether the embodiment is there at all; nothing else can be checked before."""
        steps = self.conf("transforms", self.tag, "transforms")
        if steps is not None and not isinstance(steps, list):
            self.fault(f"conf.yaml: transforms.{self.tag}.transforms: expected a list, got {steps!r}")
        return self.metadata() is not None and isinstance(steps, list)

    def conf(self, *path: str, required: bool = True) -> Any:
        return self._get("conf.yaml", path, required)

    def metadata(self, *path: str, required: bool = True) -> Any:
        """The value at `path` under the embodiment's own entry."""
        return self._get("metadata.json", (self.tag, *path), required)

    def _get(self, file: str, path: tuple[str, ...], required: bool) -> Any:
        value: Any = self.roots[file]
        for depth, key in enumerate(path, start=1):
            if not isinstance(value, Mapping) or key not in value:
                if required:
                    self.fault(f"{file}: {'.'.join(path[:depth])}: missing")
                return None
            value = value[key]
        return value

    def flag(self, name: str) -> bool:
        return bool(self.conf(name, required=False))

    def steps(self, *classes: str) -> list[Mapping[str, Any]]:
        """The transforms whose `_target_` ends in one of these class names."""
        steps = self.roots["conf.yaml"]["transforms"][self.tag]["transforms"]
        return [s for s in steps if isinstance(s, Mapping) and str(s.get("_target_")).split(".")[-1] in classes]

    def step_value(self, name: str, key: str, default: Any = None) -> Any:
        """Argument `key` of the transform called `name`."""
        steps = self.steps(name)
        value = steps[0].get(key, default) if steps else None
        if value is None:
            self.fault(f"{self.step_path(name)}{'.' + key if steps else ''}: missing")
        return value

    def step_path(self, name: str) -> str:
        return f"conf.yaml: transforms.{self.tag}.transforms[{name}]"

    def step_size(self, name: str, key: str, default: int | None = None) -> int:
        """As `step_value`, a positive whole number; 0 where there is a fault."""
        value = self.step_value(name, key, default)
        if value is not None and not _is_size(value):
            self.fault(f"{self.step_path(name)}.{key}: expected a positive whole number, got {value!r}")
        return value if _is_size(value) else 0


def _read(files: _Files, camera_size: tuple[int, int] | None) -> Embodiment:
    """The embodiment; without meaning where this noted a fault."""
    declared = files.metadata("embodiment_tag", required=False)
    if declared not in (None, files.tag):
        files.fault(f"metadata.json: {files.tag}.embodiment_tag: expected {files.tag!r}, got {declared!r}")
    crop_scale = files.step_value("VideoCrop", "scale", default=0.0)
    if not isinstance(crop_scale, int | float) or not 0 < crop_scale <= 1:
        files.fault(f"{files.step_path('VideoCrop')}.scale: expected a number in (0, 1], got {crop_scale!r}")
    interpolation = files.step_value("VideoResize", "interpolation", default="linear")
    if interpolation not in ("linear", "bilinear"):
        files.fault(f"{files.step_path('VideoResize')}.interpolation: expected linear, got {interpolation!r}")

    horizon = files.step_size("DreamTransform", "action_horizon")
    stated = files.conf("action_horizon", required=False)
    if horizon and stated not in (None, horizon):
        path = f"{files.step_path('DreamTransform')}.action_horizon"
        files.fault(f"conf.yaml: action_horizon is {stated!r}, but {path} is {horizon}")
    state = _quantities(files, "state", horizon)
    actions = _with_relative(files, _quantities(files, "action", horizon), state)
    cameras = tuple(_cameras(files, camera_size))
    return Embodiment(
        tag=files.tag,
        cameras=cameras,
        state=state,
        actions=actions,
        crop_scale=crop_scale,
        view_height=files.step_size("VideoResize", "height"),
        view_width=files.step_size("VideoResize", "width"),
        max_state_dim=_padded_dim(files, "state", state),
        max_action_dim=_padded_dim(files, "action", actions),
        action_horizon=horizon,
        text_len=files.step_size("DreamTransform", "max_length", _DEFAULT_TEXT_LEN),
        prompt_template=PROMPT_TEMPLATES.get(files.tag, ""),
        fps=_fps(files, cameras),
    )


def _order(files: _Files, kind: Kind) -> list[str]:
    """The keys of this kind in the order in which they are concatenated, without their `kind.` prefix."""
    path = f"{files.step_path('ConcatTransform')}.{kind}_concat_order"
    keys = files.step_value("ConcatTransform", f"{kind}_concat_order")
    if keys is None:
        return []
    if not isinstance(keys, list) or not keys or not all(isinstance(key, str) for key in keys):
        files.fault(f"{path}: expected a list of names, got {keys!r}")
        return []
    declared = files.conf("modality_configs", files.tag, kind, "modality_keys")
    if isinstance(declared, list) and sorted(map(str, declared)) != sorted(keys):
        files.fault(f"{path} is {keys}, but modality_configs.{files.tag}.{kind}.modality_keys is {declared}")
    return [key.removeprefix(f"{kind}.") for key in keys]


def _cameras(files: _Files, camera_size: tuple[int, int] | None) -> Iterable[Camera]:
    names = _order(files, "video")
    if files.tag == "oxe_droid" and names and len(names) != _DROID_VIEWS:
        files.fault(f"oxe_droid tiles two exterior views and a wrist view, got {len(names)} views: {names}")
    if len(names) > _MAX_VIEWS:
        files.fault(f"at most {_MAX_VIEWS} views can be tiled, got {len(names)}: {names}")
    for name in names:
        resolution = files.metadata("modalities", "video", name, "resolution")
        path = f"metadata.json: {files.tag}.modalities.video.{name}"
        channels = files.metadata("modalities", "video", name, "channels", required=False)
        if channels not in (None, 3):
            files.fault(f"{path}.channels: expected 3, got {channels!r}")
        if isinstance(resolution, list) and len(resolution) == 2 and all(map(_is_size, resolution)):
            width, height = resolution
            expected_height, expected_width = camera_size or (height, width)
            yield Camera(name, expected_height, expected_width, recorded_height=height, recorded_width=width)
        elif resolution is not None:
            files.fault(f"{path}.resolution: expected [width, height], got {resolution!r}")


def _fps(files: _Files, cameras: tuple[Camera, ...]) -> float:
    rates = {camera.name: files.metadata("modalities", "video", camera.name, "fps") for camera in cameras}
    fps = next(iter(rates.values()), None)
    if isinstance(fps, int | float) and fps > 0 and all(rate == fps for rate in rates.values()):
        return float(fps)
    if rates and None not in rates.values():
        where = f"metadata.json: {files.tag}.modalities.video.*.fps"
        files.fault(f"{where}: expected one positive rate for all cameras, got {rates}")
    return 0.0


def _quantities(files: _Files, kind: Literal["state", "action"], horizon: int) -> tuple[Quantity, ...]:
    modes = _normalisations(files)
    steps = horizon if kind == "action" and files.flag("relative_action_per_horizon") else None
    quantities = []
    for key in _order(files, kind):
        shape = files.metadata("modalities", kind, key, "shape")
        if not isinstance(shape, list) or len(shape) != 1 or not _is_size(shape[0]):
            if shape is not None:
                where = f"metadata.json: {files.tag}.modalities.{kind}.{key}.shape"
                files.fault(f"{where}: expected [dim], got {shape!r}")
            continue
        mode = modes.get(f"{kind}.{key}", "none")
        if mode not in _STATISTICS_OF:
            where = f"{files.step_path('StateActionTransform')}.normalization_modes.{kind}.{key}"
            files.fault(f"{where}: expected one of {', '.join(_STATISTICS_OF)}, got {mode!r}")
            continue
        statistics = {name: _statistic(files, kind, key, name, shape[0], steps) for name in _STATISTICS_OF[mode]}
        training_range = _training_range(files, key, shape[0]) if kind == "state" else None
        quantities.append(Quantity(key, shape[0], mode, MappingProxyType(statistics), training_range=training_range))
    return tuple(quantities)


def _normalisations(files: _Files) -> dict[str, Any]:
    """Normalisation by `kind.key`. A key that no transform names is passed through."""
    modes: dict[str, Any] = {}
    for step in files.steps("StateActionTransform", "PerHorizonActionTransform"):
        modes.update(step.get("normalization_modes") or {})
        if rotations := step.get("target_rotations"):
            where = f"{files.step_path('StateActionTransform')}.target_rotations"
            files.fault(f"{where}: expected none (rotations are not converted), got {rotations}")
    return modes


def _statistic(files: _Files, kind: str, key: str, name: str, dim: int, steps: int | None) -> np.ndarray:
    """One statistic: [dim], or [steps, dim] where there is a list per step of the action horizon."""
    values = files.metadata("statistics", kind, key, name)
    array = _numbers(values)
    if array is not None and array.shape == (dim,):
        return array
    if array is not None and steps is not None and array.shape[1:] == (dim,) and len(array) >= steps:
        return array[:steps]
    if values is not None:
        where = f"metadata.json: {files.tag}.statistics.{kind}.{key}.{name}"
        expected = f"{dim} finite numbers" + (f" or at least {steps} lists of {dim}" if steps is not None else "")
        files.fault(f"{where}: expected {expected}, got {'other' if array is None else list(array.shape)}")
    return np.zeros(dim)


def _training_range(files: _Files, key: str, dim: int) -> tuple[np.ndarray, np.ndarray] | None:
    low, high = (_numbers(files.metadata("statistics", "state", key, end, required=False)) for end in ("min", "max"))
    if low is None or high is None or not low.shape == high.shape == (dim,):
        return None
    return low, high


def _with_relative(files: _Files, actions: tuple[Quantity, ...], state: tuple[Quantity, ...]) -> tuple[Quantity, ...]:
    """`actions`, marked relative as `relative_action_keys` says; each of those needs a state of its size."""
    per_horizon = files.flag("relative_action_per_horizon")
    if not (files.flag("relative_action") or per_horizon):
        return actions
    keys = files.conf("relative_action_keys")
    if keys is None:
        return actions
    if actions and not any(action.key in keys for action in actions):
        names = [action.key for action in actions]
        files.fault(f"conf.yaml: relative_action_keys is {keys!r}; none is an action of {files.tag}: {names}")
    state_dims = {quantity.key: quantity.dim for quantity in state}
    for action in (action for action in actions if action.key in keys):
        if state_dims.get(action.key) != action.dim:
            files.fault(
                f"conf.yaml: relative_action_keys: {action.key!r} has {action.dim} numbers as an action, "
                f"{state_dims.get(action.key, 'none')} as a state; a relative action needs its state"
            )
        if per_horizon and any(statistic.ndim != 2 for statistic in action.statistics.values()):
            where = f"metadata.json: {files.tag}.statistics.action.{action.key}"
            files.fault(f"{where}: relative_action_per_horizon needs a list per horizon step, got one list")
    return tuple(replace(action, relative=action.key in keys) for action in actions)


def _padded_dim(files: _Files, kind: str, quantities: tuple[Quantity, ...]) -> int:
    limit = files.step_size("DreamTransform", f"max_{kind}_dim")
    total = sum(quantity.dim for quantity in quantities)
    if limit and total > limit:
        path = f"{files.step_path('DreamTransform')}.max_{kind}_dim"
        files.fault(f"{path} is {limit}, but the {kind} keys have {total} numbers")
    return limit


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _numbers(values: Any) -> np.ndarray | None:
    """A read-only float64 array of finite numbers, or None."""
    try:
        array = np.array(values, dtype=np.float64)
    except (TypeError, ValueError):
        return None
    if not np.isfinite(array).all():
        return None
    array.flags.writeable = False
    return array
