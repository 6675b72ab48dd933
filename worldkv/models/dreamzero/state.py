"""What an episode of DreamZero is beside its K/V. Values are replaced, never written to: keeping one is a snapshot."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from worldkv.device import moved
from worldkv.errors import BadRequest
from worldkv.models.dreamzero.config import DreamZeroConfig
from worldkv.models.saving import Saved, check_same, load, save


@dataclass(frozen=True)
class State:
    """The non-K/V state of an episode."""

    prompt_key: str | None = None  # digest of the last prompt's tokens
    first_frame_condition: torch.Tensor | None = None  # [4 + C, latent frames, h, w], of the window's first frame
    prediction: torch.Tensor | None = None  # [C, F, h, w], what the last tick imagined
    begun: Begun | None = None  # only in what `ahead` returns

    def to(self, device: torch.device | str) -> State:
        """One between two ticks, on another device, bit for bit."""
        condition, prediction = self.first_frame_condition, self.prediction
        return replace(
            self,
            first_frame_condition=None if condition is None else moved(condition, device),
            prediction=None if prediction is None else moved(prediction, device),
        )


@dataclass(frozen=True)
class Begun:
    """A tick whose observation is committed. `frames`, `prompt_key`: what it was given."""

    frames: np.ndarray | None
    prompt_key: str
    observed: torch.Tensor  # [C, F', h, w], latents
    restart_reason: str | None


def save_state(state: State, config: DreamZeroConfig) -> Saved:
    """For an export."""
    saved = save(state)
    return Saved({"sizes": _sizes(config), "state": saved.values}, saved.tensors)


def load_state(saved: Saved, config: DreamZeroConfig) -> State:
    """On the host. Raises BadRequest for what no session of this model is."""
    values = check_same(saved.values, {"sizes": _sizes(config)}, "model")
    state = load(Saved(values.get("state"), saved.tensors), State, {})
    if state.begun is not None:
        raise BadRequest("import: state.begun: expected a session between two ticks")
    for name, num_channels, num_frames in (
        ("first_frame_condition", None, config.latent_frames),
        ("prediction", config.dit.out_dim, config.frames_per_chunk),
    ):
        _check_latents(getattr(state, name), f"state.{name}", num_channels, num_frames, config)
    return state


def _sizes(config: DreamZeroConfig) -> dict[str, object]:
    """Of the model; a session of other ones cannot go on here."""
    dit = config.dit
    return {
        "model_type": dit.model_type,
        "latent_channels": dit.out_dim,
        "frame_tokens": dit.frame_tokens,
        "latent_frames": config.latent_frames,
        "frames_per_chunk": config.frames_per_chunk,
        "concat_first_frame_latent": dit.concat_first_frame_latent,
    }


def _check_latents(
    latents: torch.Tensor | None, where: str, num_channels: int | None, num_frames: int, config: DreamZeroConfig
) -> None:
    """[C, F, h, w] of the model's number of tokens a frame."""
    if latents is None:
        return
    channels = config.dit.out_dim + 4 if num_channels is None else num_channels
    _, rows, columns = config.dit.patch_size
    sizes = tuple(latents.shape)
    fits = len(sizes) == 4 and sizes[:2] == (channels, num_frames) and latents.is_floating_point()
    tokens = config.dit.frame_tokens
    if not fits or (sizes[2] // rows) * (sizes[3] // columns) != tokens or sizes[2] % rows or sizes[3] % columns:
        wanted = f"[{channels}, {num_frames}, h, w] with {tokens} tokens a frame"
        raise BadRequest(f"import: {where}: expected latents {wanted}, got {latents.dtype} of {list(sizes)}")
