"""The forms in which causal Wan models are published, as the tensors of one DiT by its own names.

A distilled model is a .pt file, a dictionary of weights before and after averaging, or safetensors; its names may stand
under the words of wrappers, or be diffusers'. A LoRA of it is a file of its own. Reads names and shapes, no tensor; of
.pt files nothing is run (weights_only), and they are mapped.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from worldkv.errors import CheckpointError
from worldkv.models.checkpoints.dtypes import of_torch
from worldkv.models.checkpoints.files import INDEX_FILE, SINGLE_FILE, raise_if_any, read_headers
from worldkv.models.checkpoints.header import read_header
from worldkv.models.checkpoints.lora import Adapter, plain_names
from worldkv.models.checkpoints.source import Place, Stored
from worldkv.models.checkpoints.wrappers import unwrapped
from worldkv.models.wan.base_folder import PATTERNS
from worldkv.models.wan.names import DIT_RULES, checkpoint_name

if TYPE_CHECKING:
    from worldkv.models.checkpoints.tensors import PthFile

PROBE = "patch_embedding.weight"  # of every DiT
AVERAGED, AS_TRAINED = "generator_ema", ("generator", "model")  # groups of a .pt file
LORA_GROUP = "generator_lora"
_BEFORE_ALL = ("model.", "transformer.", "diffusion_model.")  # words that programs put before the DiT's names
_BASE_DIT = PATTERNS[0]
_FACTOR = re.compile(r"(?P<layer>.+)\.lora_(?P<part>A|B|down|up)(?P<name>\.\w+)?\.weight")
_PEFT = "base_model.model."


@dataclass(frozen=True)
class Part:
    """What one file holds, or files that belong together. `opened`: of .pt files, which are read once."""

    name: str
    tensors: Mapping[str, Stored]
    groups: tuple[str, ...] = ()
    opened: Mapping[Path, PthFile] = field(default_factory=dict)

    @property
    def is_lora(self) -> bool:
        return any(".lora_" in name for name in self.tensors)

    def group(self, name: str) -> dict[str, Stored]:
        before = f"{name}."
        return {n.removeprefix(before): stored for n, stored in self.tensors.items() if n.startswith(before)}


def read_part(path: Path) -> Part:
    """Raises CheckpointError for a file that is no weights."""
    if path.suffix == ".safetensors":
        header = read_header(path)
        return Part(path.name, {n: Stored(Place(path, n), shape, dtype) for n, (dtype, shape) in header.items()})
    from worldkv.models.checkpoints.tensors import PthFile  # torch, which alone reads such a file

    if not path.is_file():
        raise CheckpointError(f"{path} is no file of weights")
    opened = PthFile(path)
    tensors = {n: Stored(Place(path, n), tuple(t.shape), of_torch(t.dtype)) for n, t in opened.tensors.items()}
    return Part(path.name, tensors, opened.groups, {path: opened})


def find_parts(folder: Path, file: str | None, wants_lora: bool) -> tuple[Part, Part | None]:
    """The DiT of a folder, and the LoRA that lies beside it where that is wanted.

    Weights in worldkv's own names go first, then one other file, then a base model's own. Raises CheckpointError where
    there is none, or more than one and `file` names none of them.
    """
    if file is None and any((folder / name).is_file() for name in (SINGLE_FILE, INDEX_FILE)):
        problems: list[str] = []
        whole = Part(SINGLE_FILE, read_headers(folder, problems).tensors)
        raise_if_any(folder, problems)
        beside = [part.name for part in map(read_part, weight_files(folder)) if part.is_lora] if wants_lora else []
        if beside:
            raise CheckpointError(
                f"{folder}: {beside[0]} lies beside whole weights, and may be merged into them already: take it "
                "away, or name it with --lora FILE to have it merged"
            )
        return whole, None
    if file is not None and Path(file).name != file:
        raise CheckpointError(f"file: expected a name within {folder}, got {file!r}")
    parts = [read_part(path) for path in weight_files(folder)]
    loras = [part for part in parts if part.is_lora and part.name != file]
    models = [part for part in parts if not part.is_lora or part.name == file]
    if file is not None:
        models = [part for part in models if part.name == file] or [read_part(folder / file)]
    models = [part for part in models if _is_dit(part.tensors)] or models
    if len(models) > 1:
        names = ", ".join(part.name for part in models)
        raise CheckpointError(
            f"{folder} holds several models ({names}): keep one there (from Python, `file` names one)"
        )
    if wants_lora and len(loras) > 1:
        names = ", ".join(part.name for part in loras)
        raise CheckpointError(f"{folder} holds several LoRAs ({names}): keep one there, or name one with --lora FILE")
    if not models:
        models = _base_dit(folder)
    return models[0], loras[0] if wants_lora and loras else None


def weight_files(folder: Path) -> list[Path]:
    """Files of weights that are no base model's."""
    base = {path for pattern in PATTERNS for path in folder.glob(pattern)}
    found = [path for suffix in ("pt", "pth", "safetensors") for path in sorted(folder.glob(f"*.{suffix}"))]
    return [path for path in found if path not in base and path.is_file()]


