"""Names and shapes that are written down, against the modules that hold the tensors."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("diffusers")
pytest.importorskip("transformers")

from engines import random_checkpoint

from worldkv.models.checkpoints.modules import tensor_shapes
from worldkv.models.dreamzero.checkpoint import Checkpoint, meta_dit, read_sizes
from worldkv.models.dreamzero.config import DreamZeroConfig, dreamzero_5b, dreamzero_14b
from worldkv.models.dreamzero.folder import DIT_PREFIX, PREFIXES
from worldkv.models.dreamzero.layout import TRUE_SIZES, needed_shapes
from worldkv.models.wan.libraries import build_image_encoder, build_text_encoder, build_vae
from worldkv.models.wan.sizes import EncoderSizes


def of_the_modules(config: DreamZeroConfig, sizes: EncoderSizes) -> dict[str, tuple[int, ...]]:
    assert sizes.image is not None
    shapes = {DIT_PREFIX + name: shape for name, shape in tensor_shapes(meta_dit(config.dit)).items()}
    for module, names in (
        build_vae(sizes.vae, PREFIXES.vae),
        build_text_encoder(sizes.text, PREFIXES.text),
        build_image_encoder(sizes.image, str(PREFIXES.image)),
    ):
        own = tensor_shapes(module)
        shapes |= {source.key: source.stored_shape(own[name]) for name, source in names.items()}
    return shapes


def differing(one: dict[str, tuple[int, ...]], other: dict[str, tuple[int, ...]]) -> list[str]:
    return [f"{name}: {one.get(name)}, {other.get(name)}" for name in one | other if one.get(name) != other.get(name)]


@pytest.mark.parametrize("config", [dreamzero_14b(), dreamzero_5b()], ids=["14B", "5B"])
def test_the_released_models_tensors_are_those_of_the_modules(config: DreamZeroConfig) -> None:
    sizes = TRUE_SIZES[config.dit.model_type]
    assert not differing(needed_shapes(config, sizes), of_the_modules(config, sizes))


@pytest.mark.parametrize("kind", ["i2v", "ti2v"])
def test_so_are_those_of_other_sizes(kind: str) -> None:
    checkpoint = Checkpoint.open(random_checkpoint(kind))
    sizes = read_sizes(checkpoint)
    assert not differing(needed_shapes(checkpoint.config, sizes), of_the_modules(checkpoint.config, sizes))
