"""An engine's counters, for metrics and displays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from worldkv.engine.core import EngineCore


@dataclass(frozen=True)
class CacheCard:
    """The facts of a cache that people are shown; they do not change."""

    device: str
    dtype: str
    block_size: int
    branches: tuple[str, ...]
    attention: str  # the backend's name
    num_bytes: int


@dataclass(frozen=True)
class BlockMap:
    """Who holds which block, for displays. Ids of blocks; one may be held by many."""

    num_blocks: int
    sessions: Mapping[str, Mapping[str, list[int]]]  # session -> branch -> its history's blocks
    conditioning: list[int]
    snapshots: list[int]
    shared: list[int]  # held by more than one


@dataclass(frozen=True)
class Stats:
    """Counts of the work done so far, which only ever grow, and of the sessions and blocks held now."""

    attention: str  # the backend's name
    rows_per_forward: Mapping[int, int]  # number of rows -> forwards of that many
    conditioning_hits: int
    conditioning_misses: int
    num_sessions: int
    num_parked: int
    bytes_parked: int  # on the host
    num_ticks_in_flight: int
    blocks_used: int
    blocks_shared: int  # held by more than one history
    blocks_copied: int  # copied on write, so far


def map_blocks(core: EngineCore) -> BlockMap:
    """Engine thread only."""
    pool = core.cache.pool
    return BlockMap(
        pool.num_blocks,
        {
            session.handle.session_id: {name: list(state.table.blocks) for name, state in session.kv.branches.items()}
            for session in core.sessions.values()
            if session.parked is None
        },
        core.cache.conditioning.blocks(),
        sorted({block for snapshot in core.snapshots.values() for block in snapshot.kv.blocks()}),
        [block for block in range(pool.num_blocks) if pool.num_references(block) > 1],
    )
