"""The plain baseline: a chunk's DiT work as the reference arranges it, on the same weights and device.

Branches in turn; no paging: each layer's K/V is concatenated with the current tokens', attended through torch, and the
whole cache is copied where it grows; text and image K/V are projected again in every call; modulation is computed for
every token; eager, op by op. What is not imitated: the reference's rotary embedding in complex128.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from worldkv.bench.ticks import TICKS_PER_WINDOW
from worldkv.bench.timing import timed
from worldkv.models.dreamzero.config import DreamZeroConfig
from worldkv.models.wan.dit import Block, WanDiT, layer_norm
from worldkv.models.wan.rotary import Rotary, rotate


class PlainRollout:
    """One branch: its K/V history as one tensor per layer, [2, tokens, heads, head_dim]."""

    def __init__(self, dit: WanDiT, config: DreamZeroConfig) -> None:
        self.dit, self._config = dit, config
        self.device = dit.device
        dit_config = config.dit
        self._rotary = Rotary(dit_config.head_dim, dit.device)
        self.cache = [
            torch.zeros(2, 0, dit_config.num_heads, dit_config.head_dim, device=dit.device, dtype=dit.dtype)
            for _ in dit.blocks
        ]
        self._text = torch.randn(dit_config.text_len, dit_config.dim, device=dit.device, dtype=dit.dtype)
        self._image = torch.randn(dit_config.image_tokens, dit_config.dim, device=dit.device, dtype=dit.dtype)

    @torch.no_grad()
    def forward(self, num_frames: int, *, commit: bool) -> torch.Tensor:
        """A clean pass that commits `num_frames` frames, or a denoising call with actions and a state."""
        config = self._config.dit
        num_actions, num_states = (0, 0) if commit else (config.num_actions_per_chunk, config.num_states)
        num_tokens = num_frames * config.frame_tokens + num_actions + num_states
        x = torch.randn(num_tokens, config.dim, device=self.dit.device, dtype=self.dit.dtype)
        first = self.cache[0].shape[1] // config.frame_tokens
        phases = self._rotary.phases(first, num_frames, config.frame_tokens, 1, ((0, num_actions), (0, num_states)))
        frequencies = torch.randn(num_tokens, config.freq_dim, device=x.device, dtype=x.dtype)
        modulation = self.dit.time_projection(self.dit.time_embedding(frequencies)).unflatten(1, (6, -1))
        for layer, block in enumerate(self.dit.blocks):
            x = self._block(block, layer, x, modulation, phases, commit)  # type: ignore[arg-type]
        return x

    def _block(
        self,
        block: Block,
        layer: int,
        x: torch.Tensor,
        modulation_T6: torch.Tensor,
        phases: tuple[torch.Tensor, torch.Tensor],
        commit: bool,
    ) -> torch.Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = (block.modulation + modulation_T6).unbind(1)
        own, cross = block.self_attn, block.cross_attn
        heads = (x.shape[0], own.num_heads, -1)
        y = layer_norm(x, block.eps) * (1 + scale1) + shift1
        q = rotate(own.norm_q(own.q(y)).view(heads), phases)
        k = rotate(own.norm_k(own.k(y)).view(heads), phases)
        kv = torch.cat([self.cache[layer], torch.stack([k, own.v(y).view(heads)])], dim=1)
        if commit:
            self.cache[layer] = kv.clone()
        x = x + own.o(attend(q, kv[0], kv[1])) * gate1
        z = cross.norm_q(cross.q(block.norm3(x))).view(heads)
        attended = attend(z, *cross.project_text(self._text)) + attend(z, *cross.project_image(self._image))
        x = x + cross.o(attended)
        y = layer_norm(x, block.eps) * (1 + scale2) + shift2
        updated: torch.Tensor = x + block.ffn(y) * gate2
        return updated


def attend(q_THD: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor) -> torch.Tensor:
    """[T, heads * head_dim]"""
    q, k, v = (t.transpose(0, 1)[None] for t in (q_THD, k_THD, v_THD))
    return F.scaled_dot_product_attention(q, k, v)[0].transpose(0, 1).flatten(1)


def measure_baseline(dit: WanDiT, config: DreamZeroConfig) -> dict[str, Any]:
    """A window's chunks, each two clean passes and 16 denoising calls, by history; milliseconds on the device.

    Of the 16 denoising calls of a chunk all cost the same, so four of them are timed, after a warm-up.
    """
    chunks = []
    branches = [PlainRollout(dit, config) for _ in range(2)]
    for tick in range(TICKS_PER_WINDOW):
        num_frames = 1 if tick == 0 else config.frames_per_chunk
        seconds = 0.0
        for branch in branches:
            if tick == 0:  # warm up
                branch.forward(num_frames, commit=False)
            seconds += _seconds(branch, num_frames, commit=True)
        for branch in branches:
            branch.forward(config.frames_per_chunk, commit=False)
            seconds += 8 * (sum(_seconds(branch, config.frames_per_chunk, commit=False) for _ in range(2)) / 2)
        chunks.append(1e3 * seconds)
    return {"dit_ms_by_history": [round(ms, 1) for ms in chunks], "dit_ms_mean": sum(chunks) / len(chunks)}


def _seconds(branch: PlainRollout, num_frames: int, *, commit: bool) -> float:
    return timed(lambda: branch.forward(num_frames, commit=commit), branch.device).seconds()
