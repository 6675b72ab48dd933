"""The VAE's kernel in Triton; see `fused_vae`. Imported only where there is a GPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_ELEMENTS = 4096  # of a program's tile


@triton.jit
def _norm_activate_pad(
    x_ptr, tail_ptr, gamma_ptr, y_ptr, num_positions, frames, height, width, channels,
    front, tail_frames, pad_h, pad_w, x_height, x_width, length,
    xb, xc, xt, xh, xw, tb, tc, tt, th, tw,
    HAS_TAIL: tl.constexpr, NORM: tl.constexpr, POSITIONS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    position = tl.program_id(0).to(tl.int64) * POSITIONS + tl.arange(0, POSITIONS)
    w = position % width - pad_w
    h = (position // width) % height - pad_h
    t = (position // (width * height)) % frames - front  # within the tail and x
    b = position // (width * height * frames)
    exists = position < num_positions
    inside = exists & (w >= 0) & (w < x_width) & (h >= 0) & (h < x_height)
    c = tl.arange(0, BLOCK)[None, :]
    known = c < channels
    own = (inside & (t >= tail_frames))[:, None] & known
    at = b * xb + (t - tail_frames) * xt + h * xh + w * xw
    value = tl.load(x_ptr + at[:, None] + c * xc, mask=own, other=0.0).to(tl.float32)
    if HAS_TAIL:
        old = (inside & (t >= 0) & (t < tail_frames))[:, None] & known
        at = b * tb + t * tt + h * th + w * tw
        value += tl.load(tail_ptr + at[:, None] + c * tc, mask=old, other=0.0).to(tl.float32)
    if NORM:
        gamma = tl.load(gamma_ptr + c, mask=known, other=0.0).to(tl.float32)
        norm = tl.maximum(tl.sqrt(tl.sum(value * value, axis=1)), 1e-12)
        value = value / norm[:, None] * length * gamma
        value = value * tl.sigmoid(value)
    out = y_ptr + position[:, None] * channels + c
    tl.store(out, value.to(y_ptr.dtype.element_ty), mask=exists[:, None] & known)


def norm_activate_pad(
    x: torch.Tensor, tail: torch.Tensor | None, gamma: torch.Tensor | None, zeros: tuple[int, int, int]
) -> torch.Tensor:
    front, pad_h, pad_w = zeros
    batch, channels, num_frames, x_height, x_width = x.shape
    tail_frames = 0 if tail is None else tail.shape[2]
    size = (front + tail_frames + num_frames, x_height + 2 * pad_h, x_width + 2 * pad_w)
    y = torch.empty((batch, *size, channels), device=x.device, dtype=x.dtype)
    num_positions = batch * size[0] * size[1] * size[2]
    block = triton.next_power_of_2(channels)
    positions = max(1, _ELEMENTS // block)
    other = x if tail is None else tail
    _norm_activate_pad[(triton.cdiv(num_positions, positions),)](
        x, other, x if gamma is None else gamma, y, num_positions, *size, channels,
        front, tail_frames, pad_h, pad_w, x_height, x_width, float(channels) ** 0.5,
        *x.stride(), *other.stride(),
        HAS_TAIL=tail is not None, NORM=gamma is not None, POSITIONS=positions, BLOCK=block, num_warps=8,
    )  # fmt: skip
    return y.permute(0, 4, 1, 2, 3)


def num_compiled() -> int:
    """Kernels compiled so far, one for each set of constants and dtypes."""
    return sum(len(cache[0]) for cache in _norm_activate_pad.device_caches.values())
