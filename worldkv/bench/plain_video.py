"""The plain baseline of causal video: a block as the public code arranges it, on weights of the same sizes.

Each layer's K/V is one tensor of the window, which is copied over itself when a block leaves; queries read a slice of
it through torch; text K/V are kept, as there; modulation per frame; eager, op by op; the video decoder as diffusers has
it, a latent frame at a time. What is not imitated: the embeddings and the head, and rotary phases in complex128.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import cast

import torch

from worldkv.bench.baseline import attend
from worldkv.bench.paced import Figures
from worldkv.bench.timing import timed
from worldkv.models.causal_wan.config import CausalWanConfig
from worldkv.models.wan.dit import Block, WanDiT, layer_norm
from worldkv.models.wan.encoders import WanVAE
from worldkv.models.wan.libraries import build_vae
from worldkv.models.wan.random import fill
from worldkv.models.wan.rotary import Phases, rotate
from worldkv.models.wan.sizes import VAESizes

_BLOCKS = 3  # that are counted, once the window is full


class PlainVideo:
    """One session. `kv`: of each layer, [2, tokens of the window, heads, head_dim]."""

    def __init__(self, dit: WanDiT, config: CausalWanConfig) -> None:
        self.dit, self._config, self.device = dit, config, dit.device
        heads = (config.dit.num_heads, config.dit.head_dim)
        held = config.blocks.held_frames * config.frame_tokens
        self.kv = [torch.zeros(2, held, *heads, device=dit.device, dtype=dit.dtype) for _ in dit.blocks]
        text = torch.randn(config.dit.text_len, config.dit.dim, device=dit.device, dtype=dit.dtype)
        self._blocks = cast("Sequence[Block]", dit.blocks)
        self._text = [block.cross_attn.project_text(text) for block in self._blocks]
        self.num_frames = 0

    @torch.no_grad()
    def block(self) -> None:
        """Drafts and the clean pass; the oldest block but for the sink leaves at the first of them."""
        blocks = self._config.blocks
        for step in range(len(blocks.steps) + 1):
            self._forward(leaves=step == 0 and self.num_frames >= blocks.held_frames)
        self.num_frames += blocks.frames_per_block

    def _forward(self, *, leaves: bool) -> None:
        config, blocks = self._config, self._config.blocks
        num_frames, per_frame = blocks.frames_per_block, config.frame_tokens
        x = torch.randn(num_frames * per_frame, config.dit.dim, device=self.device, dtype=self.dit.dtype)
        phases = self.dit.phases(self.num_frames, num_frames, *config.latent_size)
        frequencies = torch.randn(num_frames, config.dit.freq_dim, device=x.device, dtype=x.dtype)
        modulation = self.dit.time_projection(self.dit.time_embedding(frequencies)).unflatten(1, (6, -1))
        begin = min(self.num_frames, blocks.held_frames - num_frames) * per_frame
        for layer, block in enumerate(self._blocks):
            if leaves:
                kept, gone = blocks.sink_frames * per_frame, num_frames * per_frame
                self.kv[layer][:, kept:-gone] = self.kv[layer][:, kept + gone :].clone()
            x = self._layer(block, layer, x, modulation, phases, begin)

    def _layer(
        self, block: Block, layer: int, x: torch.Tensor, modulation_F6: torch.Tensor, phases: Phases, begin: int
    ) -> torch.Tensor:
        modulation = (block.modulation + modulation_F6)[:, :, None]  # [F, 6, 1, dim]
        shift1, scale1, gate1, shift2, scale2, gate2 = modulation.unbind(1)
        own, cross = block.self_attn, block.cross_attn
        num_frames, end = len(modulation_F6), begin + len(x)
        heads = (len(x), own.num_heads, -1)

        def frames(tokens: torch.Tensor) -> torch.Tensor:
            return tokens.view(num_frames, -1, tokens.shape[-1])

        y = (frames(layer_norm(x, block.eps)) * (1 + scale1) + shift1).flatten(0, 1)
        q = rotate(own.norm_q(own.q(y)).view(heads), phases)
        self.kv[layer][0, begin:end] = rotate(own.norm_k(own.k(y)).view(heads), phases)
        self.kv[layer][1, begin:end] = own.v(y).view(heads)
        k, v = self.kv[layer][:, :end]
        x = x + (frames(own.o(attend(q, k, v))) * gate1).flatten(0, 1)
        z = cross.norm_q(cross.q(block.norm3(x))).view(heads)
        x = x + cross.o(attend(z, *self._text[layer]))
        y = (frames(layer_norm(x, block.eps)) * (1 + scale2) + shift2).flatten(0, 1)
        updated: torch.Tensor = x + (frames(block.ffn(y)) * gate2).flatten(0, 1)
        return updated


def measure_plain_video(dit: WanDiT, config: CausalWanConfig, sizes: VAESizes) -> Figures:
    """Milliseconds on the device of a block's DiT and of its decoding, the window full; see the module."""
    video = PlainVideo(dit, config)
    for _ in range(config.blocks.held_frames // config.blocks.frames_per_block):
        video.block()
    dit_ms = [1e3 * timed(video.block, video.device).seconds() for _ in range(1 + _BLOCKS)][1:]
    vae = WanVAE(fill(build_vae(sizes)[0], video.device, dit.dtype), sizes)
    shape = (1, config.dit.out_dim, config.blocks.frames_per_block, *config.latent_size)
    latents, stream = torch.randn(shape, device=video.device, dtype=dit.dtype), vae.new_decode_state()
    for _ in range(2):
        vae.decode_stream(stream, latents)
    decode_ms = [1e3 * timed(lambda: vae.decode_stream(stream, latents), video.device).seconds() for _ in range(3)]
    return {"dit_ms": round(statistics.median(dit_ms), 2), "decode_ms": round(statistics.median(decode_ms), 2)}
