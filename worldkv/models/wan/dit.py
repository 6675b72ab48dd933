"""The causal Wan DiT over packed rows.

All rows of a forward lie one after the other in one [T, dim] tensor: per row its video tokens, of any number of frames,
then whatever tokens a family adds. Linear layers see T tokens; only attention knows rows, through its plan. Parameter
names are the checkpoint's own. Knows no family, no session, no guidance and no solver.

Letters: T packed tokens, H heads, D head_dim, U distinct timesteps, C channels, F frames, h x w latent pixels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from worldkv.attention.backend import AttentionPlan
from worldkv.device import upload
from worldkv.kv.storage import KVStorage
from worldkv.models.wan.config import WanConfig
from worldkv.models.wan.partial import PartialLinear, RMSNorm
from worldkv.models.wan.rotary import Phases, Rotary, rotate
from worldkv.models.wan.shard import WHOLE, Shard


@dataclass(frozen=True)
class WanRow:
    """A row's own inputs. A row that wants no velocity, as a clean pass, only fills the cache."""

    latents: torch.Tensor  # [C, F, h, w]
    condition: torch.Tensor | None  # [C', F, h, w], concatenated on channels where the model wants it
    first_frame: int  # its position, in frames
    timestep: float
    wants_velocity: bool


@dataclass(frozen=True)
class KeptTokens:
    """Where the keys of a forward's tokens go in `storage` as they are before rotation, beside what attention writes.
    `slots`: int64 [T]; negative where a token's are not kept. Enters CUDA graphs as attention plans do."""

    storage: KVStorage
    slots: torch.Tensor

    def write(self, layer: int, k_THD: torch.Tensor, v_THD: torch.Tensor) -> None:
        """Of all tokens of the forward."""
        kept = self.slots >= 0
        self.storage.write(layer, self.slots[kept], k_THD[kept], v_THD[kept])

    @property
    def shape_class(self) -> tuple[()]:
        return ()

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [self.slots]

    def with_own_tensors(self) -> KeptTokens:
        return KeptTokens(self.storage, self.slots.clone())


@dataclass(frozen=True)
class ForwardPlans:
    """The attention plans of one forward: history and current tokens, text, and image where the model reads one."""

    history: AttentionPlan
    text: AttentionPlan
    image: AttentionPlan | None = None
    kept: KeptTokens | None = None


@dataclass(frozen=True)
class BlockInputs:
    """The blocks' inputs. `level_T`: each token's index into the distinct timesteps."""

    x: torch.Tensor  # [T, dim]
    modulation_U6: torch.Tensor  # [U, 6, dim]
    level_T: torch.Tensor  # [T] int64
    phases: Phases
    plans: ForwardPlans


RunBlocks = Callable[[BlockInputs], torch.Tensor]  # `x` after the last block


