"""Modules filled from a checkpoint: completely or not at all. Knows no file and no model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import torch

from worldkv.models.checkpoints.complete import check_complete as check_complete
from worldkv.models.checkpoints.dtypes import StoredDtype
from worldkv.models.checkpoints.files import raise_if_any
from worldkv.models.checkpoints.source import TensorSource as TensorSource

Progress = Callable[[int, int], None]  # bytes done, bytes in all


class TensorReader(Protocol):
    """Tensors by their checkpoint's names. Shapes and dtypes are known before a tensor is read."""

    @property
    def folder(self) -> Path: ...
    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...
    @property
    def dtypes(self) -> Mapping[str, StoredDtype]: ...

    def read(self, source: TensorSource) -> torch.Tensor:
        """The part of a tensor that `source` describes, as stored. Perhaps a view of the file: copy it to keep."""
        ...


def tensor_shapes(module: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    """Of every parameter and persistent buffer; the module may lie on the meta device."""
    return {name: tuple(tensor.shape) for name, tensor in module.state_dict(keep_vars=True).items()}


def load_module(
    checkpoint: TensorReader,
    module: torch.nn.Module,
    names: Mapping[str, str | TensorSource],
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    progress: Progress | None = None,
) -> None:
    """Fills `module`, built on the meta device, from the checkpoint and leaves it frozen and in eval mode.

    `names`: for every parameter and persistent buffer of the module, where it comes from (full checkpoint names).
    Module names with the same source share one tensor. `dtype`: of floating point tensors; others keep theirs.
    `progress`: called with (bytes read, bytes in all). Peak memory is the module and one tensor.

    Raises CheckpointError, before anything is assigned, that lists every tensor which is missing or has another shape.
    """
    targets: dict[TensorSource, list[str]] = {}
    shapes = tensor_shapes(module)
    assert shapes.keys() == names.keys(), f"names and module differ: {sorted(shapes.keys() ^ names.keys())[:5]}"
    problems = []
    for name, source in names.items():
        source = TensorSource(source) if isinstance(source, str) else source
        targets.setdefault(source, []).append(name)
        stored = checkpoint.shapes.get(source.key)
        wanted = source.stored_shape(shapes[name])
        if stored is None:
            problems.append(f"missing: {source.key} {list(wanted)}")
        elif source.shape(stored) != shapes[name]:
            problems.append(f"shape: {source.key} is {list(stored)}, expected {list(wanted)}")
    raise_if_any(checkpoint.folder, list(dict.fromkeys(problems)))

    sizes = {source: _num_bytes(checkpoint, source) for source in targets}
    total, done = sum(sizes.values()), 0
    for source, owners in targets.items():
        raw = checkpoint.read(source)
        wanted_dtype = dtype if raw.is_floating_point() else raw.dtype
        tensor = raw.to(device=device, dtype=wanted_dtype, copy=True)  # copy: `raw` may be a view of the file
        parameter = torch.nn.Parameter(tensor, requires_grad=False)
        for name in owners:
            _assign(module, name, parameter)
        done += sizes[source]
        if progress is not None:
            progress(done, total)
    left = [n for n, t in (*module.named_parameters(), *module.named_buffers()) if t.is_meta]
    assert not left, f"still on the meta device after loading (non-persistent buffers are the caller's): {left}"
    module.eval()


def _assign(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter) -> None:
    path, _, leaf = name.rpartition(".")
    owner = module.get_submodule(path)
    if leaf in owner._parameters:
        owner._parameters[leaf] = parameter
    else:
        owner._buffers[leaf] = parameter.data


def _num_bytes(checkpoint: TensorReader, source: TensorSource) -> int:
    count = torch.Size(checkpoint.shapes[source.key]).numel() // source.parts
    return count * checkpoint.dtypes[source.key].itemsize
