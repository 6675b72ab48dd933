"""A causal Wan folder, opened, and the model that it holds."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from worldkv.models.causal_wan.config import SETTINGS_FILE, CausalWanConfig, kv_spec
from worldkv.models.causal_wan.folder import LOOKS_FOR as LOOKS_FOR
from worldkv.models.causal_wan.folder import (
    PREFIXES,
    RANDOM_WEIGHTS_KEY,
    Choices,
    Survey,
    check_all_tensors,
    check_mesh,
)
from worldkv.models.causal_wan.folder import is_mine as is_mine
from worldkv.models.causal_wan.folder import needed_shapes as needed_shapes
from worldkv.models.causal_wan.folder import read_sizes as read_sizes
from worldkv.models.checkpoints.files import CONFIG_FILE, INDEX_FILE, SINGLE_FILE, read_json
from worldkv.models.checkpoints.modules import Progress, load_module
from worldkv.models.checkpoints.tensors import StoredTensors
from worldkv.models.fingerprint import fingerprint
from worldkv.models.wan.dit import WanDiT
from worldkv.models.wan.encoders import load_encoders
from worldkv.models.wan.fused import Precision
from worldkv.models.wan.graphs import accelerate
from worldkv.models.wan.network import Across, Part, Recipe, load_across
from worldkv.models.wan.shard import ALONE
from worldkv.models.wan.tiny_decoder import TinyDecoder
from worldkv.models.wan.tokenizer import (
    TOKENIZER_FILES,
    TOKENIZER_FOLDERS,
    TOKENIZER_REPOSITORY,
    Tokenizer,
    find_tokenizer,
    load_tokenizer,
)

if TYPE_CHECKING:
    from worldkv.models.causal_wan.model import CausalWan
    from worldkv.models.causal_wan.network import CausalWanNetwork

FILES = (
    *(CONFIG_FILE, SETTINGS_FILE, INDEX_FILE, SINGLE_FILE, "model-*.safetensors"),
    *(f"{folder}/{file}".removeprefix("/") for folder in TOKENIZER_FOLDERS for file in TOKENIZER_FILES),
)


def from_elsewhere(folder: Path) -> dict[str, tuple[str, tuple[str, ...]]]:
    """See `models.registry`: the tokenizer."""
    said = read_json(folder / CONFIG_FILE) if (folder / CONFIG_FILE).is_file() else {}
    if find_tokenizer(folder) is not None or RANDOM_WEIGHTS_KEY in said:
        return {}
    return {TOKENIZER_FOLDERS[-1]: (TOKENIZER_REPOSITORY, TOKENIZER_FILES)}


@dataclass(frozen=True, kw_only=True)
class Checkpoint(Survey, StoredTensors):
    """An opened folder. Tensors are read when asked for, a LoRA's are merged into them."""

    @classmethod
    def open(cls, folder: str | Path, choices: Choices | None = None) -> Checkpoint:
        """See `Survey.open`."""
        survey = Survey.open(folder, choices)
        return cls(**vars(survey), _handles=dict(survey.opened))


def tokenizer_of(checkpoint: Survey) -> Tokenizer:
    """The folder's own, a base folder's, or a byte-level one, with a warning unless the weights are random."""
    places = [each for each in (checkpoint.folder, *checkpoint.bases) if find_tokenizer(each) is not None]
    folder = places[0] if places else checkpoint.folder
    warn = (lambda _: None) if checkpoint.random_weights else warnings.warn
    return load_tokenizer(folder, checkpoint.config.dit.text_len, read_sizes(checkpoint).text.vocab_size, warn)


def load(
    folder: Checkpoint | Path | str,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    preset: str | None = None,
    height: int | None = None,
    width: int | None = None,
    window_frames: int | None = None,
    sink_frames: int | None = None,
    recache: bool = True,
    decodes: bool = True,
    precision: Precision = "model",
    base: Sequence[Path | str] = (),
    lora: Path | str | None = None,
    lora_alpha: float | None = None,
    averaged: bool = True,
    file: str | None = None,
    tiny_decoder: Path | str | None = None,
    progress: Progress | None = None,
    across: Across | None = None,
) -> CausalWan:
    """The model in a folder, ready for an engine. Raises CheckpointError with everything that is wrong.

    See `Choices` for what a folder leaves open; an opened checkpoint has them. `recache`: whether a session may have
    its history computed anew under another prompt, which takes room of it. `decodes`: whether blocks become pixels.
    `across`: the ranks that run the DiT together; ValueError where it cannot be divided among them.
    """
    from worldkv.models.causal_wan.model import CausalWan  # a folder is looked at without it

    if not isinstance(folder, Checkpoint):
        choices = Choices(
            preset=preset,
            height=height,
            width=width,
            window_frames=window_frames,
            sink_frames=sink_frames,
            base=base,
            lora=lora,
            lora_alpha=lora_alpha,
            averaged=averaged,
            file=file,
            tiny_decoder=tiny_decoder,
        )
        folder = Checkpoint.open(folder, choices)
    check_all_tensors(folder)
    tiny = None if folder.tiny_decoder is None else TinyDecoder.load(folder.tiny_decoder, device, dtype)
    mesh = ALONE if across is None else across.mesh
    check_mesh(folder.config, mesh)
    spec, tensors = kv_spec(folder.config, recache, mesh), folder.under(PREFIXES.dit)
    recipe = Recipe("causal_wan", folder.config, tensors, spec, str(dtype).removeprefix("torch."), precision)
    dit, network = load_across(recipe, load_network, device, across, progress)
    found = read_sizes(folder)
    encoders = load_encoders(folder, found, PREFIXES, device=device, dtype=dtype, progress=progress)
    encoders = replace(encoders, tiny=tiny)
    model = CausalWan(folder.config, dit, encoders, recache=recache, decodes=decodes, network=network, mesh=mesh)
    encoders.vae.accelerate()
    return model


def load_network(recipe: Recipe, part: Part, progress: Progress | None = None) -> CausalWanNetwork:
    """One rank's part of the DiT, ready to run; no more than that is read. See `load_module`."""
    from worldkv.models.causal_wan.network import CausalWanNetwork

    config = recipe.config
    assert isinstance(config, CausalWanConfig), config
    with torch.device("meta"):
        dit = WanDiT(config.dit, part.shard)
    sources = part.shard.sources({name: PREFIXES.dit + name for name in dit.state_dict()})
    dtype = getattr(torch, recipe.dtype)
    load_module(recipe.tensors, dit, sources, device=part.device, dtype=dtype, progress=progress)
    dit.fingerprint = fingerprint(dit)
    accelerate(dit, recipe.precision)
    return CausalWanNetwork(config, dit, recipe.spec)
