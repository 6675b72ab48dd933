"""`kernels`' functions in Triton: one program per token, a whole row in registers.

NVIDIA GPUs only. See `kernels` for what each means.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from worldkv.models.wan.kernels import NormTable, Quantised

_FP8_MAX = tl.constexpr(448.0)  # of float8_e4m3fn


@triton.jit
def _store_quantised(row, values_ptr, scales_ptr, t, cols, mask, width):
    scale = tl.maximum(tl.max(tl.where(mask, tl.abs(row), 0.0), axis=0), 1e-12) / _FP8_MAX
    tl.store(scales_ptr + t, scale)
    scaled = tl.minimum(tl.maximum(row / scale, -_FP8_MAX), _FP8_MAX)
    tl.store(values_ptr + t * width + cols, scaled.to(values_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _residual_norm(
    x_ptr, delta_ptr, gate_ptr, scale_ptr, shift_ptr, level_ptr, y_ptr, y_scales_ptr,
    width, gate_stride, table_stride, eps,
    HAS_DELTA: tl.constexpr, HAS_GATE: tl.constexpr, NORM: tl.constexpr, PER_LEVEL: tl.constexpr,
    QUANTISE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < width
    x = tl.load(x_ptr + t * width + cols, mask=mask, other=0.0)
    level = tl.load(level_ptr + t)
    if HAS_DELTA:
        delta = tl.load(delta_ptr + t * width + cols, mask=mask, other=0.0).to(tl.float32)
        if HAS_GATE:
            gate = tl.load(gate_ptr + level * gate_stride + cols, mask=mask, other=0.0).to(tl.float32)
            delta = (delta * gate).to(x.dtype).to(tl.float32)
        x = (x.to(tl.float32) + delta).to(x.dtype)
        tl.store(x_ptr + t * width + cols, x, mask=mask)
    if NORM:
        wide = x.to(tl.float32)
        mean = tl.sum(wide, axis=0) / width
        centred = tl.where(mask, wide - mean, 0.0)
        normed = centred * tl.rsqrt(tl.sum(centred * centred, axis=0) / width + eps)
        offset = level * table_stride if PER_LEVEL else 0
        scale = tl.load(scale_ptr + offset + cols, mask=mask, other=0.0).to(tl.float32)
        shift = tl.load(shift_ptr + offset + cols, mask=mask, other=0.0).to(tl.float32)
        y = normed * (1.0 + scale) + shift if PER_LEVEL else normed * scale + shift
        if QUANTISE:
            _store_quantised(y, y_ptr, y_scales_ptr, t, cols, mask, width)
        else:
            tl.store(y_ptr + t * width + cols, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _rms_norm(x_ptr, weight_ptr, y_ptr, width, eps, BLOCK: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < width
    wide = tl.load(x_ptr + t * width + cols, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    normed = wide * tl.rsqrt(tl.sum(wide * wide, axis=0) / width + eps) * weight
    tl.store(y_ptr + t * width + cols, normed.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _norm_rotate_write(
    qkv_ptr, weight_q_ptr, weight_k_ptr, cos_ptr, sin_ptr, slots_ptr, kept_ptr, q_ptr, k_slots_ptr, v_slots_ptr,
    width, half, eps, KEPT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)  # 0: q, 1: k, 2: v
    cols = tl.arange(0, BLOCK)
    mask = cols < width
    row = tl.load(qkv_ptr + t * 3 * width + part * width + cols, mask=mask, other=0.0)
    slot = tl.load(slots_ptr + t)
    kept = tl.load(kept_ptr + t) if KEPT else slot
    if part == 2:
        v = row.to(v_slots_ptr.dtype.element_ty)
        tl.store(v_slots_ptr + slot * width + cols, v, mask=mask & (slot >= 0))
        if KEPT:
            tl.store(v_slots_ptr + kept * width + cols, v, mask=mask & (kept >= 0))
    else:
        wide = row.to(tl.float32)
        weight_ptr = weight_q_ptr if part == 0 else weight_k_ptr
        weight = tl.load(weight_ptr + cols, mask=mask, other=0.0).to(tl.float32)
        normed = wide * tl.rsqrt(tl.sum(wide * wide, axis=0) / width + eps) * weight
        even, odd = tl.split(tl.reshape(normed, [BLOCK // 2, 2]))
        pairs = tl.arange(0, BLOCK // 2)
        cos = tl.load(cos_ptr + t * half + pairs % half)
        sin = tl.load(sin_ptr + t * half + pairs % half)
        turned = tl.interleave(even * cos - odd * sin, even * sin + odd * cos)
        if part == 0:
            tl.store(q_ptr + t * width + cols, turned.to(q_ptr.dtype.element_ty), mask=mask)
        else:
            k = turned.to(k_slots_ptr.dtype.element_ty)
            tl.store(k_slots_ptr + slot * width + cols, k, mask=mask & (slot >= 0))
            if KEPT:
                k = normed.to(k_slots_ptr.dtype.element_ty)
                tl.store(k_slots_ptr + kept * width + cols, k, mask=mask & (kept >= 0))


@triton.jit
def _quantise_rows(x_ptr, values_ptr, scales_ptr, width, GELU: tl.constexpr, BLOCK: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < width
    x = tl.load(x_ptr + t * width + cols, mask=mask, other=0.0).to(tl.float32)
    if GELU:  # 0.5 x (1 + tanh(u)) = x sigmoid(2 u)
        x = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    _store_quantised(x, values_ptr, scales_ptr, t, cols, mask, width)


def residual_norm(
    x: torch.Tensor,
    level: torch.Tensor,
    eps: float,
    delta: torch.Tensor | None,
    gate: torch.Tensor | None,
    table: NormTable | None,
    quantise: bool,
) -> torch.Tensor | Quantised | None:
    num_tokens, width = x.shape
    y = y_scales = x  # stand-ins where nothing is stored
    if table is not None:
        y = torch.empty_like(x, dtype=torch.float8_e4m3fn if quantise else x.dtype)
        if quantise:
            y_scales = torch.empty(num_tokens, 1, device=x.device, dtype=torch.float32)
    scale, shift = (x, x) if table is None else (table.scale, table.shift)
    _residual_norm[(num_tokens,)](
        x,
        x if delta is None else delta,
        x if gate is None else gate,
        scale,
        shift,
        level,
        y,
        y_scales,
        width,
        0 if gate is None else gate.stride(0),
        scale.stride(0) if table is not None and table.per_level else 0,
        eps,
        HAS_DELTA=delta is not None,
        HAS_GATE=gate is not None,
        NORM=table is not None,
        PER_LEVEL=table is not None and table.per_level,
        QUANTISE=quantise,
        **_launch(width),
    )
    if table is None:
        return None
    return Quantised(y, y_scales) if quantise else y


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    y = torch.empty_like(x)
    _rms_norm[(x.shape[0],)](x, weight, y, x.shape[1], eps, **_launch(x.shape[1]))
    return y


def norm_rotate_write(
    qkv: torch.Tensor,
    weight_q: torch.Tensor,
    weight_k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_slots: torch.Tensor,
    v_slots: torch.Tensor,
    write_slots: torch.Tensor,
    eps: float,
    kept_slots: torch.Tensor | None,
) -> torch.Tensor:
    num_tokens, width = qkv.shape[0], weight_q.shape[0]
    q = torch.empty(num_tokens, *k_slots.shape[1:], device=qkv.device, dtype=qkv.dtype)
    _norm_rotate_write[(num_tokens, 3)](
        qkv,
        weight_q,
        weight_k,
        cos,
        sin,
        write_slots,
        write_slots if kept_slots is None else kept_slots,
        q,
        k_slots,
        v_slots,
        width,
        cos.shape[-1],
        eps,
        KEPT=kept_slots is not None,
        **_launch(width),
    )
    return q


def quantise_rows(x: torch.Tensor, gelu: bool) -> Quantised:
    values = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    scales = torch.empty(x.shape[0], 1, device=x.device, dtype=torch.float32)
    _quantise_rows[(x.shape[0],)](x, values, scales, x.shape[1], GELU=gelu, **_launch(x.shape[1]))
    return Quantised(values, scales)


def _launch(width: int) -> dict[str, int]:
    """A row in one program: 8 elements or so for each of its threads' loads in flight."""
    block = triton.next_power_of_2(width)
    return {"BLOCK": block, "num_warps": min(max(block // 1024, 1), 16)}


def num_compiled() -> int:
    """Kernels compiled so far, one for each set of constants and dtypes."""
    kernels = (_residual_norm, _rms_norm, _norm_rotate_write, _quantise_rows)
    return sum(len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values())