class Attention(nn.Module):
    """The parameters of both kinds, of a shard's heads."""

    def __init__(self, config: WanConfig, shard: Shard) -> None:
        super().__init__()
        dim = config.dim
        self.num_heads = config.num_heads // shard.size
        self.q, self.k, self.v = (nn.Linear(dim, dim // shard.size) for _ in range(3))
        self.o = PartialLinear(dim, dim, shard)
        self.norm_q, self.norm_k = (RMSNorm(dim, config.eps, shard) for _ in range(2))

    def heads(self, x: torch.Tensor) -> torch.Tensor:
        """[T, dim] as [T, H, D]."""
        return x.view(x.shape[0], self.num_heads, -1)


class SelfAttention(Attention):
    def forward(self, x: torch.Tensor, phases: Phases, plans: ForwardPlans, layer: int) -> torch.Tensor:
        q_THD = rotate(self.heads(self.norm_q(self.q(x))), phases)
        k_THD, v_THD = self.heads(self.norm_k(self.k(x))), self.heads(self.v(x))
        if plans.kept is not None:
            plans.kept.write(layer, k_THD, v_THD)
        attended: torch.Tensor = self.o(plans.history.run(layer, q_THD, rotate(k_THD, phases), v_THD).flatten(1))
        return attended


class CrossAttention(Attention):
    """Attention to text; where the model reads an image too, its attention shares the query and is added."""

    def __init__(self, config: WanConfig, shard: Shard) -> None:
        super().__init__(config, shard)
        if config.image_tokens:
            self.k_img, self.v_img = (nn.Linear(config.dim, config.dim // shard.size) for _ in range(2))
            self.norm_k_img = RMSNorm(config.dim, config.eps, shard)

    def forward(self, x: torch.Tensor, plans: ForwardPlans, layer: int) -> torch.Tensor:
        q_THD = self.heads(self.norm_q(self.q(x)))
        attended = plans.text.run(layer, q_THD)
        if plans.image is not None:
            attended = attended + plans.image.run(layer, q_THD)
        out: torch.Tensor = self.o(attended.flatten(1))
        return out

    def project_text(self, context: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V [tokens, heads, head_dim] of embedded text [tokens, dim]."""
        return self.heads(self.norm_k(self.k(context))), self.heads(self.v(context))

    def project_image(self, context: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.heads(self.norm_k_img(self.k_img(context))), self.heads(self.v_img(context))


class Block(nn.Module):
    def __init__(self, config: WanConfig, shard: Shard) -> None:
        super().__init__()
        dim = config.dim
        self.eps = config.eps
        self.self_attn = SelfAttention(config, shard)
        self.norm3 = nn.LayerNorm(dim, config.eps)
        self.cross_attn = CrossAttention(config, shard)
        self.ffn = nn.Sequential(
            nn.Linear(dim, config.ffn_dim // shard.size),
            nn.GELU(approximate="tanh"),
            PartialLinear(config.ffn_dim, dim, shard),
        )
        self.modulation = nn.Parameter(torch.empty(1, 6, dim))

    def forward(self, inputs: BlockInputs, layer: int) -> torch.Tensor:
        x, level_T, plans = inputs.x, inputs.level_T, inputs.plans
        shift1, scale1, gate1, shift2, scale2, gate2 = (self.modulation + inputs.modulation_U6).unbind(1)
        y = layer_norm(x, self.eps) * (1 + scale1[level_T]) + shift1[level_T]
        x = x + self.self_attn(y, inputs.phases, plans, layer) * gate1[level_T]
        x = x + self.cross_attn(self.norm3(x), plans, layer)
        y = layer_norm(x, self.eps) * (1 + scale2[level_T]) + shift2[level_T]
        updated: torch.Tensor = x + self.ffn(y) * gate2[level_T]
        return updated


class Head(nn.Module):
    def __init__(self, config: WanConfig) -> None:
        super().__init__()
        self.eps = config.eps
        self.head = nn.Linear(config.dim, config.out_dim * math.prod(config.patch_size))
        self.modulation = nn.Parameter(torch.empty(1, 2, config.dim))

    def forward(self, x: torch.Tensor, embedding_U: torch.Tensor, level_T: torch.Tensor) -> torch.Tensor:
        shift, scale = (self.modulation + embedding_U[:, None]).unbind(1)
        out: torch.Tensor = self.head(layer_norm(x, self.eps) * (1 + scale[level_T]) + shift[level_T])
        return out


class ImageEmbedding(nn.Module):
    def __init__(self, image_dim: int, dim: int) -> None:
        super().__init__()
        self.proj = nn.Sequential(
            nn.LayerNorm(image_dim),
            nn.Linear(image_dim, image_dim),
            nn.GELU(),
            nn.Linear(image_dim, dim),
            nn.LayerNorm(dim),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        projected: torch.Tensor = self.proj(x)
        return projected


class Layout:
    """Where rows lie in the packed tensor: each row's video tokens, then its extra ones; and the distinct timesteps.

    `extras`: (number, timestep) of each row's extra tokens.
    """

    def __init__(
        self, rows: Sequence[WanRow], patch_size: tuple[int, int, int], extras: Sequence[tuple[int, float]]
    ) -> None:
        self.videos: list[slice] = []  # of each row
        self.extras: list[slice] = []
        index: dict[float, int] = {}
        levels, lengths, end = [], [], 0
        for row, (num_extra, extra_timestep) in zip(rows, extras, strict=True):
            num_video = row.latents[0].numel() // math.prod(patch_size)
            for slices, length, timestep in (
                (self.videos, num_video, row.timestep),
                (self.extras, num_extra, extra_timestep),
            ):
                slices.append(slice(end, end + length))
                end += length
                if length:
                    levels.append(index.setdefault(timestep, len(index)))
                    lengths.append(length)
        self.timesteps = list(index)
        self.level_T = np.repeat(levels, lengths)


@dataclass(frozen=True)
class Hidden:
    """The tokens after the last block, and the inputs of the heads beside them."""

    x: torch.Tensor  # [T, dim]
    embedding_U: torch.Tensor  # [U, dim], of the distinct timesteps
    level_T: torch.Tensor
    layout: Layout


class WanDiT(nn.Module):
    """Build it on the meta device and fill it from a checkpoint.

    Its rows are `WanRow`s, its output each row's video velocity (noise - clean) [C, F, h, w], None where the row wants
    none. A family that adds tokens behind each row's video overrides the four methods at the end. `shard`: the part of
    heads and feed-forwards that this one has; K and V are of its heads.
    """

    def __init__(self, config: WanConfig, shard: Shard = WHOLE) -> None:
        super().__init__()
        dim, wide = config.dim, config.in_dim
        self.config, self.shard = config, shard
        self.fingerprint = ""  # of its weights, once they are loaded
        self.patch_embedding = nn.Conv3d(wide, dim, config.patch_size, config.patch_size)
        self.text_embedding = nn.Sequential(
            nn.Linear(config.text_dim, dim), nn.GELU(approximate="tanh"), nn.Linear(dim, dim)
        )
        self.time_embedding = nn.Sequential(nn.Linear(config.freq_dim, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.time_projection = nn.Sequential(nn.SiLU(), nn.Linear(dim, 6 * dim))
        if config.image_tokens:
            self.img_emb = ImageEmbedding(config.image_dim, dim)
        self.blocks = nn.ModuleList([Block(config, shard) for _ in range(config.num_layers)])
        self.head = Head(config)
        self._rotary: Rotary | None = None
        self.run_blocks: RunBlocks = self._run_blocks  # `worldkv.models.wan.fused` has a faster one

    @property
    def device(self) -> torch.device:
        return self.head.modulation.device

    @property
    def dtype(self) -> torch.dtype:
        return self.head.modulation.dtype

    def project_text(self, embedding: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Per-layer K and V [text_len, heads, head_dim] of a prompt embedding [text_len, text_dim]."""
        context = self.text_embedding(embedding.to(self.device, self.dtype))
        for block in self.blocks:
            yield block.cross_attn.project_text(context)  # type: ignore[operator, union-attr]

    def project_image(self, feature: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Per-layer K and V [image_tokens, heads, head_dim] of an image feature [image_tokens, image_dim]."""
        context = self.img_emb(feature.to(self.device, self.dtype))
        for block in self.blocks:
            yield block.cross_attn.project_image(context)  # type: ignore[operator, union-attr]

    def forward(self, rows: Sequence[Any], plans: ForwardPlans) -> list[Any]:
        """An output per row. K/V of every layer are written through `plans.history` on the way."""
        layout = Layout(rows, self.config.patch_size, [self._extra_level(row) for row in rows])
        levels = upload(np.array(layout.timesteps, dtype=np.float64), self.device)
        embedding_U = self.time_embedding(sinusoid(levels, self.config.freq_dim).to(self.dtype))
        modulation_U6 = self.time_projection(embedding_U).unflatten(1, (6, -1))
        level_T = upload(layout.level_T, self.device)
        x = self.run_blocks(BlockInputs(self._embed(rows), modulation_U6, level_T, self._phases(rows), plans))
        return self._read_out(rows, Hidden(x, embedding_U, level_T, layout))

    def _run_blocks(self, inputs: BlockInputs) -> torch.Tensor:
        for layer, block in enumerate(self.blocks):
            inputs = replace(inputs, x=block(inputs, layer))
        return inputs.x

    def _embed(self, rows: Sequence[WanRow]) -> torch.Tensor:
        """Tokens [T, dim]: each kind is embedded for all rows at once, then laid out row by row."""
        patches = [_patches(self._input(row), self.config.patch_size) for row in rows]
        embedded = F.linear(torch.cat(patches), self.patch_embedding.weight.flatten(1), self.patch_embedding.bias)
        extras = self._extra_tokens(rows)
        if not any(extras):
            return embedded
        videos = torch.split(embedded, [len(row_patches) for row_patches in patches])
        return torch.cat([part for video, extra in zip(videos, extras, strict=True) for part in (video, *extra)])

    def _input(self, row: WanRow) -> torch.Tensor:
        """[in_dim, F, h, w]"""
        latents = row.latents
        if self.config.concat_first_frame_latent:
            assert row.condition is not None, "this model takes the first frame on its channels"
            latents = torch.cat([latents, row.condition])
        return latents.to(self.device, self.dtype)

    def phases(
        self, first_frame: int, num_frames: int, height: int, width: int, groups: tuple[tuple[int, int], ...] = ()
    ) -> Phases:
        """Of the tokens of latent frames of `height` x `width`, then of groups on one axis: see `Rotary.phases`."""
        if self._rotary is None:
            self._rotary = Rotary(self.config.head_dim, self.device)
        patch_t, patch_h, patch_w = self.config.patch_size
        return self._rotary.phases(first_frame, num_frames // patch_t, height // patch_h, width // patch_w, groups)

    def _phases(self, rows: Sequence[WanRow]) -> Phases:
        phases = []
        for row in rows:
            _, num_frames, height, width = row.latents.shape
            phases.append(self.phases(row.first_frame, num_frames, height, width, self._extra_positions(row)))
        return torch.cat([cos for cos, _ in phases]), torch.cat([sin for _, sin in phases])

    def _video_velocities(self, rows: Sequence[WanRow], hidden: Hidden) -> list[torch.Tensor | None]:
        wanted = [row.wants_velocity for row in rows]
        parts = [part for part, wants in zip(hidden.layout.videos, wanted, strict=True) if wants]
        if not parts:
            return [None] * len(rows)
        x, level_T = (torch.cat([packed[part] for part in parts]) for packed in (hidden.x, hidden.level_T))
        patches = self.head(x, hidden.embedding_U, level_T)
        split = iter(torch.split(patches, [part.stop - part.start for part in parts]))
        return [
            _unpatch(next(split), row.latents.shape[1:], self.config) if row.wants_velocity else None for row in rows
        ]

    # for families with tokens of their own

    def _extra_level(self, row: Any) -> tuple[int, float]:
        """Number of the row's extra tokens, and their timestep."""
        return 0, 0

    def _extra_positions(self, row: Any) -> tuple[tuple[int, int], ...]:
        """Rotary positions of the row's extra tokens, group by group: (first position, count)."""
        return ()

    def _extra_tokens(self, rows: Sequence[Any]) -> list[tuple[torch.Tensor, ...]]:
        """The rows' extra tokens, embedded: groups of [count, dim]."""
        return [()] * len(rows)

    def _read_out(self, rows: Sequence[Any], hidden: Hidden) -> list[Any]:
        return self._video_velocities(rows, hidden)


def layer_norm(x: torch.Tensor, eps: float) -> torch.Tensor:
    """Without affine parameters, in float32."""
    return F.layer_norm(x.float(), x.shape[-1:], eps=eps).to(x.dtype)


def sinusoid(timesteps: torch.Tensor, dim: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """[timesteps, dim]: cosines, then sines, of frequencies 10000^(-i / (dim / 2))."""
    half = dim // 2
    frequencies = 10000.0 ** -(torch.arange(half, device=timesteps.device, dtype=dtype) / half)
    angles = timesteps.to(dtype)[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


def _patches(x_CFhw: torch.Tensor, patch: tuple[int, int, int]) -> torch.Tensor:
    """[C, F, h, w] -> [tokens, C * patch volume], tokens in order f, h, w; elements in the order of a Conv3d kernel."""
    c, f, h, w = x_CFhw.shape
    t, p, q = patch
    grid = x_CFhw.reshape(c, f // t, t, h // p, p, w // q, q)
    return grid.permute(1, 3, 5, 0, 2, 4, 6).reshape(-1, c * t * p * q)


def _unpatch(patches: torch.Tensor, size: Sequence[int], config: WanConfig) -> torch.Tensor:
    """[tokens, patch volume * C] -> [C, F, h, w]; a patch's elements are ordered t, h, w, channel."""
    f, h, w = size
    t, p, q = config.patch_size
    grid = patches.view(f // t, h // p, w // q, t, p, q, config.out_dim)
    return grid.permute(6, 0, 3, 1, 4, 2, 5).reshape(config.out_dim, f, h, w)
