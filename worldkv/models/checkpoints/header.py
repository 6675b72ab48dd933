"""The header of a safetensors file: names, dtypes and shapes without reading a tensor, and whether the file is whole.

Layout: 8 bytes little-endian header length, a JSON header, then the tensors' bytes without gaps.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path

from worldkv.errors import CheckpointError
from worldkv.models.checkpoints.dtypes import KNOWN, StoredDtype

_MAX_HEADER_BYTES = 100_000_000  # the format's own limit


def read_header(path: Path) -> dict[str, tuple[StoredDtype, tuple[int, ...]]]:
    """Tensor name -> (dtype, shape). Raises CheckpointError for a truncated, overlong or foreign file."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        if start == b"version ":
            raise CheckpointError(f"{path.name} is a Git LFS pointer, not the weights: fetch them with git lfs pull")
        if len(start) < 8:
            raise CheckpointError(f"{path.name} is truncated: {size} bytes found, not even a header")
        (length,) = struct.unpack("<Q", start)
        if length > _MAX_HEADER_BYTES:
            raise CheckpointError(f"{path.name} is not a safetensors file")
        if length > size - 8:
            raise CheckpointError(f"{path.name} is truncated: at least {8 + length} bytes expected, {size} found")
        try:
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            ends = [entry["data_offsets"][1] for entry in header.values()]
            found = {name: (entry["dtype"], tuple(entry["shape"])) for name, entry in header.items()}
        except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
            raise CheckpointError(f"{path.name} is not a safetensors file: its header is damaged") from error
    expected = 8 + length + max(ends, default=0)
    if size != expected:
        state = "truncated" if size < expected else "longer than its header says"
        raise CheckpointError(f"{path.name} is {state}: {expected} bytes expected, {size} found")
    unknown = sorted({dtype for dtype, _ in found.values() if dtype not in KNOWN})
    if unknown:
        raise CheckpointError(f"{path.name} holds tensors of unknown dtype {', '.join(unknown)}")
    return {name: (KNOWN[dtype], shape) for name, (dtype, shape) in found.items()}
