"""Sizes of a checkpoint's VAE, text encoder and image encoder, and the library modules of those sizes.

A released config.json states none of these sizes: they are read off the tensors' shapes, except the image encoder's
head count, which no shape shows. Modules are built on torch's meta device: they cost no memory and hold no weights.
"""

from __future__ import annotations

import importlib
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import nn

from worldkv.errors import CheckpointError
from worldkv.models.checkpoints.modules import TensorReader, TensorSource, tensor_shapes
from worldkv.models.wan import names as keys
from worldkv.models.wan.names import Prefixes

IMAGE_PIXELS, IMAGE_PATCH = 224, 14  # of the CLIP tower: 16 x 16 patches and a class token are 257 tokens
_LEVEL_WIDTHS = [1, 2, 4, 4]  # the VAE's width per level in units of its base width, both kinds


@dataclass(frozen=True)
class VAESizes:
    z_dim: int  # channels of a latent: 16 (Wan 2.1) or 48 (Wan 2.2)
    base_dim: int
    decoder_base_dim: int
    residual: bool  # the 2.2 kind: averaging shortcuts, and 2 x 2 pixels are folded into channels first

    @property
    def pixel_patch(self) -> int:
        return 2 if self.residual else 1

    @property
    def pixel_stride(self) -> int:
        """Pixels per latent row or column."""
        return 8 * self.pixel_patch

    @property
    def rules(self) -> tuple[keys.Rule, ...]:
        return keys.VAE22_RULES if self.residual else keys.VAE21_RULES


@dataclass(frozen=True)
class TextSizes:
    vocab_size: int
    dim: int
    attention_dim: int
    ffn_dim: int
    num_layers: int
    num_heads: int
    num_buckets: int


@dataclass(frozen=True)
class ImageSizes:
    dim: int
    ffn_dim: int
    num_layers: int  # of the checkpoint; the last one is never run
    num_heads: int


Built = tuple[nn.Module, dict[str, TensorSource]]  # a module on the meta device, and where its tensors come from


@dataclass(frozen=True)
class EncoderSizes:
    vae: VAESizes
    text: TextSizes
    image: ImageSizes | None = None  # None: the model has no image encoder

    def tensor_shapes(self, prefixes: Prefixes) -> dict[str, tuple[int, ...]]:
        """Full checkpoint name -> shape of every tensor that the encoders need."""
        built = [build_vae(self.vae, prefixes.vae), build_text_encoder(self.text, prefixes.text)]
        if self.image is not None:
            assert prefixes.image is not None, "an image encoder has a place in the checkpoint"
            built.append(build_image_encoder(self.image, prefixes.image))
        shapes: dict[str, tuple[int, ...]] = {}
        for module, names in built:
            own = tensor_shapes(module)
            shapes |= {source.key: source.stored_shape(own[name]) for name, source in names.items()}
        return shapes


def read_sizes(checkpoint: TensorReader, prefixes: Prefixes, image_num_heads: int = 16) -> EncoderSizes:
    """Of the encoders that `prefixes` names. `image_num_heads`: no tensor shows them.

    Raises CheckpointError that lists the tensors which should show a size and are missing or have odd shapes.
    """
    probe = _Probe(checkpoint.shapes)
    vae = VAESizes(
        z_dim=probe.size(f"{prefixes.vae}conv2.weight", 0),
        base_dim=probe.size(f"{prefixes.vae}encoder.conv1.weight", 0),
        decoder_base_dim=probe.size(f"{prefixes.vae}decoder.head.0.gamma", 0),
        residual=any(name.startswith(f"{prefixes.vae}decoder.upsamples.0.upsamples.") for name in checkpoint.shapes),
    )
    text = TextSizes(
        vocab_size=probe.size(f"{prefixes.text}token_embedding.weight", 0),
        dim=probe.size(f"{prefixes.text}token_embedding.weight", 1),
        attention_dim=probe.size(f"{prefixes.text}blocks.0.attn.q.weight", 0),
        ffn_dim=probe.size(f"{prefixes.text}blocks.0.ffn.fc1.weight", 0),
        num_layers=probe.count(f"{prefixes.text}blocks."),
        num_heads=probe.size(f"{prefixes.text}blocks.0.pos_embedding.embedding.weight", 1),
        num_buckets=probe.size(f"{prefixes.text}blocks.0.pos_embedding.embedding.weight", 0),
    )
    image = None
    if prefixes.image is not None:
        image = ImageSizes(
            dim=probe.size(f"{prefixes.image}cls_embedding", 2),
            ffn_dim=probe.size(f"{prefixes.image}transformer.0.mlp.0.weight", 0),
            num_layers=probe.count(f"{prefixes.image}transformer."),
            num_heads=image_num_heads,
        )
    if probe.problems:
        raise CheckpointError("\n  ".join([f"{checkpoint.folder}: encoders cannot be sized:", *probe.problems]))
    for what, width, num_heads in (
        ("text", text.attention_dim, text.num_heads),
        *((("image", image.dim, image.num_heads),) if image is not None else ()),
    ):
        if width % num_heads:
            raise CheckpointError(f"the {what} encoder's width {width} is not a multiple of its {num_heads} heads")
    if vae.z_dim not in keys.LATENT_MEAN:
        raise CheckpointError(f"the VAE has {vae.z_dim} latent channels; known are {sorted(keys.LATENT_MEAN)}")
    return EncoderSizes(vae, text, image)


def build_vae(sizes: VAESizes, prefix: str = "") -> Built:
    """diffusers' AutoencoderKLWan of the 2.1 or the 2.2 kind."""
    wan = library("diffusers.models.autoencoders.autoencoder_kl_wan")
    channels = 3 * sizes.pixel_patch**2
    with torch.device("meta"):
        module = wan.AutoencoderKLWan(
            base_dim=sizes.base_dim,
            decoder_base_dim=sizes.decoder_base_dim,
            z_dim=sizes.z_dim,
            dim_mult=_LEVEL_WIDTHS,
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


class _Probe:
    """Reads sizes off shapes and remembers what it did not find."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._shapes = shapes
        self.problems: list[str] = []

    def size(self, name: str, dimension: int) -> int:
        shape = self._shapes.get(name)
        if shape is None or len(shape) <= dimension:
            found = "missing" if shape is None else f"shape {list(shape)}"
            self.problems.append(f"{name}: {found}")
            return 1
        return shape[dimension]

    def count(self, prefix: str) -> int:
        """How many numbered layers there are under `prefix`."""
        number = re.compile(re.escape(prefix) + r"(\d+)\.")
        found = {int(match[1]) for name in self._shapes if (match := number.match(name))}
        if not found:
            self.problems.append(f"{prefix}0: missing")
        return 1 + max(found, default=0)
