"""Checks of the inputs of a DreamZero tick. Runs nothing."""

from __future__ import annotations

import numpy as np

from worldkv.errors import BadRequest
from worldkv.models.dreamzero.config import DreamZeroConfig
from worldkv.models.wan.config import VAE_TEMPORAL_STRIDE
from worldkv.models.world_action import TickInputs


def fill_chunk(frames: np.ndarray, frames_per_chunk: int) -> np.ndarray:
    """Repeat frames to fill a chunk, and the first once more in front: 4 frames become 9, 3 latent frames."""
    num_frames, full = frames.shape[0], VAE_TEMPORAL_STRIDE * frames_per_chunk
    if num_frames == full + 1:
        return frames
    frames = np.repeat(frames, full // num_frames, axis=0)
    return np.concatenate([frames[:1], frames])


def check_inputs(config: DreamZeroConfig, inputs: TickInputs, has_prediction: bool) -> None:
    """Raises BadRequest that names the field. `has_prediction`: whether a tick without frames can be imagined."""
    dit = config.dit
    if inputs.frames is not None:
        _check_frames(config, inputs.frames)
    elif inputs.latents is not None:
        expected = (dit.out_dim, config.frames_per_chunk)
        if inputs.latents.ndim != 4 or tuple(inputs.latents.shape[:2]) != expected:
            raise BadRequest(f"latents: expected {[*expected]} + [h, w], got {list(inputs.latents.shape)}")
    elif not has_prediction:
        raise BadRequest("frames: nothing was predicted yet that could take their place; send the first frames")
    if inputs.state.shape != (dit.num_states, dit.max_state_dim):
        raise BadRequest(f"state: expected shape {[dit.num_states, dit.max_state_dim]}, got {list(inputs.state.shape)}")
    for name in ("token_ids", "attention_mask"):
        shape = getattr(inputs, name).shape
        if shape != (1, dit.text_len):
            raise BadRequest(f"{name}: expected shape [1, {dit.text_len}], got {list(shape)}")


def _check_frames(config: DreamZeroConfig, frames: np.ndarray) -> None:
    dit, full = config.dit, VAE_TEMPORAL_STRIDE * config.frames_per_chunk
    if frames.ndim != 4 or frames.shape[-1] != 3 or frames.dtype != np.uint8:
        raise BadRequest(f"frames: expected uint8 [T, H, W, 3], got {frames.dtype} {list(frames.shape)}")
    allowed = [n for n in range(1, full + 1) if n == 1 or (n % VAE_TEMPORAL_STRIDE == 0 and full % n == 0)]
    if frames.shape[0] not in (*allowed, full + 1):
        raise BadRequest(f"frames: expected {[*allowed, full + 1]} frames per tick, got {frames.shape[0]}")
    height = config.target_video_height or frames.shape[1]
    width = config.target_video_width or frames.shape[2]
    num_tokens = dit.tokens_of_image(height, width)
    if num_tokens != dit.frame_tokens:
        raise BadRequest(
            f"frames: {height}x{width} pixels make {num_tokens} tokens a frame, this model has {dit.frame_tokens}"
        )


def latent_size(config: DreamZeroConfig) -> tuple[int, int]:
    """Height and width of a latent frame."""
    height, width = config.target_video_height, config.target_video_width
    if height is None or width is None:
        height, width = tiled_size(config)
    return height // config.dit.pixel_stride, width // config.dit.pixel_stride


def tiled_size(config: DreamZeroConfig) -> tuple[int, int]:
    """Height and width, in pixels, of an image that makes the model's tokens."""
    if config.target_video_height and config.target_video_width:
        return 2 * config.target_video_height, 2 * config.target_video_width
    stride = config.dit.pixel_stride * config.dit.patch_size[1]
    tokens = config.dit.frame_tokens
    rows = 22 if tokens == 880 else next(n for n in range(int(tokens**0.5), 0, -1) if tokens % n == 0)
    return rows * stride, tokens // rows * stride
