"""Causal Wan at a released model's true size, and nothing learned: on a device, for measuring."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from worldkv.models.causal_wan.config import CausalWanConfig
from worldkv.models.causal_wan.model import CausalWan
from worldkv.models.wan.dit import WanDiT
from worldkv.models.wan.encoders import TextEncoder, WanEncoders, WanVAE, place_position_ids
from worldkv.models.wan.libraries import build_text_encoder, build_vae
from worldkv.models.wan.random import fill
from worldkv.models.wan.sizes import EncoderSizes
from worldkv.models.wan.tiny_decoder import TinyDecoder


def random_model(
    config: CausalWanConfig,
    sizes: EncoderSizes,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    decodes: bool = True,
    tiny_decoder: bool = False,
    progress: Callable[[str], None] = lambda _: None,
) -> CausalWan:
    """Made on the device; no file is written. `progress` is told each part as it is begun."""
    torch.manual_seed(0)

    def made(name: str, module: nn.Module) -> nn.Module:
        progress(name)
        place_position_ids(module, device)
        return fill(module, device, dtype)

    with torch.device("meta"):
        dit = WanDiT(config.dit)
    fill(dit, device, dtype)
    encoders = WanEncoders(
        WanVAE(made("VAE", build_vae(sizes.vae)[0]), sizes.vae),
        TextEncoder(made("text encoder", build_text_encoder(sizes.text)[0]), sizes.text.vocab_size),
        tiny=TinyDecoder.random(device, dtype) if tiny_decoder else None,
    )
    return CausalWan(config, dit, encoders, decodes=decodes)
