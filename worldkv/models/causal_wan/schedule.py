"""The steps of a block: timesteps, noise levels, and the arithmetic between them. Knows no model.

Flow matching with a shift: sigma = shift s / (1 + (shift - 1) s) at s from 1 down to 0, timestep 1000 sigma. Each step
takes the velocity's clean latents, in float64, and noises them afresh to the next step's level: stochastic, not DDIM.
Source: Self-Forcing (Huang et al., 2025).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from worldkv.models.causal_wan.config import NUM_TIMESTEPS, CausalSettings


@dataclass(frozen=True)
class Schedule:
    """`timesteps`: what the model is given at each step; `sigmas`: the share of noise there, exact float32 values."""

    timesteps: tuple[float, ...]
    sigmas: tuple[float, ...]

    @classmethod
    def of(cls, steps: tuple[int, ...], settings: CausalSettings) -> Schedule:
        """Warped, a step is a place in the table of timesteps, else a timestep itself; sigma is the nearest one's."""
        s = torch.linspace(1, 0, NUM_TIMESTEPS + 1)[:-1]
        sigmas = settings.shift * s / (1 + (settings.shift - 1) * s)
        table = NUM_TIMESTEPS * sigmas
        chosen = torch.tensor(steps)
        timesteps = table[NUM_TIMESTEPS - chosen] if settings.warp_steps else chosen.float()
        nearest = (table - timesteps[:, None]).abs().argmin(dim=1)
        return cls(tuple(timesteps.tolist()), tuple(sigmas[nearest].tolist()))

    def __len__(self) -> int:
        return len(self.timesteps)

    def clean(self, step: int, x: torch.Tensor, velocity: torch.Tensor) -> torch.Tensor:
        """x0 of a step's input and the model's velocity (noise - clean)."""
        return (x.double() - self.sigmas[step] * velocity.double()).to(x.dtype)

    def noised(self, step: int, x0: torch.Tensor, epsilon: torch.Tensor) -> torch.Tensor:
        """The input of step `step`, from the clean latents of the one before and fresh noise."""
        sigma = self.sigmas[step]
        return ((1 - sigma) * x0.float() + sigma * epsilon.float()).to(x0.dtype)
