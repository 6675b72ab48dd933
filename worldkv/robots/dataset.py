"""The layout of a model's training data: experiment_cfg and an embodiment file, brought together to an `Embodiment`.

conf.yaml says how the model was trained: orders, sizes, normalisation. metadata.json holds sizes and statistics. The
file says how the robot names things, and all the rest where a release lacks conf.yaml. What two of them say must agree.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from worldkv.errors import CheckpointError
from worldkv.robots.embodiment import Camera, Embodiment, Normalisation, Quantity, RoboArena
from worldkv.robots.embodiment_file import EmbodimentFile, find_packaged, load_embodiment_file, packaged
from worldkv.robots.experiment_cfg import ExperimentCfg, ModelSizes, Trained, is_size, read_training

__all__ = ["ModelSizes", "find_embodiment", "read_embodiment"]

_STATISTICS_OF: Mapping[Normalisation, tuple[str, ...]] = {
    "none": (),
    "q99": ("q01", "q99"),
    "mean_std": ("mean", "std"),
    "min_max": ("min", "max"),
    "scale": ("min", "max"),
    "binary": (),
}


def read_embodiment(
    conf: Mapping[str, Any],
    metadata: Mapping[str, Any],
    tag: str = "oxe_droid",
    *,
    file: EmbodimentFile | None = None,
    sizes: ModelSizes | None = None,
    camera_size: tuple[int, int] | None = None,
) -> Embodiment:
    """The embodiment `tag` of conf.yaml and metadata.json, given as dictionaries.

    `file`: the user's own, which must not contradict conf.yaml, and stands in for it where it is empty (then `sizes` is
    needed); without it the packaged file of that tag is used, and conf.yaml goes before it. `camera_size`: (height,
    width) that config.json's target_video_height and target_video_width demand of clients in place of the recorded
    resolution. Raises CheckpointError that lists every fault with its path.
    """
    files = ExperimentCfg(conf, _completed(metadata, tag, file), tag)
    known = file or find_packaged(tag)
    if known is None:
        files.fault(
            f"nothing is known of a robot {tag!r}: its prompt and its names on the wire; packaged are "
            f"{', '.join(packaged())}; give your own with --embodiment FILE (docs/embodiments.md)"
        )
    elif not conf and file is None:
        files.fault(
            "experiment_cfg/conf.yaml is missing: it says how observations and actions are ordered and scaled; put "
            f"the training run's there, or give --embodiment NAME or FILE (packaged: {', '.join(packaged())})"
        )
    elif not metadata and not file:
        files.fault("experiment_cfg/metadata.json is missing: it holds what states and actions are scaled by")
    elif files.readable():
        trained = read_training(files) if conf else _from_file(known, sizes)
        if file is not None and file not in packaged().values():
            _compare_with_metadata(files, metadata.get(tag) or {}, file)
        if conf and file is not None:
            _compare_with_conf(files, trained, _from_file(file, sizes or trained.sizes), file)
        embodiment = _read(files, trained, known, camera_size)
        if not files.faults:
            return embodiment
    listing = "\n".join(f"  - {fault}" for fault in files.faults)
    raise CheckpointError(f"experiment_cfg does not describe the embodiment {tag!r}:\n{listing}")


def find_embodiment(
    name: str | Path | None, conf: Mapping[str, Any], metadata: Mapping[str, Any]
) -> tuple[str, EmbodimentFile | None]:
    """(tag, file) for `read_embodiment`.

    `name`: a packaged file's, one of its tags, or a path; None is the checkpoint's own robot (DROID, or the only one).
    A packaged file stands behind conf.yaml, a user's own beside it.
    """
    if name is None:
        return ("oxe_droid" if "oxe_droid" in metadata or len(metadata) != 1 else next(iter(metadata))), None
    known = find_packaged(str(name))
    if known is None and not (Path(name).suffix in (".yaml", ".yml") or Path(name).exists()):
        return str(name), None
    file = known or load_embodiment_file(name)
    tag = str(name) if str(name) in file.tags else next((tag for tag in file.tags if tag in metadata), file.tags[0])
    return tag, None if known is not None and conf else file


def _from_file(file: EmbodimentFile, sizes: ModelSizes | None) -> Trained:
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
        sizes=replace(sizes, action_horizon=file.action_horizon or sizes.action_horizon),
    )


def _compare_with_conf(files: ExperimentCfg, conf: Trained, own: Trained, file: EmbodimentFile) -> None:
    """Where a user's file, config.json and conf.yaml say different things, one of them would be silently wrong."""
    for name in (field.name for field in fields(Trained) if field.name != "sizes"):
        said, here = getattr(conf, name), getattr(own, name)
        if name == "modes":  # a key that conf.yaml does not name is passed through
            said = {key: said.get(key, "none") for key in here}
        if said != here:
            said, here = (sorted(value) if isinstance(value, frozenset) else value for value in (said, here))
            files.fault(f"the embodiment file says {name} {here}, conf.yaml {said}: correct the file")
    for name in (field.name for field in fields(ModelSizes)):
        said, here = getattr(conf.sizes, name), getattr(own.sizes, name)
        if said != here and name == "action_horizon" and file.action_horizon:
            files.fault(f"the embodiment file says {name} {here}, conf.yaml {said}: correct the file")
        elif said != here:
            files.fault(f"config.json says {name} {here}, conf.yaml {said}")


