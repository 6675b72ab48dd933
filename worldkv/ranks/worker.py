"""What every rank does when it is told to: the same commands on all of them, in one order, each over its own part.

Block ids are the leader's, who keeps the books. Copies between device and host run on a thread of their own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from worldkv.attention.backend import AttentionBackend, choose_backend
from worldkv.engine.room import free_on_host
from worldkv.kv.host import HostBlocks
from worldkv.kv.spec import KVSpec
from worldkv.kv.storage import KVStorage
from worldkv.models.base import BatchLimits
from worldkv.models.checkpoints.modules import Progress
from worldkv.models.registry import checkpoint_module
from worldkv.models.wan.network import ActiveRow, LocalNetwork, Recipe
from worldkv.models.wan.shard import Mesh
from worldkv.ranks.mesh import RankMesh
from worldkv.ranks.place import TCPStore

Ticket = int  # the leader's number of a copy that every rank keeps a part of, on its host
Layer = tuple[torch.Tensor, torch.Tensor]


class RankPages:
    """One rank's pages."""

    def __init__(self, storage: KVStorage, backend: AttentionBackend) -> None:
        self.storage, self.backend = storage, backend


class Worker:
    """One rank. It is told to `join`, `load` and `make_pages` first. `progress`: of its own loading."""

    COMMANDS = frozenset(
        (
            *("join", "agree", "load", "memory", "make_pages", "ready_steps", "make_ready"),
            *("forward", "project", "copy_blocks"),
            *("read", "write", "tokens", "keep", "lay_out", "drop"),
        )
    )

    def __init__(self, rank: int, store: TCPStore) -> None:
        self.rank = rank
        self._store = store
        self.progress: Progress | None = None
        self._steps: Sequence[Callable[[], object]] = ()
        self._kept: dict[Ticket, HostBlocks] = {}
        self._coming: dict[Ticket, list[Layer]] = {}

    def run(self, command: str, arguments: Sequence[object]) -> object:
        """Raises what the command raises; ValueError for one that does not exist."""
        if command not in self.COMMANDS:
            raise ValueError(f"command: expected one of {sorted(self.COMMANDS)}, got {command!r}")
        return getattr(self, command)(*arguments)

    # the beginning

    def join(self, mesh: Mesh, device: str, timeout_s: float) -> None:
        """`device`: cpu, or cuda: the GPU of this rank's number on its machine."""
        found = torch.device(device)
        if found.type == "cuda":
            local = int(os.environ.get("LOCAL_RANK", self.rank))
            if local >= torch.cuda.device_count():
                raise ValueError(
                    f"device: rank {self.rank} is number {local} of its machine, where torch sees "
                    f"{torch.cuda.device_count()} GPUs; expected one for each rank"
                )
            found = torch.device("cuda", local)
        self.mesh = RankMesh(mesh, self.rank, self._store, found, timeout_s)

    def agree(self) -> None:
        """Only if everybody does."""
        dist.all_reduce(torch.zeros(1, device=self.mesh.device))

    def load(self, recipe: Recipe) -> None:
        self.network: LocalNetwork = checkpoint_module(recipe.family).load_network(
            recipe, self.mesh.part, self.progress
        )

    def memory(self) -> tuple[int, int]:
        """(free, total) bytes that this rank may use: of its GPU, or its share of the host's."""
        if self.mesh.device.type == "cuda":
            torch.cuda.empty_cache()
            free, total = torch.cuda.mem_get_info(self.mesh.device)
            return int(free), int(total)
        share = free_on_host() // self.mesh.mesh.num_ranks
        return share, share

    def make_pages(self, spec: KVSpec, num_blocks: int, block_size: int, attention: str) -> None:
        storage = KVStorage(spec, num_blocks, block_size, self.mesh.device, self.network.dit.dtype)
        self.pages = RankPages(storage, choose_backend(attention, storage))

    def ready_steps(self, limits: BatchLimits) -> int:
        """How many there are."""
        self._steps = self.network.ready_steps(self.pages, limits)
        return len(self._steps)

    def make_ready(self, step: int) -> None:
        self._steps[step]()

    # the work

    def forward(self, rows: Sequence[ActiveRow]) -> Sequence[object]:
        return self.network.forward(self.pages, rows)

    def project(self, kind: str, embeddings: tuple[torch.Tensor, ...], blocks: Sequence[int]) -> None:
        """Conditioning, into these blocks."""
        for layer, (k, v) in enumerate(self.network.project(kind, embeddings)):
            self.pages.storage.write_blocks(layer, blocks, k, v)

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        self.pages.storage.copy_blocks(copies)

    # copies between device and host, beside the work

    def read(self, ticket: Ticket, blocks: Sequence[int]) -> None:
        """Keep a copy of these blocks on the host."""
        storage = self.pages.storage
        with storage.aside(storage.mark()):
            self._kept[ticket] = storage.read_blocks(blocks)

    def write(self, ticket: Ticket, blocks: Sequence[int]) -> None:
        """What was kept, into these blocks."""
        storage = self.pages.storage
        with storage.aside(storage.mark()):
            storage.load_blocks(blocks, self._kept[ticket])

    def tokens(self, ticket: Ticket, branch: int, layer: int, num_tokens: int) -> tuple[torch.Tensor, ...]:
        """K and V [tokens, heads, head_dim] of what is kept, of the ranks that run this branch of guidance."""
        if self.rank // self.mesh.mesh.tensor != branch:
            return ()
        return tuple(torch.cat(pieces) for pieces in self._kept[ticket].tokens(layer, num_tokens))

    def keep(self, ticket: Ticket, k_THD: torch.Tensor, v_THD: torch.Tensor) -> None:
        """The next layer of what is coming."""
        self._coming.setdefault(ticket, []).append((k_THD, v_THD))

    def lay_out(self, ticket: Ticket) -> None:
        """All layers have come."""
        self._kept[ticket] = self.pages.storage.laid_out(self._coming.pop(ticket))

    def drop(self, tickets: Sequence[Ticket]) -> None:
        for ticket in tickets:
            self._kept.pop(ticket, None)
            self._coming.pop(ticket, None)

    def kept(self, ticket: Ticket) -> HostBlocks:
        """This rank's part."""
        return self._kept[ticket]
