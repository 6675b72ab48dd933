"""The header of a safetensors file: names, dtypes and shapes without reading a tensor, and whether the file is whole.

Layout: 8 bytes little-endian header length, a JSON header, then the tensors' bytes without gaps. What passes here is
opened by the library as well, so nothing that is called whole fails when its tensors are read.
"""

from __future__ import annotations

import json
import math
import struct
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from worldkv.errors import CheckpointError
from worldkv.models.checkpoints.dtypes import KNOWN, StoredDtype
from worldkv.models.checkpoints.words import one_line, shown

_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_MAX_SIZE = 2**48  # of a dimension, and of an offset
_MAX_DIMENSIONS = 64  # torch's own limit
_METADATA = "__metadata__"

Header = dict[str, tuple[StoredDtype, tuple[int, ...]]]


def read_header(path: Path) -> Header:
    """Tensor name -> (dtype, shape). Raises CheckpointError for a truncated, overlong, damaged or foreign file."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(8)
            length = _header_length(path, start, size)
            text = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path.name} cannot be read: {error.strerror or error}") from error
    found, num_bytes = _parse(path, text)
    expected = 8 + length + num_bytes
    if size != expected:
        state = "truncated" if size < expected else "longer than its header says"
        raise CheckpointError(f"{path.name} is {state}: {expected} bytes expected, {size} found")
    from safetensors import SafetensorError, safe_open  # here: `plan` needs no file

    try:
        with safe_open(path, framework="np"):  # "pt" would ask for as much memory as the file is large
            pass
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"{path.name} is not a safetensors file: {one_line(error)}") from error
    return found


def _header_length(path: Path, start: bytes, size: int) -> int:
    if start == b"version ":
        raise CheckpointError(f"{path.name} is a Git LFS pointer, not the weights: fetch them with git lfs pull")
    if len(start) < 8:
        raise CheckpointError(f"{path.name} is truncated: {size} bytes found, not even a header")
    length: int = struct.unpack("<Q", start)[0]
    if length > _MAX_HEADER_BYTES:
        raise CheckpointError(f"{path.name} is not a safetensors file")
    if length > size - 8:
        raise CheckpointError(f"{path.name} is truncated: at least {8 + length} bytes expected, {size} found")
    return length


def _parse(path: Path, text: bytes) -> tuple[Header, int]:
    """The tensors, and how many bytes they take in all."""
    damaged = f"{path.name} is not a safetensors file: its header is damaged"
    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=_without_repeats)
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else one_line(error)
        raise CheckpointError(f"{damaged}: {reason}") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{damaged}: expected tensors by name, got {shown(header)}")
    found: Header = {}
    places: list[tuple[int, int, str]] = []
    unknown: set[str] = set()
    for name, entry in header.items():
        if name == _METADATA:
            continue
        if not name.isprintable():
            raise CheckpointError(f"{damaged}: {shown(name)} is no tensor's name")
        if not isinstance(entry, dict):
            raise CheckpointError(f"{damaged}: {one_line(name)}: expected an object, got {shown(entry)}")
        dtype, shape, begin, end = _entry(f"{damaged}: {one_line(name)}", entry)
        if dtype not in KNOWN:
            unknown.add(one_line(dtype))
            continue
        if end - begin != math.prod(shape) * KNOWN[dtype].itemsize:
            raise CheckpointError(
                f"{damaged}: {one_line(name)}: {dtype} {shown(list(shape))} does not fill bytes {begin} to {end}"
            )
        found[name] = (KNOWN[dtype], shape)
        places.append((begin, end, name))
    if unknown:
        raise CheckpointError(f"{path.name} holds tensors of unknown dtype {', '.join(sorted(unknown)[:5])}")
    position = 0
    for begin, end, name in sorted(places):
        if begin != position:
            what = "overlaps another tensor" if begin < position else "leaves a gap before it"
            raise CheckpointError(f"{damaged}: {one_line(name)} {what}")
        position = end
    return found, position


def _without_repeats(pairs: list[tuple[str, object]]) -> dict[str, object]:
    entries = dict(pairs)
    if len(entries) != len(pairs):
        repeated = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"{repeated} is there twice")
    return entries


def _entry(where: str, entry: Mapping[str, object]) -> tuple[str, tuple[int, ...], int, int]:
    """dtype, shape, begin and end as a header states them for one tensor."""
    dtype, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str):
        raise CheckpointError(f"{where}: expected the name of a dtype, got {shown(dtype)}")
    if not isinstance(shape, list) or len(shape) > _MAX_DIMENSIONS or not all(_is_size(size) for size in shape):
        raise CheckpointError(f"{where}: expected a shape of sizes from 0, got {shown(shape)}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_size(offset) for offset in offsets):
        raise CheckpointError(f"{where}: expected data_offsets of two numbers from 0, got {shown(offsets)}")
    return dtype, tuple(shape), offsets[0], offsets[1]


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value <= _MAX_SIZE
