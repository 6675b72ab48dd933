"""The causal Wan DiT with action and state tokens, over packed rows.

All rows of a forward lie one after the other in one [T, dim] tensor: [video | actions | state] per row, any number of
frames each. Linear layers see T tokens; only attention knows rows, through its plan. Parameter names are the
checkpoint's own. Knows no session, no guidance and no solver.

Letters: T packed tokens, H heads, D head_dim, U distinct timesteps, C channels, F frames, h x w latent pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from worldkv.attention.backend import AttentionPlan
from worldkv.device import upload
from worldkv.models.base import ForwardRow, RowOutput
from worldkv.models.dreamzero.config import DiTConfig
from worldkv.models.wan.rotary import Phases, Rotary, rotate


@dataclass(frozen=True)
class ForwardPlans:
    """The attention plans of one forward: history and current tokens, text, image."""

    history: AttentionPlan
    text: AttentionPlan
    image: AttentionPlan


RunBlocks = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Phases, ForwardPlans], torch.Tensor]


class RMSNorm(nn.Module):
    """Over the full width, all heads together, in float32."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype) * self.weight


class CategoryLinear(nn.Module):
    """A linear layer stored per embodiment, [1, in, out]; DreamZero forces the embodiment to 0."""

    def __init__(self, dim_in: int, dim_out: int) -> None:
        super().__init__()
        self.W = nn.Parameter(torch.empty(1, dim_in, dim_out))
        self.b = nn.Parameter(torch.empty(1, dim_out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.W[0] + self.b[0]


class CategoryMLP(nn.Module):
    def __init__(self, dim_in: int, hidden: int, dim_out: int) -> None:
        super().__init__()
        self.layer1 = CategoryLinear(dim_in, hidden)
        self.layer2 = CategoryLinear(hidden, dim_out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.layer2(F.relu(self.layer1(x)))
        return hidden


class ActionEncoder(nn.Module):
    """Actions and their noise level to tokens."""

    def __init__(self, action_dim: int, dim: int) -> None:
        super().__init__()
        self.W1 = CategoryLinear(action_dim, dim)
        self.W2 = CategoryLinear(2 * dim, dim)
        self.W3 = CategoryLinear(dim, dim)

    def forward(self, actions: torch.Tensor, timesteps: torch.Tensor) -> torch.Tensor:
        """[tokens, action_dim] and [tokens] -> [tokens, dim]."""
        a = self.W1(actions)
        tau = sinusoid(timesteps, a.shape[-1], torch.float32).roll(a.shape[-1] // 2, -1)  # [sin, cos] here
        encoded: torch.Tensor = self.W3(F.silu(self.W2(torch.cat([a, tau.to(a.dtype)], dim=-1))))
        return encoded


class SelfAttention(nn.Module):
    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        dim = config.dim
        self.num_heads = config.num_heads
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))
        self.norm_q, self.norm_k = RMSNorm(dim, config.eps), RMSNorm(dim, config.eps)

    def forward(self, x: torch.Tensor, phases: Phases, plan: AttentionPlan, layer: int) -> torch.Tensor:
        shape = (x.shape[0], self.num_heads, -1)
        q_THD = rotate(self.norm_q(self.q(x)).view(shape), phases)
        k_THD = rotate(self.norm_k(self.k(x)).view(shape), phases)
        attended: torch.Tensor = self.o(plan.run(layer, q_THD, k_THD, self.v(x).view(shape)).flatten(1))
        return attended


class CrossAttention(nn.Module):
    """Text and image attention share the query; their outputs are summed."""

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        dim = config.dim
        self.num_heads = config.num_heads
        self.q, self.k, self.v, self.o, self.k_img, self.v_img = (nn.Linear(dim, dim) for _ in range(6))
        self.norm_q, self.norm_k, self.norm_k_img = (RMSNorm(dim, config.eps) for _ in range(3))

    def forward(self, x: torch.Tensor, plans: ForwardPlans, layer: int) -> torch.Tensor:
        q_THD = self.norm_q(self.q(x)).view(x.shape[0], self.num_heads, -1)
        attended = plans.text.run(layer, q_THD) + plans.image.run(layer, q_THD)
        out: torch.Tensor = self.o(attended.flatten(1))
        return out

    def project_text(self, context: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V [tokens, heads, head_dim] of embedded text [tokens, dim]."""
        return self._heads(self.norm_k(self.k(context))), self._heads(self.v(context))

    def project_image(self, context: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._heads(self.norm_k_img(self.k_img(context))), self._heads(self.v_img(context))

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(x.shape[0], self.num_heads, -1)


class Block(nn.Module):
    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        dim = config.dim
        self.eps = config.eps
        self.self_attn = SelfAttention(config)
        self.norm3 = nn.LayerNorm(dim, config.eps)
        self.cross_attn = CrossAttention(config)
        self.ffn = nn.Sequential(
            nn.Linear(dim, config.ffn_dim), nn.GELU(approximate="tanh"), nn.Linear(config.ffn_dim, dim)
        )
        self.modulation = nn.Parameter(torch.empty(1, 6, dim))

    def forward(
        self,
        x: torch.Tensor,
        modulation_U6: torch.Tensor,
        level_T: torch.Tensor,
        phases: Phases,
        plans: ForwardPlans,
        layer: int,
    ) -> torch.Tensor:
        """`modulation_U6` [U, 6, dim] of the distinct timesteps; `level_T` says which of them a token has."""
        shift1, scale1, gate1, shift2, scale2, gate2 = (self.modulation + modulation_U6).unbind(1)
        y = layer_norm(x, self.eps) * (1 + scale1[level_T]) + shift1[level_T]
        x = x + self.self_attn(y, phases, plans.history, layer) * gate1[level_T]
        x = x + self.cross_attn(self.norm3(x), plans, layer)
        y = layer_norm(x, self.eps) * (1 + scale2[level_T]) + shift2[level_T]
        updated: torch.Tensor = x + self.ffn(y) * gate2[level_T]
        return updated


class Head(nn.Module):
    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        self.eps = config.eps
        self.head = nn.Linear(config.dim, config.out_dim * _patch_volume(config))
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


class WanDiT(nn.Module):
    """Build it on the meta device and fill it from a checkpoint."""

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        dim, wide = config.dim, config.in_dim
        self.config = config
        self.patch_embedding = nn.Conv3d(wide, dim, config.patch_size, config.patch_size)
        self.text_embedding = nn.Sequential(
            nn.Linear(config.text_dim, dim), nn.GELU(approximate="tanh"), nn.Linear(dim, dim)
        )
        self.time_embedding = nn.Sequential(nn.Linear(config.freq_dim, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.time_projection = nn.Sequential(nn.SiLU(), nn.Linear(dim, 6 * dim))
        self.img_emb = ImageEmbedding(config.image_dim, dim)
        self.state_encoder = CategoryMLP(config.max_state_dim, config.hidden_size, dim)
        self.action_encoder = ActionEncoder(config.action_dim, dim)
        self.action_decoder = CategoryMLP(dim, config.hidden_size, config.action_dim)
        self.blocks = nn.ModuleList([Block(config) for _ in range(config.num_layers)])
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

    def forward(self, rows: Sequence[ForwardRow], plans: ForwardPlans) -> list[RowOutput]:
        """Velocities of the rows. K/V of every layer are written through `plans.history` on the way."""
        packed = _Packing(self.config, rows)
        levels = upload(packed.timesteps, self.device)
        embedding_U = self.time_embedding(sinusoid(levels, self.config.freq_dim).to(self.dtype))
        modulation_U6 = self.time_projection(embedding_U).unflatten(1, (6, -1))
        level_T = upload(np.repeat(packed.levels, packed.segment_lengths), self.device)
        x = self.run_blocks(self._embed(rows), modulation_U6, level_T, self._phases(rows), plans)
        return self._read_out(rows, x, embedding_U, level_T, packed)

    def _run_blocks(
        self,
        x: torch.Tensor,
        modulation_U6: torch.Tensor,
        level_T: torch.Tensor,
        phases: Phases,
        plans: ForwardPlans,
    ) -> torch.Tensor:
        for layer, block in enumerate(self.blocks):
            x = block(x, modulation_U6, level_T, phases, plans, layer)
        return x

    def _embed(self, rows: Sequence[ForwardRow]) -> torch.Tensor:
        """Tokens [T, dim]: each part is embedded for all rows at once, then laid out row by row."""
        patches = [_patches(self._input(row), self.config.patch_size) for row in rows]
        embedded = F.linear(torch.cat(patches), self.patch_embedding.weight.flatten(1), self.patch_embedding.bias)
        video = torch.split(embedded, [len(row_patches) for row_patches in patches])
        drafts = [row for row in rows if row.actions is not None]
        if not drafts:
            return embedded
        actions = torch.cat([row.actions for row in drafts if row.actions is not None]).to(self.device, self.dtype)
        states = torch.cat([row.state for row in drafts if row.state is not None]).to(self.device, self.dtype)
        counts = [_draft_tokens(row) for row in drafts]
        timesteps = upload(np.repeat([row.action_timestep for row in drafts], [n for n, _ in counts]), self.device)
        action_tokens = iter(torch.split(self.action_encoder(actions, timesteps), [n for n, _ in counts]))
        state_tokens = iter(torch.split(self.state_encoder(states), [n for _, n in counts]))
        parts: list[torch.Tensor] = []
        for row, row_video in zip(rows, video, strict=True):
            parts += [row_video] if row.actions is None else [row_video, next(action_tokens), next(state_tokens)]
        return torch.cat(parts)

    def _input(self, row: ForwardRow) -> torch.Tensor:
        """[in_dim, F, h, w]"""
        latents = row.latents
        if self.config.concat_first_frame_latent:
            assert row.condition is not None, "this model takes the first frame on its channels"
            latents = torch.cat([latents, row.condition])
        return latents.to(self.device, self.dtype)

    def _phases(self, rows: Sequence[ForwardRow]) -> Phases:
        if self._rotary is None:
            self._rotary = Rotary(self.config.head_dim, self.device)
        _, patch_h, patch_w = self.config.patch_size
        phases = []
        for row in rows:
            _, num_frames, height, width = row.latents.shape
            num_actions, num_states = _draft_tokens(row)
            # a chunk's actions are numbered from the frame after the first one
            chunk = max(row.first_frame - 1, 0) // num_frames
            phases.append(
                self._rotary.phases(
                    row.first_frame, num_frames, height // patch_h, width // patch_w, num_actions, num_states, chunk
                )
            )
        return torch.cat([cos for cos, _ in phases]), torch.cat([sin for _, sin in phases])

    def _read_out(
        self,
        rows: Sequence[ForwardRow],
        x: torch.Tensor,
        embedding_U: torch.Tensor,
        level_T: torch.Tensor,
        packed: _Packing,
    ) -> list[RowOutput]:
        drafts = [(row, start) for row, start in zip(rows, packed.row_starts, strict=True) if row.actions is not None]
        if not drafts:
            return [RowOutput(None, None)] * len(rows)
        frame_tokens = self.config.frame_tokens
        videos, actions = [], []
        for row, start in drafts:
            stop = start + frame_tokens * row.latents.shape[1]
            videos.append(slice(start, stop))
            actions.append(slice(stop, stop + _draft_tokens(row)[0]))
        patches = self.head(
            torch.cat([x[part] for part in videos]), embedding_U, torch.cat([level_T[part] for part in videos])
        )
        split_patches = iter(torch.split(patches, [part.stop - part.start for part in videos]))
        velocities = self.action_decoder(torch.cat([x[part] for part in actions]))
        split_actions = iter(torch.split(velocities, [part.stop - part.start for part in actions]))
        return [
            RowOutput(None, None)
            if row.actions is None
            else RowOutput(_unpatch(next(split_patches), row.latents.shape[1:], self.config), next(split_actions))
            for row in rows
        ]


class _Packing:
    """Where rows lie in the packed tensor, and the distinct timesteps: a row has segments video, then the rest."""

    def __init__(self, config: DiTConfig, rows: Sequence[ForwardRow]) -> None:
        index: dict[int, int] = {}
        self.levels: list[int] = []
        self.segment_lengths: list[int] = []
        self.row_starts: list[int] = []
        start = 0
        for row in rows:
            num_video = config.frame_tokens * row.latents.shape[1]
            self.row_starts.append(start)
            for timestep, length in ((row.timestep, num_video), (row.action_timestep, sum(_draft_tokens(row)))):
                if length:
                    self.levels.append(index.setdefault(timestep, len(index)))
                    self.segment_lengths.append(length)
                    start += length
        self.timesteps = list(index)


def _draft_tokens(row: ForwardRow) -> tuple[int, int]:
    """Numbers of action and state tokens, which are never history."""
    return (
        0 if row.actions is None else row.actions.shape[0],
        0 if row.state is None else row.state.shape[0],
    )


def num_draft_tokens(row: ForwardRow) -> int:
    return sum(_draft_tokens(row))


def layer_norm(x: torch.Tensor, eps: float) -> torch.Tensor:
    """Without affine parameters, in float32."""
    return F.layer_norm(x.float(), x.shape[-1:], eps=eps).to(x.dtype)


def sinusoid(timesteps: torch.Tensor, dim: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """[timesteps, dim]: cosines, then sines, of frequencies 10000^(-i / (dim / 2))."""
    half = dim // 2
    frequencies = 10000.0 ** -(torch.arange(half, device=timesteps.device, dtype=dtype) / half)
    angles = timesteps.to(dtype)[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


def _patch_volume(config: DiTConfig) -> int:
    t, h, w = config.patch_size
    return t * h * w


def _patches(x_CFhw: torch.Tensor, patch: tuple[int, int, int]) -> torch.Tensor:
    """[C, F, h, w] -> [tokens, C * patch volume], tokens in order f, h, w; elements in the order of a Conv3d kernel."""
    c, f, h, w = x_CFhw.shape
    t, p, q = patch
    grid = x_CFhw.reshape(c, f // t, t, h // p, p, w // q, q)
    return grid.permute(1, 3, 5, 0, 2, 4, 6).reshape(-1, c * t * p * q)


def _unpatch(patches: torch.Tensor, size: Sequence[int], config: DiTConfig) -> torch.Tensor:
    """[tokens, patch volume * C] -> [C, F, h, w]; a patch's elements are ordered t, h, w, channel."""
    f, h, w = size
    t, p, q = config.patch_size
    grid = patches.view(f // t, h // p, w // q, t, p, q, config.out_dim)
    return grid.permute(6, 0, 3, 1, 4, 2, 5).reshape(config.out_dim, f, h, w)
