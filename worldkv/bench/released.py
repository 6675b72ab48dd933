"""The released models by name, with their sizes. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable

from worldkv.models.dreamzero.config import DreamZeroConfig, dreamzero_5b, dreamzero_14b

RELEASED: dict[str, Callable[[], DreamZeroConfig]] = {"dreamzero-14b": dreamzero_14b, "dreamzero-5b": dreamzero_5b}
TINY = "tiny"  # for machines without a GPU
