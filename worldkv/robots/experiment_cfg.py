"""A checkpoint's experiment_cfg and an embodiment file, brought together to an `Embodiment`.

conf.yaml says how the model was trained: orders, sizes, normalisation. metadata.json holds sizes and statistics. The
file says how the robot names things, and all the rest where a release lacks conf.yaml. What two of them say must agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from worldkv.errors import CheckpointError
from worldkv.robots.dataset import ModelSizes, Trained, compare, from_conf, from_file, sizes_of
from worldkv.robots.embodiment import Camera, Embodiment, Normalisation, Quantity, RoboArena
from worldkv.robots.embodiment_file import EmbodimentFile, find_packaged, load_embodiment_file, packaged
from worldkv.robots.experiment_files import ExperimentFiles, is_size

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
    files = ExperimentFiles(conf, _completed(metadata, tag, file), tag)
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
        trained = from_conf(files) if conf else from_file(known, sizes)
        if file is not None and file not in packaged().values():
            _compare_sizes(files, metadata.get(tag) or {}, file)
        if conf and file is not None:
            compare(files, trained, from_file(file, sizes or sizes_of(trained)), sizes, file.action_horizon)
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


def _compare_sizes(files: ExperimentFiles, own: Mapping[str, Any], file: EmbodimentFile) -> None:
    """Where a user's file and metadata.json both say a size or a rate, they must agree."""
    said: list[tuple[str, Any, Any]] = []
    modalities = own.get("modalities") or {}
    for camera in file.cameras:
        known = (modalities.get("video") or {}).get(camera.name) or {}
        said.append((f"rate_hz {file.rate_hz:g}", known.get("fps"), file.rate_hz))
        if camera.resolution is not None:
            said.append(
                (f"resolution of {camera.name} {camera.resolution}", known.get("resolution"), camera.resolution[::-1])
            )
    for kind, entries in (("state", file.state), ("action", file.actions)):
        for entry in entries:
            known = (modalities.get(kind) or {}).get(entry.key) or {}
            if entry.dim is not None:
                said.append((f"dim of {kind} {entry.key} {entry.dim}", known.get("shape"), [entry.dim]))
    for what, there, here in said:
        if there is not None and there != here:
            files.fault(f"the embodiment file says {what}, metadata.json {there}: correct the file")


def _completed(metadata: Mapping[str, Any], tag: str, file: EmbodimentFile | None) -> Mapping[str, Any]:
    """`metadata` with what a user's file says of this robot: statistics, which go first, and sizes that it lacks."""
    if file is None:
        return metadata
    own = dict(metadata.get(tag) or {})
    statistics, modalities = dict(own.get("statistics") or {}), dict(own.get("modalities") or {})
    for kind, by_key in file.statistics.items():
        statistics[kind] = {**(statistics.get(kind) or {}), **by_key}
    for kind, entries in (("state", file.state), ("action", file.actions)):
        shapes = {entry.key: {"shape": [entry.dim]} for entry in entries if entry.dim is not None}
        modalities[kind] = {**shapes, **(modalities.get(kind) or {})}
    video = dict(modalities.get("video") or {})
    for camera in file.cameras:
        said: dict[str, Any] = {"fps": file.rate_hz}
        if camera.resolution is not None:
            said["resolution"] = camera.resolution[::-1]
        video[camera.name] = {**said, **(video.get(camera.name) or {})}
    modalities["video"] = video
    return {**metadata, tag: {**own, "statistics": statistics, "modalities": modalities}}


def _read(
    files: ExperimentFiles, trained: Trained, file: EmbodimentFile, camera_size: tuple[int, int] | None
) -> Embodiment:
    """The embodiment; without meaning where this noted a fault."""
    declared = files.metadata("embodiment_tag", required=False)
    if declared not in (None, files.tag):
        files.fault(f"metadata.json: {files.tag}.embodiment_tag: expected {files.tag!r}, got {declared!r}")
    state = _with_fields(files, _quantities(files, "state", trained), file)
    actions = _with_relative(files, _quantities(files, "action", trained), state, trained)
    cameras = tuple(_cameras(files, trained, file, camera_size))
    for kind, quantities, limit in (
        ("state", state, trained.max_state_dim),
        ("action", actions, trained.max_action_dim),
    ):
        total = sum(quantity.dim for quantity in quantities)
        if limit and total > limit:
            path = f"{files.step_path('DreamTransform')}.max_{kind}_dim"
            files.fault(f"{path} is {limit}, but the {kind} keys have {total} numbers")
    return Embodiment(
        tag=files.tag,
        cameras=cameras,
        state=state,
        actions=actions,
        crop_scale=trained.crop_scale,
        view_height=trained.view_size[0],
        view_width=trained.view_size[1],
        max_state_dim=trained.max_state_dim,
        max_action_dim=trained.max_action_dim,
        action_horizon=trained.action_horizon,
        text_len=trained.text_len,
        prompt_template=file.prompt,
        fps=_fps(files, cameras),
        layout=file.layout,
        frames_per_tick=file.frames_per_tick,
        roboarena=RoboArena(**file.roboarena.model_dump()),
    )