def _said(file: EmbodimentFile) -> Iterator[tuple[str, str, str, Any, str]]:
    """The file's part of metadata.json: modality, key, field, value, and the file's own words for it."""
    for camera in file.cameras:
        yield "video", camera.name, "fps", file.rate_hz, f"rate_hz {file.rate_hz:g}"
        if camera.resolution is not None:
            words = f"resolution of {camera.name} {camera.resolution}"
            yield "video", camera.name, "resolution", camera.resolution[::-1], words
    for kind, entries in (("state", file.state), ("action", file.actions)):
        for entry in entries:
            if entry.dim is not None:
                yield kind, entry.key, "shape", [entry.dim], f"dim of {kind} {entry.key} {entry.dim}"


def _completed(metadata: Mapping[str, Any], tag: str, file: EmbodimentFile | None) -> Mapping[str, Any]:
    """`metadata` with a user's file's statistics of this robot, which go first, and the sizes that it lacks."""
    if file is None:
        return metadata
    own = dict(metadata.get(tag) or {})
    statistics, modalities = dict(own.get("statistics") or {}), dict(own.get("modalities") or {})
    for kind, by_key in file.statistics.items():
        statistics[kind] = {**(statistics.get(kind) or {}), **by_key}
    for modality, key, field, value, _ in _said(file):
        keys = modalities[modality] = dict(modalities.get(modality) or {})
        known = keys.get(key) or {}
        keys[key] = {field: value, **known} if isinstance(known, Mapping) else known
    return {**metadata, tag: {**own, "statistics": statistics, "modalities": modalities}}


def _compare_with_metadata(files: ExperimentCfg, own: Mapping[str, Any], file: EmbodimentFile) -> None:
    """Where a user's file and metadata.json both say a size or a rate, they must agree."""
    modalities = own.get("modalities") or {}
    for modality, key, field, here, words in _said(file):
        there = ((modalities.get(modality) or {}).get(key) or {}).get(field)
        if there is not None and there != here:
            files.fault(f"the embodiment file says {words}, metadata.json {there}: correct the file")


def _read(
    files: ExperimentCfg, trained: Trained, file: EmbodimentFile, camera_size: tuple[int, int] | None
) -> Embodiment:
    """The embodiment; without meaning where this noted a fault."""
    declared = files.metadata("embodiment_tag", required=False)
    is_same = declared in (None, files.tag)
    files.expect(is_same, files.metadata_path("embodiment_tag"), repr(files.tag), declared)
    state = tuple(_state(files, trained, file))
    actions = tuple(_actions(files, trained, {quantity.key: quantity.dim for quantity in state}))
    cameras = tuple(_cameras(files, trained, file, camera_size))
    sizes = trained.sizes
    for kind, quantities, limit in (("state", state, sizes.max_state_dim), ("action", actions, sizes.max_action_dim)):
        total = sum(quantity.dim for quantity in quantities)
        if limit and total > limit:
            path = files.step_path("DreamTransform", f"max_{kind}_dim")
            files.fault(f"{path} is {limit}, but the {kind} keys have {total} numbers")
    return Embodiment(
        tag=files.tag,
        cameras=cameras,
        state=state,
        actions=actions,
        crop_scale=trained.crop_scale,
        view_height=trained.view_size[0],
        view_width=trained.view_size[1],
        max_state_dim=sizes.max_state_dim,
        max_action_dim=sizes.max_action_dim,
        action_horizon=sizes.action_horizon,
        text_len=sizes.text_len,
        prompt_template=file.prompt,
        fps=_fps(files, cameras),
        layout=file.layout,
        frames_per_tick=file.frames_per_tick,
        roboarena=RoboArena(**file.roboarena.model_dump()),
    )


def _cameras(
    files: ExperimentCfg, trained: Trained, file: EmbodimentFile, camera_size: tuple[int, int] | None
) -> Iterator[Camera]:
    entries = {camera.name: camera for camera in file.cameras}
    if trained.cameras and len(trained.cameras) != len(entries):
        files.fault(
            f"the model was trained with {len(trained.cameras)} views {trained.cameras}, the embodiment file has "
            f"{len(entries)}: {list(entries)}"
        )
    for name in trained.cameras:
        entry = entries.get(name)
        if entry is None:
            files.fault(f"the embodiment file has no camera {name!r}, only {list(entries)}")
            continue
        path = ("modalities", "video", name)
        resolution = files.metadata(*path, "resolution")
        channels = files.metadata(*path, "channels", required=False)
        files.expect(channels in (None, 3), files.metadata_path(*path, "channels"), "3", channels)
        if resolution is None:
            continue
        is_pair = isinstance(resolution, list) and len(resolution) == 2 and all(map(is_size, resolution))
        if files.expect(is_pair, files.metadata_path(*path, "resolution"), "[width, height]", resolution):
            width, height = resolution
            expected_height, expected_width = camera_size or (height, width)
            yield Camera(name, expected_height, expected_width, height, width, entry.field, entry.optional)


