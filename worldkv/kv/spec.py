"""What a model needs of the cache, and what that costs in blocks and bytes, before anything is allocated."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache

from worldkv.kv.block_pool import BlockPool
from worldkv.kv.block_table import BlockTable, blocks_for
from worldkv.kv.window import Window


@dataclass(frozen=True)
class KVSpec:
    """The K/V a world model keeps per session.

    `window.chunk_size` tokens are the unit of history; a forward brings at most `max_chunks_per_forward` chunks and
    `max_draft_tokens` tokens that never become history. A restarted window begins with `restart_chunks` chunks.
    `conditioning` maps each half to its number of tokens. `entries_per_session` says how many different entries of a
    half one session reads (default: one for each branch), `entries_shared` how many are the same for all sessions.
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
    entries_per_session: Mapping[str, int] = field(default_factory=dict)
    entries_shared: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        window = self.window
        for name in ("max_chunks_per_forward", "restart_chunks"):
            if not 1 <= getattr(self, name) <= window.window:
                raise ValueError(f"{name}: expected 1 to {window.window} (the window), got {getattr(self, name)}")
        if window.policy == "reset" and not window.has_room(self.restart_chunks, self.max_chunks_per_forward):
            raise ValueError(
                f"window: a restart of {self.restart_chunks} and a forward of {self.max_chunks_per_forward} chunks do "
                f"not fit {window.max_chunks} chunks; expected a larger window"
            )

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

        A tick commits up to `max_chunks_per_forward` observed chunks (or restarts), then drafts that many and the
        draft-only tokens after them. Under `reset` it restarts when the two do not fit. The bound is reached.
        """
        return _most_blocks(
            self.window, self.max_chunks_per_forward, self.max_draft_tokens, self.restart_chunks, block_size
        )

    def blocks_of_conditioning(self, block_size: int) -> int:
        """Most blocks of conditioning one session holds: an old entry stays until the tick that replaces it is over."""
        return sum(
            2 * self.entries_per_session.get(half, len(self.branches)) * blocks_for(num_tokens, block_size)
            for half, num_tokens in self.conditioning.items()
        )

    def blocks_per_session(self, block_size: int) -> int:
        """Most blocks one session holds at any moment."""
        return len(self.branches) * self.blocks_per_branch(block_size) + self.blocks_of_conditioning(block_size)

    def blocks_shared(self, block_size: int) -> int:
        """Blocks of conditioning that all sessions read and the cache stores once."""
        return sum(
            count * blocks_for(self.conditioning[half], block_size) for half, count in self.entries_shared.items()
        )


@cache
def _most_blocks(window: Window, num_chunks: int, num_draft_tokens: int, restart_chunks: int, block_size: int) -> int:
    """Ids are cheap, so every tick is played instead of bounded by a formula: each length of history (under `slide`
    until the ring's phases recur), each number of observed chunks."""
    slides = window.policy == "slide"
    longest = window.max_chunks + window.window if slides else window.max_chunks - num_chunks
    most = 0
    for length in range(longest + 1):
        restarted = [(0, restart_chunks)]
        continued = [(length, n) for n in range(1, num_chunks + 1) if slides or window.has_room(length, n + num_chunks)]
        for first, num_observed in restarted + continued:
            forwards = ((num_observed, 0), (num_chunks, num_draft_tokens))
            most = max(most, _blocks_of_tick(window, block_size, length, first, forwards))
    return most


def _blocks_of_tick(
    window: Window, block_size: int, length: int, first: int, forwards: Iterable[tuple[int, int]]
) -> int:
    """Most blocks held while forwards of (chunks, draft-only tokens) run from chunk `first` on; `length` chunks of
    history are kept for a roll-back, and shared unless `first` is 0."""
    history = blocks_for(window.num_slots(length), block_size)
    extra = sum(num_draft_tokens for _, num_draft_tokens in forwards)
    pool = BlockPool(3 * blocks_for(window.num_slots(window.max_chunks) + extra, block_size))
    kept = BlockTable(pool, block_size, pool.allocate(history) or ())
    table = kept.fork() if first else BlockTable(pool, block_size)
    most = 0
    for num_chunks, num_draft_tokens in forwards:
        placement = window.place(first, num_chunks, num_draft_tokens)
        staged = table.stage(placement.writes, window.num_slots(first), placement.num_visible)
        assert staged is not None
        most = max(most, pool.num_used)
        first += num_chunks
        table.commit(staged, window.num_slots(first))
    return most
