"""Who may open a session: each is charged, before any work, the most blocks it can ever hold. Counts only."""

from __future__ import annotations

from worldkv.errors import AdmissionRefused
from worldkv.kv.spec import KVSpec


class Admission:
    """The books of promised blocks. The sum of promises never exceeds the pool, so no tick can run out of blocks."""

    def __init__(self, spec: KVSpec, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.blocks_per_session = session_blocks(spec, block_size)
        self.num_charged = 0
        if self.blocks_per_session > num_blocks:
            raise ValueError(
                f"num_blocks: one session needs {self.blocks_per_session} blocks of {block_size} slots, "
                f"the pool has {num_blocks}"
            )

    def has_room(self) -> bool:
        return self.num_charged + self.blocks_per_session <= self.num_blocks

    def charge(self) -> int:
        """Promise one session its blocks; raises AdmissionRefused with needed, free and what would help."""
        if not self.has_room():
            raise AdmissionRefused(
                f"no room for another session: it needs {self.blocks_per_session} blocks, "
                f"{self.num_blocks - self.num_charged} of {self.num_blocks} are not promised to open sessions; "
                f"close a session or start the server with a larger --max-sessions",
                retry_after_ms=1000,
            )
        self.num_charged += self.blocks_per_session
        return self.blocks_per_session

    def refund(self, num_blocks: int) -> None:
        self.num_charged -= num_blocks
        assert self.num_charged >= 0, "more was refunded than charged"


def session_blocks(spec: KVSpec, block_size: int) -> int:
    """Blocks of one session at worst: every branch, and each half of its conditioning twice, since the old one stays
    until the tick that replaces it has succeeded."""
    conditioning = 2 * sum(spec.blocks_of_half(half, block_size) for half in spec.conditioning)
    return len(spec.branches) * (spec.blocks_per_branch(block_size) + conditioning)
