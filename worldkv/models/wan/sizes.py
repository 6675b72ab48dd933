"""Sizes of a checkpoint's VAE, text encoder and image encoder.

A released config.json states none of these sizes: they are read off the tensors' shapes, except the image encoder's
head count, which no shape shows. Imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from worldkv.errors import CheckpointError
from worldkv.models.checkpoints.complete import Shaped
from worldkv.models.wan import names as keys
from worldkv.models.wan.names import Prefixes

IMAGE_PIXELS, IMAGE_PATCH = 224, 14  # of the CLIP tower: 16 x 16 patches and a class token are 257 tokens
LEVEL_WIDTHS = (1, 2, 4, 4)  # the VAE's width per level in units of its base width, both kinds


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


@dataclass(frozen=True)
class EncoderSizes:
    vae: VAESizes
    text: TextSizes
    image: ImageSizes | None = None  # None: the model has no image encoder


def read_sizes(checkpoint: Shaped, prefixes: Prefixes, image_num_heads: int = 16) -> EncoderSizes:
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


def numbers_under(prefix: str, names: Iterable[str]) -> set[int]:
    """Of the layers whose tensors' names begin with `prefix`. What has too many digits for a layer is none."""
    number = re.compile(re.escape(prefix) + r"([0-9]{1,6})\.")
    return {int(match[1]) for name in names if (match := number.match(name))}


class _Probe:
    """Reads sizes off shapes and remembers what it did not find."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._shapes = shapes
        self.problems: list[str] = []

    def size(self, name: str, dimension: int) -> int:
        shape = self._shapes.get(name)
        if shape is None or len(shape) <= dimension or 0 in shape:
            found = "missing" if shape is None else f"shape {list(shape)}"
            self.problems.append(f"{name}: {found}")
            return 1
        return shape[dimension]

    def count(self, prefix: str) -> int:
        """How many numbered layers there are under `prefix`."""
        found = numbers_under(prefix, self._shapes)
        absent = next(index for index in range(len(found) + 1) if index not in found)
        if absent == 0 or absent < len(found):
            self.problems.append(f"{prefix}{absent}: missing")
        return max(1, absent)
