"""Moving a session's K/V to host memory and back, block by block, bit for bit.

A parked history holds no block. Conditioning is parked with its key, so that coming back finds it stored already where
another session still uses it. Knows no engine and no policy of when to park.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from worldkv.errors import OutOfBlocks
from worldkv.kv.block_table import BlockTable
from worldkv.kv.conditioning import ConditioningEntry

if TYPE_CHECKING:
    from worldkv.kv.cache import KVCache
    from worldkv.kv.state import KVState
    from worldkv.kv.storage import HostBlocks


@dataclass(frozen=True)
class ParkedHalf:
    key: str
    num_tokens: int
    blocks: HostBlocks


@dataclass(frozen=True)
class ParkedBranch:
    num_chunks: int
    blocks: HostBlocks
    conditioning: Mapping[str, ParkedHalf]


@dataclass(frozen=True)
class ParkedKV:
    """All branches of one session, on the host."""

    branches: Mapping[str, ParkedBranch]

    @property
    def num_bytes(self) -> int:
        return sum(
            branch.blocks.num_bytes + sum(half.blocks.num_bytes for half in branch.conditioning.values())
            for branch in self.branches.values()
        )


def park(cache: KVCache, state: KVState) -> ParkedKV:
    """Copy a session's K/V to the host, then give its blocks back. It must be at a commit."""
    storage = cache.storage
    branches = {}
    for name, branch in state.branches.items():
        assert branch.context is None or not branch.context.is_active, "a session is parked at a commit"
        halves = {
            half: ParkedHalf(entry.key, entry.num_tokens, storage.read_blocks(entry.blocks.tolist()))
            for half, entry in branch.conditioning.items()
        }
        branches[name] = ParkedBranch(branch.num_chunks, storage.read_blocks(branch.table.blocks), halves)
    storage.synchronize()
    state.reset()
    return ParkedKV(branches)


def resume(cache: KVCache, state: KVState, parked: ParkedKV) -> None:
    """Bring a parked history back into an empty state. Raises OutOfBlocks, with nothing changed."""
    try:
        for name, branch in parked.branches.items():
            target = state.branches[name]
            blocks = cache.pool.allocate(branch.blocks.num_blocks)
            if blocks is None:
                raise OutOfBlocks(f"branch {name!r}: no room for {branch.blocks.num_blocks} parked blocks")
            target.table = BlockTable(cache.pool, cache.storage.block_size, blocks)
            target.num_chunks = branch.num_chunks
            cache.storage.load_blocks(blocks, branch.blocks)
            for half, parked_half in branch.conditioning.items():
                state.set_conditioning(name, half, _resume_half(cache, parked_half))
    except BaseException:
        state.reset()
        raise


def _resume_half(cache: KVCache, half: ParkedHalf) -> ConditioningEntry:
    return cache.conditioning.publish(half.key, half.num_tokens, half.blocks.tokens(half.num_tokens))
