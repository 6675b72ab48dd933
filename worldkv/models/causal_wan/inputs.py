"""What a session of causal video is given for a block, what it gives, and what it remembers; and what is refused."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch

from worldkv.device import moved
from worldkv.errors import BadRequest
from worldkv.models.causal_wan.config import CausalWanConfig
from worldkv.models.wan.encoders import VAEStream

PromptSwitch = Literal["recache", "keep"]


@dataclass(frozen=True)
class BlockRequest:
    """One block. `switch`: what becomes of history where the prompt is another one than before: computed anew under it,
    or kept as it is. Noise that is not given is drawn from the session's seed and the block's place in the session."""

    token_ids: np.ndarray  # int64 [1, text_len]
    attention_mask: np.ndarray  # int64 [1, text_len]
    switch: PromptSwitch = "recache"
    seed: int | None = None  # of the session from now on; None: as before, at first 0
    noise: torch.Tensor | None = None  # [1, C, F, h, w]
    epsilons: tuple[torch.Tensor, ...] | None = None  # of all steps but the last, each as `noise`
    given: torch.Tensor | None = None  # [1, C, frames, h, w]: latents that the session starts from


@dataclass(frozen=True)
class Block:
    """A finished block. `video` has the session's beginning in front, where it starts from given latents."""

    latents: torch.Tensor  # [C, F, h, w]
    video: torch.Tensor | None  # [3, T, H, W] in [-1, 1]; 4 frames a latent one, the session's first gives 1
    first_frame: int
    num_recached: int  # frames that were computed anew before it


@dataclass(frozen=True)
class State:
    """Beside its K/V. Values are replaced, never written to: keeping one is a snapshot."""

    prompt_key: str | None = None  # digest of the prompt in force
    seed: int = 0
    num_blocks: int = 0  # denoised so far; given latents are none
    recent: torch.Tensor | None = None  # [C, frames, h, w], clean, as many as the window holds
    decoder: VAEStream | None = None

    @property
    def num_bytes(self) -> int:
        """Of tensors."""
        recent = 0 if self.recent is None else self.recent.numel() * self.recent.element_size()
        return recent + (0 if self.decoder is None else self.decoder.num_bytes)

    def to(self, device: torch.device | str) -> State:
        """The same on another device, bit for bit."""
        return replace(
            self,
            recent=None if self.recent is None else moved(self.recent, device),
            decoder=None if self.decoder is None else self.decoder.to(device),
        )


def check_request(config: CausalWanConfig, request: BlockRequest, num_frames: int, num_steps: int) -> None:
    """`num_frames`: of the session so far. Raises BadRequest that names the field."""
    text = (1, config.dit.text_len)
    for name in ("token_ids", "attention_mask"):
        value = getattr(request, name)
        if value.shape != text or value.dtype != np.int64:
            raise BadRequest(f"{name}: expected int64 of shape {text}, got {value.dtype} of {value.shape}")
    if request.switch not in ("recache", "keep"):
        raise BadRequest(f"switch: expected 'recache' or 'keep', got {request.switch!r}")
    if request.seed is not None and not 0 <= request.seed < 2**63:
        raise BadRequest(f"seed: expected 0 to 2^63 - 1, got {request.seed}")
    per_block = config.blocks.frames_per_block
    shape = (1, config.dit.out_dim, per_block, *config.latent_size)
    tensors = [("noise", request.noise)]
    if request.epsilons is not None:
        if len(request.epsilons) != num_steps - 1:
            raise BadRequest(f"epsilons: expected {num_steps - 1}, one less than steps, got {len(request.epsilons)}")
        tensors += [(f"epsilons[{index}]", epsilon) for index, epsilon in enumerate(request.epsilons)]
    for name, tensor in tensors:
        if tensor is not None and tuple(tensor.shape) != shape:
            raise BadRequest(f"{name}: expected shape {shape}, got {tuple(tensor.shape)}")
    if request.given is not None:
        _check_given(request.given, shape, num_frames)


def _check_given(given: torch.Tensor, block: tuple[int, ...], num_frames: int) -> None:
    if num_frames:
        raise BadRequest(f"given: a session starts from latents before its first frame, and {num_frames} are there")
    if given.dim() != 5 or (*given.shape[:2], *given.shape[3:]) != (*block[:2], *block[3:]):
        raise BadRequest(f"given: expected shape {block} with any whole blocks of frames, got {tuple(given.shape)}")
    if given.shape[2] == 0 or given.shape[2] % block[2]:
        raise BadRequest(f"given: expected whole blocks of {block[2]} frames, got {given.shape[2]} frames")
