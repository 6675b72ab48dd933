"""A DreamZero checkpoint folder, opened: what it says, its tensors by name, and the model that it holds.

Everything wrong with a folder is found before a tensor is read, and reported in one CheckpointError.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from worldkv.kv.window import WindowPolicy
from worldkv.models.checkpoints.files import CONFIG_FILE, INDEX_FILE, SINGLE_FILE
from worldkv.models.checkpoints.modules import load_module
from worldkv.models.checkpoints.tensors import StoredTensors
from worldkv.models.dreamzero.config import DiTConfig, DreamZeroConfig
from worldkv.models.dreamzero.dit import DreamZeroDiT
from worldkv.models.dreamzero.folder import CONF_FILE, DIT_PREFIX, METADATA_FILE, PREFIXES, WORLDKV_FILE, describe
from worldkv.models.dreamzero.folder import LOOKS_FOR as LOOKS_FOR
from worldkv.models.dreamzero.folder import is_mine as is_mine
from worldkv.models.dreamzero.layout import needed_shapes as needed_shapes
from worldkv.models.dreamzero.prompts import NEGATIVE_PROMPT
from worldkv.models.dreamzero.spec import check_guidance, kv_spec
from worldkv.models.dreamzero.steps import Steps
from worldkv.models.dreamzero.survey import Survey
from worldkv.models.dreamzero.survey import check_all_tensors as check_all_tensors
from worldkv.models.dreamzero.survey import read_sizes as read_sizes
from worldkv.models.fingerprint import fingerprint
from worldkv.models.wan import encoders
from worldkv.models.wan.encoders import WanEncoders
from worldkv.models.wan.fused import Precision
from worldkv.models.wan.graphs import accelerate
from worldkv.models.wan.network import Across, Part, Recipe, load_across
from worldkv.models.wan.shard import ALONE, WHOLE, Shard, check_parts
from worldkv.models.wan.tokenizer import (
    TOKENIZER_FILES,
    TOKENIZER_FOLDERS,
    TOKENIZER_REPOSITORY,
    Tokenizer,
    Tokens,
    find_tokenizer,
    load_tokenizer,
)

if TYPE_CHECKING:
    from worldkv.models.dreamzero.model import DreamZero
    from worldkv.models.dreamzero.network import DreamZeroNetwork

FILES = (  # globs of what is read of a repository
    *(CONFIG_FILE, WORLDKV_FILE, CONF_FILE, METADATA_FILE, INDEX_FILE),
    *(SINGLE_FILE, "model-*.safetensors"),
    *(f"{folder}/{file}".removeprefix("/") for folder in TOKENIZER_FOLDERS for file in TOKENIZER_FILES),
)
Progress = Callable[[int, int], None]  # bytes read, bytes in all; restarts for each part


def from_elsewhere(folder: Path) -> dict[str, tuple[str, tuple[str, ...]]]:
    """What a published checkpoint leaves to another repository: where it goes, the repository, its files."""
    if find_tokenizer(folder) is not None or describe(folder, []).random_weights:
        return {}
    return {TOKENIZER_FOLDERS[-1]: (TOKENIZER_REPOSITORY, TOKENIZER_FILES)}


@dataclass(frozen=True, kw_only=True)
class Checkpoint(Survey, StoredTensors):
    """An opened checkpoint folder. Tensors are read when asked for."""

    @classmethod
    def open(cls, folder: str | Path, base: Sequence[str | Path] = ()) -> Checkpoint:
        """Reads descriptions and headers of `folder`; tensors that it lacks are taken from `base`, Wan folders.

        Raises CheckpointError with all that is wrong: files absent, damaged or contradicting one another.
        """
        return cls(**vars(Survey.open(folder, base)))


def meta_dit(config: DiTConfig, shard: Shard = WHOLE) -> DreamZeroDiT:
    """On the meta device: names and shapes, no memory."""
    with torch.device("meta"):
        return DreamZeroDiT(config, shard)


def load_network(recipe: Recipe, part: Part, progress: Progress | None = None) -> DreamZeroNetwork:
    """One rank's part of the DiT, ready to run; no more than that is read. See `load_module`."""
    from worldkv.models.dreamzero.network import DreamZeroNetwork

    assert isinstance(recipe.config, DreamZeroConfig), recipe.config
    dit = meta_dit(recipe.config.dit, part.shard)
    sources = part.shard.sources({name: DIT_PREFIX + name for name in dit.state_dict()})
    dtype = getattr(torch, recipe.dtype)
    load_module(recipe.tensors, dit, sources, device=part.device, dtype=dtype, progress=progress)
    dit.fingerprint = fingerprint(dit)
    accelerate(dit, recipe.precision)
    return DreamZeroNetwork(recipe.config, dit, recipe.spec, part.branches)


def load_encoders(
    checkpoint: Checkpoint, *, device: torch.device | str, dtype: torch.dtype, progress: Progress | None = None
) -> WanEncoders:
    """See `load_module`; progress restarts for each encoder. Raises CheckpointError."""
    found = read_sizes(checkpoint)
    return encoders.load_encoders(checkpoint, found, PREFIXES, device=device, dtype=dtype, progress=progress)


def tokenizer_of(checkpoint: Checkpoint) -> Tokenizer:
    """The folder's own, or a byte-level one with a warning."""
    return load_tokenizer(checkpoint.folder, checkpoint.config.dit.text_len, read_sizes(checkpoint).text.vocab_size)


def load(
    folder: Checkpoint | Path | str,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    steps: Steps = 8,
    cfg_scale: float | None = None,
    window_policy: WindowPolicy = "reset",
    precision: Precision = "model",
    tokenizer: Tokenizer | None = None,
    negative_prompt: Tokens | None = None,
    progress: Progress | None = None,
    across: Across | None = None,
) -> DreamZero:
    """The model in a folder, ready for an engine. Raises CheckpointError with everything that is wrong.

    `cfg_scale` 1 turns guidance off, and one branch runs instead of two; None is the reference's 5. `tokenizer`:
    the folder's, where it is loaded already. `negative_prompt`: token ids and mask in place of the model's own, for
    verification. `across`: the ranks that run the DiT together; ValueError where it cannot be divided among them.
    """
    from worldkv.models.dreamzero.model import DreamZero  # a folder is looked at without it

    checkpoint = folder if isinstance(folder, Checkpoint) else Checkpoint.open(folder)
    check_all_tensors(checkpoint)
    config = checkpoint.config if cfg_scale is None else replace(checkpoint.config, cfg_scale=cfg_scale)
    mesh = ALONE if across is None else across.mesh
    check_guidance(config, mesh)
    check_parts(config.dit, mesh.tensor)
    spec, tensors = kv_spec(config, window_policy, mesh), checkpoint.under(DIT_PREFIX)
    recipe = Recipe("dreamzero", config, tensors, spec, str(dtype).removeprefix("torch."), precision)
    dit, network = load_across(recipe, load_network, device, across, progress)
    assert isinstance(dit, DreamZeroDiT)
    model = DreamZero(
        config,
        dit,
        load_encoders(checkpoint, device=device, dtype=dtype, progress=progress),
        negative_prompt or (tokenizer or tokenizer_of(checkpoint)).encode(NEGATIVE_PROMPT),
        window_policy=window_policy,
        steps=steps,
        network=network,
        mesh=mesh,
    )
    model.encoders.vae.accelerate()
    return model
