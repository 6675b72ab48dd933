"""The part of a Wan model that runs on every rank: a DiT over pages, given ids and tensors only.

A model's `forward` takes the blocks of its rows and hands them here as ActiveRows: no session, no branch, no books. So
the same call can be made in other processes, over pages of their own with the same ids.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from worldkv.kv.row import AttentionRow
from worldkv.models.base import BatchLimits, Row
from worldkv.models.wan.dit import WanRow

if TYPE_CHECKING:
    from worldkv.attention.backend import AttentionBackend
    from worldkv.kv.storage import KVStorage

RowT = TypeVar("RowT", bound=WanRow)
Layers = Iterable[tuple[torch.Tensor, torch.Tensor]]  # K and V of each


class Pages(Protocol):
    """The part of a KVCache that holds tensors."""

    @property
    def storage(self) -> KVStorage: ...
    @property
    def backend(self) -> AttentionBackend: ...


@dataclass(frozen=True)
class WindowCopy:
    """Physical slots of a window that is to be copied before it is read, in temporal order: see `CopiedWindow`."""

    sources: npt.NDArray[np.int64]
    targets: npt.NDArray[np.int64]
    num_frames: int


@dataclass(frozen=True)
class ActiveRow:
    """A row that has its blocks. `kept_slots`: where its keys go as they are before rotation."""

    inputs: WanRow
    history: AttentionRow
    conditioning: Mapping[str, AttentionRow]
    kept_slots: npt.NDArray[np.int64] | None = None
    copy: WindowCopy | None = None


class Network(Protocol):
    """One for each rank; what they are called with is the same on all."""

    def forward(self, pages: Pages, rows: Sequence[ActiveRow]) -> Sequence[object]:
        """An output per row, their K/V written to the pages."""
        ...

    def project(self, kind: str, embeddings: tuple[torch.Tensor, ...]) -> Layers:
        """K and V of conditioning, [tokens, heads, head_dim] for each layer. `embeddings`: [tokens, dim] for each
        branch, or one for all."""
        ...

    def ready_steps(self, pages: Pages, limits: BatchLimits) -> Sequence[Callable[[], object]]:
        """See MakesReady; of the DiT alone."""
        ...


def activated(rows: Sequence[Row[RowT]], kinds: Iterable[str]) -> list[ActiveRow]:
    """Take the blocks of the rows. Raises OutOfBlocks."""
    histories = [row.activate() for row in rows]
    return [_active(row, history, kinds) for row, history in zip(rows, histories, strict=True)]


def _active(row: Row[RowT], history: AttentionRow, kinds: Iterable[str]) -> ActiveRow:
    read = {kind: row.conditioning[kind].row(history.num_queries) for kind in kinds}
    copy, wanted = row.context.branch.copy, None
    if copy is not None and not copy.is_filled and len(copy.sources):
        wanted = WindowCopy(copy.sources, copy.targets, len(copy.chunks.history))
    return ActiveRow(row.inputs, history, read, row.context.history_slots, wanted)
