"""One branch of a session, and one forward of it: the slots it sees and writes, and whether they become history.

Building a context allocates nothing. `activate` takes blocks when the branch is really executed; `close` gives back
every block that did not become history. The context is handed to an attention backend as an `AttentionRow`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from worldkv.errors import OutOfBlocks
from worldkv.kv.block_table import BlockTable, StagedWrite, blocks_for
from worldkv.kv.conditioning import ConditioningEntry
from worldkv.kv.copied_window import CopiedWindow, physical_slots
from worldkv.kv.row import AttentionRow
from worldkv.kv.window import CopiedChunks, Placement, Window

if TYPE_CHECKING:
    from worldkv.kv.storage import KVStorage


class BranchState:
    """One K/V history: its blocks, how many chunks it has seen, its conditioning, and the forward under way.

    `reads_copy`: its forwards read a copy of the window, see KVSpec.
    """

    def __init__(
        self, name: str, table: BlockTable, window: Window, storage: KVStorage, reads_copy: bool = False
    ) -> None:
        self.name = name
        self.table = table
        self.window = window
        self.storage = storage
        self.num_chunks = 0  # chunks committed since the last reset; past a full ring the oldest are gone
        self.conditioning: dict[str, ConditioningEntry] = {}
        self.context: ForwardContext | None = None
        self.reads_copy = reads_copy
        self.copy: CopiedWindow | None = None  # of the forwards under way

    def drop_copy(self) -> None:
        """Give its blocks back; safe to call twice."""
        if self.copy is not None:
            self.copy.release()
        self.copy = None

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
        # physical slots of history for its tokens' K/V, keys unturned: only of a commit of a branch that reads a copy
        self.history_slots: npt.NDArray[np.int64] | None = None

    @property
    def is_active(self) -> bool:
        """Whether blocks are held for this forward."""
        return self.staged is not None or (self._row is not None and not self.closed)

    @property
    def num_tokens(self) -> int:
        return self.num_chunks * self.branch.window.chunk_size

    def activate(self, num_draft_tokens: int = 0) -> AttentionRow:
        """Take the blocks this forward writes to (once; later calls return the same row).

        Raises OutOfBlocks, with nothing changed, when the pool has no room.
        """
        assert not self.closed, "a closed forward context cannot run again"
        if self._row is None and self.branch.reads_copy:
            assert num_draft_tokens == 0, "forwards that read a copy of the window have no draft tokens"
            copy = self._take_copy()
            if self.commits:
                self.history_slots = self._stage(0).write_slots
            own = copy.own_slots(self.branch.window.chunk_size)
            num_visible = copy.chunks.num_visible * self.branch.window.chunk_size
            self._row = AttentionRow(np.asarray(copy.blocks, dtype=np.int32), num_visible, len(own), own)
        if self._row is None:
            self._row = self._stage(num_draft_tokens)
        return self._row

    def _take_copy(self) -> CopiedWindow:
        """The branch's, where an earlier forward saw the same chunks, or a new one."""
        branch, size = self.branch, self.branch.window.chunk_size
        chunks = CopiedChunks.of(branch.window, branch.num_chunks, self.num_chunks, self.rewrites)
        if branch.copy is not None and branch.copy.chunks == chunks:
            return branch.copy
        branch.drop_copy()
        num_tokens = (chunks.num_visible + chunks.num_unread) * size
        blocks = branch.table.pool.allocate(blocks_for(num_tokens, branch.table.block_size))
        if blocks is None:
            raise self._no_room(num_tokens)
        starts = np.asarray([branch.window.entry(chunk) * size for chunk in chunks.history], dtype=np.int64)
        sources = self._physical((starts[:, None] + np.arange(size)).reshape(-1), branch.table.blocks)
        branch.copy = CopiedWindow(branch.table.pool, blocks, chunks, sources, branch.table.block_size)
        return branch.copy

    def _stage(self, num_draft_tokens: int) -> AttentionRow:
        """Take the blocks that are written in the branch's own order."""
        window, table = self.branch.window, self.branch.table
        if self.rewrites:
            assert num_draft_tokens == 0, "a forward that rewrites history has no draft tokens"
            placement = window.place_again(self.branch.num_chunks, self.num_chunks)
        else:
            placement = window.place(self.first_chunk, self.num_chunks, num_draft_tokens)
        staged = table.stage(placement.writes, window.num_slots(self.branch.num_chunks), placement.num_visible)
        if staged is None:
            raise self._no_room(self.num_tokens + num_draft_tokens)
        try:
            self.branch.storage.copy_blocks(staged.copies)
        except BaseException:
            table.abort(staged)
            raise
        self.placement, self.staged = placement, staged
        logical = np.concatenate([np.arange(r.start, r.stop) for r in placement.writes])
        slots = self._physical(logical, staged.blocks)
        return AttentionRow(np.asarray(staged.blocks, dtype=np.int32), placement.num_visible, len(logical), slots)

    def _physical(self, logical: npt.NDArray[np.int64], blocks: list[int]) -> npt.NDArray[np.int64]:
        return physical_slots(logical, blocks, self.branch.table.block_size)

    def _no_room(self, num_tokens: int) -> OutOfBlocks:
        pool = self.branch.table.pool
        return OutOfBlocks(
            f"branch {self.branch.name!r}: no room for {num_tokens} tokens; "
            f"{pool.num_free} of {pool.num_blocks} blocks are free"
        )

    def commit(self) -> None:
        """Make the written chunks history. K/V of all layers must have been written."""
        assert self.commits, "a draft cannot be committed"
        assert self.staged is not None, "nothing was executed that could be committed"
        branch = self.branch
        branch.num_chunks = self.first_chunk + self.num_chunks
        branch.table.commit(self.staged, branch.window.num_slots(branch.num_chunks))
        branch.drop_copy()
        self.staged, self.closed = None, True

    def close(self) -> None:
        """Give back every block that did not become history; safe to call twice. A copy of the window stays for the
        next forward: see `BranchState.drop_copy`."""
        if self.staged is not None:
            self.branch.table.abort(self.staged)
        self.staged, self.closed = None, True
