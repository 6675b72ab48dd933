"""A robot as a model sees it and as the wire names it: cameras, state and action vectors with their statistics, the
prompt's template.

Frozen data. Does not know where it was read from (`dataset.py`, `embodiment_file.py`), what a pixel is
(`transforms.py`) or what a session is (`policy.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

Normalisation = Literal["none", "q99", "mean_std", "min_max", "scale", "binary"]
Layout = Literal["single", "wrist_over_exteriors", "grid"]


@dataclass(frozen=True)
class Camera:
    """One view. `height`, `width`: pixels expected of clients; `recorded_*`: of the training recordings.

    They differ only where config.json overrides the resolution (the 5B kind); clients may then send either. `field`:
    its name in an observation. `optional`: training saw a black screen in its place at times.
    """

    name: str
    height: int
    width: int
    recorded_height: int
    recorded_width: int
    field: str
    optional: bool = False


@dataclass(frozen=True, eq=False)
class Quantity:
    """One named run of numbers in the state or action vector.

    `statistics`: read-only float64 arrays by name, [dim], or [steps, dim]: one row per step of the horizon.
    `relative`: the model predicts the difference to the last observed state of the same key.
    `training_range`: (min, max), each [dim], of the training data, where the checkpoint states it.
    `field`: a state's name in an observation. `allowed`: (low, high) of what it may be, in place of the training's
    range; `meaning` says what the ends are.
    """

    key: str
    dim: int
    normalisation: Normalisation
    statistics: Mapping[str, np.ndarray]
    relative: bool = False
    training_range: tuple[np.ndarray, np.ndarray] | None = None
    field: str = ""
    allowed: tuple[float, float] | None = None
    meaning: str = ""


@dataclass(frozen=True)
class RoboArena:
    """This robot's part of the RoboArena dialect's greeting."""

    needs_wrist_camera: bool
    n_external_cameras: int
    action_space: str


@dataclass(frozen=True, eq=False)
class Embodiment:
    """Everything that stands between a robot's observation and the model, and back.

    `cameras`, `state`, `actions`: in the order in which the model concatenates them. `crop_scale`: side of
    the centre crop relative to the image's. `view_height`, `view_width`: pixels of one view after the resize.
    `layout`: how the views share the model's image; `tiling.tile_views` draws it. `fps`: control and recording rate in
    Hz. `frames_per_tick`: of each camera, in every tick but the first after an opening or a reset, which has one.
    """

    tag: str
    cameras: tuple[Camera, ...]
    state: tuple[Quantity, ...]
    actions: tuple[Quantity, ...]
    crop_scale: float
    view_height: int
    view_width: int
    max_state_dim: int
    max_action_dim: int
    action_horizon: int
    text_len: int
    prompt_template: str
    fps: float
    layout: Layout
    frames_per_tick: int
    roboarena: RoboArena

    @property
    def action_dim(self) -> int:
        """Numbers in one robot action; the model's own action vector is padded to `max_action_dim`."""
        return sum(quantity.dim for quantity in self.actions)

    @property
    def image_size(self) -> tuple[int, int]:
        """(height, width) in pixels of the image that the model sees."""
        side = 1 if self.layout == "single" else 2
        return side * self.view_height, side * self.view_width
