"""Where tensors lie in a checkpoint, and which part of one a module's tensor is. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from worldkv.models.checkpoints.dtypes import StoredDtype


@dataclass(frozen=True)
class TensorSource:
    """Where a module's tensor comes from.

    It is part `part` of `parts` equal ones along dimension `dim` of checkpoint tensor `key`, after dropping its first
    `squeeze` dimensions, which have size 1.
    """

    key: str
    part: int = 0
    parts: int = 1
    squeeze: int = 0
    dim: int = 0

    def shape(self, stored: tuple[int, ...]) -> tuple[int, ...] | None:
        """The shape this source has if the checkpoint's tensor has shape `stored`; None if that cannot be."""
        kept = stored[self.squeeze :]
        if any(size != 1 for size in stored[: self.squeeze]) or len(stored) < self.squeeze:
            return None
        if self.parts == 1:
            return kept
        if len(kept) <= self.dim or kept[self.dim] % self.parts:
            return None
        return (*kept[: self.dim], kept[self.dim] // self.parts, *kept[self.dim + 1 :])

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The inverse of `shape`: what the checkpoint must store."""
        if self.parts > 1:
            shape = (*shape[: self.dim], shape[self.dim] * self.parts, *shape[self.dim + 1 :])
        return (1,) * self.squeeze + shape


@dataclass(frozen=True)
class Place:
    """Where a tensor lies: a file, and its name in there."""

    file: Path
    key: str


@dataclass(frozen=True)
class Stored:
    place: Place
    shape: tuple[int, ...]
    dtype: StoredDtype
