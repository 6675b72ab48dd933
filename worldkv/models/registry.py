"""Families of world models by name, each imported only when it is asked for.

A family's `checkpoint` module offers `LOOKS_FOR` (what it knows its folders by, in words), `is_mine(folder)` and
`load(folder, *, device, dtype, ...)`, which returns a WorldModel. For checkpoints that are fetched, see `models.hub`:
`FILES` (globs of what it reads), `from_elsewhere(folder)` (where in it another repository's files belong, and which).
"""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

from worldkv.errors import CheckpointError
from worldkv.models.checkpoints.files import CONFIG_FILE, read_json, what_it_looks_like

FAMILIES = {  # name -> its checkpoint module
    "dreamzero": "worldkv.models.dreamzero.checkpoint",
    "causal_wan": "worldkv.models.causal_wan.checkpoint",
    "dots": "worldkv.models.dots.checkpoint",
}
_FOLDERS = {  # name -> the module that knows its folders, where that is another one: it imports no torch
    "dreamzero": "worldkv.models.dreamzero.folder",
    "causal_wan": "worldkv.models.causal_wan.folder",
}


def checkpoint_module(family: str) -> ModuleType:
    """Raises ValueError, which lists the known ones, for a family that does not exist."""
    if family not in FAMILIES:
        raise ValueError(f"family: expected one of {sorted(FAMILIES)}, got {family!r}")
    return importlib.import_module(FAMILIES[family])


def family_of(folder: str | Path) -> str:
    """The family of a checkpoint folder, by its config.json and file names; no tensor is read.

    Raises CheckpointError that lists what each family looks for.
    """
    folder = Path(folder)
    if not folder.is_dir():
        found = "is a file" if folder.is_file() else "does not exist"
        raise CheckpointError(f"checkpoint folder {folder} {found}; expected a folder with {CONFIG_FILE}")
    looked_for = []
    for family in FAMILIES:
        module = importlib.import_module(_FOLDERS.get(family, FAMILIES[family]))
        if module.is_mine(folder):
            return family
        looked_for.append(f"{family}: {module.LOOKS_FOR}")
    config = read_json(folder / CONFIG_FILE) if (folder / CONFIG_FILE).is_file() else {}
    raise CheckpointError(
        f"{folder} is no checkpoint folder of a known family ({'; '.join(looked_for)})."
        + what_it_looks_like(folder, config)
    )
