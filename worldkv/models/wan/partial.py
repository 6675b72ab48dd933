"""The layers of a DiT that add up what its shards have. By itself a shard is whole, and nothing is added."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from worldkv.models.wan.shard import Shard


class RMSNorm(nn.Module):
    """Over the full width, all heads together, those of other shards too, in float32."""

    def __init__(self, dim: int, eps: float, shard: Shard) -> None:
        super().__init__()
        self.eps, self.shard = eps, shard
        self.weight = nn.Parameter(torch.empty(dim // shard.size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(mean_square(wide, self.shard) + self.eps)).to(x.dtype) * self.weight


def mean_square(wide: torch.Tensor, shard: Shard) -> torch.Tensor:
    """[T, 1], over the full width; `wide`: this shard's part of it."""
    if shard.size == 1:
        return wide.square().mean(-1, keepdim=True)
    return shard.sum(wide.square().sum(-1, keepdim=True)) / (wide.shape[-1] * shard.size)


class PartialLinear(nn.Linear):
    """A product whose inputs are divided among shards."""

    def __init__(self, dim_in: int, dim_out: int, shard: Shard) -> None:
        super().__init__(dim_in // shard.size, dim_out)
        self.shard = shard

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.shard.size == 1:
            return super().forward(x)
        return self.shard.sum(F.linear(x, self.weight)) + self.bias
