"""A causal Wan folder, opened, and the model that it holds."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

import torch

from worldkv.models.causal_wan.config import SETTINGS_FILE
from worldkv.models.causal_wan.folder import LOOKS_FOR as LOOKS_FOR
from worldkv.models.causal_wan.folder import PREFIXES, RANDOM_WEIGHTS_KEY, Choices, Survey, check_all_tensors
from worldkv.models.causal_wan.folder import is_mine as is_mine
from worldkv.models.causal_wan.folder import needed_shapes as needed_shapes
from worldkv.models.causal_wan.folder import read_sizes as read_sizes
from worldkv.models.checkpoints.files import CONFIG_FILE, INDEX_FILE, SINGLE_FILE, read_json
from worldkv.models.checkpoints.modules import Progress, load_module
from worldkv.models.checkpoints.tensors import StoredTensors
from worldkv.models.wan.dit import WanDiT
from worldkv.models.wan.encoders import load_encoders
from worldkv.models.wan.fused import Precision
from worldkv.models.wan.graphs import accelerate
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

FILES = (
    *(CONFIG_FILE, SETTINGS_FILE, INDEX_FILE, SINGLE_FILE, "model-*.safetensors"),
    *(f"{folder}/{file}".removeprefix("/") for folder in TOKENIZER_FOLDERS for file in TOKENIZER_FILES),
)


def from_elsewhere(folder: Path) -> dict[str, tuple[str, tuple[str, ...]]]:
    """See `models.registry`: the tokenizer."""
    if find_tokenizer(folder) is not None or has_random_weights(folder):
        return {}
    return {TOKENIZER_FOLDERS[-1]: (TOKENIZER_REPOSITORY, TOKENIZER_FILES)}


def has_random_weights(folder: Path) -> bool:
    """Whether `random` wrote it. Raises CheckpointError for a damaged config.json."""
    path = folder / CONFIG_FILE
    return path.is_file() and RANDOM_WEIGHTS_KEY in read_json(path)


@dataclass(frozen=True, kw_only=True)
class Checkpoint(Survey, StoredTensors):
    """An opened folder. Tensors are read when asked for, a LoRA's are merged into them."""

    @classmethod
    def open(cls, folder: str | Path, choices: Choices | None = None) -> Checkpoint:
        """See `Survey.open`."""
        survey = Survey.open(folder, choices)
        return cls(**vars(survey), _handles=dict(survey.opened))


def tokenizer_of(folder: Path, model: CausalWan, base: Sequence[Path | str] = ()) -> Tokenizer:
    """The folder's own, a base folder's, or a byte-level one, with a warning unless the weights are random."""
    warn = (lambda _: None) if has_random_weights(folder) else warnings.warn
    places = [place for place in (folder, *map(Path, base)) if find_tokenizer(place) is not None]
    return load_tokenizer(
        places[0] if places else folder, model.config.dit.text_len, model.encoders.text.vocab_size, warn
    )


class Options(TypedDict, total=False):
    """What `load` takes beside folder, device and dtype."""

    preset: str | None
    height: int | None
    width: int | None
    window_frames: int | None
    sink_frames: int | None
    recache: bool
    decodes: bool
    precision: Precision
    base: Sequence[Path | str]
    lora: Path | str | None
    lora_alpha: float | None
    averaged: bool
    file: str | None
    progress: Progress | None


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
    progress: Progress | None = None,
) -> CausalWan:
    """The model in a folder, ready for an engine. Raises CheckpointError with everything that is wrong.

    See `Choices` for what a folder leaves open; an opened checkpoint has them. `recache`: whether a session may have
    its history computed anew under another prompt, which takes room of it. `decodes`: whether blocks become pixels.
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
        )
        folder = Checkpoint.open(folder, choices)
    check_all_tensors(folder)
    with torch.device("meta"):
        dit = WanDiT(folder.config.dit)
    names = {name: PREFIXES.dit + name for name in dit.state_dict()}
    load_module(folder, dit, names, device=device, dtype=dtype, progress=progress)
    found = read_sizes(folder)
    encoders = load_encoders(folder, found, PREFIXES, device=device, dtype=dtype, progress=progress)
    model = CausalWan(folder.config, dit, encoders, recache=recache, decodes=decodes)
    accelerate(dit, precision)
    encoders.vae.accelerate()
    return model
