"""Rotary phases of video tokens and of tokens on one axis, computed for the positions asked for.

There is no table and so no end: frame 5000 is as good as frame 5. Angles are computed in float64 and rounded once.
Source: RoFormer (Su et al., 2021) over three axes as in Wan; pairs are adjacent elements.
"""

from __future__ import annotations

from collections import OrderedDict

import torch

_THETA = 10000.0
_MAX_CACHED_ROWS = 256

Phases = tuple[torch.Tensor, torch.Tensor]  # cos and sin, [tokens, 1, head_dim / 2]


def _angles(positions: torch.Tensor, dim: int) -> torch.Tensor:
    """[positions, dim / 2] angles in float64."""
    frequencies = _THETA ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    return positions.to(torch.float64)[:, None] * frequencies


def video_angles(first_frame: int, num_frames: int, height: int, width: int, head_dim: int) -> torch.Tensor:
    """[num_frames * height * width, head_dim / 2]; the axes' shares are time, then two equal ones for space."""
    side = 2 * (head_dim // 6)
    t = _angles(torch.arange(first_frame, first_frame + num_frames), head_dim - 2 * side)
    h, w = (_angles(torch.arange(n), side) for n in (height, width))
    grid = (num_frames, height, width, -1)
    return torch.cat(
        [
            t[:, None, None].expand(grid),
            h[None, :, None].expand(grid),
            w[None, None].expand(grid),
        ],
        dim=-1,
    ).flatten(0, 2)


class Rotary:
    """Phases of one row's tokens, kept for the rows asked for most recently."""

    def __init__(self, head_dim: int, device: torch.device | str) -> None:
        self._head_dim = head_dim
        self._device = torch.device(device)
        self._rows: OrderedDict[tuple[object, ...], Phases] = OrderedDict()

    def phases(
        self, first_frame: int, num_frames: int, height: int, width: int, groups: tuple[tuple[int, int], ...] = ()
    ) -> Phases:
        """Video tokens at absolute frames, then groups of tokens on one axis: (first position, count) of each."""
        key = (first_frame, num_frames, height, width, groups)
        if key in self._rows:
            self._rows.move_to_end(key)
            return self._rows[key]
        angles = [video_angles(first_frame, num_frames, height, width, self._head_dim)]
        angles += [_angles(torch.arange(start, start + count), self._head_dim) for start, count in groups]
        phase = torch.cat(angles)[:, None]
        self._rows[key] = (
            phase.cos().to(self._device, torch.float32),
            phase.sin().to(self._device, torch.float32),
        )
        if len(self._rows) > _MAX_CACHED_ROWS:
            self._rows.popitem(last=False)
        return self._rows[key]


def rotate(x_THD: torch.Tensor, phases: Phases) -> torch.Tensor:
    """Turn adjacent pairs of elements by the tokens' phases; computed in float32, returned in x's dtype."""
    cos, sin = phases
    pairs = x_THD.float().reshape(*x_THD.shape[:-1], -1, 2)
    even, odd = pairs[..., 0], pairs[..., 1]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2).to(x_THD.dtype)
