"""What a session's history was computed from, so that it can be computed anew. Values on the host; computes nothing."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from worldkv.errors import BadRequest
from worldkv.models.causal_wan.config import CausalWanConfig
from worldkv.models.saving import check_count, check_tensor
from worldkv.words import count

Prompt = tuple[np.ndarray, np.ndarray]  # token ids and attention mask, int64 [1, text_len]
_MOST = 2**31
_MAX_REASON = 200


@dataclass(frozen=True)
class Passage:
    """Blocks whose clean passes read one text. `share`: of the prompt in it, the rest is what `Past.mixed_from` has;
    None: the prompt alone. `recached`: they were computed anew under it, all in one forward."""

    prompt: Prompt
    num_blocks: int
    share: float | None = None
    recached: bool = False


@dataclass(frozen=True)
class Past:
    """`blocks`: clean latents, of the sink and the newest ones that the window holds, oldest first. `passages`: of all
    of them, while that is known; `inexact`: why it is not. `num_given`: blocks that the session started from."""

    blocks: tuple[torch.Tensor, ...] = ()  # each [C, F, h, w]
    num_frames: int = 0  # so far, those that are forgotten included
    num_given: int = 0
    passages: tuple[Passage, ...] = ()
    mixed_from: torch.Tensor | None = None  # [text_len, text_dim]
    mixed_name: str | None = None  # of its conditioning entry
    inexact: str | None = None

    def recached(self, prompt: Prompt) -> Past:
        """Once all that the window holds was computed anew."""
        if self.num_forgotten:
            return self
        return replace(self._without_passages(None), passages=(Passage(prompt, len(self.blocks), recached=True),))

    def after(self, blocks: Sequence[torch.Tensor], passage: Passage, config: CausalWanConfig) -> Past:
        """With the blocks of one more tick."""
        num_frames = self.num_frames + sum(each.shape[1] for each in blocks)
        past = replace(self, blocks=(*self.blocks, *blocks), num_frames=num_frames)
        most = config.blocks.held_frames
        if num_frames > most:
            num_sink, num_newest = kept_blocks(config)
            kept = past.blocks
            if len(kept) > num_sink + num_newest:
                kept = (*kept[:num_sink], *kept[-num_newest:])
            why = f"{count(num_frames - most, 'frame')} of its history have left the window, and were read by others"
            return replace(past._without_passages(why), blocks=kept)
        if past.inexact is not None:
            return past
        return replace(past, passages=(*past.passages, passage))

    def mixing(self, old: torch.Tensor, name: str) -> Past:
        """Once a blend from `old` has begun."""
        if any(passage.share is not None for passage in self.passages) and self.mixed_name != name:
            return self._without_passages("two blends of its prompts are in its window")
        return self if self.inexact is not None else replace(self, mixed_from=old, mixed_name=name)

    @property
    def num_forgotten(self) -> int:
        """Frames that are in no block any more."""
        return self.num_frames - sum(each.shape[1] for each in self.blocks)

    def _without_passages(self, why: str | None) -> Past:
        return replace(self, passages=(), mixed_from=None, mixed_name=None, inexact=why)


def kept_blocks(config: CausalWanConfig) -> tuple[int, int]:
    """Of a window that frames have left: those of its sink, and the newest."""
    per_block = config.blocks.frames_per_block
    return -(-config.blocks.sink_frames // per_block), config.blocks.held_frames // per_block


def name_of(mixed_from: torch.Tensor, prompt_key: str, share: float) -> str:
    """Of a mixture's conditioning entry: by what it is made of, whatever an export calls it."""
    return f"text:mixed:{digest_of(mixed_from)} {prompt_key} {share!r}"


def digest_of(tensor: torch.Tensor) -> str:
    data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return hashlib.sha256(f"{tensor.dtype}{tuple(tensor.shape)}".encode() + data.tobytes()).hexdigest()


def check_past(past: Past, config: CausalWanConfig, dtype: torch.dtype) -> None:
    """Raises BadRequest for what no session of this model has."""
    where, per_block, held = "state.past", config.blocks.frames_per_block, config.blocks.held_frames
    for name, value in (("num_frames", past.num_frames), ("num_given", past.num_given)):
        check_count(value, f"{where}.{name}", _MOST)
    for index, latents in enumerate(past.blocks):
        shape = (config.dit.out_dim, per_block, *config.latent_size)
        check_tensor(latents, f"{where}.blocks.{index}", dtype, shape)
    num_kept = per_block * len(past.blocks)
    if past.inexact is not None and len(past.inexact) > _MAX_REASON:
        raise BadRequest(f"import: {where}.inexact: expected at most {_MAX_REASON} characters")
    has_left = past.num_frames > held
    fits = len(past.blocks) <= sum(kept_blocks(config)) if has_left else num_kept == past.num_frames
    if not fits or num_kept > past.num_frames or not past.blocks or (has_left and past.inexact is None):
        raise BadRequest(f"import: {where}.blocks: expected those of a window of {held} frames")
    if past.inexact is not None:
        return
    counts = [passage.num_blocks for passage in past.passages]
    if min(counts, default=0) < 1 or sum(counts) != len(past.blocks):
        raise BadRequest(f"import: {where}.passages: expected those of {len(past.blocks)} blocks")
    for index, passage in enumerate(past.passages):
        for array in passage.prompt:
            check_tensor(array, f"{where}.passages.{index}.prompt", np.dtype(np.int64), (1, config.dit.text_len))
        share = passage.share
        if share is not None and (past.mixed_from is None or not 0 <= share <= 1 or passage.recached):
            raise BadRequest(f"import: {where}.passages.{index}.share: expected 0 to 1 beside `mixed_from`, or null")
        if passage.recached and index:
            raise BadRequest(f"import: {where}.passages.{index}: expected only the first to be recached")
    if not 0 <= past.num_given < len(past.blocks):
        raise BadRequest(f"import: {where}.num_given: expected fewer than {len(past.blocks)}, got {past.num_given}")
    if past.mixed_from is not None:
        if not past.mixed_from.is_floating_point():
            raise BadRequest(f"import: {where}.mixed_from: expected an embedding, got {past.mixed_from.dtype}")
        embedding = (config.dit.text_len, config.dit.text_dim)
        check_tensor(past.mixed_from, f"{where}.mixed_from", past.mixed_from.dtype, embedding)
