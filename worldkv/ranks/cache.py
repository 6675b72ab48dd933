"""The cache of a model on several ranks, as the engine sees it at the leader: its books, and every rank's bytes.

Blocks, tables and counts are those of one rank, and the same on all. With a rank for each branch of guidance, one
branch stands for all of them: the same block holds another branch's K/V on each.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from worldkv.errors import BadRequest
from worldkv.kv.cache import KVCache
from worldkv.kv.conditioning import ConditioningStore
from worldkv.kv.host import HostBlocks
from worldkv.kv.spec import KVSpec
from worldkv.kv.storage import KVStorage
from worldkv.kv.transfer import ParkedBranch, ParkedEntry, ParkedKV, joined_key, key_of_part, native_name
from worldkv.models.wan.shard import Mesh
from worldkv.ranks.leader import Leader
from worldkv.ranks.network import Projection


@dataclass(frozen=True)
class RankedBlocks(HostBlocks):
    """Copies that every rank keeps a part of; `layers` are the leader's."""

    leader: Leader = field(repr=False)
    ticket: int

    def of_branch(self, branch: int, heads: int) -> WholeBlocks:
        return WholeBlocks(self.layers, self.num_blocks, self.num_bytes, self, branch, heads)


@dataclass(frozen=True)
class WholeBlocks(HostBlocks):
    """All heads of one branch, fetched from the ranks that have them, layer by layer."""

    held: RankedBlocks
    branch: int
    num_heads: int

    def tokens(self, layer: int, num_tokens: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        answers = self.held.leader.copies.call("tokens", self.held.ticket, self.branch, layer, num_tokens)
        parts = [part for part in answers if isinstance(part, tuple) and part]
        k, v = (torch.cat(shards, dim=1) for shards in zip(*parts, strict=True))
        assert k.shape[1] == self.num_heads, k.shape
        return [k], [v]


class RankedStorage(KVStorage):
    """The leader's part of the pages, whose copies are made on all ranks."""

    def __init__(self, leader: Leader, mesh: Mesh) -> None:
        vars(self).update(vars(leader.worker.pages.storage))  # the same tensors
        self._leader, self._mesh = leader, mesh
        self._tickets = itertools.count()

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        if copies:
            self._leader.work.call("copy_blocks", list(copies))
            self.num_copied += len(copies)

    def host_bytes(self, num_blocks: int) -> int:
        """Of all ranks: they may share a host."""
        return super().host_bytes(num_blocks) * self._mesh.num_ranks

    def read_blocks(self, blocks: Sequence[int]) -> HostBlocks:
        ticket = next(self._tickets)
        self._leader.copies.call("read", ticket, list(blocks))
        return self._kept(ticket)

    def load_blocks(self, blocks: Sequence[int], host: HostBlocks) -> None:
        assert isinstance(host, RankedBlocks), "a copy of one rank alone"
        self._leader.copies.call("write", host.ticket, list(blocks))

    def scattered(self, branches: Sequence[HostBlocks]) -> RankedBlocks:
        """Each branch's blocks, with all heads, given to the ranks that keep them; one: to all."""
        ticket, mesh = next(self._tickets), self._mesh
        num_tokens = branches[0].num_blocks * self.block_size
        for layer in range(self.num_layers):
            pairs = [[torch.cat(pieces) for pieces in each.tokens(layer, num_tokens)] for each in branches]
            arguments = []
            for rank in range(mesh.num_ranks):
                branch, part = divmod(rank, mesh.tensor)
                own = pairs[min(branch, len(pairs) - 1)]
                k, v = (whole.chunk(mesh.tensor, dim=1)[part].contiguous() for whole in own)
                arguments.append((ticket, k, v))
            self._leader.copies.call_each("keep", arguments)
        self._leader.copies.call("lay_out", ticket)
        return self._kept(ticket)

    def _kept(self, ticket: int) -> RankedBlocks:
        own = self._leader.worker.kept(ticket)
        num_bytes = own.num_bytes * self._mesh.num_ranks
        blocks = RankedBlocks(own.layers, own.num_blocks, num_bytes, self._leader, ticket)
        weakref.finalize(blocks, self._leader.dropped.append, ticket)
        return blocks


class _RankedConditioning(ConditioningStore):
    """Each rank projects its own heads, of its own branch."""

    def __init__(self, leader: Leader, cache: KVCache) -> None:
        super().__init__(cache.pool, cache.storage)
        self._leader = leader

    def write(self, blocks: list[int], num_tokens: int, layers: Iterable[tuple[object, object]]) -> None:
        assert isinstance(layers, Projection), "conditioning of one rank alone"
        if any(len(embedding) != num_tokens for embedding in layers.embeddings):
            raise ValueError(f"conditioning: expected {num_tokens} tokens, got {[len(e) for e in layers.embeddings]}")
        self._leader.work.call("project", layers.kind, layers.embeddings, list(blocks))


class RankedCache(KVCache):
    """`spec`: of one rank; `whole_spec`: of all of them together, as a model on one rank has it."""

    def __init__(self, leader: Leader, mesh: Mesh, spec: KVSpec, whole_spec: KVSpec) -> None:
        self._ranked = RankedStorage(leader, mesh)
        super().__init__(spec, self._ranked, leader.worker.pages.backend)
        self.conditioning = _RankedConditioning(leader, self)
        self._mesh, self._whole_spec = mesh, whole_spec

    @property
    def whole_spec(self) -> KVSpec:
        return self._whole_spec

    def whole(self, parked: ParkedKV) -> ParkedKV:
        entries: dict[str, ParkedEntry] = {}
        branches = {}
        for index, name in enumerate(self._whole_spec.branches):
            branch = index if self._mesh.guidance > 1 else 0
            own = parked.branches[self.spec.branches[0 if self._mesh.guidance > 1 else index]]
            conditioning = {}
            for kind, key in own.conditioning.items():
                entry = parked.entries[key]
                conditioning[kind] = key_of_part(native_name(key), branch) if self._mesh.guidance > 1 else key
                whole = ParkedEntry(entry.num_tokens, self._gathered(entry.blocks, branch))
                entries.setdefault(conditioning[kind], whole)
            branches[name] = ParkedBranch(own.num_chunks, self._gathered(own.blocks, branch), conditioning)
        return ParkedKV(branches, entries)

    def parted(self, whole: ParkedKV) -> ParkedKV:
        if self._mesh.guidance == 1:
            branches = {
                name: ParkedBranch(each.num_chunks, self._ranked.scattered([each.blocks]), each.conditioning)
                for name, each in whole.branches.items()
            }
            entries = {key: self._parted_entry(whole, [key]) for key in whole.entries}
            return ParkedKV(branches, entries)
        all_branches = [whole.branches[name] for name in self._whole_spec.branches]
        first = all_branches[0]
        for each in all_branches:
            if each.num_chunks != first.num_chunks or set(each.conditioning) != set(first.conditioning):
                raise BadRequest(
                    "import: branches: expected as many chunks and the same kinds of conditioning in each, since each "
                    f"runs on a rank of its own here; got {[branch.num_chunks for branch in all_branches]} chunks"
                )
        entries, conditioning = {}, {}
        for kind in first.conditioning:
            keys = [branch.conditioning[kind] for branch in all_branches]
            conditioning[kind] = joined_key(keys)
            entries[conditioning[kind]] = self._parted_entry(whole, keys)
        blocks = self._ranked.scattered([branch.blocks for branch in all_branches])
        return ParkedKV({self.spec.branches[0]: ParkedBranch(first.num_chunks, blocks, conditioning)}, entries)

    def _parted_entry(self, whole: ParkedKV, keys: Sequence[str]) -> ParkedEntry:
        found = [whole.entries[key] for key in dict.fromkeys(keys)]
        is_foreign = any(entry.is_foreign for entry in found)
        return ParkedEntry(found[0].num_tokens, self._ranked.scattered([entry.blocks for entry in found]), is_foreign)

    def _gathered(self, blocks: HostBlocks, branch: int) -> HostBlocks:
        assert isinstance(blocks, RankedBlocks), "a copy of one rank alone"
        return blocks.of_branch(branch, self._whole_spec.num_heads)
