"""A whole checkpoint's names and shapes against those that are needed. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Protocol

from worldkv.models.checkpoints.files import raise_if_any


class Shaped(Protocol):
    """A checkpoint's folder and the shapes of its tensors."""

    @property
    def folder(self) -> Path: ...
    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...


def check_complete(checkpoint: Shaped, expected: Mapping[str, tuple[int, ...]], ignored: Iterable[str] = ()) -> None:
    """Compares the whole checkpoint with `expected` (full name -> shape).

    Raises one CheckpointError that lists wrong shapes, missing and unexpected tensors. Names matching a glob of
    `ignored` are known and not needed.
    """
    ignored = tuple(ignored)
    problems = [
        f"shape: {name} is {list(checkpoint.shapes[name])}, expected {list(shape)}"
        for name, shape in expected.items()
        if checkpoint.shapes.get(name, shape) != shape
    ]
    problems += [f"missing: {name} {list(expected[name])}" for name in expected if name not in checkpoint.shapes]
    problems += [
        f"unexpected: {name} {list(shape)}"
        for name, shape in checkpoint.shapes.items()
        if name not in expected and not any(fnmatchcase(name, pattern) for pattern in ignored)
    ]
    raise_if_any(checkpoint.folder, problems)
