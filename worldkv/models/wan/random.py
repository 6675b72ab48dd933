"""Random weights for the tensors of a Wan model, from a seed: everything runs, is finite and depends on its inputs, and
nothing was learned. Knows names and shapes only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import nn

NOTICE = "random weights written by worldkv: nothing was learned"


def random_tensors(shapes: Mapping[str, tuple[int, ...]], seed: int) -> dict[str, torch.Tensor]:
    """Norm scales 1, biases nearly 0, weights scaled so that each layer about keeps the size of its input."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name in sorted(shapes):
        tensor = torch.randn(shapes[name], generator=generator) * _spread(name, shapes[name])
        if _is_norm_scale(name, shapes[name]):
            tensor += 1.0
        tensors[name] = tensor.to(torch.bfloat16)
    return tensors


def _is_norm_scale(name: str, shape: tuple[int, ...]) -> bool:
    return name.endswith(".gamma") or (name.endswith(".weight") and len(shape) == 1)


def _spread(name: str, shape: tuple[int, ...]) -> float:
    """Standard deviation of a tensor's values."""
    if _is_norm_scale(name, shape) or name.endswith((".bias", ".b")):
        return 0.02
    if name.endswith("token_embedding.weight"):
        return 1.0
    if name.endswith(("modulation", "cls_embedding", "pos_embedding", "image_encoder.model.visual.head")):
        return 0.1
    if name.endswith("pos_embedding.embedding.weight"):
        return 0.5
    fan_in = shape[-2] if name.endswith(".W") else math.prod(shape[1:])  # W is [1, in, out], weight [out, in, ...]
    return 1.0 / math.sqrt(fan_in)


@torch.no_grad()
def fill(module: nn.Module, device: torch.device | str, dtype: torch.dtype) -> nn.Module:
    """Off the meta device, in place: matrices that keep magnitudes, ones where a norm scales, zeros for biases."""
    filled: dict[nn.Parameter, nn.Parameter] = {}  # what modules share they go on sharing
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is None:
                continue
            if parameter in filled:
                owner._parameters[name] = filled[parameter]
                continue
            tensor = torch.empty(parameter.shape, device=device, dtype=dtype)
            if parameter.ndim < 2 or "norm" in type(owner).__name__.lower():
                tensor.fill_(1.0 if name in ("weight", "gamma") else 0.0)
            else:
                fan_in = parameter[0].numel() if parameter.ndim > 2 and name != "W" else parameter.shape[-1]
                tensor.normal_(0, fan_in**-0.5)
            owner._parameters[name] = filled[parameter] = nn.Parameter(tensor, requires_grad=False)
    return module.eval()
