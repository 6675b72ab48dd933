"""One branch of a session, and one forward of it: the slots it sees and writes, and whether they become history.

Building a context allocates nothing. `activate` takes blocks when the branch is really executed; `close` gives back
every block that did not become history. The context is handed to an attention backend as an `AttentionRow`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from worldkv.errors import OutOfBlocks
from worldkv.kv.block_table import BlockTable, StagedWrite
from worldkv.kv.conditioning import ConditioningEntry
from worldkv.kv.row import AttentionRow
from worldkv.kv.window import Placement, Window

if TYPE_CHECKING:
    from worldkv.kv.storage import KVStorage


class BranchState:
    """One K/V history: its blocks, how many chunks it has seen, its conditioning, and the forward under way."""

    def __init__(self, name: str, table: BlockTable, window: Window, storage: KVStorage) -> None:
        self.name = name
        self.table = table
        self.window = window
        self.storage = storage
        self.num_chunks = 0  # chunks committed since the last reset; past a full ring the oldest are gone
        self.conditioning: dict[str, ConditioningEntry] = {}
        self.context: ForwardContext | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens of history that a forward can see now."""
        return self.window.num_slots(self.num_chunks)


class ForwardContext:
    """A draft or committing forward of `num_chunks` chunks on one branch: the next ones, or the newest of its history
    once more (`rewrites`)."""

    def __init__(self, branch: BranchState, num_chunks: int, commits: bool, rewrites: bool = False) -> None:
        self.branch = branch
        self.num_chunks = num_chunks
        self.commits = commits
        self.rewrites = rewrites
        self.first_chunk = branch.num_chunks - num_chunks if rewrites else branch.num_chunks
        self.closed = False
        self._row: AttentionRow | None = None
        self.placement: Placement | None = None
        self.staged: StagedWrite | None = None

    @property
    def is_active(self) -> bool:
        """Whether blocks are held for this forward."""
        return self.staged is not None

    @property
    def num_tokens(self) -> int:
        return self.num_chunks * self.branch.window.chunk_size

    def activate(self, num_draft_tokens: int = 0) -> AttentionRow:
        """Take the blocks this forward writes to (once; later calls return the same row).

        Raises OutOfBlocks, with nothing changed, when the pool has no room.
        """
        assert not self.closed, "a closed forward context cannot run again"
        if self._row is not None:
            return self._row
        window, table = self.branch.window, self.branch.table
        if self.rewrites:
            assert num_draft_tokens == 0, "a forward that rewrites history has no draft tokens"
            placement = window.place_again(self.branch.num_chunks, self.num_chunks)
        else:
            placement = window.place(self.first_chunk, self.num_chunks, num_draft_tokens)
        staged = table.stage(placement.writes, window.num_slots(self.branch.num_chunks), placement.num_visible)
        if staged is None:
            raise OutOfBlocks(
                f"branch {self.branch.name!r}: no room for {self.num_tokens + num_draft_tokens} tokens; "
                f"{table.pool.num_free} of {table.pool.num_blocks} blocks are free"
            )
        try:
            self.branch.storage.copy_blocks(staged.copies)
        except BaseException:
            table.abort(staged)
            raise
        self.placement, self.staged = placement, staged
        self._row = self._make_row(placement, staged)
        return self._row

    def _make_row(self, placement: Placement, staged: StagedWrite) -> AttentionRow:
        block_size = self.branch.table.block_size
        blocks = np.asarray(staged.blocks, dtype=np.int32)
        logical = np.concatenate([np.arange(r.start, r.stop) for r in placement.writes])
        slots = blocks[logical // block_size].astype(np.int64) * block_size + logical % block_size
        return AttentionRow(blocks, placement.num_visible, len(logical), slots)

    def commit(self) -> None:
        """Make the written chunks history. K/V of all layers must have been written."""
        assert self.commits, "a draft cannot be committed"
        assert self.staged is not None, "nothing was executed that could be committed"
        branch = self.branch
        branch.num_chunks = self.first_chunk + self.num_chunks
        branch.table.commit(self.staged, branch.window.num_slots(branch.num_chunks))
        self.staged, self.closed = None, True

    def close(self) -> None:
        """Give back every block that did not become history; safe to call twice."""
        if self.staged is not None:
            self.branch.table.abort(self.staged)
        self.staged, self.closed = None, True
