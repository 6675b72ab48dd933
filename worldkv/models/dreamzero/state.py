"""What an episode of DreamZero is beside its K/V. Values are replaced, never written to: keeping one is a snapshot."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class State:
    """The non-K/V state of an episode."""

    prompt_key: str | None = None  # digest of the last prompt's tokens
    first_frame_condition: torch.Tensor | None = None  # [4 + C, latent frames, h, w], of the window's first frame
    prediction: torch.Tensor | None = None  # [C, F, h, w], what the last tick imagined
    begun: Begun | None = None  # only in what `ahead` returns


@dataclass(frozen=True)
class Begun:
    """A tick whose observation is committed. `frames`, `prompt_key`: what it was given."""

    frames: np.ndarray | None
    prompt_key: str
    observed: torch.Tensor  # [C, F', h, w], latents
    restart_reason: str | None
