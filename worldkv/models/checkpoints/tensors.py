"""Tensors in a checkpoint's files, by name: read when asked for, merged with their adapters. Knows no model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from worldkv.errors import CheckpointError
from worldkv.models.checkpoints.dtypes import StoredDtype
from worldkv.models.checkpoints.lora import Adapter
from worldkv.models.checkpoints.source import Place as Place
from worldkv.models.checkpoints.source import TensorSource
from worldkv.models.checkpoints.words import one_line

PTH_SUFFIXES = (".pth", ".pt")


class PthFile:
    """Tensors of a .pth or .pt file, as safetensors' handles give theirs.

    `groups`: names of dictionaries in it; a tensor of one is called GROUP.NAME.
    """

    def __init__(self, path: Path) -> None:
        try:
            value = self._read(path)
        except Exception as error:  # whatever a broken file makes of itself inside torch
            reason = one_line(str(error).split("\n")[0]) or type(error).__name__
            raise CheckpointError(f"{path.name} cannot be read as weights only: {reason}") from error
        inner = {name: part for name, part in value.items() if isinstance(name, str) and isinstance(part, dict)}
        self.groups = tuple(name for name in inner if name.isprintable())
        flat = [(f"{group}.{name}", t) for group in self.groups for name, t in inner[group].items()]
        self.tensors = {
            name: tensor
            for name, tensor in (*value.items(), *flat)
            if isinstance(name, str) and name.isprintable() and _is_plain(tensor)
        }
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


@dataclass(frozen=True, kw_only=True)
class StoredTensors:
    """A `TensorReader` over safetensors, .pth and .pt files. `shapes` and `dtypes` come from the headers."""

    folder: Path
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, StoredDtype]
    places: Mapping[str, Place] = field(repr=False)  # of every tensor and of every adapter's factors
    adapters: Mapping[str, Adapter] = field(repr=False)  # of a LoRA run, by the weight that they are merged into
    _handles: dict[Path, Any] = field(default_factory=dict, repr=False, compare=False)

    def under(self, prefix: str) -> StoredTensors:
        """Those whose names begin so, in the same files."""
        adapters = {name: adapter for name, adapter in self.adapters.items() if name.startswith(prefix)}
        factors = {name for adapter in adapters.values() for name in (adapter.down, adapter.up)}
        shapes = {name: shape for name, shape in self.shapes.items() if name.startswith(prefix)}
        return StoredTensors(
            folder=self.folder,
            shapes=shapes,
            dtypes={name: self.dtypes[name] for name in shapes},
            places={name: place for name, place in self.places.items() if name in shapes or name in factors},
            adapters=adapters,
            _handles=self._handles,
        )

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor as stored, or merged with its adapter, on the CPU. Perhaps a view of the file: copy it to keep."""
        tensor = self._as_stored(name)
        adapter = self.adapters.get(name)
        if adapter is None:
            return tensor
        return adapter.merged(tensor, self._as_stored(adapter.down), self._as_stored(adapter.up))

    def read(self, source: TensorSource) -> torch.Tensor:
        """The part of a tensor that `source` describes; only that part is read from the file."""
        if source.parts == 1:
            stored = self.tensor(source.key)
            return stored.reshape(stored.shape[source.squeeze :])
        assert source.squeeze == 0, "a source is split or squeezed, not both"
        size = self.shapes[source.key][source.dim] // source.parts
        wanted = slice(source.part * size, (source.part + 1) * size)
        index = (*[slice(None)] * source.dim, wanted)
        if source.key in self.adapters:
            return self.tensor(source.key)[index]
        part: torch.Tensor = self._handle(source.key).get_slice(self.places[source.key].key)[index]
        return part

    def _as_stored(self, name: str) -> torch.Tensor:
        handle = self._handle(name)
        try:
            tensor: torch.Tensor = handle.get_tensor(self.places[name].key)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{self.places[name].file}: {name} cannot be read: {one_line(error)}") from error
        return tensor

    def _handle(self, name: str) -> Any:
        if name not in self.places:
            raise CheckpointError(f"{self.folder} has no tensor {name!r}")
        path = self.places[name].file
        if path not in self._handles:
            self._handles[path] = PthFile(path) if path.suffix in PTH_SUFFIXES else _open(path)
        return self._handles[path]


def _is_plain(value: object) -> TypeGuard[torch.Tensor]:
    """A tensor of numbers in memory, as weights are: not sparse, quantised or without values."""
    return (
        isinstance(value, torch.Tensor)
        and value.layout == torch.strided
        and value.device.type == "cpu"
        and not value.is_quantized
    )


def _open(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (OSError, SafetensorError, RuntimeError) as error:  # changed since its header was read, or no room to map it
        raise CheckpointError(f"{path} cannot be opened: {one_line(error)}") from error


def read_all(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of one small file, .safetensors or .pth. Raises CheckpointError."""
    if not path.is_file():
        raise CheckpointError(f"{path} is no file")
    if path.suffix in PTH_SUFFIXES:
        return dict(PthFile(path).tensors)
    try:
        return load_file(path)
    except (OSError, SafetensorError, RuntimeError) as error:
        raise CheckpointError(f"{path} cannot be read: {one_line(error)}") from error
