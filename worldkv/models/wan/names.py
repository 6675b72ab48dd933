"""The checkpoint's names of the encoders' tensors beside those of diffusers' and transformers' modules, as data.

A rule pairs a name in the library's module with the checkpoint's; {i} is any number, {p} weight, bias or gamma. Each
module name has exactly one source, and only the two names of a tied embedding share one, so rules read both ways. Rules
leave out the prefix under which a family's checkpoints keep each part. Knows no sizes and no family.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from worldkv.models.checkpoints.source import TensorSource


@dataclass(frozen=True)
class Prefixes:
    """Where a family's checkpoints keep the parts of a Wan model: the beginnings of their tensors' names."""

    dit: str
    vae: str
    text: str
    image: str | None = None  # None: the family has no image encoder


class Rule(NamedTuple):
    """`part` of `parts` rows of the checkpoint's tensor, less `squeeze` leading dimensions: see TensorSource."""

    module: str
    checkpoint: str
    part: int = 0
    parts: int = 1
    squeeze: int = 0


# transformers' UMT5EncoderModel; the embedding is tied, so both names take one tensor
TEXT_RULES = (
    Rule("shared.weight", "token_embedding.weight"),
    Rule("encoder.embed_tokens.weight", "token_embedding.weight"),
    Rule("encoder.block.{i}.layer.0.layer_norm.weight", "blocks.{i}.norm1.weight"),
    Rule("encoder.block.{i}.layer.0.SelfAttention.q.weight", "blocks.{i}.attn.q.weight"),
    Rule("encoder.block.{i}.layer.0.SelfAttention.k.weight", "blocks.{i}.attn.k.weight"),
    Rule("encoder.block.{i}.layer.0.SelfAttention.v.weight", "blocks.{i}.attn.v.weight"),
    Rule("encoder.block.{i}.layer.0.SelfAttention.o.weight", "blocks.{i}.attn.o.weight"),
    Rule(
        "encoder.block.{i}.layer.0.SelfAttention.relative_attention_bias.weight",
        "blocks.{i}.pos_embedding.embedding.weight",
    ),
    Rule("encoder.block.{i}.layer.1.layer_norm.weight", "blocks.{i}.norm2.weight"),
    Rule("encoder.block.{i}.layer.1.DenseReluDense.wi_0.weight", "blocks.{i}.ffn.gate.0.weight"),
    Rule("encoder.block.{i}.layer.1.DenseReluDense.wi_1.weight", "blocks.{i}.ffn.fc1.weight"),
    Rule("encoder.block.{i}.layer.1.DenseReluDense.wo.weight", "blocks.{i}.ffn.fc2.weight"),
    Rule("encoder.final_layer_norm.weight", "norm.weight"),
)

# transformers' CLIPVisionModel without its last layer and final norm
IMAGE_RULES = (
    Rule("embeddings.class_embedding", "cls_embedding", squeeze=2),
    Rule("embeddings.patch_embedding.weight", "patch_embedding.weight"),
    Rule("embeddings.position_embedding.weight", "pos_embedding", squeeze=1),
    Rule("pre_layrnorm.{p}", "pre_norm.{p}"),
    Rule("encoder.layers.{i}.layer_norm1.{p}", "transformer.{i}.norm1.{p}"),
    Rule("encoder.layers.{i}.self_attn.q_proj.{p}", "transformer.{i}.attn.to_qkv.{p}", part=0, parts=3),
    Rule("encoder.layers.{i}.self_attn.k_proj.{p}", "transformer.{i}.attn.to_qkv.{p}", part=1, parts=3),
    Rule("encoder.layers.{i}.self_attn.v_proj.{p}", "transformer.{i}.attn.to_qkv.{p}", part=2, parts=3),
    Rule("encoder.layers.{i}.self_attn.out_proj.{p}", "transformer.{i}.attn.proj.{p}"),
    Rule("encoder.layers.{i}.layer_norm2.{p}", "transformer.{i}.norm2.{p}"),
    Rule("encoder.layers.{i}.mlp.fc1.{p}", "transformer.{i}.mlp.0.{p}"),
    Rule("encoder.layers.{i}.mlp.fc2.{p}", "transformer.{i}.mlp.2.{p}"),
)

