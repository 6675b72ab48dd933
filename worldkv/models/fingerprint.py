"""A short name for a model's weights, to tell those of equal sizes apart: for exports, which go on with the same ones.

Cheap: the first numbers of each tensor, read once where a model is loaded, before its weights are put together or
quantised. They are the same on a rank that has a part of each. It tells training runs and LoRAs apart, and is no proof
against somebody who changes what is not looked at.
"""

from __future__ import annotations

import hashlib

import torch
from torch import nn

_NUM_SAMPLES = 4  # numbers of a tensor: as many as any part of it has


def fingerprint(*modules: nn.Module) -> str:
    """Of names, types and sampled numbers: 32 hexadecimal digits. Waits for the device."""
    digest = hashlib.sha256()
    for module in modules:
        samples: dict[torch.dtype, list[torch.Tensor]] = {}
        for name, tensor in sorted(module.state_dict().items()):
            digest.update(f"{name} {tensor.dtype}\n".encode())
            if tensor.numel() and tensor.device.type != "meta":
                samples.setdefault(tensor.dtype, []).append(_first(tensor))
        for found in samples.values():
            digest.update(torch.cat(found).cpu().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:32]


def _first(tensor: torch.Tensor) -> torch.Tensor:
    while tensor.dim() > 1:
        tensor = tensor[0]
    return tensor.detach().reshape(-1)[:_NUM_SAMPLES]