def _fps(files: ExperimentCfg, cameras: tuple[Camera, ...]) -> float:
    rates = {camera.name: files.metadata("modalities", "video", camera.name, "fps") for camera in cameras}
    fps = next(iter(rates.values()), None)
    if isinstance(fps, int | float) and fps > 0 and all(rate == fps for rate in rates.values()):
        return float(fps)
    if rates and None not in rates.values():
        where = files.metadata_path("modalities", "video", "*", "fps")
        files.expect(False, where, "one positive rate for all cameras", rates)
    return 0.0


def _state(files: ExperimentCfg, trained: Trained, file: EmbodimentFile) -> Iterator[Quantity]:
    """Each key with its name in an observation, its range in training, and the range it may have."""
    entries = {entry.key: entry for entry in file.state}
    for key in trained.state:
        quantity, entry = _quantity(files, "state", key, trained), entries.get(key)
        if entry is None:
            files.fault(f"the embodiment file has no state {key!r}, only {list(entries)}")
        elif quantity is not None:
            seen, allowed = _training_range(files, key, quantity.dim), entry.range
            yield replace(
                quantity,
                training_range=seen,
                field=entry.field,
                allowed=None if allowed is None else (allowed[0], allowed[1]),
                meaning=entry.meaning,
            )


def _actions(files: ExperimentCfg, trained: Trained, state_dims: Mapping[str, int]) -> Iterator[Quantity]:
    """Each key, marked if it was trained relative to the state of the same key, which must be there then."""
    for key in trained.actions:
        action, is_relative = _quantity(files, "action", key, trained), key in trained.relative
        if action is None:
            continue
        if is_relative and state_dims.get(key) != action.dim:
            files.fault(
                f"conf.yaml: relative_action_keys: {key!r} has {action.dim} numbers as an action, "
                f"{state_dims.get(key, 'none')} as a state; a relative action needs its state"
            )
        if is_relative and trained.statistics_per_step and any(s.ndim != 2 for s in action.statistics.values()):
            where = files.metadata_path("statistics", "action", key)
            files.fault(f"{where}: relative_action_per_horizon needs a list per horizon step, got one list")
        yield replace(action, relative=is_relative)


def _quantity(files: ExperimentCfg, kind: Literal["state", "action"], key: str, trained: Trained) -> Quantity | None:
    """Size, normalisation and statistics; None where they are not said."""
    path = ("modalities", kind, key, "shape")
    shape = files.metadata(*path)
    is_shape = isinstance(shape, list) and len(shape) == 1 and is_size(shape[0])
    if shape is None or not files.expect(is_shape, files.metadata_path(*path), "[dim]", shape):
        return None
    mode = trained.modes.get(f"{kind}.{key}", "none")
    where = files.step_path("StateActionTransform", f"normalization_modes.{kind}.{key}")
    if not files.expect(mode in _STATISTICS_OF, where, f"one of {', '.join(_STATISTICS_OF)}", mode):
        return None
    steps = trained.sizes.action_horizon if kind == "action" and trained.statistics_per_step else None
    statistics = {name: _statistic(files, kind, key, name, shape[0], steps) for name in _STATISTICS_OF[mode]}
    return Quantity(key, shape[0], mode, MappingProxyType(statistics))


def _statistic(files: ExperimentCfg, kind: str, key: str, name: str, dim: int, steps: int | None) -> np.ndarray:
    """One statistic: [dim], or [steps, dim] where there is a list per step of the action horizon."""
    values = files.metadata("statistics", kind, key, name)
    array = _numbers(values)
    if array is not None and array.shape == (dim,):
        return array
    if array is not None and steps is not None and array.shape[1:] == (dim,) and len(array) >= steps:
        return array[:steps]
    if values is not None:
        expected = f"{dim} finite numbers" + (f" or at least {steps} lists of {dim}" if steps is not None else "")
        got = "other" if array is None else list(array.shape)
        files.fault(f"{files.metadata_path('statistics', kind, key, name)}: expected {expected}, got {got}")
    return np.zeros(dim)


def _training_range(files: ExperimentCfg, key: str, dim: int) -> tuple[np.ndarray, np.ndarray] | None:
    low, high = (_numbers(files.metadata("statistics", "state", key, end, required=False)) for end in ("min", "max"))
    if low is None or high is None or not low.shape == high.shape == (dim,):
        return None
    return low, high


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
