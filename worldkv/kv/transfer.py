"""Moving a session's K/V to host memory and back, block by block, bit for bit.

A parked history holds no block. Conditioning is parked with its key, so that coming back finds it stored already where
another session still uses it. Each way has three parts: `begin` and `finish` keep the cache's books, on the thread that
owns the cache; `copy`, between them, moves bytes only and may run on any thread while the cache goes on. Knows no
engine and no policy of when to park.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from worldkv.errors import OutOfBlocks
from worldkv.kv.block_table import BlockTable
from worldkv.kv.conditioning import ConditioningEntry
from worldkv.kv.state import KVSnapshot

if TYPE_CHECKING:
    from worldkv.kv.cache import KVCache
    from worldkv.kv.host import HostBlocks
    from worldkv.kv.state import KVState
    from worldkv.kv.storage import Mark


@dataclass(frozen=True)
class ParkedEntry:
    """Conditioning under its key."""

    num_tokens: int
    blocks: HostBlocks
    is_foreign: bool = False  # it was made elsewhere: nobody else may come to read it under its key


@dataclass(frozen=True)
class ParkedBranch:
    num_chunks: int
    blocks: HostBlocks
    conditioning: Mapping[str, str]  # kind -> key


@dataclass(frozen=True)
class ParkedKV:
    """All branches of one session, on the host; what branches share is held once."""

    branches: Mapping[str, ParkedBranch]
    entries: Mapping[str, ParkedEntry]  # by key

    @property
    def num_bytes(self) -> int:
        of_branches = sum(branch.blocks.num_bytes for branch in self.branches.values())
        return of_branches + sum(entry.blocks.num_bytes for entry in self.entries.values())


_FOREIGN = "imported:"


def foreign_name(key: str) -> str:
    """A new name for conditioning of `key` that was made elsewhere. Those who look for `key` do not find it, so that an
    import changes nobody's session but its own."""
    return f"{_FOREIGN}{uuid.uuid4().hex}:{key}"


def native_name(name: str) -> str:
    """The key that an entry was made under."""
    return name.split(":", 2)[2] if name.startswith(_FOREIGN) else name


_AND = "+"


def joined_key(keys: Sequence[str]) -> str:
    """Of conditioning that is stored in the same blocks of several ranks, a part on each: their keys, in order."""
    return keys[0] if len(set(keys)) == 1 else _AND.join(keys)


def key_of_part(key: str, index: int) -> str:
    """Part `index` of a joined key; of a plain one, that itself."""
    parts = key.split(_AND)
    return parts[index] if len(parts) > index and len(parts) > 1 else key


# to the host


@dataclass
class ParkJob:
    """A copy to the host under way. It holds a reference of every block that it reads, until it ends."""

    cache: KVCache
    frozen: KVSnapshot
    mark: Mark
    parked: ParkedKV | None = None

    def copy(self) -> None:
        """Read the blocks, on any thread; returns once all bytes are on the host."""
        storage = self.cache.storage
        with storage.aside(self.mark):
            entries = {
                entry.key: entry for branch in self.frozen.branches.values() for entry in branch.conditioning.values()
            }
            parked_entries = {
                key: ParkedEntry(entry.num_tokens, storage.read_blocks(entry.blocks.tolist()))
                for key, entry in entries.items()
            }
            branches = {
                name: ParkedBranch(
                    branch.num_chunks,
                    storage.read_blocks(branch.table.blocks),
                    {kind: entry.key for kind, entry in branch.conditioning.items()},
                )
                for name, branch in self.frozen.branches.items()
            }
        self.parked = ParkedKV(branches, parked_entries)

    def abandon(self) -> None:
        """Leave the session as it is; not while `copy` runs. Safe to call twice, and after the end."""
        self.frozen.release()


def begin_park(cache: KVCache, state: KVState) -> ParkJob:
    """Keep the blocks to be copied from being freed. Raises RuntimeError while a forward is under way.

    The session must not commit before `finish_park` or `abandon`.
    """
    return ParkJob(cache, state.snapshot(), cache.storage.mark())


