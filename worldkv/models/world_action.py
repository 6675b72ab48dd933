"""World-action models: from what a robot saw, the next frames and the actions that lead there.

What such a model is given and gives at each tick, whatever its family; the robots' room knows no more of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from worldkv.models.base import Encode, StateT, WorldModel


@dataclass(frozen=True)
class TickInputs:
    """The inputs of one tick. `state` is normalised and zero-padded; `frames` are tiled camera images.

    An imagined tick has no frames: it takes `latents` for observed, or else what the tick before predicted. Noise
    that is None is drawn from `noise_seed`, or else the model's own, the same at every tick, as the reference does.
    """

    frames: np.ndarray | None  # uint8 [T, H, W, 3]; T == 1 restarts the window
    state: np.ndarray  # float64 [1, max_state_dim]
    token_ids: np.ndarray  # int64 [1, text_len]
    attention_mask: np.ndarray  # int64 [1, text_len]
    latents: torch.Tensor | None = None  # [C, F, h, w], in place of frames
    noise_seed: int | None = None
    noise_video: torch.Tensor | None = None  # [1, C, F, h, w]
    noise_action: torch.Tensor | None = None  # [1, horizon, action_dim]


@dataclass(frozen=True)
class TickResult:
    """The result of one tick. Latents are normalised; actions are in the model's own units, [-1, 1] mostly."""

    actions: np.ndarray  # float32 [horizon, action_dim]
    video_latents: torch.Tensor  # [C, F, h, w], the denoised chunk
    observed_latents: torch.Tensor  # [C, F', h, w], what this tick committed
    restart_reason: str | None
    start_frame: int  # frame index at which the denoised chunk starts: so many are history


class WorldActionModel(WorldModel[TickInputs, StateT, TickResult], Protocol[StateT]):
    """A world model that acts."""

    def imagined_video(self, result: TickResult) -> Encode:
        """The request whose output `frames` turns into what a tick imagined."""
        ...

    def frames(self, video: torch.Tensor, num_latent_frames: int) -> np.ndarray:
        """The last frames of a decoded video: uint8 [T, H, W, 3]. Waits for the device."""
        ...