def _cameras(
    files: ExperimentFiles, trained: Trained, file: EmbodimentFile, camera_size: tuple[int, int] | None
) -> Iterable[Camera]:
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
        resolution = files.metadata("modalities", "video", name, "resolution")
        path = f"metadata.json: {files.tag}.modalities.video.{name}"
        channels = files.metadata("modalities", "video", name, "channels", required=False)
        if channels not in (None, 3):
            files.fault(f"{path}.channels: expected 3, got {channels!r}")
        if isinstance(resolution, list) and len(resolution) == 2 and all(map(is_size, resolution)):
            width, height = resolution
            expected_height, expected_width = camera_size or (height, width)
            yield Camera(name, expected_height, expected_width, height, width, entry.field, entry.optional)
        elif resolution is not None:
            files.fault(f"{path}.resolution: expected [width, height], got {resolution!r}")


def _fps(files: ExperimentFiles, cameras: tuple[Camera, ...]) -> float:
    rates = {camera.name: files.metadata("modalities", "video", camera.name, "fps") for camera in cameras}
    fps = next(iter(rates.values()), None)
    if isinstance(fps, int | float) and fps > 0 and all(rate == fps for rate in rates.values()):
        return float(fps)
    if rates and None not in rates.values():
        where = f"metadata.json: {files.tag}.modalities.video.*.fps"
        files.fault(f"{where}: expected one positive rate for all cameras, got {rates}")
    return 0.0


def _quantities(files: ExperimentFiles, kind: Literal["state", "action"], trained: Trained) -> tuple[Quantity, ...]:
    steps = trained.action_horizon if kind == "action" and trained.statistics_per_step else None
    quantities = []
    for key in trained.state if kind == "state" else trained.actions:
        shape = files.metadata("modalities", kind, key, "shape")
        if not isinstance(shape, list) or len(shape) != 1 or not is_size(shape[0]):
            if shape is not None:
                where = f"metadata.json: {files.tag}.modalities.{kind}.{key}.shape"
                files.fault(f"{where}: expected [dim], got {shape!r}")
            continue
        mode = trained.modes.get(f"{kind}.{key}", "none")
        if mode not in _STATISTICS_OF:
            where = f"{files.step_path('StateActionTransform')}.normalization_modes.{kind}.{key}"
            files.fault(f"{where}: expected one of {', '.join(_STATISTICS_OF)}, got {mode!r}")
            continue
        statistics = {name: _statistic(files, kind, key, name, shape[0], steps) for name in _STATISTICS_OF[mode]}
        training_range = _training_range(files, key, shape[0]) if kind == "state" else None
        quantities.append(Quantity(key, shape[0], mode, MappingProxyType(statistics), training_range=training_range))
    return tuple(quantities)


def _with_fields(files: ExperimentFiles, state: tuple[Quantity, ...], file: EmbodimentFile) -> tuple[Quantity, ...]:
    """`state`, with each key's name in an observation and what it may be."""
    entries = {entry.key: entry for entry in file.state}
    named = []
    for quantity in state:
        entry = entries.get(quantity.key)
        if entry is None:
            files.fault(f"the embodiment file has no state {quantity.key!r}, only {list(entries)}")
            continue
        allowed = (entry.range[0], entry.range[1]) if entry.range is not None else None
        named.append(replace(quantity, field=entry.field, allowed=allowed, meaning=entry.meaning))
    return tuple(named)


def _statistic(files: ExperimentFiles, kind: str, key: str, name: str, dim: int, steps: int | None) -> np.ndarray:
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


def _training_range(files: ExperimentFiles, key: str, dim: int) -> tuple[np.ndarray, np.ndarray] | None:
    low, high = (_numbers(files.metadata("statistics", "state", key, end, required=False)) for end in ("min", "max"))
    if low is None or high is None or not low.shape == high.shape == (dim,):
        return None
    return low, high


def _with_relative(
    files: ExperimentFiles, actions: tuple[Quantity, ...], state: tuple[Quantity, ...], trained: Trained
) -> tuple[Quantity, ...]:
    """`actions`, those that were trained so marked relative; each of those needs a state of its size."""
    state_dims = {quantity.key: quantity.dim for quantity in state}
    for action in (action for action in actions if action.key in trained.relative):
        if state_dims.get(action.key) != action.dim:
            files.fault(
                f"conf.yaml: relative_action_keys: {action.key!r} has {action.dim} numbers as an action, "
                f"{state_dims.get(action.key, 'none')} as a state; a relative action needs its state"
            )
        if trained.statistics_per_step and any(statistic.ndim != 2 for statistic in action.statistics.values()):
            where = f"metadata.json: {files.tag}.statistics.action.{action.key}"
            files.fault(f"{where}: relative_action_per_horizon needs a list per horizon step, got one list")
    return tuple(replace(action, relative=action.key in trained.relative) for action in actions)


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
