"""What an engine counts, for metrics and displays. Data only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


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
    """What the engine has done so far, and what it holds. Counts of what was done only ever grow."""

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
