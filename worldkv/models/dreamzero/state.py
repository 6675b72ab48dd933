"""What an episode of DreamZero is beside its K/V. Values are replaced, never written to: keeping one is a snapshot."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from worldkv.device import moved
from worldkv.errors import BadRequest
from worldkv.kv.window import Window
from worldkv.models.dreamzero.config import DreamZeroConfig
from worldkv.models.saving import Saved, check_count, check_same, check_tensor, load, save

_MOST = 2**31  # frames of one window: more than a century
_MAX_PIXELS = 8192  # of a side


@dataclass(frozen=True)
class State:
    """The non-K/V state of an episode."""

    prompt_key: str | None = None  # digest of the last prompt's tokens
    first_frame_condition: torch.Tensor | None = None  # [4 + C, latent frames, h, w], of the window's first frame
    prediction: torch.Tensor | None = None  # [C, F, h, w], what the last tick imagined
    begun: Begun | None = None  # only in what `ahead` returns
    past: Past | None = None  # what the window was made of
    num_skipped: int = 0  # frames of the window that were never in this cache: before the first that is

    def to(self, device: torch.device | str) -> State:
        """One between two ticks, on another device, bit for bit."""
        condition, prediction = self.first_frame_condition, self.prediction
        return replace(
            self,
            first_frame_condition=None if condition is None else moved(condition, device),
            prediction=None if prediction is None else moved(prediction, device),
        )


@dataclass(frozen=True)
class Past:
    """What a window's K/V was computed from, to compute it anew; on the host.

    It began with `image`, or with what was imagined in its place. `observed`: latents, those of each clean pass, oldest
    first. `first_frame`: of them, as a number in the window; earlier ones are forgotten, since they have left it.
    """

    token_ids: np.ndarray  # int64 [1, text_len]
    attention_mask: np.ndarray
    image: np.ndarray | None  # uint8 [1, H, W, 3]
    imagined: torch.Tensor | None  # [C, F, h, w]
    observed: tuple[torch.Tensor, ...] = ()  # each [C, F', h, w]
    first_frame: int = 0

    def with_observed(self, latents: torch.Tensor, window_frames: int) -> Past:
        """After another clean pass. Passes of which nothing is left in the window are forgotten."""
        observed, first_frame = (*self.observed, latents), self.first_frame
        while sum(each.shape[1] for each in observed[1:]) >= window_frames:
            first_frame += observed[0].shape[1]
            observed = observed[1:]
        return replace(self, observed=observed, first_frame=first_frame)


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
    check_count(state.num_skipped, "state.num_skipped", _MOST)
    if (state.past is None) != (state.prompt_key is None):
        raise BadRequest("import: state.past: expected one in a session that has a window, and only there")
    if state.past is not None:
        _check_past(state.past, config)
    if state.begun is not None:
        raise BadRequest("import: state.begun: expected a session between two ticks")
    for name, num_channels, num_frames in (
        ("first_frame_condition", None, config.latent_frames),
        ("prediction", config.dit.out_dim, config.frames_per_chunk),
    ):
        _check_latents(getattr(state, name), f"state.{name}", num_channels, num_frames, config)
    return state


def load_compact(saved: Saved, config: DreamZeroConfig, window: Window) -> State:
    """One whose history is to be computed anew. On the host."""
    state = load_state(saved, config)
    if state.past is not None:
        num_frames = sum(each.shape[1] for each in state.past.observed)
        most = window.max_chunks if window.policy == "reset" else window.max_chunks + config.frames_per_chunk - 1
        if state.past.first_frame and window.policy == "reset":
            raise BadRequest("import: state.past.first_frame: expected 0, since nothing leaves this window")
        if not 1 <= num_frames <= most:
            raise BadRequest(f"import: state.past.observed: expected 1 to {most} frames, got {num_frames}")
    return state


def _check_past(past: Past, config: DreamZeroConfig) -> None:
    text = (1, config.dit.text_len)
    check_tensor(past.token_ids, "state.past.token_ids", np.dtype(np.int64), text)
    check_tensor(past.attention_mask, "state.past.attention_mask", np.dtype(np.int64), text)
    if (past.image is None) == (past.imagined is None):
        raise BadRequest("import: state.past.image: expected one, or `imagined` in its place")
    if past.image is not None:
        check_tensor(past.image, "state.past.image", np.dtype(np.uint8), (1, None, None, 3))
        height, width = (config.target_video_height, config.target_video_width)
        tokens = config.dit.tokens_of_image(height or past.image.shape[1], width or past.image.shape[2])
        if tokens != config.dit.frame_tokens or max(past.image.shape) > _MAX_PIXELS:
            raise BadRequest(f"import: state.past.image: expected {config.dit.frame_tokens} tokens, got {tokens}")
    per_chunk = config.frames_per_chunk
    _check_latents(past.imagined, "state.past.imagined", config.dit.out_dim, per_chunk, config)
    for index, latents in enumerate(past.observed):
        num_frames = latents.shape[1] if latents.dim() == 4 and 1 <= latents.shape[1] <= per_chunk else per_chunk
        _check_latents(latents, f"state.past.observed.{index}", config.dit.out_dim, num_frames, config)
    check_count(past.first_frame, "state.past.first_frame", _MOST)


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
