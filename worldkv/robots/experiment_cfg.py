"""A checkpoint's experiment_cfg: how the model was trained, by conf.yaml; sizes and statistics, by metadata.json.

Reads by path and notes faults; opens no file. Does not know embodiment files: `dataset` brings the two together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

_DEFAULT_TEXT_LEN = 512  # DreamTransform's own default; configs may leave it out


class ExperimentCfg:
    """conf.yaml and metadata.json, read by path. Faults are noted, not raised, so that one run finds them all."""

    def __init__(self, conf: Mapping[str, Any], metadata: Mapping[str, Any], tag: str) -> None:
        self._roots = {"conf.yaml": conf, "metadata.json": metadata}
        self.tag = tag
        self.faults: list[str] = []

    def fault(self, text: str) -> None:
        if text not in self.faults:
            self.faults.append(text)

    def expect(self, holds: bool, where: str, expected: str, got: object) -> bool:
        """Notes a fault unless it holds."""
        if not holds:
            self.fault(f"{where}: expected {expected}, got {got!r}")
        return holds

    def readable(self) -> bool:
        """Whether the embodiment is there at all; nothing else can be checked before."""
        if not self._roots["conf.yaml"]:
            return self.metadata() is not None
        steps = self.conf("transforms", self.tag, "transforms")
        if steps is not None:
            self.expect(isinstance(steps, list), f"conf.yaml: transforms.{self.tag}.transforms", "a list", steps)
        return self.metadata() is not None and isinstance(steps, list)

    def conf(self, *path: str, required: bool = True) -> Any:
        return self._get("conf.yaml", path, required)

    def metadata(self, *path: str, required: bool = True) -> Any:
        """The value at `path` under the embodiment's own entry."""
        return self._get("metadata.json", (self.tag, *path), required)

    def metadata_path(self, *path: str) -> str:
        return f"metadata.json: {'.'.join((self.tag, *path))}"

    def _get(self, file: str, path: tuple[str, ...], required: bool) -> Any:
        value: Any = self._roots[file]
        for depth, key in enumerate(path, start=1):
            if not isinstance(value, Mapping) or key not in value:
                if required:
                    self.fault(f"{file}: {'.'.join(path[:depth])}: missing")
                return None
            value = value[key]
        return value

    def steps(self, *classes: str) -> list[Mapping[str, Any]]:
        """The transforms whose `_target_` ends in one of these class names."""
        steps = self._roots["conf.yaml"]["transforms"][self.tag]["transforms"]
        return [s for s in steps if isinstance(s, Mapping) and str(s.get("_target_")).split(".")[-1] in classes]

    def step_path(self, name: str, key: str) -> str:
        return f"conf.yaml: transforms.{self.tag}.transforms[{name}].{key}"

    def step_value(self, name: str, key: str, default: Any = None) -> Any:
        """Argument `key` of the transform called `name`."""
        steps = self.steps(name)
        value = steps[0].get(key, default) if steps else None
        if value is None:
            path = self.step_path(name, key)
            self.fault(f"{path if steps else path.removesuffix('.' + key)}: missing")
        return value

    def step_size(self, name: str, key: str, default: int | None = None) -> int:
        """As `step_value`, a positive whole number; 0 where there is a fault."""
        value = self.step_value(name, key, default)
        if value is not None:
            self.expect(is_size(value), self.step_path(name, key), "a positive whole number", value)
        return value if is_size(value) else 0


@dataclass(frozen=True)
class ModelSizes:
    """The sizes of the model's vectors, as config.json says them, for where conf.yaml does not."""

    action_horizon: int
    max_state_dim: int
    max_action_dim: int
    text_len: int


@dataclass(frozen=True)
class Trained:
    """The training, as conf.yaml or an embodiment file tells it. Keys without their `kind.` prefix."""

    cameras: list[str]
    state: list[str]
    actions: list[str]
    modes: Mapping[str, Any]  # normalisation by `kind.key`
    relative: frozenset[str]
    statistics_per_step: bool
    crop_scale: float
    view_size: tuple[int, int]
    sizes: ModelSizes


def read_training(files: ExperimentCfg) -> Trained:
    """Without meaning where this noted a fault."""
    crop_scale = files.step_value("VideoCrop", "scale", default=0.0)
    is_scale = isinstance(crop_scale, int | float) and 0 < crop_scale <= 1
    files.expect(is_scale, files.step_path("VideoCrop", "scale"), "a number in (0, 1]", crop_scale)
    interpolation = files.step_value("VideoResize", "interpolation", default="linear")
    is_linear = interpolation in ("linear", "bilinear")
    files.expect(is_linear, files.step_path("VideoResize", "interpolation"), "linear", interpolation)
    horizon = files.step_size("DreamTransform", "action_horizon")
    stated = files.conf("action_horizon", required=False)
    if horizon and stated not in (None, horizon):
        path = files.step_path("DreamTransform", "action_horizon")
        files.fault(f"conf.yaml: action_horizon is {stated!r}, but {path} is {horizon}")
    actions = _order(files, "action")
    per_step = bool(files.conf("relative_action_per_horizon", required=False))
    any_relative = files.conf("relative_action", required=False) or per_step
    relative = files.conf("relative_action_keys") if any_relative else None
    if relative is not None and not (isinstance(relative, list) and all(isinstance(key, str) for key in relative)):
        files.fault(f"conf.yaml: relative_action_keys: expected a list of names, got {relative!r}")
        relative = []
    if relative and actions and not set(actions) & set(relative):
        files.fault(f"conf.yaml: relative_action_keys is {relative!r}; none is an action of {files.tag}: {actions}")
    return Trained(
        cameras=_order(files, "video"),
        state=_order(files, "state"),
        actions=actions,
        modes=_normalisations(files),
        relative=frozenset(relative or ()) & set(actions),
        statistics_per_step=per_step,
        crop_scale=crop_scale,
        view_size=(files.step_size("VideoResize", "height"), files.step_size("VideoResize", "width")),
        sizes=ModelSizes(
            horizon,
            files.step_size("DreamTransform", "max_state_dim"),
            files.step_size("DreamTransform", "max_action_dim"),
            files.step_size("DreamTransform", "max_length", _DEFAULT_TEXT_LEN),
        ),
    )


def _order(files: ExperimentCfg, kind: Literal["video", "state", "action"]) -> list[str]:
    """The keys of this kind in the order in which they are concatenated, without their `kind.` prefix."""
    path = files.step_path("ConcatTransform", f"{kind}_concat_order")
    keys = files.step_value("ConcatTransform", f"{kind}_concat_order")
    is_list = isinstance(keys, list) and bool(keys) and all(isinstance(key, str) for key in keys)
    if keys is None or not files.expect(is_list, path, "a list of names", keys):
        return []
    declared = files.conf("modality_configs", files.tag, kind, "modality_keys")
    if isinstance(declared, list) and sorted(map(str, declared)) != sorted(keys):
        files.fault(f"{path} is {keys}, but modality_configs.{files.tag}.{kind}.modality_keys is {declared}")
    return [key.removeprefix(f"{kind}.") for key in keys]


def _normalisations(files: ExperimentCfg) -> dict[str, Any]:
    """Normalisation by `kind.key`. A key that no transform names is passed through."""
    modes: dict[str, Any] = {}
    for step in files.steps("StateActionTransform", "PerHorizonActionTransform"):
        modes.update(step.get("normalization_modes") or {})
        path, rotations = files.step_path("StateActionTransform", "target_rotations"), step.get("target_rotations")
        files.expect(not rotations, path, "none (rotations are not converted)", rotations)
    return modes


def is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