# diffusers' AutoencoderKLWan: the parts of a block (module, checkpoint), then where the blocks are
_RESIDUAL = (
    ("norm1", "residual.0"),
    ("conv1", "residual.2"),
    ("norm2", "residual.3"),
    ("conv2", "residual.6"),
    ("conv_shortcut", "shortcut"),
)
_RESAMPLE = (("resample.1", "resample.1"), ("time_conv", "time_conv"))
_ATTENTION = (("norm", "norm"), ("to_qkv", "to_qkv"), ("proj", "proj"))
_Parts = tuple[tuple[str, str], ...]

_VAE_ENDS = (
    Rule("quant_conv.{p}", "conv1.{p}"),
    Rule("post_quant_conv.{p}", "conv2.{p}"),
    *(
        Rule(f"{side}.{module}.{{p}}", f"{side}.{checkpoint}.{{p}}")
        for side in ("encoder", "decoder")
        for module, checkpoint in (("conv_in", "conv1"), ("norm_out", "head.0"), ("conv_out", "head.2"))
    ),
)
_VAE_MIDDLE: tuple[tuple[str, str, _Parts], ...] = tuple(
    (f"{side}.mid_block.{module}", f"{side}.middle.{checkpoint}", parts)
    for side in ("encoder", "decoder")
    for module, checkpoint, parts in (
        ("resnets.0", "0", _RESIDUAL),
        ("attentions.0", "1", _ATTENTION),
        ("resnets.1", "2", _RESIDUAL),
    )
)
_VAE21_BLOCKS: tuple[tuple[str, str, _Parts], ...] = (
    ("encoder.down_blocks.{i}", "encoder.downsamples.{i}", _RESIDUAL + _RESAMPLE),
    # the checkpoint numbers a decoder level's 3 residual blocks and its upsampler on: level b begins at 4 b
    *(
        (f"decoder.up_blocks.{b}.resnets.{r}", f"decoder.upsamples.{4 * b + r}", _RESIDUAL)
        for b in range(4)
        for r in range(3)
    ),
    *((f"decoder.up_blocks.{b}.upsamplers.0", f"decoder.upsamples.{4 * b + 3}", _RESAMPLE) for b in range(3)),
)
_VAE22_BLOCKS: tuple[tuple[str, str, _Parts], ...] = (
    ("encoder.down_blocks.{i}.resnets.{j}", "encoder.downsamples.{i}.downsamples.{j}", _RESIDUAL),
    ("encoder.down_blocks.{i}.downsampler", "encoder.downsamples.{i}.downsamples.2", _RESAMPLE),
    ("decoder.up_blocks.{i}.resnets.{j}", "decoder.upsamples.{i}.upsamples.{j}", _RESIDUAL),
    ("decoder.up_blocks.{i}.upsampler", "decoder.upsamples.{i}.upsamples.3", _RESAMPLE),
)


def _vae_rules(blocks: tuple[tuple[str, str, _Parts], ...]) -> tuple[Rule, ...]:
    return _VAE_ENDS + tuple(
        Rule(f"{module}.{part}.{{p}}", f"{checkpoint}.{stored}.{{p}}")
        for module, checkpoint, parts in _VAE_MIDDLE + blocks
        for part, stored in parts
    )


VAE21_RULES = _vae_rules(_VAE21_BLOCKS)
VAE22_RULES = _vae_rules(_VAE22_BLOCKS)

# diffusers' WanTransformer3DModel, of the text-to-video kind
DIT_RULES = (
    Rule("patch_embedding.{p}", "patch_embedding.{p}"),
    *(
        Rule(f"condition_embedder.{module}_{n}.{{p}}", f"{checkpoint}.{2 * (n - 1)}.{{p}}")
        for module, checkpoint in (
            ("time_embedder.linear", "time_embedding"),
            ("text_embedder.linear", "text_embedding"),
        )
        for n in (1, 2)
    ),
    Rule("condition_embedder.time_proj.{p}", "time_projection.1.{p}"),
    Rule("blocks.{i}.scale_shift_table", "blocks.{i}.modulation"),
    *(
        Rule(f"blocks.{{i}}.{module}.{part}.{{p}}", f"blocks.{{i}}.{checkpoint}.{stored}.{{p}}")
        for module, checkpoint in (("attn1", "self_attn"), ("attn2", "cross_attn"))
        for part, stored in (
            *((f"to_{letter}", letter) for letter in "qkv"),
            *(("to_out.0", "o"), ("norm_q", "norm_q"), ("norm_k", "norm_k")),
        )
    ),
    Rule("blocks.{i}.norm2.{p}", "blocks.{i}.norm3.{p}"),  # the affine one, before the text
    Rule("blocks.{i}.ffn.net.0.proj.{p}", "blocks.{i}.ffn.0.{p}"),
    Rule("blocks.{i}.ffn.net.2.{p}", "blocks.{i}.ffn.2.{p}"),
    Rule("scale_shift_table", "head.modulation"),
    Rule("proj_out.{p}", "head.head.{p}"),
)

