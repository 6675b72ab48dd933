"""A session's K/V: named branches, each with a window of committed chunks and its conditioning.

This is the general state that a model's rollout works with; it knows no model and no request. History changes in one
place only, `commit`; everything else can be thrown away. A snapshot is block ids and reference counts: zero bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from worldkv.errors import ConditioningMissing
from worldkv.kv.block_table import BlockTable
from worldkv.kv.branch import BranchState, ForwardContext
from worldkv.kv.conditioning import ConditioningEntry

if TYPE_CHECKING:
    from worldkv.kv.cache import KVCache


@dataclass(frozen=True)
class BranchSnapshot:
    table: BlockTable
    num_chunks: int
    conditioning: Mapping[str, ConditioningEntry]


class KVSnapshot:
    """A frozen history of all branches. Holds references until `release`; any number of restores and forks."""

    def __init__(self, cache: KVCache, branches: Mapping[str, BranchSnapshot]) -> None:
        self.cache = cache
        self.branches = dict(branches)

    @property
    def is_released(self) -> bool:
        return not self.branches

    @property
    def num_blocks(self) -> int:
        """Blocks this snapshot keeps from being freed, conditioning included; those it shares are counted too."""
        return len(self.blocks())

    def blocks(self) -> set[int]:
        held = {block for branch in self.branches.values() for block in branch.table.blocks}
        for branch in self.branches.values():
            for entry in branch.conditioning.values():
                held.update(entry.blocks.tolist())
        return held

    def release(self) -> None:
        """Give the references back; safe to call twice."""
        for branch in self.branches.values():
            branch.table.release()
            for entry in branch.conditioning.values():
                self.cache.conditioning.release(entry)
        self.branches = {}


class KVState:
    """The K/V of one session over the branches that really run. `cache`: the one that it lives in."""

    def __init__(self, cache: KVCache, branches: Iterable[str] | None = None) -> None:
        self.cache = cache
        names = cache.spec.branches if branches is None else tuple(branches)
        self.branches = {
            name: BranchState(
                name,
                BlockTable(cache.pool, cache.storage.block_size),
                cache.spec.window,
                cache.storage,
                cache.spec.reads_copy,
            )
            for name in names
        }

    # forwards

    def prepare(self, branch: str, seq_len: int, commit: bool) -> ForwardContext:
        """A context for one forward of `seq_len` current tokens; nothing is allocated.

        It replaces the branch's previous context. Raises ValueError for a length that is not whole chunks, and
        RuntimeError if the previous context has taken blocks for a commit that never came.
        """
        return self._prepare(branch, seq_len, commit, rewrites=False)

    def prepare_rewrite(self, branch: str, seq_len: int) -> ForwardContext:
        """As `prepare`, for a committing forward that computes the newest `seq_len` tokens of history anew, together.

        See `Window.place_again`; the history is as long afterwards as before. Raises ValueError where it is shorter.
        """
        return self._prepare(branch, seq_len, commit=True, rewrites=True)

    def _prepare(self, branch: str, seq_len: int, commit: bool, rewrites: bool) -> ForwardContext:
        state = self.branches[branch]
        size = state.window.chunk_size
        if seq_len < size or seq_len % size:
            raise ValueError(
                f"branch {branch!r}: seq_len must be a positive multiple of chunk_size={size}, got {seq_len}"
            )
        if rewrites:
            state.window.place_again(state.num_chunks, seq_len // size)  # raises for what is not there
        previous = state.context
        if previous is not None and not previous.closed:
            if previous.commits and previous.is_active:
                raise RuntimeError(
                    f"branch {branch!r}: a committing forward has taken blocks and was not committed; "
                    f"commit or abandon it before the next one"
                )
            previous.close()
        state.context = ForwardContext(state, seq_len // size, commit, rewrites)
        return state.context

    def commit(self, branch: str) -> None:
        """Make the branch's executed committing forward history; a no-op for drafts and when nothing is pending."""
        context = self.branches[branch].context
        if context is None or context.closed or not context.commits or not context.is_active:
            return
        context.commit()
        self.branches[branch].context = None

    def abandon(self) -> None:
        """Give back every block that is not history, in every branch."""
        for state in self.branches.values():
            if state.context is not None:
                state.context.close()
                state.context = None
            state.drop_copy()

    # conditioning

    def set_conditioning(self, branch: str, kind: str, entry: ConditioningEntry) -> None:
        """Attach a published entry (the caller's reference goes to the branch) and release the one it replaces.

        Raises ValueError, and takes no reference, for a kind that the spec does not have.
        """
        if kind not in self.cache.spec.conditioning:
            raise ValueError(f"kind: expected one of {list(self.cache.spec.conditioning)}, got {kind!r}")
        replaced = self.branches[branch].conditioning.get(kind)
        self.branches[branch].conditioning[kind] = entry
        if replaced is not None:
            self.cache.conditioning.release(replaced)

    def conditioning(self, branch: str) -> Mapping[str, ConditioningEntry]:
        """The branch's entry of each kind; raises ConditioningMissing with every kind's flag when one is missing."""
        entries = self.branches[branch].conditioning
        kinds = self.cache.spec.conditioning
        if any(kind not in entries for kind in kinds):
            flags = ", ".join(f"{kind}={'set' if kind in entries else 'missing'}" for kind in kinds)
            raise ConditioningMissing(f"branch {branch!r}: conditioning read before it was populated ({flags})")
        return entries

    def drop_conditioning(self, kind: str) -> None:
        """Forget one kind in every branch."""
        for state in self.branches.values():
            entry = state.conditioning.pop(kind, None)
            if entry is not None:
                self.cache.conditioning.release(entry)

    # life cycle

    def reset(self, keep: Iterable[str] = ()) -> None:
        """Drop all history, and all conditioning but the kinds named in `keep`; the object stays usable."""
        self.abandon()
        for state in self.branches.values():
            state.table.release()
            state.num_chunks = 0
        for kind in set(self.cache.spec.conditioning) - set(keep):
            self.drop_conditioning(kind)

    def close(self) -> None:
        """Give everything back; safe to call twice."""
        self.reset()

    def snapshot(self) -> KVSnapshot:
        """Freeze all branches at their last commit. Raises RuntimeError while a forward is under way."""
        for state in self.branches.values():
            if state.context is not None and state.context.is_active:
                raise RuntimeError(f"branch {state.name!r}: a snapshot is taken at a commit, not during a forward")
        return KVSnapshot(self.cache, {name: self._freeze(state) for name, state in self.branches.items()})

    def restore(self, snapshot: KVSnapshot) -> None:
        """Go back to a snapshot, which stays valid. Blocks committed since are given back.

        Raises ValueError, with nothing changed, for a snapshot that is released, of another cache or of other branches.
        """
        if snapshot.is_released:
            raise ValueError("the snapshot is released; nothing is left to go back to")
        if snapshot.cache is not self.cache:
            raise ValueError("the snapshot is of another cache, whose blocks this one does not have")
        if set(snapshot.branches) != set(self.branches):
            raise ValueError(f"snapshot has branches {list(snapshot.branches)}, this state {list(self.branches)}")
        self.abandon()
        for name, frozen in snapshot.branches.items():
            state = self.branches[name]
            old_table, old_entries = state.table, state.conditioning
            state.table, state.num_chunks = frozen.table.fork(), frozen.num_chunks
            state.conditioning = self._share(frozen.conditioning)
            old_table.release()
            for entry in old_entries.values():
                self.cache.conditioning.release(entry)

    def _freeze(self, state: BranchState) -> BranchSnapshot:
        return BranchSnapshot(state.table.fork(), state.num_chunks, self._share(state.conditioning))

    def _share(self, entries: Mapping[str, ConditioningEntry]) -> dict[str, ConditioningEntry]:
        return {kind: self.cache.conditioning.share(entry) for kind, entry in entries.items()}

    @property
    def num_chunks(self) -> int:
        """Chunks committed since the last reset, of the branch that has most."""
        return max((state.num_chunks for state in self.branches.values()), default=0)

    @property
    def num_blocks(self) -> int:
        """Blocks of history, those shared with snapshots and forks included."""
        return sum(len(state.table.blocks) for state in self.branches.values())

    def num_held(self) -> int:
        """Blocks that a snapshot taken now would hold. Raises what `snapshot` raises."""
        frozen = self.snapshot()
        try:
            return frozen.num_blocks
        finally:
            frozen.release()

    def layer_kv(self, branch: str, layer: int) -> tuple[Any, Any]:
        """Copies of a branch's committed K and V of one layer, [tokens, heads, head_dim] in temporal order."""
        state, size = self.branches[branch], self.cache.spec.chunk_size
        starts = [state.window.entry(i) * size for i in state.window.visible_chunks(state.num_chunks)]
        slots = np.asarray([slot for start in starts for slot in range(start, start + size)], dtype=np.int64)
        return self.cache.storage.gather(layer, np.asarray(state.table.blocks, dtype=np.int32), slots)
