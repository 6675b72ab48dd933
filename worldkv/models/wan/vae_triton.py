"""The VAE's kernels in Triton; see `fused_vae`. Imported only where there is a GPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_ELEMENTS = 4096  # of a program's tile: positions of one row of pixels, all their channels


@triton.jit
def _norm_activate_pad(
    x_ptr, tail_ptr, gamma_ptr, bias_ptr, y_ptr, frames, height, width, channels,
    front, tail_frames, pad_h, pad_w, x_height, x_width, length,
    xb, xc, xt, xh, xw, tb, tc, tt, th, tw,
    HAS_TAIL: tl.constexpr, BIAS: tl.constexpr, NORM: tl.constexpr, POSITIONS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    h = row % height - pad_h
    t = (row // height) % frames - front  # within the tail and x
    b = (row // (height * frames)).to(tl.int64)
    in_row = tl.where((h >= 0) & (h < x_height) & (t >= 0), x_width, 0)  # positions that are no zeros
    of_x, of_tail = tl.where(t >= tail_frames, in_row, 0), tl.where(t < tail_frames, in_row, 0)
    column = tl.program_id(1) * POSITIONS + tl.arange(0, POSITIONS)
    w = column - pad_w
    c = tl.arange(0, BLOCK)[None, :]
    known = c < channels
    at = w[:, None] * xw + c * xc
    start = b * xb + (t - tail_frames).to(tl.int64) * xt + h.to(tl.int64) * xh
    new = ((w >= 0) & (w < of_x))[:, None] & known
    value = tl.load(x_ptr + start + at, mask=new, other=0.0).to(tl.float32)
    if HAS_TAIL:
        at = w[:, None] * tw + c * tc
        start = b * tb + t.to(tl.int64) * tt + h.to(tl.int64) * th
        old = ((w >= 0) & (w < of_tail))[:, None] & known
        value += tl.load(tail_ptr + start + at, mask=old, other=0.0).to(tl.float32)
    if BIAS:
        bias = tl.load(bias_ptr + c, mask=known, other=0.0).to(tl.float32)
        value = tl.where(((w >= 0) & (w < in_row))[:, None], value + bias, 0.0)
    if NORM:
        gamma = tl.load(gamma_ptr + c, mask=known, other=0.0).to(tl.float32)
        norm = tl.maximum(tl.sqrt(tl.sum(value * value, axis=1)), 1e-12)
        value = value * (length / norm)[:, None] * gamma
        value = value * tl.sigmoid(value)
    out = y_ptr + row.to(tl.int64) * width * channels + column[:, None] * channels + c
    tl.store(out, value.to(y_ptr.dtype.element_ty), mask=(column < width)[:, None] & known)


@triton.jit
def _add_with_bias(
    x_ptr, y_ptr, bias_ptr, out_ptr, num_positions, channels, POSITIONS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    position = tl.program_id(0).to(tl.int64) * POSITIONS + tl.arange(0, POSITIONS)
    c = tl.arange(0, BLOCK)[None, :]
    known = c < channels
    exists = (position < num_positions)[:, None] & known
    at = position[:, None] * channels + c
    bias = tl.load(bias_ptr + c, mask=known, other=0.0).to(tl.float32)
    value = tl.load(x_ptr + at, mask=exists).to(tl.float32) + tl.load(y_ptr + at, mask=exists).to(tl.float32) + bias
    tl.store(out_ptr + at, value.to(out_ptr.dtype.element_ty), mask=exists)


@triton.jit
def _twice_as_large(
    x_ptr, y_ptr, parts, frames, height, width, channels, xb, xc, xt, xh, xw,
    POSITIONS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)  # of what is read
    h = row % height
    frame = (row // height) % (frames * parts)
    b = (row // (height * frames * parts)).to(tl.int64)
    w = tl.program_id(1) * POSITIONS + tl.arange(0, POSITIONS)
    c = tl.arange(0, BLOCK)[None, :]
    exists = (w < width)[:, None] & (c < channels)
    start = b * xb + (frame // parts).to(tl.int64) * xt + h.to(tl.int64) * xh + (frame % parts) * channels * xc
    value = tl.load(x_ptr + start + w[:, None] * xw + c * xc, mask=exists)
    above = row.to(tl.int64) * 4 * width * channels
    for below in tl.static_range(2):
        for right in tl.static_range(2):
            at = above + (2 * width * below + 2 * w[:, None] + right) * channels + c
            tl.store(y_ptr + at, value, mask=exists)


def norm_activate_pad(
    x: torch.Tensor,
    tail: torch.Tensor | None,
    gamma: torch.Tensor | None,
    zeros: tuple[int, int, int],
    bias: torch.Tensor | None,
) -> torch.Tensor:
    front, pad_h, pad_w = zeros
    batch, channels, num_frames, x_height, x_width = x.shape
    tail_frames = 0 if tail is None else tail.shape[2]
    frames, height, width = front + tail_frames + num_frames, x_height + 2 * pad_h, x_width + 2 * pad_w
    y = torch.empty((batch, frames, height, width, channels), device=x.device, dtype=x.dtype)
    tile = _tile(channels)
    other = x if tail is None else tail
    _norm_activate_pad[(batch * frames * height, triton.cdiv(width, tile["POSITIONS"]))](
        x, other, x if gamma is None else gamma, x if bias is None else bias, y, frames, height, width, channels,
        front, tail_frames, pad_h, pad_w, x_height, x_width, float(channels) ** 0.5,
        *x.stride(), *other.stride(),
        HAS_TAIL=tail is not None, BIAS=bias is not None, NORM=gamma is not None, **tile,
    )  # fmt: skip
    return y.permute(0, 4, 1, 2, 3)


def add_with_bias(x: torch.Tensor, y: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    x, y = (each.contiguous(memory_format=torch.channels_last_3d) for each in (x, y))
    out = torch.empty_like(x)
    tile = _tile(x.shape[1])
    num_positions = x.numel() // x.shape[1]
    _add_with_bias[(triton.cdiv(num_positions, tile["POSITIONS"]),)](x, y, bias, out, num_positions, x.shape[1], **tile)
    return out


def twice_as_large(x: torch.Tensor, parts: int) -> torch.Tensor:
    """`parts`: in how many frames each one is drawn apart, by its channels."""
    batch, channels, num_frames, height, width = x.shape
    channels //= parts
    y = torch.empty((batch * num_frames * parts, 2 * height, 2 * width, channels), device=x.device, dtype=x.dtype)
    tile = _tile(channels)
    _twice_as_large[(batch * num_frames * parts * height, triton.cdiv(width, tile["POSITIONS"]))](
        x, y, parts, num_frames, height, width, channels, *x.stride(), **tile
    )
    return y.permute(0, 3, 1, 2)


def _tile(channels: int) -> dict[str, int]:
    block = triton.next_power_of_2(channels)
    return {"POSITIONS": max(1, _ELEMENTS // block), "BLOCK": block, "num_warps": 8}


def num_compiled() -> int:
    """Kernels compiled so far, one for each set of constants and dtypes."""
    kernels = (_norm_activate_pad, _add_with_bias, _twice_as_large)
    return sum(len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values())
