"""A WanDiT's blocks with everything between two matrix products in one kernel each, in bfloat16 or float8 products.

The same arithmetic as `WanDiT`'s own loop, which it is tested against. K and V of the current tokens go from the fused
projection straight to their pages. No host synchronisation, so it can be captured in a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

from worldkv.models.wan.dit import Block, BlockInputs, ForwardPlans, WanDiT
from worldkv.models.wan.kernels import NormTable, Quantised, norm_rotate_write, quantise_rows, residual_norm, rms_norm
from worldkv.models.wan.rotary import Phases

Precision = Literal["model", "fp8"]


class Product:
    """A linear layer in the model's own dtype."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)

    def gelu(self, x: torch.Tensor) -> torch.Tensor:
        """gelu(x W + b), tanh kind, in the product's epilogue where there is one."""
        if x.is_cuda and x.dtype != torch.float32:
            return torch._addmm_activation(self.bias, x, self.weight.t(), use_gelu=True)
        return F.gelu(self(x), approximate="tanh")


class Float8Product:
    """A linear layer with a scale per output and per token."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor) -> None:
        rows = quantise_rows(weight)
        self.weight, self.scales, self.bias = rows.values, rows.scales.t().contiguous(), bias

    def __call__(self, x: Quantised) -> torch.Tensor:
        if not x.values.is_cuda:
            product = (x.values.float() @ self.weight.float().t()) * x.scales * self.scales
            return product.to(self.bias.dtype) + self.bias
        return torch._scaled_mm(
            x.values,
            self.weight.t(),
            scale_a=x.scales,
            scale_b=self.scales,
            bias=self.bias,
            out_dtype=self.bias.dtype,
            use_fast_accum=True,
        )


@dataclass(frozen=True)
class _Layer:
    """One block's parameters, as the loop wants them."""

    qkv: Any
    norm_q: torch.Tensor
    norm_k: torch.Tensor
    out: Any
    norm3: NormTable
    cross_q: Any
    cross_norm_q: torch.Tensor
    cross_out: Any
    ffn_in: Any
    ffn_out: Any


class FusedBlocks:
    """A faster `dit.run_blocks`, to be set in its place. With "fp8" the products' own weights are given up."""

    def __init__(self, dit: WanDiT, precision: Precision = "model") -> None:
        self.dit = dit
        self._eps = dit.config.eps
        self._quantise = precision == "fp8"
        self._modulation = torch.stack([block.modulation[0] for block in dit.blocks]).detach()  # type: ignore[index]
        self._layers = [self._fuse(block) for block in dit.blocks]  # type: ignore[arg-type]

    def __call__(self, inputs: BlockInputs) -> torch.Tensor:
        """`inputs.x` is overwritten and returned."""
        x, level_T, phases, plans = inputs.x, inputs.level_T, inputs.phases, inputs.plans
        tables = self._modulation[:, None] + inputs.modulation_U6  # [layers, U, 6, dim]: shift, scale, gate, twice
        eps, quantise = self._eps, self._quantise
        y = residual_norm(x, level_T, eps, table=_table(tables[0], 0), quantise=quantise)
        for index, layer in enumerate(self._layers):
            delta = self._self_attention(layer, index, y, phases, plans)
            y = residual_norm(
                x,
                level_T,
                eps,
                delta_TD=delta,
                gate_UD=tables[index, :, 2],
                table=layer.norm3,
                quantise=quantise,
            )
            q = rms_norm(layer.cross_q(y), layer.cross_norm_q, eps).view(len(x), self.dit.config.num_heads, -1)
            attended = plans.text.run(index, q)
            if plans.image is not None:
                attended = attended.add_(plans.image.run(index, q))
            delta = layer.cross_out(self._operand(attended.flatten(1)))
            y = residual_norm(x, level_T, eps, delta_TD=delta, table=_table(tables[index], 3), quantise=quantise)
            delta = self._feed_forward(layer, y)
            following = _table(tables[index + 1], 0) if index + 1 < len(self._layers) else None
            y = residual_norm(
                x,
                level_T,
                eps,
                delta_TD=delta,
                gate_UD=tables[index, :, 5],
                table=following,
                quantise=quantise,
            )
        return x

    def _self_attention(self, layer: _Layer, index: int, y: Any, phases: Phases, plans: ForwardPlans) -> torch.Tensor:
        plan = plans.history
        assert plan.write_slots is not None
        kept_slots = None if plans.kept is None else plans.kept.slots
        q = norm_rotate_write(
            layer.qkv(y),
            *(layer.norm_q, layer.norm_k, *phases),
            *(plan.storage, index, plan.write_slots),
            self._eps,
            kept_slots,
        )
        delta: torch.Tensor = layer.out(self._operand(plan.run(index, q).flatten(1)))
        return delta

    def _feed_forward(self, layer: _Layer, y: Any) -> torch.Tensor:
        hidden = quantise_rows(layer.ffn_in(y), gelu=True) if self._quantise else layer.ffn_in.gelu(y)
        delta: torch.Tensor = layer.ffn_out(hidden)
        return delta

    def _operand(self, x: torch.Tensor) -> Any:
        return quantise_rows(x) if self._quantise else x

    def _fuse(self, block: Block) -> _Layer:
        own, cross = block.self_attn, block.cross_attn
        return _Layer(
            qkv=self._product(own.q, own.k, own.v),
            norm_q=own.norm_q.weight.detach(),
            norm_k=own.norm_k.weight.detach(),
            out=self._product(own.o),
            norm3=NormTable(block.norm3.weight.detach(), block.norm3.bias.detach(), per_level=False),
            cross_q=self._product(cross.q),
            cross_norm_q=cross.norm_q.weight.detach(),
            cross_out=self._product(cross.o),
            ffn_in=self._product(block.ffn[0]),
            ffn_out=self._product(block.ffn[2]),
        )

    def _product(self, *linears: Any) -> Product | Float8Product:
        """One product of several layers side by side; they become views of it, so nothing is stored twice."""
        weight = torch.cat([linear.weight.detach() for linear in linears]) if len(linears) > 1 else linears[0].weight
        bias = torch.cat([linear.bias.detach() for linear in linears])
        if self._quantise:
            product = Float8Product(weight.detach(), bias)
            for linear in linears:
                linear.weight = nn.Parameter(linear.weight.new_empty(0), requires_grad=False)
            return product
        start = 0
        for linear in linears:
            stop = start + linear.weight.shape[0]
            linear.weight.data, linear.bias.data = weight.data[start:stop], bias[start:stop]
            start = stop
        return Product(weight.detach(), bias)


def _table(tables_U6D: torch.Tensor, first: int) -> NormTable:
    """Shift and scale of one block's norm, at rows `first` and `first + 1`."""
    return NormTable(scale=tables_U6D[:, first + 1], shift=tables_U6D[:, first], per_level=True)
