"""How a model was trained: the order of its cameras and keys, their normalisation, sizes; by conf.yaml or by a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from worldkv.robots.embodiment_file import EmbodimentFile
from worldkv.robots.experiment_files import ExperimentFiles

Kind = Literal["video", "state", "action"]
_DEFAULT_TEXT_LEN = 512  # DreamTransform's own default; configs may leave it out


@dataclass(frozen=True)
class ModelSizes:
    """What config.json says of the model's vectors, for where conf.yaml does not."""

    action_horizon: int
    max_state_dim: int
    max_action_dim: int
    text_len: int


@dataclass(frozen=True)
class Trained:
    """How the model was trained, by conf.yaml or by an embodiment file. Keys without their `kind.` prefix."""

    cameras: list[str]
    state: list[str]
    actions: list[str]
    modes: Mapping[str, Any]  # normalisation by `kind.key`
    relative: frozenset[str]
    statistics_per_step: bool
    crop_scale: float
    view_size: tuple[int, int]
    action_horizon: int
    max_state_dim: int
    max_action_dim: int
    text_len: int


def from_conf(files: ExperimentFiles) -> Trained:
    """Without meaning where this noted a fault."""
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
    actions = _order(files, "action")
    per_step = files.flag("relative_action_per_horizon")
    relative = files.conf("relative_action_keys") if files.flag("relative_action") or per_step else None
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
        action_horizon=horizon,
        max_state_dim=files.step_size("DreamTransform", "max_state_dim"),
        max_action_dim=files.step_size("DreamTransform", "max_action_dim"),
        text_len=files.step_size("DreamTransform", "max_length", _DEFAULT_TEXT_LEN),
    )


def from_file(file: EmbodimentFile, sizes: ModelSizes | None) -> Trained:
    assert sizes is not None, "without conf.yaml the model's own sizes are needed"
    modes = {f"state.{entry.key}": entry.normalisation for entry in file.state}
    modes |= {f"action.{entry.key}": entry.normalisation for entry in file.actions}
    height, width = file.view_size
    return Trained(
        cameras=[camera.name for camera in file.cameras],
        state=[entry.key for entry in file.state],
        actions=[entry.key for entry in file.actions],
        modes=modes,
        relative=frozenset(entry.key for entry in file.actions if entry.relative),
        statistics_per_step=file.statistics_per_step,
        crop_scale=file.crop_scale,
        view_size=(height, width),
        action_horizon=file.action_horizon or sizes.action_horizon,
        max_state_dim=sizes.max_state_dim,
        max_action_dim=sizes.max_action_dim,
        text_len=sizes.text_len,
    )


def sizes_of(trained: Trained) -> ModelSizes:
    return ModelSizes(**{field.name: getattr(trained, field.name) for field in fields(ModelSizes)})


def compare(
    files: ExperimentFiles, conf: Trained, file: Trained, sizes: ModelSizes | None, own_horizon: int | None
) -> None:
    """Where a user's file and conf.yaml say different things, one of them would be silently wrong.

    The file's sizes are config.json's but for a horizon of its own.
    """
    of_model = {field.name for field in fields(ModelSizes)}
    for field in fields(Trained):
        said, own = getattr(conf, field.name), getattr(file, field.name)
        if field.name == "modes":  # a key that conf.yaml does not name is passed through
            said = {key: said.get(key, "none") for key in own}
        if said != own and field.name in of_model and not (field.name == "action_horizon" and own_horizon):
            files.fault(f"config.json says {field.name} {own}, conf.yaml {said}")
        elif said != own:
            said, own = (sorted(v) if isinstance(v, frozenset) else v for v in (said, own))
            files.fault(f"the embodiment file says {field.name} {own}, conf.yaml {said}: correct the file")


def _order(files: ExperimentFiles, kind: Kind) -> list[str]:
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


def _normalisations(files: ExperimentFiles) -> dict[str, Any]:
    """Normalisation by `kind.key`. A key that no transform names is passed through."""
    modes: dict[str, Any] = {}
    for step in files.steps("StateActionTransform", "PerHorizonActionTransform"):
        modes.update(step.get("normalization_modes") or {})
        if rotations := step.get("target_rotations"):
            where = f"{files.step_path('StateActionTransform')}.target_rotations"
            files.fault(f"{where}: expected none (rotations are not converted), got {rotations}")
    return modes
