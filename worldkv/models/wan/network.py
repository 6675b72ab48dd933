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
from worldkv.kv.spec import KVSpec
from worldkv.models.base import BatchLimits, Row
from worldkv.models.checkpoints.modules import Progress
from worldkv.models.checkpoints.tensors import StoredTensors
from worldkv.models.wan.dit import WanDiT, WanRow
from worldkv.models.wan.fused import Precision
from worldkv.models.wan.shard import WHOLE, Mesh, Shard

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


class Branches(Protocol):
    """The ranks that run the branches of guidance, the conditional one first. `index`: of this one."""

    @property
    def index(self) -> int: ...

    def exchange(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """What each of them has; of one shape."""
        ...


@dataclass(frozen=True)
class Recipe:
    """What a rank needs to know to load its part of a DiT: `config` of the family, `tensors` of the DiT's files."""

    family: str
    config: object
    tensors: StoredTensors
    spec: KVSpec
    dtype: str
    precision: Precision


@dataclass(frozen=True)
class Part:
    """The place of one rank: where it computes, and what of the DiT is its own."""

    device: torch.device | str
    shard: Shard = WHOLE
    branches: Branches | None = None  # None: this rank runs all of them


class LocalNetwork(Network, Protocol):
    """One rank's."""

    @property
    def dit(self) -> WanDiT: ...


LoadNetwork = Callable[[Recipe, Part, Progress | None], LocalNetwork]  # a family's `checkpoint.load_network`


class Across(Protocol):
    """Ranks that run a network together, seen from the one that leads."""

    @property
    def mesh(self) -> Mesh: ...

    def load(self, recipe: Recipe, load: LoadNetwork, progress: Progress | None) -> tuple[WanDiT, Network]:
        """Load every rank's part: the leader's own DiT, and the network that runs them all."""
        ...


def load_across(
    recipe: Recipe,
    load: LoadNetwork,
    device: torch.device | str,
    across: Across | None,
    progress: Progress | None,
) -> tuple[WanDiT, Network]:
    """A DiT and the network that runs it, on the ranks of `across`; on this one alone where that is None."""
    if across is not None:
        return across.load(recipe, load, progress)
    network = load(recipe, Part(device), progress)
    return network.dit, network


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
