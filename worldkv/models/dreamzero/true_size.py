"""DreamZero at its true sizes with random weights, made on the device: for measuring, since nothing was learned.

No file is written: the 14B with its text encoder would be 45 GB.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import nn

from worldkv.kv.window import WindowPolicy
from worldkv.models.dreamzero.config import DreamZeroConfig
from worldkv.models.dreamzero.model import DreamZero
from worldkv.models.dreamzero.steps import Steps
from worldkv.models.wan.dit import WanDiT
from worldkv.models.wan.encoders import ImageEncoder, TextEncoder, WanEncoders, WanVAE, place_position_ids
from worldkv.models.wan.sizes import (
    EncoderSizes,
    ImageSizes,
    TextSizes,
    VAESizes,
    build_image_encoder,
    build_text_encoder,
    build_vae,
)

_TEXT = TextSizes(256384, 4096, 4096, 10240, num_layers=24, num_heads=64, num_buckets=32)  # UMT5-XXL
_IMAGE = ImageSizes(1280, 5120, num_layers=32, num_heads=16)  # CLIP ViT-H/14
TRUE_SIZES = {
    "i2v": EncoderSizes(VAESizes(16, 96, 96, residual=False), _TEXT, _IMAGE),
    "ti2v": EncoderSizes(VAESizes(48, 160, 256, residual=True), _TEXT, _IMAGE),
}


def random_model(
    config: DreamZeroConfig,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    steps: Steps = 8,
    window_policy: WindowPolicy = "reset",
    progress: Callable[[str], None] = lambda _: None,
) -> DreamZero:
    """`progress` is told each part as it is begun. Raises CheckpointError without diffusers and transformers."""
    torch.manual_seed(0)
    sizes = TRUE_SIZES[config.dit.model_type]

    def made(name: str, module: nn.Module) -> nn.Module:
        progress(name)
        place_position_ids(module, device)
        return _fill(module, device, dtype)

    with torch.device("meta"):
        dit = WanDiT(config.dit)
    _fill(dit, device, dtype)
    encoders = WanEncoders(
        WanVAE(made("VAE", build_vae(sizes.vae)[0]), sizes.vae),
        TextEncoder(made("text encoder", build_text_encoder(sizes.text)[0]), sizes.text.vocab_size),
        ImageEncoder(made("image encoder", build_image_encoder(sizes.image)[0])),
    )
    tokens = np.zeros((1, config.dit.text_len), dtype=np.int64)
    tokens[0, :8] = np.arange(10, 18)
    return DreamZero(
        config, dit, encoders, (tokens, (tokens > 0).astype(np.int64)), steps=steps, window_policy=window_policy
    )


@torch.no_grad()
def _fill(module: nn.Module, device: torch.device | str, dtype: torch.dtype) -> nn.Module:
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
