"""Writes a checkpoint's tensors as clean shards: plain names, one dtype, adapters merged, nothing that nobody reads.

Shards are written to *.partial and renamed when complete, so an existing shard is always complete: a second run goes on
where the first one stopped. Knows no model and no robots.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open

from worldkv.errors import CheckpointError
from worldkv.models.checkpoints.dtypes import StoredDtype, of_torch
from worldkv.models.checkpoints.files import INDEX_FILE
from worldkv.models.checkpoints.header import read_header
from worldkv.models.checkpoints.modules import Progress, TensorReader, TensorSource
from worldkv.models.checkpoints.writing import save_tensors, write_text


@dataclass(frozen=True)
class Shard:
    file: str
    names: tuple[str, ...]


def plan_shards(shapes: Mapping[str, tuple[int, ...]], itemsize: int, max_bytes: int) -> list[Shard]:
    """Tensors in the order of their names, as many to a shard as `max_bytes` hold (one always fits)."""
    groups: list[list[str]] = [[]]
    used = 0
    for name in sorted(shapes):
        size = itemsize * torch.Size(shapes[name]).numel()
        if groups[-1] and used + size > max_bytes:
            groups.append([])
            used = 0
        groups[-1].append(name)
        used += size
    return [
        Shard(f"model-{index:05d}-of-{len(groups):05d}.safetensors", tuple(names))
        for index, names in enumerate(groups, start=1)
    ]


def write_shards(
    checkpoint: TensorReader,
    shapes: Mapping[str, tuple[int, ...]],
    shards: list[Shard],
    folder: Path,
    dtype: torch.dtype,
    progress: Progress,
) -> int:
    """Writes the shards that are not there yet, and the index; returns how many were. Peak memory is one shard."""
    total = dtype.itemsize * sum(torch.Size(shape).numel() for shape in shapes.values())
    done = kept = 0
    for shard in shards:
        path = folder / shard.file
        wanted = {name: (of_torch(dtype), shapes[name]) for name in shard.names}
        if path.is_file() and _header(path) == wanted:
            kept += 1
        else:
            tensors = {name: checkpoint.read(TensorSource(name)).to(dtype).contiguous().clone() for name in shard.names}
            save_tensors(tensors, path)
        done += sum(dtype.itemsize * torch.Size(shapes[name]).numel() for name in shard.names)
        progress(done, total)
    weight_map = {name: shard.file for shard in shards for name in shard.names}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    write_text(json.dumps(index, indent=1) + "\n", folder / INDEX_FILE)
    planned = {shard.file for shard in shards}
    for path in folder.glob("model-*"):  # shards of another size, and halves
        if path.name not in planned:
            path.unlink()
    return kept


def compare_shards(checkpoint: TensorReader, shards: list[Shard], folder: Path, progress: Progress) -> None:
    """Reads every written tensor back. Raises CheckpointError that names the first ones that differ."""
    total, done, differ = sum((folder / shard.file).stat().st_size for shard in shards), 0, []
    for shard in shards:
        with safe_open(folder / shard.file, framework="pt", device="cpu") as written:
            for name in shard.names:
                tensor = written.get_tensor(name)
                if not torch.equal(tensor, checkpoint.read(TensorSource(name)).to(tensor.dtype)):
                    differ.append(name)
                done += tensor.numel() * tensor.itemsize
                progress(done, total)
    if differ:
        count = f"{len(differ)} of {sum(len(shard.names) for shard in shards)} tensors"
        raise CheckpointError(
            f"{folder}: {count} are not what the source holds ({', '.join(differ[:3])}, ...): were they written from "
            "another checkpoint? Remove the folder and convert again"
        )


def _header(path: Path) -> Mapping[str, tuple[StoredDtype, tuple[int, ...]]]:
    try:
        return read_header(path)
    except CheckpointError:
        return {}
