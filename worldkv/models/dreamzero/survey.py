"""A DreamZero checkpoint folder, surveyed: what it says of itself and of its tensors, from descriptions and headers.

Everything wrong with a folder is found here, before a tensor is read, and reported in one CheckpointError. Imports no
torch, unless a base folder keeps its parts in .pth files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from worldkv.errors import CheckpointError
from worldkv.models.checkpoints.complete import Shaped, check_complete
from worldkv.models.checkpoints.dtypes import StoredDtype
from worldkv.models.checkpoints.files import CONFIG_FILE, raise_if_any, read_headers
from worldkv.models.checkpoints.lora import Adapter, is_lora, plain_names
from worldkv.models.checkpoints.source import Place
from worldkv.models.dreamzero.config import DreamZeroConfig
from worldkv.models.dreamzero.folder import (
    DIT_PREFIX,
    IMAGE_PREFIX,
    PREFIXES,
    contradictions,
    describe,
    expect_checkpoint_folder,
)
from worldkv.models.dreamzero.layout import needed_shapes
from worldkv.models.wan import sizes
from worldkv.models.wan.base_folder import read_base
from worldkv.models.wan.sizes import EncoderSizes

_LORA_ALPHA = f"{CONFIG_FILE}: action_head_cfg.config.lora_alpha"


@dataclass(frozen=True, kw_only=True)
class Survey:
    """Of a folder. `Checkpoint` is one whose tensors can be read."""

    folder: Path
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, StoredDtype]
    places: Mapping[str, Place] = field(repr=False)  # of every tensor and of every adapter's factors
    adapters: Mapping[str, Adapter] = field(repr=False)  # of a LoRA run, by the weight that they are merged into
    config: DreamZeroConfig
    conf: Mapping[str, Any]  # experiment_cfg/conf.yaml; empty where there is none
    metadata: Mapping[str, Any]  # experiment_cfg/metadata.json; empty where there is none
    embodiments: Mapping[str, Any]  # of a converted folder, by tag; others say it in conf and metadata
    random_weights: bool  # written by `random`: nobody trained these

    @classmethod
    def open(cls, folder: str | Path, base: Sequence[str | Path] = ()) -> Survey:
        """Reads descriptions and headers of `folder`; tensors that it lacks are taken from `base`, Wan folders.

        Raises CheckpointError with all that is wrong: files absent, damaged or contradicting one another.
        """
        folder = Path(folder)
        expect_checkpoint_folder(folder)
        problems: list[str] = []
        described = describe(folder, problems)
        tensors = read_base(map(Path, base), PREFIXES)
        from_base = {name: stored.shape for name, stored in tensors.items()}
        own = read_headers(folder, problems).tensors
        own_shapes = {name: stored.shape for name, stored in own.items()}
        names: Mapping[str, str] = {name: name for name in own}
        adapters: dict[str, Adapter] = {}
        if is_lora(own_shapes):
            names, adapters = plain_names(own_shapes, described.lora_alpha, problems, from_base, _LORA_ALPHA)
        tensors |= {name: own[stored] for name, stored in names.items()}
        shapes = {name: stored.shape for name, stored in tensors.items()}
        places = {name: stored.place for name, stored in (*own.items(), *tensors.items())}
        config = described.config
        if not problems:
            problems += contradictions(config, shapes, described.conf)
        raise_if_any(folder, problems)
        image_dim = shapes[f"{DIT_PREFIX}img_emb.proj.0.weight"][0]
        return cls(
            folder=folder,
            shapes=shapes,
            dtypes={name: stored.dtype for name, stored in tensors.items()},
            places=places,
            adapters=adapters,
            config=replace(config, dit=replace(config.dit, image_dim=image_dim)),
            conf=described.conf,
            metadata=described.metadata,
            embodiments=described.embodiments,
            random_weights=described.random_weights,
        )


class Surveyed(Shaped, Protocol):
    """A Survey or a Checkpoint."""

    @property
    def config(self) -> DreamZeroConfig: ...


def read_sizes(checkpoint: Surveyed) -> EncoderSizes:
    """Raises CheckpointError for tensors that are missing, have odd shapes or contradict config.json."""
    found, said = sizes.read_sizes(checkpoint, PREFIXES, checkpoint.config.image_num_heads), checkpoint.config
    if said.text_num_heads != found.text.num_heads:
        raise CheckpointError(
            f"{CONFIG_FILE}: text_encoder_cfg.num_heads {said.text_num_heads} contradicts the tensors: "
            f"width {found.text.attention_dim}, position bias for {found.text.num_heads} heads"
        )
    return found


def check_all_tensors(checkpoint: Surveyed) -> None:
    """Checks names and shapes of the whole checkpoint, DiT and encoders together, without reading a tensor.

    Raises one CheckpointError that lists what is missing, unexpected or of another shape.
    """
    found = read_sizes(checkpoint)
    assert found.image is not None
    check_complete(checkpoint, needed_shapes(checkpoint.config, found), _not_needed(found.image.num_layers))


def _not_needed(num_image_layers: int) -> tuple[str, ...]:
    """Globs of names that a released checkpoint may hold and inference never reads: the image tower's last layer, final
    norm, projection and text part, and a vision-language backbone."""
    return (
        f"{IMAGE_PREFIX}transformer.{num_image_layers - 1}.*",
        f"{IMAGE_PREFIX}post_norm.*",
        f"{IMAGE_PREFIX}head",
        "action_head.image_encoder.model.log_scale",
        "action_head.image_encoder.model.textual.*",
        "backbone.*",
    )
