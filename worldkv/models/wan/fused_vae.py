"""Wan's VAE with one kernel before each of its causal convolutions, in the memory format that the GPU's are fast in.

diffusers' modules stay: of each residual block the norm and the activation move into the convolution behind them, which
reads what was not normed yet, this piece and the tail of the one before, and writes it normed, activated and padded at
once. Biases are added where the output is read next, and frames are drawn apart as they are enlarged. The same
arithmetic with fewer roundings; tails hold what was not normed yet, and has no bias.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Protocol, cast

import torch
import torch.nn.functional as F
from torch import nn

Sides = tuple[int, int, int]  # zeros before the first frame, above and below, left and right
Tails = list[torch.Tensor | str | None]  # diffusers' cache: a convolution's newest inputs; None, then _FIRST, at first
_FIRST = "Rep"
_TAIL_FRAMES = 2


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
    conv_shortcut: nn.Module
    nonlinearity: nn.Module


class _Resample(Protocol):
    mode: str
    resample: nn.Sequential
    time_conv: nn.Conv3d


def fuse_vae(module: nn.Module) -> None:
    """Have diffusers' AutoencoderKLWan run faster on a GPU; on a CPU it is right, and no faster."""
    for name in ("encoder", "decoder"):
        coder = cast("_Coder", module.get_submodule(name))
        for each in coder.modules():
            if isinstance(each, nn.Conv3d | nn.Conv2d):
                last = torch.channels_last_3d if isinstance(each, nn.Conv3d) else torch.channels_last
                each.weight.data = each.weight.data.contiguous(memory_format=last)
        _fuse(coder.conv_in, None)
        for each in list(coder.modules()):
            if type(each).__name__ == "WanResidualBlock":
                _fuse_residual(each)
            elif type(each).__name__ == "WanResample" and str(each.mode).startswith("upsample"):
                _fuse_upsampling(each)
        _fuse(coder.conv_out, coder.norm_out)
        coder.norm_out = coder.nonlinearity = nn.Identity()


def _fuse(convolution: nn.Conv3d, norm: nn.Module | None) -> None:
    convolution.forward = _prepared(convolution, norm)  # type: ignore[method-assign]


