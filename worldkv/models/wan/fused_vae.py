"""Wan's VAE with one kernel before each of its causal convolutions, in the memory format that the GPU's are fast in.

diffusers' modules stay: of each residual block the norm and the activation move into the convolution behind them, which
reads what was not normed yet, this piece and the tail of the one before, and writes it normed, activated and padded at
once. The same arithmetic with fewer roundings; tails hold what was not normed yet.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Protocol, cast

import torch
import torch.nn.functional as F
from torch import nn

Sides = tuple[int, int, int]  # zeros before the first frame, above and below, left and right


class _Coder(Protocol):
    """What diffusers' encoder and decoder have in common."""

    conv_in: nn.Conv3d
    norm_out: nn.Module
    nonlinearity: nn.Module
    conv_out: nn.Conv3d

    def modules(self) -> Iterator[nn.Module]: ...


class _ResidualBlock(Protocol):
    norm1: nn.Module
    conv1: nn.Conv3d
    norm2: nn.Module
    conv2: nn.Conv3d
    nonlinearity: nn.Module


def fuse_vae(module: nn.Module) -> None:
    """Have diffusers' AutoencoderKLWan run faster on a GPU; on a CPU it is right, and no faster."""
    for name in ("encoder", "decoder"):
        coder = cast("_Coder", module.get_submodule(name))
        for each in coder.modules():
            if isinstance(each, nn.Conv3d | nn.Conv2d):
                last = torch.channels_last_3d if isinstance(each, nn.Conv3d) else torch.channels_last
                each.weight.data = each.weight.data.contiguous(memory_format=last)
        _fuse(coder.conv_in, None)
        for norm, convolution in _pairs(coder):
            _fuse(convolution, norm)


def _pairs(coder: _Coder) -> Iterator[tuple[nn.Module, nn.Conv3d]]:
    """The norms whose output is activated and then only convolved, each with its convolution."""
    for each in coder.modules():
        if type(each).__name__ == "WanResidualBlock":
            block = cast("_ResidualBlock", each)
            yield block.norm1, block.conv1
            yield block.norm2, block.conv2
            block.norm1 = block.norm2 = block.nonlinearity = nn.Identity()
    yield coder.norm_out, coder.conv_out
    coder.norm_out = coder.nonlinearity = nn.Identity()


def _fuse(convolution: nn.Conv3d, norm: nn.Module | None) -> None:
    frames, height, width = convolution.kernel_size
    gamma = None if norm is None else norm.get_parameter("gamma").detach().flatten()
    sides = (frames - 1, height // 2, width // 2)
    convolution.forward = partial(_convolve, convolution, gamma, sides)  # type: ignore[method-assign]


def _convolve(
    convolution: nn.Conv3d,
    gamma: torch.Tensor | None,
    sides: Sides,
    x: torch.Tensor,
    cache_x: torch.Tensor | None = None,
) -> torch.Tensor:
    padded = norm_activate_pad(x, cache_x, gamma, sides)
    return F.conv3d(padded, convolution.weight, convolution.bias, convolution.stride)


def norm_activate_pad(
    x: torch.Tensor, tail: torch.Tensor | None, gamma: torch.Tensor | None, sides: Sides
) -> torch.Tensor:
    """`tail`, then `x` [B, C, T, H, W], each position's channels normed to length sqrt(C), scaled by `gamma` and passed
    through SiLU (not where `gamma` is None), with zeros around; a tail takes the place of zeros before the first frame.
    """
    front = sides[0] - (0 if tail is None else tail.shape[2])
    if x.is_cuda:
        from worldkv.models.wan import vae_triton

        return vae_triton.norm_activate_pad(x, tail, gamma, (front, *sides[1:]))
    joined = x if tail is None else torch.cat([tail, x], dim=2)
    if gamma is not None:
        normed = F.normalize(joined.float(), dim=1) * len(gamma) ** 0.5 * gamma.float()[:, None, None, None]
        joined = F.silu(normed).to(x.dtype)
    _, height, width = sides
    return F.pad(joined, (width, width, height, height, front, 0))