def finish_park(cache: KVCache, state: KVState, job: ParkJob) -> ParkedKV:
    """Give the session's blocks back, now that they are copied."""
    assert job.parked is not None, "nothing was copied to the host"
    assert all(state.branches[name].table.blocks == frozen.table.blocks for name, frozen in job.frozen.branches.items())
    job.abandon()
    state.reset()
    return job.parked


# back to the device


@dataclass
class ResumeJob:
    """A copy to the device under way. It owns the blocks it writes to, which nobody else sees until it ends."""

    cache: KVCache
    parked: ParkedKV
    mark: Mark
    branches: dict[str, list[int]] = field(default_factory=dict)  # blocks of each
    projected: dict[str, list[int]] = field(default_factory=dict)  # blocks of conditioning to be stored, by key
    shared: dict[str, ConditioningEntry] = field(default_factory=dict)  # conditioning that was stored already, by key
    is_copied: bool = False

    def copy(self) -> None:
        """Write the blocks, on any thread; returns once all bytes are on the device."""
        storage = self.cache.storage
        with storage.aside(self.mark):
            for key, blocks in self.projected.items():
                storage.load_blocks(blocks, self.parked.entries[key].blocks)
            for name, blocks in self.branches.items():
                storage.load_blocks(blocks, self.parked.branches[name].blocks)
        self.is_copied = True

    def abandon(self) -> None:
        """Give every block back; not while `copy` runs. Safe to call twice, and after the end."""
        for blocks in (*self.branches.values(), *self.projected.values()):
            self.cache.pool.release(blocks)
        for entry in self.shared.values():
            self.cache.conditioning.release(entry)
        self.branches, self.projected, self.shared = {}, {}, {}


def begin_resume(cache: KVCache, state: KVState, parked: ParkedKV) -> ResumeJob:
    """Take the blocks to come back to, all or none; conditioning that is stored is shared.

    Raises OutOfBlocks where the pool has no room, ValueError where `parked` has other branches than `state`; nothing
    has changed then. The state must be empty, and stay so until `finish_resume` or `abandon`.
    """
    if set(parked.branches) != set(state.branches):
        raise ValueError(f"parked are branches {list(parked.branches)}, this state has {list(state.branches)}")
    store, missing = cache.conditioning, [key for key in parked.entries if key not in cache.conditioning]
    counts = [branch.blocks.num_blocks for branch in parked.branches.values()]
    counts += [parked.entries[key].blocks.num_blocks for key in missing]
    blocks = cache.pool.allocate(sum(counts))
    if blocks is None:
        raise OutOfBlocks(
            f"no room for {sum(counts)} parked blocks; {cache.pool.num_free} of {cache.pool.num_blocks} are free"
        )
    job = ResumeJob(cache, parked, cache.storage.mark())
    taken = iter(blocks)
    runs = [[next(taken) for _ in range(count)] for count in counts]
    job.branches = dict(zip(parked.branches, runs, strict=False))
    job.projected = dict(zip(missing, runs[len(parked.branches) :], strict=True))
    for key in parked.entries:
        if (entry := store.acquire(key)) is not None:
            job.shared[key] = entry
    return job


def finish_resume(cache: KVCache, state: KVState, job: ResumeJob) -> None:
    """Make the copied blocks the state's history, and publish its conditioning.

    Conditioning that was published meanwhile is shared instead, and our blocks of it go back.
    """
    assert job.is_copied, "nothing was copied to the device"
    assert not state.num_blocks, "a parked history comes back into an empty state"
    store, entries = cache.conditioning, job.parked.entries
    while job.projected:
        key, blocks = job.projected.popitem()
        name = key if not entries[key].is_foreign or key in store else foreign_name(key)
        job.shared[key] = store.adopt(name, entries[key].num_tokens, blocks)
    for name, branch in job.parked.branches.items():
        target = state.branches[name]
        target.table = BlockTable(cache.pool, cache.storage.block_size, job.branches.pop(name))
        target.num_chunks = branch.num_chunks
        for kind, key in branch.conditioning.items():
            state.set_conditioning(name, kind, store.share(job.shared[key]))
    job.abandon()
