"""The operations between a block's matrix products, each one pass over memory: Triton on a GPU, plain torch elsewhere.

The plain versions define the meaning; the Triton ones are tested against them. Arithmetic is float32 inside, rounded
once where a tensor is stored. Letters: T tokens, D model width, H heads, U distinct timesteps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from worldkv.kv.storage import KVStorage

_TRITON: Any = None


@dataclass(frozen=True)
class Quantised:
    """Rows in float8_e4m3fn, and the factor of each, float32 [T, 1]."""

    values: torch.Tensor
    scales: torch.Tensor


@dataclass(frozen=True)
class NormTable:
    """Scale and shift of a norm's output. Per timestep: [U, D] views of one table; else one weight and bias [D]."""

    scale: torch.Tensor
    shift: torch.Tensor
    per_level: bool


def residual_norm(
    x_TD: torch.Tensor,
    level_T: torch.Tensor,
    eps: float,
    *,
    delta_TD: torch.Tensor | None = None,
    gate_UD: torch.Tensor | None = None,
    table: NormTable | None = None,
    quantise: bool = False,
) -> Any:
    """x += delta * gate[level], in place; then, with a table, layer norm times (1 + scale[level]) plus shift[level].

    A table that is not per level is an ordinary affine: times scale. Returns the normed rows in x's dtype, or
    Quantised; None without a table.
    """
    if x_TD.is_cuda:
        return _triton().residual_norm(x_TD, level_T, eps, delta_TD, gate_UD, table, quantise)
    if delta_TD is not None:
        x_TD += delta_TD if gate_UD is None else (delta_TD.float() * gate_UD[level_T].float()).to(x_TD.dtype)
    if table is None:
        return None
    normed = F.layer_norm(x_TD.float(), x_TD.shape[-1:], eps=eps)
    if table.per_level:
        normed = normed * (1 + table.scale[level_T].float()) + table.shift[level_T].float()
    else:
        normed = normed * table.scale.float() + table.shift.float()
    return _quantise(normed) if quantise else normed.to(x_TD.dtype)


def rms_norm(x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    """Over the full width."""
    if x_TD.is_cuda:
        normed: torch.Tensor = _triton().rms_norm(x_TD, weight_D, eps)
        return normed
    wide = x_TD.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight_D.float()).to(x_TD.dtype)


def norm_rotate_write(
    qkv_T3D: torch.Tensor,
    weight_q_D: torch.Tensor,
    weight_k_D: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    storage: KVStorage,
    layer: int,
    write_slots: torch.Tensor,
    eps: float,
    kept_slots: torch.Tensor | None = None,
) -> torch.Tensor:
    """q [T, H, head_dim], normed over the full width and rotated; k likewise and v go to their slots of the cache.

    `cos`, `sin`: float32 [T, 1, head_dim / 2]; pairs are adjacent elements. `write_slots`: int64 [T]; what
    would go to a negative one is dropped. `kept_slots`: likewise, where k normed but not rotated goes, and v again.
    """
    if qkv_T3D.is_cuda:
        k_slots, v_slots = storage.slots(layer)
        out: torch.Tensor = _triton().norm_rotate_write(
            qkv_T3D, weight_q_D, weight_k_D, cos, sin, k_slots, v_slots, write_slots, eps, kept_slots
        )
        return out
    q, k, v = qkv_T3D.chunk(3, dim=-1)
    heads = (q.shape[0], *storage.k[layer].shape[2:])

    def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()).view(heads)

    def rotated(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        even, odd = normed(x, weight).view(*heads[:2], -1, 2).unbind(-1)
        return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)

    written = [(write_slots, rotated(k, weight_k_D))]
    if kept_slots is not None:
        written.append((kept_slots, normed(k, weight_k_D)))
    for slots, keys in written:
        exist = slots >= 0
        storage.write(layer, slots[exist], keys[exist], v.reshape(heads)[exist])
    return rotated(q, weight_q_D).to(qkv_T3D.dtype)


def quantise_rows(x_TD: torch.Tensor, *, gelu: bool = False) -> Quantised:
    """Rows in float8, each scaled by its largest magnitude; of gelu(x), tanh kind, if asked for."""
    if x_TD.is_cuda:
        quantised: Quantised = _triton().quantise_rows(x_TD, gelu)
        return quantised
    return _quantise(F.gelu(x_TD.float(), approximate="tanh") if gelu else x_TD.float())


def _quantise(wide_TD: torch.Tensor) -> Quantised:
    largest = torch.finfo(torch.float8_e4m3fn).max
    scales = wide_TD.abs().amax(-1, keepdim=True).clamp(min=1e-12) / largest
    return Quantised((wide_TD / scales).clamp(-largest, largest).to(torch.float8_e4m3fn), scales)


def _triton() -> Any:
    """The kernels' module, imported where there is a GPU to run them."""
    global _TRITON
    if _TRITON is None:
        import worldkv.models.wan.kernels_triton

        _TRITON = worldkv.models.wan.kernels_triton
    return _TRITON