_FIELDS = {"i": r"(?P<i>\d+)", "j": r"(?P<j>\d+)", "p": r"(?P<p>weight|bias|gamma)"}


def sources(names: Iterable[str], rules: Iterable[Rule], prefix: str) -> dict[str, TensorSource]:
    """For each tensor name of a library's module, where the checkpoint keeps it.

    Raises NotImplementedError for a name that no rule, or more than one, covers: of an unknown version of the library.
    """
    compiled = [(re.compile(_pattern(rule.module)), rule) for rule in rules]
    found = {}
    for name in names:
        short = name.removeprefix("vision_model.")  # transformers 4 wraps the image tower once more
        matches = [(match, rule) for pattern, rule in compiled if (match := pattern.fullmatch(short))]
        if len(matches) != 1:
            raise NotImplementedError(f"no single rule for tensor {name!r} of the installed diffusers or transformers")
        match, rule = matches[0]
        key = prefix + rule.checkpoint.format(**match.groupdict())
        found[name] = TensorSource(key, rule.part, rule.parts, rule.squeeze)
    return found


def checkpoint_name(name: str, rules: Iterable[Rule]) -> str | None:
    """A library's name as the checkpoint's; None where no rule has it. For rules that take whole tensors."""
    return _renamed(name, [(rule.module, rule.checkpoint) for rule in rules])


def module_name(name: str, rules: Iterable[Rule]) -> str | None:
    """The other way round."""
    return _renamed(name, [(rule.checkpoint, rule.module) for rule in rules])


def _renamed(name: str, pairs: Iterable[tuple[str, str]]) -> str | None:
    for pattern, target in pairs:
        if match := _compiled(pattern).fullmatch(name):
            return target.format(**match.groupdict())
    return None


@cache
def _compiled(template: str) -> re.Pattern[str]:
    return re.compile(_pattern(template))


def _pattern(template: str) -> str:
    return "".join(_FIELDS.get(piece, re.escape(piece)) for piece in re.split(r"\{(\w)\}", template))


# Wan's latent statistics per number of latent channels: latents = (mu - mean) / std
LATENT_MEAN = {
    16: (
        -0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508,
        0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921,
    ),
    48: (
        -0.2289, -0.0052, -0.1323, -0.2339, -0.2799, 0.0174, 0.1838, 0.1557,
        -0.1382, 0.0542, 0.2813, 0.0891, 0.1570, -0.0098, 0.0375, -0.1825,
        -0.2246, -0.1207, -0.0698, 0.5109, 0.2665, -0.2108, -0.2158, 0.2502,
        -0.2055, -0.0322, 0.1109, 0.1567, -0.0729, 0.0899, -0.2799, -0.1230,
        -0.0313, -0.1649, 0.0117, 0.0723, -0.2839, -0.2083, -0.0520, 0.3748,
        0.0152, 0.1957, 0.1433, -0.2944, 0.3573, -0.0548, -0.1681, -0.0667,
    ),
}  # fmt: skip
LATENT_STD = {
    16: (
        2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743,
        3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.9160,
    ),
    48: (
        0.4765, 1.0364, 0.4514, 1.1677, 0.5313, 0.4990, 0.4818, 0.5013,
        0.8158, 1.0344, 0.5894, 1.0901, 0.6885, 0.6165, 0.8454, 0.4978,
        0.5759, 0.3523, 0.7135, 0.6804, 0.5833, 1.4146, 0.8986, 0.5659,
        0.7069, 0.5338, 0.4889, 0.4917, 0.4069, 0.4999, 0.6866, 0.4093,
        0.5709, 0.6065, 0.6415, 0.4944, 0.5726, 1.2042, 0.5458, 1.6887,
        0.3971, 1.0600, 0.3943, 0.5537, 0.5444, 0.4089, 0.7468, 0.7744,
    ),
}  # fmt: skip
