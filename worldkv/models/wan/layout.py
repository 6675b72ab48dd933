"""Names and shapes of the tensors of a Wan model, from its sizes alone, as its checkpoints keep them. Imports no torch.

So a folder can be judged, and a GPU planned for, before a library is loaded; the modules stay the oracle, in the tests.
"""

from __future__ import annotations

from collections.abc import Iterator

from worldkv.models.wan.config import WanConfig
from worldkv.models.wan.names import Prefixes
from worldkv.models.wan.sizes import (
    IMAGE_PATCH,
    IMAGE_PIXELS,
    LEVEL_WIDTHS,
    EncoderSizes,
    ImageSizes,
    TextSizes,
    VAESizes,
)

Shapes = dict[str, tuple[int, ...]]
_TIME_DOWN, _TIME_UP = (False, True, True), (True, True, False)  # levels after which the VAE halves, doubles time


def encoder_shapes(sizes: EncoderSizes, prefixes: Prefixes) -> Shapes:
    """Full name -> shape of every tensor that the encoders need."""
    shapes = _under(prefixes.vae, vae_shapes(sizes.vae)) | _under(prefixes.text, text_shapes(sizes.text))
    if sizes.image is not None:
        assert prefixes.image is not None, "an image encoder has a place in the checkpoint"
        shapes |= _under(prefixes.image, image_shapes(sizes.image))
    return shapes


def _under(prefix: str, shapes: Shapes) -> Shapes:
    return {prefix + name: shape for name, shape in shapes.items()}


def _linear(name: str, num_out: int, num_in: int) -> Shapes:
    return {f"{name}.weight": (num_out, num_in), f"{name}.bias": (num_out,)}


def _conv(name: str, num_out: int, num_in: int, *kernel: int) -> Shapes:
    return {f"{name}.weight": (num_out, num_in, *kernel), f"{name}.bias": (num_out,)}


def _norm(name: str, dim: int) -> Shapes:
    return {f"{name}.weight": (dim,), f"{name}.bias": (dim,)}


# the DiT


def dit_shapes(config: WanConfig) -> Shapes:
    """Of the video model, without what a family adds to it."""
    dim, patch = config.dim, config.patch_size
    shapes = _conv("patch_embedding", dim, config.in_dim, *patch)
    shapes |= _linear("text_embedding.0", dim, config.text_dim) | _linear("text_embedding.2", dim, dim)
    shapes |= _linear("time_embedding.0", dim, config.freq_dim) | _linear("time_embedding.2", dim, dim)
    shapes |= _linear("time_projection.1", 6 * dim, dim)
    if config.image_tokens:
        image = config.image_dim
        shapes |= _norm("img_emb.proj.0", image) | _linear("img_emb.proj.1", image, image)
        shapes |= _linear("img_emb.proj.3", dim, image) | _norm("img_emb.proj.4", dim)
    for layer in range(config.num_layers):
        shapes |= _under(f"blocks.{layer}.", _dit_block(config))
    shapes["head.modulation"] = (1, 2, dim)
    return shapes | _linear("head.head", config.out_dim * patch[0] * patch[1] * patch[2], dim)


def _dit_block(config: WanConfig) -> Shapes:
    dim = config.dim
    shapes: Shapes = {"modulation": (1, 6, dim)}
    for kind in ("self_attn", "cross_attn"):
        for part in "qkvo":
            shapes |= _linear(f"{kind}.{part}", dim, dim)
        shapes |= {f"{kind}.norm_q.weight": (dim,), f"{kind}.norm_k.weight": (dim,)}
    if config.image_tokens:
        shapes |= _linear("cross_attn.k_img", dim, dim) | _linear("cross_attn.v_img", dim, dim)
        shapes["cross_attn.norm_k_img.weight"] = (dim,)
    shapes |= _norm("norm3", dim)
    return shapes | _linear("ffn.0", config.ffn_dim, dim) | _linear("ffn.2", dim, config.ffn_dim)


# the encoders


def text_shapes(sizes: TextSizes) -> Shapes:
    dim, inner, ffn = sizes.dim, sizes.attention_dim, sizes.ffn_dim
    shapes: Shapes = {"token_embedding.weight": (sizes.vocab_size, dim), "norm.weight": (dim,)}
    for layer in range(sizes.num_layers):
        shapes |= _under(
            f"blocks.{layer}.",
            {
                "norm1.weight": (dim,),
                "attn.q.weight": (inner, dim),
                "attn.k.weight": (inner, dim),
                "attn.v.weight": (inner, dim),
                "attn.o.weight": (dim, inner),
                "pos_embedding.embedding.weight": (sizes.num_buckets, sizes.num_heads),
                "norm2.weight": (dim,),
                "ffn.gate.0.weight": (ffn, dim),
                "ffn.fc1.weight": (ffn, dim),
                "ffn.fc2.weight": (dim, ffn),
            },
        )
    return shapes