def _base_dit(folder: Path) -> list[Part]:
    files = sorted(folder.glob(_BASE_DIT))
    if not files:
        raise CheckpointError(
            f"{folder} holds no weights of a model: looked for {SINGLE_FILE}, {INDEX_FILE}, a .pt or .safetensors file "
            f"and {_BASE_DIT}"
        )
    tensors: dict[str, Stored] = {}
    for path in files:
        tensors |= read_part(path).tensors
    return [Part(_BASE_DIT, tensors)]


def dit_tensors(part: Part, averaged: bool, problems: list[str]) -> dict[str, Stored]:
    """By the DiT's own names. `averaged`: take the averaged weights where there are such. Appends what is mixed."""
    wanted = ((AVERAGED,) if averaged else ()) + AS_TRAINED
    group = next((name for name in wanted if name in part.groups), None)
    if group is None and part.groups and not _is_dit(part.tensors):
        raise CheckpointError(f"{part.name}: expected one of {', '.join(wanted)}, got {', '.join(part.groups)}")
    return _own_names(part.tensors if group is None else part.group(group), problems)


def _is_dit(names: Mapping[str, Stored]) -> bool:
    return any(name.endswith(PROBE) for name in names)


def _own_names(tensors: Mapping[str, Stored], problems: list[str]) -> dict[str, Stored]:
    plain, _ = unwrapped(tensors, problems)
    found: dict[str, Stored] = {}
    for name, stored in plain.items():
        own = _own_name(name)
        if own in found:
            problems.append(f"{stored} and {found[own].place.key} are both {own}: two models seem to be mixed")
        found[own] = tensors[stored]
    return found


def _own_name(name: str) -> str:
    short = name
    for word in _BEFORE_ALL * 2:  # transformer.model., say
        short = short.removeprefix(word)
    return checkpoint_name(short, DIT_RULES) or short


def lora_adapters(
    part: Part, alpha: float | None, dit: Mapping[str, Stored], problems: list[str]
) -> tuple[dict[str, Adapter], dict[str, Stored]]:
    """(weight of the DiT -> its adapter, name of a factor -> where it lies). `alpha` None: as large as the rank.

    Appends adapters of weights that the DiT does not have, and whatever is none.
    """
    tensors = part.group(LORA_GROUP) if LORA_GROUP in part.groups else part.tensors
    factors: dict[str, Stored] = {}
    for name, stored in tensors.items():
        found = _FACTOR.fullmatch(name.removeprefix(_PEFT))
        weight = None if found is None else _own_name(f"{found['layer']}.weight")
        if found is None or weight is None:
            problems.append(f"{part.name}: {name} is no factor of a LoRA; expected lora_A and lora_B of linear layers")
        elif weight not in dit:
            problems.append(f"{part.name}: {name} adapts {weight}, which the model does not have")
        else:
            letter = {"down": "A", "up": "B"}.get(found["part"], found["part"])
            factors[f"{weight.removesuffix('.weight')}.lora_{letter}{found['name'] or ''}.weight"] = stored
    shapes = {name: stored.shape for name, stored in factors.items()}
    own = {name: stored.shape for name, stored in dit.items()}
    _, adapters = plain_names(shapes, 1.0 if alpha is None else alpha, problems, own, "lora_alpha")
    if alpha is None:
        adapters = {weight: replace(adapter, scale=1.0) for weight, adapter in adapters.items()}
    return adapters, factors
