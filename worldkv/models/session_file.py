"""A session in bytes: a safetensors file whose metadata says what it is and holds a checksum of the whole.

Reading checks everything before anything is believed: size, header, checksum, version, every tensor's place. It knows
no model: what the values and tensors mean is checked by who reads them.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from worldkv.errors import BadRequest
from worldkv.models.checkpoints.dtypes import KNOWN, of_torch

FORMAT, VERSION = "worldkv-session", 2
_LENGTH = struct.Struct("<Q")
_MAX_HEADER_BYTES = 64 << 20
_MAX_DIMENSIONS = 8
_NO_DIGEST = "0" * 64
_NAMES = {dtype.name: name for name, dtype in KNOWN.items()}


@dataclass(frozen=True)
class Part:
    """One tensor: `pieces` of it in order, on the host and contiguous."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: Sequence[torch.Tensor]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Part:
        return cls(tensor.dtype, tuple(tensor.shape), [tensor])

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class SessionExport:
    """A session in bytes. It holds host memory until it is dropped; the session may go on or be closed meanwhile."""

    header: bytes
    pieces: Sequence[torch.Tensor]
    num_bytes: int
    inexact: str | None = None  # why what is imported of it is not, to the bit, what was exported; None: it is

    def parts(self) -> Iterator[memoryview]:
        """The bytes, piece by piece, without a copy."""
        yield memoryview(self.header)
        yield from map(_bytes_of, self.pieces)

    def to_bytes(self) -> bytes:
        return b"".join(self.parts())


def write(about: Mapping[str, object], tensors: Mapping[str, Part]) -> SessionExport:
    """`about`: of JSON's types. Takes a pass over all bytes, for the checksum."""
    ordered = sorted(tensors.items(), key=lambda named: (-named[1].dtype.itemsize, named[0]))  # aligned
    metadata = {"format": FORMAT, "version": str(VERSION), "sha256": _NO_DIGEST, "session": json.dumps(about)}
    header: dict[str, object] = {"__metadata__": metadata}
    position = 0
    for name, part in ordered:
        end = position + part.num_bytes
        dtype = _NAMES[of_torch(part.dtype).name]
        header[name] = {"dtype": dtype, "shape": list(part.shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header).encode()
    start = _LENGTH.pack(len(text) + -len(text) % 8) + text + b" " * (-len(text) % 8)
    pieces = [piece for _, part in ordered for piece in part.pieces]
    digest = hashlib.sha256(start)
    for piece in pieces:
        digest.update(_bytes_of(piece))
    start = start.replace(_NO_DIGEST.encode(), digest.hexdigest().encode(), 1)
    return SessionExport(start, pieces, len(start) + position)


def read(data: bytes | bytearray | memoryview) -> tuple[Mapping[str, object], dict[str, torch.Tensor]]:
    """(`about`, tensors, which share memory with a `bytearray`). Raises BadRequest that says what is wrong."""
    whole = data if isinstance(data, bytearray) else bytearray(data)
    if len(whole) < _LENGTH.size:
        raise BadRequest(f"import: truncated: {len(whole)} bytes are not even a header")
    (length,) = _LENGTH.unpack_from(whole)
    start = _LENGTH.size + length
    if length > _MAX_HEADER_BYTES:
        raise BadRequest("import: not a session that was exported: its header is no safetensors header")
    if start > len(whole):
        raise BadRequest(f"import: truncated: at least {start} bytes expected, {len(whole)} found")
    header = _parsed(bytes(whole[_LENGTH.size : start]), "its header")
    metadata = header.pop("__metadata__", None)
    if not isinstance(metadata, dict) or metadata.get("format") != FORMAT:
        raise BadRequest("import: not a session that was exported, but some other safetensors file")
    if metadata.get("version") != str(VERSION):
        raise BadRequest(f"import: version: this worldkv reads {VERSION}, got {str(metadata.get('version'))[:20]}")
    places = {name: _place(name, entry) for name, entry in header.items()}
    expected = start + max((place.end for place in places.values()), default=0)
    if len(whole) != expected:
        state = "truncated" if len(whole) < expected else "longer than its header says"
        raise BadRequest(f"import: {state}: {expected} bytes expected, {len(whole)} found")
    _check_digest(whole, start, metadata.get("sha256"))
    _check_gaps(places)
    return _parsed(str(metadata.get("session")).encode(), "its description"), {
        name: place.tensor(whole, start) for name, place in places.items()
    }


@dataclass(frozen=True)
class _Place:
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int

    def tensor(self, whole: bytearray, start: int) -> torch.Tensor:
        count = math.prod(self.shape)
        if count == 0:
            return torch.empty(self.shape, dtype=self.dtype)
        return torch.frombuffer(whole, dtype=self.dtype, count=count, offset=start + self.begin).view(self.shape)


def _place(name: str, entry: object) -> _Place:
    dtype = entry.get("dtype") if isinstance(entry, dict) else None
    shape, offsets = (_sizes(entry.get(key)) if isinstance(entry, dict) else None for key in ("shape", "data_offsets"))
    if not (isinstance(dtype, str) and dtype in KNOWN) or shape is None or offsets is None or len(offsets) != 2:
        raise BadRequest(f"import: damaged: the header's entry of {name[:80]!r} is none of a tensor")
    place = _Place(getattr(torch, KNOWN[dtype].name), shape, offsets[0], offsets[1])
    if place.end - place.begin != math.prod(shape) * KNOWN[dtype].itemsize:
        raise BadRequest(f"import: damaged: {name[:80]!r} does not fill its bytes")
    return place


def _sizes(values: object) -> tuple[int, ...] | None:
    """A list of a few sizes; None for anything else."""
    if not isinstance(values, list) or len(values) > _MAX_DIMENSIONS:
        return None
    return tuple(values) if all(type(value) is int and 0 <= value < 2**48 for value in values) else None


def _check_digest(whole: bytearray, start: int, told: object) -> None:
    head = bytes(whole[:start])
    if not isinstance(told, str) or len(told) != len(_NO_DIGEST) or told.encode() not in head:
        raise BadRequest("import: damaged: it has no checksum")
    digest = hashlib.sha256(head.replace(told.encode(), _NO_DIGEST.encode(), 1))
    digest.update(memoryview(whole)[start:])
    if digest.hexdigest() != told:
        raise BadRequest("import: damaged: its bytes do not make its checksum; export the session again")


def _check_gaps(places: Mapping[str, _Place]) -> None:
    position = 0
    for place in sorted(places.values(), key=lambda place: (place.begin, place.end)):
        if place.begin != position:
            raise BadRequest("import: damaged: tensors overlap, or leave gaps")
        position = place.end


def _parsed(text: bytes, what: str) -> dict[str, object]:
    try:
        values = json.loads(text.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"import: damaged: {what} is no JSON: {str(error)[:100]}") from error
    if not isinstance(values, dict):
        raise BadRequest(f"import: damaged: {what} is no JSON object")
    return values


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    array: np.ndarray = tensor.contiguous().view(-1).view(torch.uint8).numpy()
    return array.data