def _prepared(
    convolution: nn.Conv3d, norm: nn.Module | None, before: torch.Tensor | None = None, *, adds_bias: bool = True
) -> Callable[..., torch.Tensor]:
    """`before`: the bias of whose output it reads. `adds_bias`: its own, or that is left to who reads."""
    frames, height, width = convolution.kernel_size
    gamma = None if norm is None else norm.get_parameter("gamma").detach().flatten()
    sides = (frames - 1, height // 2, width // 2)
    return partial(_convolve, convolution, gamma, before, sides, convolution.bias if adds_bias else None)


def _convolve(
    convolution: nn.Conv3d,
    gamma: torch.Tensor | None,
    bias_before: torch.Tensor | None,
    sides: Sides,
    bias: torch.Tensor | None,
    x: torch.Tensor,
    cache_x: torch.Tensor | None = None,
) -> torch.Tensor:
    padded = norm_activate_pad(x, cache_x, gamma, sides, bias_before)
    return F.conv3d(padded, convolution.weight, bias, convolution.stride)


def _fuse_residual(module: nn.Module) -> None:
    """The first convolution's bias is added where the second one is prepared, that one's with the residual."""
    block = cast("_ResidualBlock", module)
    first = _prepared(block.conv1, block.norm1, adds_bias=False)
    second = _prepared(block.conv2, block.norm2, block.conv1.bias, adds_bias=False)
    module.forward = partial(_residual, block, first, second)


def _residual(
    block: _ResidualBlock,
    first: Callable[..., torch.Tensor],
    second: Callable[..., torch.Tensor],
    x: torch.Tensor,
    feat_cache: Tails | None = None,
    feat_idx: list[int] | None = None,
) -> torch.Tensor:
    y = _with_tail(second, _with_tail(first, x, feat_cache, feat_idx), feat_cache, feat_idx)
    return add_with_bias(y, block.conv_shortcut(x), block.conv2.bias)


def _with_tail(
    convolve: Callable[..., torch.Tensor], x: torch.Tensor, tails: Tails | None, at: list[int] | None
) -> torch.Tensor:
    """`at`: which tail is this convolution's, moved on to the next."""
    if tails is None or at is None:
        return convolve(x)
    tail = tails[at[0]]
    assert not isinstance(tail, str)
    tails[at[0]] = _newest_frames(tail, x)
    at[0] += 1
    return convolve(x, tail)


def _newest_frames(tail: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
    """Copied: two of them, where so many were seen."""
    if x.shape[2] >= _TAIL_FRAMES or tail is None:
        return x[:, :, -_TAIL_FRAMES:].clone()
    return torch.cat([tail[:, :, -1:], x], dim=2)


def _fuse_upsampling(module: nn.Module) -> None:
    resample = cast("_Resample", module)
    if resample.mode == "upsample3d":
        _fuse(resample.time_conv, None)
    module.forward = partial(_upsample, resample)


def _upsample(
    module: _Resample, x: torch.Tensor, feat_cache: Tails | None = None, feat_idx: list[int] | None = None
) -> torch.Tensor:
    """Twice as high and wide, and of twice as many frames but for a video's first, which stands alone."""
    in_time = False
    if module.mode == "upsample3d" and feat_cache is not None and feat_idx is not None:
        tail = feat_cache[feat_idx[0]]
        in_time = tail is not None
        x, feat_cache[feat_idx[0]] = _drawn_apart(module.time_conv, x, tail) if in_time else (x, _FIRST)
        feat_idx[0] += 1
    images: torch.Tensor = module.resample[1](twice_as_large(x, interleaved=in_time))
    return images.view(len(x), -1, *images.shape[1:]).transpose(1, 2)


def _drawn_apart(
    convolution: nn.Conv3d, x: torch.Tensor, tail: torch.Tensor | str | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """With twice as many channels, and the new tail. The first frame, which stood alone, counts as zeros."""
    seen = tail if isinstance(tail, torch.Tensor) else None
    newest = _newest_frames(torch.zeros_like(x[:, :, :1]) if seen is None else seen, x)
    convolve: Callable[..., torch.Tensor] = convolution.forward
    return convolve(x, seen), newest


def norm_activate_pad(
    x: torch.Tensor,
    tail: torch.Tensor | None,
    gamma: torch.Tensor | None,
    sides: Sides,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """`tail`, then `x` [B, C, T, H, W], both with `bias` added, each position's channels normed to length sqrt(C),
    scaled by `gamma` and passed through SiLU (not where `gamma` is None), with zeros around; a tail takes the place of
    zeros before the first frame.
    """
    front = sides[0] - (0 if tail is None else tail.shape[2])
    if x.is_cuda:
        from worldkv.models.wan import vae_triton

        return vae_triton.norm_activate_pad(x, tail, gamma, (front, *sides[1:]), bias)
    joined = x if tail is None else torch.cat([tail, x], dim=2)
    wide = joined.float() if bias is None else joined.float() + bias.float()[:, None, None, None]
    if gamma is not None:
        wide = F.silu(F.normalize(wide, dim=1) * len(gamma) ** 0.5 * gamma.float()[:, None, None, None])
    _, height, width = sides
    return F.pad(wide.to(x.dtype), (width, width, height, height, front, 0))


def add_with_bias(x: torch.Tensor, y: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """[B, C, T, H, W]"""
    if x.is_cuda and bias is not None:
        from worldkv.models.wan import vae_triton

        return vae_triton.add_with_bias(x, y, bias)
    return x + y if bias is None else x + y + bias[:, None, None, None]


def twice_as_large(x: torch.Tensor, *, interleaved: bool) -> torch.Tensor:
    """Images [B * T, C, 2 H, 2 W] of a video [B, C, T, H, W], each pixel four times. `interleaved`: x is [B, 2 C, T, H,
    W], and each of its frames two of the video's: the one in its first C channels, then the other."""
    if x.is_cuda:
        from worldkv.models.wan import vae_triton

        return vae_triton.twice_as_large(x, 2 if interleaved else 1)
    if interleaved:
        batch, channels, num_frames, height, width = x.shape
        halves = x.view(batch, 2, channels // 2, num_frames, height, width)
        x = halves.permute(0, 2, 3, 1, 4, 5).reshape(batch, channels // 2, 2 * num_frames, height, width)
    return F.interpolate(x.transpose(1, 2).flatten(0, 1), scale_factor=2, mode="nearest-exact")
