"""Base Wan folders, for what a LoRA run leaves out: their names, and a DreamZero checkpoint's names for the same.

A folder of Wan2.1-I2V-14B-480P or Wan2.2-TI2V-5B holds the DiT as safetensors and the encoders as .pth files, which are
read with weights_only (nothing in them is run) and mapped, not loaded. Of several folders the first that has a part
brings it: the 5B takes its image encoder from a Wan2.1 folder.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from worldkv.errors import CheckpointError
from worldkv.models.checkpoints.header import read_header
from worldkv.models.dreamzero.folder import DIT_PREFIX


@dataclass(frozen=True)
class Place:
    """Where a tensor lies: a file, and its name in there."""

    file: Path
    key: str


@dataclass(frozen=True)
class Stored:
    place: Place
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class _Part:
    pattern: str
    prefix: str  # of a DreamZero checkpoint's names
    strip: str = ""  # of the file's names; what does not begin with it is left out


_PARTS = (
    _Part("diffusion_pytorch_model*.safetensors", DIT_PREFIX),
    _Part("models_t5_*.pth", "action_head.text_encoder."),
    _Part("models_clip_*.pth", "action_head.image_encoder.model.visual.", strip="visual."),
    _Part("Wan*_VAE.pth", "action_head.vae.model."),
)
PATTERNS = tuple(part.pattern for part in _PARTS)


class PthFile:
    """Tensors of a .pth file, as safetensors' handles give theirs."""

    def __init__(self, path: Path) -> None:
        try:
            value = self._read(path)
        except Exception as error:  # whatever a broken file makes of itself inside torch
            reason = str(error).split("\n")[0]
            raise CheckpointError(f"{path.name} cannot be read as weights only: {reason}") from error
        self.tensors = {name: tensor for name, tensor in value.items() if isinstance(tensor, torch.Tensor)}
        if not self.tensors:
            raise CheckpointError(f"{path.name} holds no tensors by name")

    @staticmethod
    def _read(path: Path) -> dict[str, Any]:
        try:
            value = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:  # a file of before torch 1.6 cannot be mapped
            value = torch.load(path, map_location="cpu", weights_only=True)
        if isinstance(value, dict) and isinstance(value.get("state_dict"), dict):
            value = value["state_dict"]
        if not isinstance(value, dict):
            raise ValueError(f"expected tensors by name, got {type(value).__name__}")
        return value

    def get_tensor(self, name: str) -> torch.Tensor:
        return self.tensors[name]

    def get_slice(self, name: str) -> torch.Tensor:
        return self.tensors[name]


def read_base(folders: Iterable[Path]) -> dict[str, Stored]:
    """DreamZero name -> what the folders have of it. Raises CheckpointError for a folder without any part."""
    found: dict[str, Stored] = {}
    for folder in folders:
        files = {part: sorted(folder.glob(part.pattern)) for part in _PARTS}
        if not any(files.values()):
            state = "is no base Wan folder" if folder.is_dir() else "does not exist"
            raise CheckpointError(f"--base: {folder} {state}; looked for {', '.join(PATTERNS)}")
        for part, paths in files.items():
            if any(name.startswith(part.prefix) for name in found):
                continue  # an earlier folder has brought it
            for path in paths:
                found |= _read_part(part, path)
    return found


def _read_part(part: _Part, path: Path) -> dict[str, Stored]:
    if path.suffix == ".safetensors":
        entries = {name: (shape, dtype) for name, (dtype, shape) in read_header(path).items()}
    else:
        entries = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in PthFile(path).tensors.items()}
    return {
        part.prefix + name.removeprefix(part.strip): Stored(Place(path, name), *entry)
        for name, entry in entries.items()
        if name.startswith(part.strip)
    }
