"""The books of promised blocks: a session is charged, before any work, the most it can ever hold; a snapshot its own.

Counts only. The sum of the charges never exceeds the pool, so no admitted tick can run out of blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

from worldkv.errors import AdmissionRefused
from worldkv.kv.spec import KVSpec
from worldkv.words import count


@dataclass(frozen=True)
class Capacity:
    """The books of one engine. Blocks, but for `bytes_per_block`."""

    bytes_per_block: int
    num_blocks: int
    num_used: int  # really held now
    num_charged: int  # promised to open sessions and snapshots
    blocks_per_session: int
    blocks_per_branch: int  # of which: one branch's window, drafts, and the history a tick may roll back to
    blocks_of_conditioning: int  # of which: its own conditioning, the one that a tick may replace included
    blocks_of_state: int  # of which: as much memory as it keeps beside its K/V, outside of the pool
    blocks_shared: int  # conditioning that all sessions read, charged once
    num_sessions: int
    num_more_sessions: int

    def explain(self) -> str:
        """The sum, in words."""
        session = self.blocks_per_session * self.bytes_per_block / 2**20
        state = f", {self.blocks_of_state} for what it keeps beside its K/V" if self.blocks_of_state else ""
        return (
            f"{count(self.num_blocks, 'block')} of {self.bytes_per_block / 2**20:.3g} MiB; a session is charged "
            f"{self.blocks_per_session} ({session:.3g} MiB): {self.blocks_per_branch} per branch, "
            f"{self.blocks_of_conditioning} for its conditioning{state}; {self.blocks_shared} are shared by all; "
            f"{count(self.num_sessions, 'session is open', 'sessions are open')}, "
            f"{count(self.num_charged, 'block is charged', 'blocks are charged')}, {self.num_used} held; "
            f"{count(self.num_more_sessions, 'more session fits', 'more sessions fit')}"
        )


class Admission:
    """The books of promised blocks.

    `blocks_of_state`: as much memory as a session's or snapshot's state takes at most, outside of the pool. The pool
    bounds how many sessions there can be, and what they keep is counted in blocks on top of it. A snapshot is charged
    as a session then, so that neither the pool nor the number of states can be exceeded.
    """

    def __init__(self, spec: KVSpec, num_blocks: int, block_size: int, blocks_of_state: int = 0) -> None:
        blocks_of_kv = spec.blocks_per_session(block_size)
        most_sessions = max(0, num_blocks - spec.blocks_shared(block_size)) // blocks_of_kv
        self.num_blocks = num_blocks + most_sessions * blocks_of_state
        self.blocks_per_session = blocks_of_kv + blocks_of_state
        self.blocks_of_state = blocks_of_state
        self.blocks_shared = spec.blocks_shared(block_size)
        self.num_charged = self.blocks_shared
        self._blocks_per_branch = spec.blocks_per_branch(block_size)
        self._blocks_of_conditioning = spec.blocks_of_conditioning(block_size)
        needed = self.blocks_shared + blocks_of_kv
        if needed > num_blocks:
            raise ValueError(
                f"num_blocks: one session needs {needed} blocks of {block_size} slots, the pool has {num_blocks}"
            )

    @property
    def num_free(self) -> int:
        """Blocks promised to nobody."""
        return self.num_blocks - self.num_charged

    def blocks_of_snapshot(self, num_blocks: int) -> int:
        """To be charged for one that holds `num_blocks` of the pool."""
        return self.blocks_per_session if self.blocks_of_state else num_blocks

    def refusal(self, num_blocks: int, what: str, num_kept: int = 0, trouble: str = "") -> AdmissionRefused:
        """The error for whoever needs `num_blocks`; `num_kept` blocks are for others. Says what would help."""
        free = max(0, self.num_free - num_kept)
        return AdmissionRefused(
            f"no room for {what}: it needs {num_blocks} blocks, {free} of {self.num_blocks} are not "
            f"promised to others; {trouble + '; ' if trouble else ''}"
            f"close a session, release a snapshot, or start with a larger max_sessions"
        )

    def refund(self, num_blocks: int) -> None:
        self.num_charged -= num_blocks
        assert self.num_charged >= self.blocks_shared, "more was refunded than charged"

    def capacity(self, bytes_per_block: int, num_sessions: int, num_used: int) -> Capacity:
        return Capacity(
            bytes_per_block,
            self.num_blocks,
            num_used,
            self.num_charged,
            self.blocks_per_session,
            self._blocks_per_branch,
            self._blocks_of_conditioning,
            self.blocks_of_state,
            self.blocks_shared,
            num_sessions,
            self.num_free // self.blocks_per_session,
        )
