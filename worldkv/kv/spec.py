"""What a model needs of the cache, and what that costs in blocks and bytes, before anything is allocated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from worldkv.kv.block_table import blocks_for
from worldkv.kv.window import Window


@dataclass(frozen=True)
class KVSpec:
    """The K/V a world model keeps per session.

    `window.chunk_size` tokens are the unit of history; a forward brings at most `max_chunks_per_forward` chunks and
    `max_draft_tokens` tokens that never become history. A restarted window begins with `restart_chunks` chunks.
    `conditioning` maps each half to its number of tokens.
    """

    num_layers: int
    num_heads: int
    head_dim: int
    window: Window
    branches: tuple[str, ...]
    max_chunks_per_forward: int = 1
    max_draft_tokens: int = 0
    restart_chunks: int = 1
    conditioning: Mapping[str, int] = field(default_factory=dict)

    @property
    def chunk_size(self) -> int:
        return self.window.chunk_size

    def bytes_per_token(self, element_size: int) -> int:
        """Bytes of K and V of one token over all layers."""
        return 2 * self.num_layers * self.num_heads * self.head_dim * element_size

    def bytes_per_block(self, block_size: int, element_size: int) -> int:
        return block_size * self.bytes_per_token(element_size)

    def blocks_per_branch(self, block_size: int) -> int:
        """Most blocks one branch holds at any moment of a tick, the history the tick may have to roll back to included.

        A tick commits observed chunks, then drafts the next ones and the draft-only tokens after them.
        """
        size, num = self.chunk_size, self.max_chunks_per_forward
        full = self.window.num_slots(self.window.max_chunks)
        if self.window.policy == "slide":  # committed and drafted ring entries are written into other blocks
            return (
                blocks_for(full, block_size)
                + 2 * _blocks_touched(num * size, block_size, num_runs=2)
                + _blocks_touched(self.max_draft_tokens, block_size)
            )
        # `reset` leaves room for the drafts before it commits; + 1: the last, partly filled block is shared, so copied
        filling = blocks_for(full + self.max_draft_tokens, block_size) + 1
        history = blocks_for(full - num * size, block_size)
        restarted = blocks_for((self.restart_chunks + num) * size + self.max_draft_tokens, block_size)
        return max(filling, history + restarted)

    def blocks_of_half(self, half: str, block_size: int) -> int:
        return blocks_for(self.conditioning[half], block_size)


def _blocks_touched(num_slots: int, block_size: int, num_runs: int = 1) -> int:
    """Most blocks that `num_slots` slots in `num_runs` unaligned runs can lie in."""
    if num_slots == 0:
        return 0
    return (num_slots + num_runs * (block_size - 2)) // block_size + num_runs
