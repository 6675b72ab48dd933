"""DreamZero's DiT: the causal Wan DiT with action and state tokens behind each row's video tokens.

A row lies packed as [video | actions | states]; actions and states are never history. Letters as in `wan.dit`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from worldkv.device import upload
from worldkv.models.dreamzero.config import DiTConfig
from worldkv.models.wan.dit import Hidden, WanDiT, WanRow, sinusoid
from worldkv.models.wan.shard import WHOLE, Shard


@dataclass(frozen=True)
class DreamZeroRow(WanRow):
    """A row's own inputs. A clean pass has neither actions nor states."""

    actions: torch.Tensor | None = None  # [horizon, action_dim]
    state: torch.Tensor | None = None  # [num_states, max_state_dim]
    action_timestep: float = 0

    @property
    def token_counts(self) -> tuple[int, int]:
        """Numbers of action and state tokens."""
        actions, states = (0 if part is None else part.shape[0] for part in (self.actions, self.state))
        return actions, states

    @property
    def num_draft_tokens(self) -> int:
        return sum(self.token_counts)


@dataclass(frozen=True)
class RowOutput:
    """Velocities (noise - clean) of one row; None where it wants none, as a clean pass."""

    video_velocity: torch.Tensor | None  # [C, F, h, w]
    action_velocity: torch.Tensor | None  # [horizon, action_dim]


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


class DreamZeroDiT(WanDiT):
    """Its rows are `DreamZeroRow`s, its outputs `RowOutput`s."""

    def __init__(self, config: DiTConfig, shard: Shard = WHOLE) -> None:
        super().__init__(config, shard)
        self.state_encoder = CategoryMLP(config.max_state_dim, config.hidden_size, config.dim)
        self.action_encoder = ActionEncoder(config.action_dim, config.dim)
        self.action_decoder = CategoryMLP(config.dim, config.hidden_size, config.action_dim)

    def _extra_level(self, row: DreamZeroRow) -> tuple[int, float]:
        return row.num_draft_tokens, row.action_timestep

    def _extra_positions(self, row: DreamZeroRow) -> tuple[tuple[int, int], ...]:
        # a chunk's actions are numbered from the frame after the first one
        chunk = max(row.first_frame - 1, 0) // row.latents.shape[1]
        return tuple((chunk * count, count) for count in row.token_counts if count)

    def _extra_tokens(self, rows: Sequence[DreamZeroRow]) -> list[tuple[torch.Tensor, ...]]:
        num_actions, num_states = ([row.token_counts[kind] for row in rows] for kind in (0, 1))
        if not any(num_actions + num_states):
            return [()] * len(rows)
        actions = torch.cat([row.actions for row in rows if row.actions is not None]).to(self.device, self.dtype)
        states = torch.cat([row.state for row in rows if row.state is not None]).to(self.device, self.dtype)
        timesteps = upload(np.repeat([row.action_timestep for row in rows], num_actions), self.device)
        action_tokens = torch.split(self.action_encoder(actions, timesteps), num_actions)
        state_tokens = torch.split(self.state_encoder(states), num_states)
        return list(zip(action_tokens, state_tokens, strict=True))

    def _read_out(self, rows: Sequence[DreamZeroRow], hidden: Hidden) -> list[RowOutput]:
        videos, actions = self._video_velocities(rows, hidden), self._action_velocities(rows, hidden)
        return [RowOutput(*velocities) for velocities in zip(videos, actions, strict=True)]

    def _action_velocities(self, rows: Sequence[DreamZeroRow], hidden: Hidden) -> list[torch.Tensor | None]:
        parts = [
            slice(extra.start, extra.start + row.token_counts[0])
            for row, extra in zip(rows, hidden.layout.extras, strict=True)
            if row.wants_velocity
        ]
        if not parts:
            return [None] * len(rows)
        velocities = self.action_decoder(torch.cat([hidden.x[part] for part in parts]))
        split = iter(torch.split(velocities, [part.stop - part.start for part in parts]))
        return [next(split) if row.wants_velocity else None for row in rows]
