"""A short name for a model's weights, to tell those of equal sizes apart: for exports, which go on with the same ones.

Cheap: a fixed sample of each tensor, read once where a model is loaded. It tells training runs apart, and is no proof
against somebody who changes what is not sampled.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import nn

_NUM_SAMPLES = 64  # elements of a tensor, evenly spread


def fingerprint(parts: Mapping[str, nn.Module]) -> str:
    """Of names, shapes, types and sampled numbers: 32 hexadecimal digits. Waits for the device."""
    digest = hashlib.sha256()
    for part, module in sorted(parts.items()):
        samples: dict[torch.dtype, list[torch.Tensor]] = {}
        for name, tensor in sorted(module.state_dict().items()):
            digest.update(f"{part}.{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
            if tensor.numel() and tensor.device.type != "meta":
                samples.setdefault(tensor.dtype, []).append(_sample(tensor))
        for found in samples.values():
            digest.update(torch.cat(found).cpu().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:32]


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().flatten()
    return flat[:: max(1, flat.numel() // _NUM_SAMPLES)][:_NUM_SAMPLES]
