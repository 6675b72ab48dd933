"""Most blocks one branch holds at once: every kind of tick is played on a pool of its own, at every length of history.

Ids are cheap, so nothing is bounded by a formula. Knows windows, tables and pools; no tensors and no model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from worldkv.kv.block_pool import BlockPool
from worldkv.kv.block_table import BlockTable, blocks_for
from worldkv.kv.window import CopiedChunks, Window


@dataclass(frozen=True)
class Step:
    """One forward of a tick: `num_chunks` chunks, then `num_draft_tokens` tokens that never become history.

    A step that commits adds its chunks to the history. Any other is a draft: it may be repeated, and its slots are
    given back before the next step. A step that rewrites computes the newest `num_chunks` chunks of history anew (all
    of a shorter one), and commits.
    """

    num_chunks: int
    commits: bool = False
    num_draft_tokens: int = 0
    rewrites: bool = False

    def __post_init__(self) -> None:
        if self.num_chunks < 1:
            raise ValueError(f"num_chunks: expected at least 1, got {self.num_chunks}")
        if self.num_draft_tokens < 0:
            raise ValueError(f"num_draft_tokens: expected 0 or more, got {self.num_draft_tokens}")
        if self.rewrites and (not self.commits or self.num_draft_tokens):
            raise ValueError("rewrites: expected a step that commits and has no draft tokens")

    @property
    def num_added(self) -> int:
        """Chunks past the history before it that it writes."""
        return 0 if self.rewrites else self.num_chunks


Tick = tuple[Step, ...]


def chunks_committed(tick: Tick) -> int:
    """How many chunks longer the history is after the tick."""
    return sum(step.num_added for step in tick if step.commits)


def chunks_reached(tick: Tick) -> int:
    """How many chunks past the history before it the tick writes at most."""
    return max(chunks_committed(tick[:i]) + step.num_added for i, step in enumerate(tick))


@cache
def most_blocks(
    window: Window, ticks: tuple[Tick, ...], restarts: tuple[Tick, ...], block_size: int, reads_copy: bool = False
) -> int:
    """Most blocks a branch holds at any moment of any tick, the history it may have to roll back to included.

    Plays every sequence of ticks from an empty history on, each length of history once. See KVSpec.
    """
    most, known, waiting = 0, {0}, [0]
    while waiting:
        length = waiting.pop()
        for first, tick in _ticks_after(length, window, ticks, restarts):
            most = max(most, _blocks_of_tick(window, block_size, length, first, tick, reads_copy))
            after = _recurring(first + chunks_committed(tick), window)
            if after not in known:
                known.add(after)
                waiting.append(after)
    return most


def _ticks_after(
    length: int, window: Window, ticks: tuple[Tick, ...], restarts: tuple[Tick, ...]
) -> Iterator[tuple[int, Tick]]:
    """Each tick that may follow `length` chunks of history, with the chunk it begins at: 0 where it restarts."""
    for tick in restarts:
        yield 0, tick
    for tick in ticks:
        if window.policy == "slide" or window.has_room(length, chunks_reached(tick)):
            yield length, tick


def _recurring(length: int, window: Window) -> int:
    """The least length whose slots are laid out alike: once chunks have left the ring, only its phase counts."""
    full = window.max_chunks
    return length if length <= full else full + 1 + (length - full - 1) % window.window


def _blocks_of_tick(window: Window, block_size: int, length: int, first: int, tick: Tick, reads_copy: bool) -> int:
    """Most blocks held while `tick` runs from chunk `first` on; `length` chunks of history are kept for a roll-back,
    and shared unless `first` is 0."""
    extra = sum(step.num_draft_tokens for step in tick)
    pool = BlockPool(4 * blocks_for(window.num_slots(window.max_chunks) + extra, block_size))
    kept = BlockTable(pool, block_size, pool.allocate(blocks_for(window.num_slots(length), block_size)) or ())
    table = kept.fork() if first else BlockTable(pool, block_size)
    most = 0
    for step in tick:
        if step.rewrites and not first:
            continue
        num_chunks = min(step.num_chunks, first, window.max_chunks) if step.rewrites else step.num_chunks
        copied = _blocks_of_copy(window, block_size, first, num_chunks, step) if reads_copy else 0
        if reads_copy and not step.commits:  # it writes into its copy only
            most = max(most, pool.num_used + copied)
            continue
        if step.rewrites:
            placement = window.place_again(first, num_chunks)
        else:
            placement = window.place(first, step.num_chunks, step.num_draft_tokens)
        staged = table.stage(placement.writes, window.num_slots(first), placement.num_visible)
        assert staged is not None
        most = max(most, pool.num_used + copied)
        if step.commits:
            first += step.num_added
            table.commit(staged, window.num_slots(first))
        else:
            table.abort(staged)
    return most


def _blocks_of_copy(window: Window, block_size: int, first: int, num_chunks: int, step: Step) -> int:
    chunks = CopiedChunks.of(window, first, num_chunks, step.rewrites)
    return blocks_for((chunks.num_visible + chunks.num_unread) * window.chunk_size, block_size)
