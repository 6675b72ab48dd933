"""The encoders as modules of diffusers and transformers, of a checkpoint's sizes.

They are built on torch's meta device: they cost no memory and hold no weights.
"""

from __future__ import annotations

import importlib
import warnings
from types import ModuleType

import torch
from torch import nn

from worldkv.errors import CheckpointError
from worldkv.models.checkpoints.source import TensorSource
from worldkv.models.wan import names as keys
from worldkv.models.wan.sizes import IMAGE_PATCH, IMAGE_PIXELS, LEVEL_WIDTHS, ImageSizes, TextSizes, VAESizes

Built = tuple[nn.Module, dict[str, TensorSource]]  # a module on the meta device, and where its tensors come from


def build_vae(sizes: VAESizes, prefix: str = "") -> Built:
    """diffusers' AutoencoderKLWan of the 2.1 or the 2.2 kind."""
    wan = library("diffusers.models.autoencoders.autoencoder_kl_wan")
    channels = 3 * sizes.pixel_patch**2
    with torch.device("meta"):
        module = wan.AutoencoderKLWan(
            base_dim=sizes.base_dim,
            decoder_base_dim=sizes.decoder_base_dim,
            z_dim=sizes.z_dim,
            dim_mult=list(LEVEL_WIDTHS),
            latents_mean=list(keys.LATENT_MEAN[sizes.z_dim]),
            latents_std=list(keys.LATENT_STD[sizes.z_dim]),
            is_residual=sizes.residual,
            in_channels=channels,
            out_channels=channels,
            patch_size=sizes.pixel_patch if sizes.residual else None,
            scale_factor_spatial=sizes.pixel_stride,
        )
    return module, keys.sources(module.state_dict(), sizes.rules, prefix)


def build_text_encoder(sizes: TextSizes, prefix: str = "") -> Built:
    """transformers' UMT5EncoderModel."""
    transformers = library("transformers")
    config = transformers.UMT5Config(
        vocab_size=sizes.vocab_size,
        d_model=sizes.dim,
        d_kv=sizes.attention_dim // sizes.num_heads,
        d_ff=sizes.ffn_dim,
        num_layers=sizes.num_layers,
        num_heads=sizes.num_heads,
        relative_attention_num_buckets=sizes.num_buckets,
        feed_forward_proj="gated-gelu",
        dropout_rate=0.0,
        attn_implementation="eager",
    )
    with torch.device("meta"):
        module = transformers.UMT5EncoderModel(config)
    return module, keys.sources(module.state_dict(), keys.TEXT_RULES, prefix)


def build_image_encoder(sizes: ImageSizes, prefix: str = "") -> Built:
    """transformers' CLIPVisionModel less the last layer and the final norm, neither of which is ever run."""
    transformers = library("transformers")
    config = transformers.CLIPVisionConfig(
        hidden_size=sizes.dim,
        intermediate_size=sizes.ffn_dim,
        num_hidden_layers=sizes.num_layers - 1,
        num_attention_heads=sizes.num_heads,
        image_size=IMAGE_PIXELS,
        patch_size=IMAGE_PATCH,
        hidden_act="gelu",
        layer_norm_eps=1e-5,
        attn_implementation="eager",
    )
    with torch.device("meta"):
        module = transformers.CLIPVisionModel(config)
    tower = getattr(module, "vision_model", module)
    tower.post_layernorm = nn.Identity()
    return module, keys.sources(module.state_dict(), keys.IMAGE_RULES, prefix)


def library(name: str) -> ModuleType:
    """Imports a module of diffusers or transformers; their import-time warnings are not the user's business."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise CheckpointError(
            f"the encoders need {package}, which cannot be imported ({error}): pip install 'worldkv[dreamzero]'"
        ) from error
