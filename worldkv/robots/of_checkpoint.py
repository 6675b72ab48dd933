"""The robot that a DreamZero checkpoint is for, by its folder, checked against the model's sizes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from worldkv.errors import CheckpointError
from worldkv.models.dreamzero.config import DreamZeroConfig
from worldkv.models.dreamzero.folder import WORLDKV_FILE
from worldkv.models.wan.config import VAE_TEMPORAL_STRIDE
from worldkv.robots.dataset import ModelSizes, find_embodiment, read_embodiment
from worldkv.robots.embodiment import Embodiment
from worldkv.robots.embodiment_file import EmbodimentFile, from_mapping


class Described(Protocol):
    """A folder's own words: a Checkpoint, or its Description where it cannot be opened as one."""

    @property
    def config(self) -> DreamZeroConfig: ...
    @property
    def conf(self) -> Mapping[str, Any]: ...
    @property
    def metadata(self) -> Mapping[str, Any]: ...
    @property
    def embodiments(self) -> Mapping[str, Any]: ...


def checkpoint_embodiment(described: Described, name: str | Path | None = None) -> Embodiment:
    """The robot that a checkpoint is for. `name`: a packaged embodiment, a tag in metadata.json, or a file; None is the
    checkpoint's own. Raises CheckpointError with all that is missing or contradicts itself."""
    model, conf, metadata, own = described.config, described.conf, described.metadata, described.embodiments
    camera_size = None
    if model.target_video_height is not None and model.target_video_width is not None:
        camera_size = (model.target_video_height, model.target_video_width)
    sizes = ModelSizes(model.action_horizon, model.dit.max_state_dim, model.dit.action_dim, model.dit.text_len)
    tag = next(iter(own), "") if name is None else str(name)
    file: EmbodimentFile | None
    if tag in own:
        file = from_mapping(own[tag], f"{WORLDKV_FILE}: embodiments.{tag}")
    else:
        tag, file = find_embodiment(name, conf, metadata)
    robot = read_embodiment(conf, metadata, tag, file=file, sizes=sizes, camera_size=camera_size)
    height, width = camera_size or robot.image_size
    tokens = model.dit.tokens_of_image(height, width)
    if tokens != model.dit.frame_tokens:
        raise CheckpointError(
            f"embodiment {robot.tag!r}: view_size makes an image of {height} x {width} pixels, {tokens} tokens, but "
            f"config.json says frame_seqlen {model.dit.frame_tokens}"
        )
    counts = [VAE_TEMPORAL_STRIDE * n for n in range(1, model.frames_per_chunk + 1) if model.frames_per_chunk % n == 0]
    if robot.frames_per_tick not in counts:
        raise CheckpointError(
            f"embodiment {robot.tag!r}: frames_per_tick: expected one of {counts} for this model, got "
            f"{robot.frames_per_tick}"
        )
    return robot