def image_shapes(sizes: ImageSizes) -> Shapes:
    """Without the last layer, which is never run."""
    dim, num_patches = sizes.dim, (IMAGE_PIXELS // IMAGE_PATCH) ** 2
    shapes: Shapes = {
        "cls_embedding": (1, 1, dim),
        "patch_embedding.weight": (dim, 3, IMAGE_PATCH, IMAGE_PATCH),
        "pos_embedding": (1, 1 + num_patches, dim),
    }
    shapes |= _norm("pre_norm", dim)
    for layer in range(sizes.num_layers - 1):
        shapes |= _under(
            f"transformer.{layer}.",
            _norm("norm1", dim)
            | _linear("attn.to_qkv", 3 * dim, dim)
            | _linear("attn.proj", dim, dim)
            | _norm("norm2", dim)
            | _linear("mlp.0", sizes.ffn_dim, dim)
            | _linear("mlp.2", dim, sizes.ffn_dim),
        )
    return shapes


def vae_shapes(sizes: VAESizes) -> Shapes:
    z, pixels = sizes.z_dim, 3 * sizes.pixel_patch**2
    narrow, wide = sizes.base_dim, sizes.base_dim * LEVEL_WIDTHS[-1]
    top, bottom = sizes.decoder_base_dim * LEVEL_WIDTHS[-1], sizes.decoder_base_dim
    shapes = _conv("conv1", 2 * z, 2 * z, 1, 1, 1) | _conv("conv2", z, z, 1, 1, 1)
    shapes |= _conv("encoder.conv1", narrow, pixels, 3, 3, 3) | _vae_middle("encoder.middle", wide)
    shapes |= {"encoder.head.0.gamma": (wide, 1, 1, 1)} | _conv("encoder.head.2", 2 * z, wide, 3, 3, 3)
    shapes |= _conv("decoder.conv1", top, z, 3, 3, 3) | _vae_middle("decoder.middle", top)
    shapes |= {"decoder.head.0.gamma": (bottom, 1, 1, 1)} | _conv("decoder.head.2", pixels, bottom, 3, 3, 3)
    sides = {"encoder.downsamples": _encoder_levels(sizes), "decoder.upsamples": _decoder_levels(sizes)}
    for side, blocks in sides.items():
        flat = 0  # the 2.1 kind numbers the blocks of all levels on, the 2.2 kind those of each level
        for level, parts in enumerate(blocks):
            for number, part in enumerate(parts):
                inner = f"{side}.{level}.{side.split('.')[1]}.{number}" if sizes.residual else f"{side}.{flat}"
                shapes |= _under(f"{inner}.", part)
                flat += 1
    return shapes


def decoder_state_size(sizes: VAESizes, height: int, width: int) -> int:
    """Numbers that a VAEStream holds of a video that is being decoded: the last 2 frames of the input of every
    convolution that looks back in time. `height`, `width`: of a latent frame. Of the 2.1 kind."""
    assert not sizes.residual, "the decoder of the 2.2 kind is laid out otherwise"
    total = 0
    for name, shape in vae_shapes(sizes).items():
        if not name.startswith("decoder.") or len(shape) != 5 or shape[2] != 3:
            continue
        _, place, number, *_ = name.split(".")
        level = int(number) // 4 if place == "upsamples" else len(_TIME_UP) if place == "head" else 0
        total += 2 * shape[1] * (height << level) * (width << level)
    return total


def _encoder_levels(sizes: VAESizes) -> Iterator[list[Shapes]]:
    """The blocks of each level, in order."""
    width = sizes.base_dim
    for level, factor in enumerate(LEVEL_WIDTHS):
        before, width = width, sizes.base_dim * factor
        parts = [_residual(before, width), _residual(width, width)]
        if level < len(_TIME_DOWN):
            parts.append(_resample(width, width, width if _TIME_DOWN[level] else 0))
        yield parts


def _decoder_levels(sizes: VAESizes) -> Iterator[list[Shapes]]:
    """Likewise. An upsampler of the 2.1 kind halves the width."""
    before = sizes.decoder_base_dim * LEVEL_WIDTHS[-1]
    for level, factor in enumerate(reversed(LEVEL_WIDTHS)):
        width = sizes.decoder_base_dim * factor
        parts = [_residual(before, width), _residual(width, width), _residual(width, width)]
        before = width if sizes.residual else width // 2
        if level < len(_TIME_UP):
            parts.append(_resample(before, width, 2 * width if _TIME_UP[level] else 0))
        yield parts


def _residual(num_in: int, num_out: int) -> Shapes:
    shapes: Shapes = {"residual.0.gamma": (num_in, 1, 1, 1), "residual.3.gamma": (num_out, 1, 1, 1)}
    shapes |= _conv("residual.2", num_out, num_in, 3, 3, 3) | _conv("residual.6", num_out, num_out, 3, 3, 3)
    return shapes if num_in == num_out else shapes | _conv("shortcut", num_out, num_in, 1, 1, 1)


def _resample(num_out: int, num_in: int, num_time: int) -> Shapes:
    """`num_time`: channels of the convolution over time, 0 where there is none."""
    shapes = _conv("resample.1", num_out, num_in, 3, 3)
    return shapes | _conv("time_conv", num_time, num_in, 3, 1, 1) if num_time else shapes


def _vae_middle(name: str, dim: int) -> Shapes:
    attention: Shapes = {"norm.gamma": (dim, 1, 1)}
    attention |= _conv("to_qkv", 3 * dim, dim, 1, 1) | _conv("proj", dim, dim, 1, 1)
    return (
        _under(f"{name}.0.", _residual(dim, dim))
        | _under(f"{name}.1.", attention)
        | _under(f"{name}.2.", _residual(dim, dim))
    )
