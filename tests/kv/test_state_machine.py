"""Any order of what sessions may do, on one small pool, against the plainest model there is: lists of tokens."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, precondition, rule
from numpy_storage import (
    Tokens,
    as_kv,
    from_kv,
    history,
    make_cache,
    make_spec,
    physical_slots,
    poison_free_blocks,
    seen,
    write,
)

from worldkv.errors import OutOfBlocks
from worldkv.kv.block_table import BlockTable, blocks_for
from worldkv.kv.branch import ForwardContext
from worldkv.kv.row import AttentionRow
from worldkv.kv.state import KVSnapshot, KVState
from worldkv.kv.window import Window

BRANCHES = ("conditional", "unconditional")
KINDS = {"text": 5, "image": 3}


@dataclass
class Expected:
    """What a branch should hold."""

    chunks: list[Tokens] = field(default_factory=list)  # all that were committed since the last reset
    kinds: dict[str, str] = field(default_factory=dict)  # kind -> key

    def copy(self) -> Expected:
        return Expected(list(self.chunks), dict(self.kinds))


@dataclass
class Pending:
    """A forward under way, and what was written by it."""

    context: ForwardContext
    num_draft_tokens: int
    row: AttentionRow | None = None
    written: Tokens | None = None


class Session:
    def __init__(self, state: KVState) -> None:
        self.state = state
        self.expected = {name: Expected() for name in BRANCHES}
        self.pending: dict[str, Pending] = {}


@dataclass
class Frozen:
    snapshot: KVSnapshot
    expected: dict[str, Expected]


def visible(window: Window, chunks: list[Tokens]) -> list[Tokens]:
    return chunks[: window.sink] + chunks[window.sink :][-window.window :]


def joined(chunks: list[Tokens]) -> Tokens:
    return np.concatenate([np.zeros(0), *chunks])


class Sessions(RuleBasedStateMachine):
    """Three sessions of two branches; the third is there to be forked into."""

    snapshots = Bundle("snapshots")
    sessions = st.integers(0, 2)
    branches = st.sampled_from(BRANCHES)

    @initialize(
        chunk_size=st.sampled_from((1, 3, 4, 6)),
        window=st.integers(1, 4),
        sink=st.integers(0, 2),
        policy=st.sampled_from(("slide", "reset")),
        block_size=st.sampled_from((1, 4, 8)),
        num_windows=st.integers(2, 12),
    )
    def open(self, chunk_size: int, window: int, sink: int, policy: str, block_size: int, num_windows: int) -> None:
        sink += policy == "reset" and sink + window < 2  # room for a restart and a forward after it
        self.spec = make_spec(chunk_size, window, sink, policy, conditioning=KINDS)
        self.window = self.spec.window
        full = blocks_for((sink + window) * chunk_size, block_size)
        self.cache = make_cache(self.spec, max(4, num_windows * full), block_size)
        self.open_sessions = [Session(self.cache.create_state()) for _ in range(3)]
        self.frozen: list[Frozen] = []
        self.next_token = 1.0

    def new_tokens(self, count: int) -> Tokens:
        tokens = self.next_token + np.arange(count)
        self.next_token += count
        return tokens

    # forwards

    @rule(i=sessions, branch=branches, num_chunks=st.integers(1, 3), commits=st.booleans(), extra=st.integers(0, 3))
    def prepare(self, i: int, branch: str, num_chunks: int, commits: bool, extra: int) -> None:
        session, num_free = self.open_sessions[i], self.cache.pool.num_free
        before = session.pending.get(branch)
        try:
            context = session.state.prepare(branch, num_chunks * self.spec.chunk_size, commits)
        except RuntimeError:
            assert before is not None
            assert before.context.commits
            assert before.row is not None
            assert self.cache.pool.num_free == num_free
            return
        assert before is None or before.row is None or not before.context.commits
        assert self.cache.pool.num_free >= num_free
        session.pending[branch] = Pending(context, 0 if commits else extra)

    @rule(i=sessions, branch=branches)
    def execute(self, i: int, branch: str) -> None:
        """Activate, and write values that were never written before."""
        session, pending = self.open_sessions[i], self.open_sessions[i].pending.get(branch)
        if pending is None:
            return
        context, num_free = pending.context, self.cache.pool.num_free
        num_history = len(session.expected[branch].chunks)
        num_entries = min(num_history + context.num_chunks, self.window.max_chunks)
        num_slots = num_entries * self.spec.chunk_size + pending.num_draft_tokens
        fits = context.num_chunks <= self.window.window
        if self.window.policy == "reset":
            fits &= num_history + context.num_chunks <= self.window.max_chunks
        try:
            row = context.activate(pending.num_draft_tokens)
        except OutOfBlocks:
            assert num_free < blocks_for(num_slots, self.cache.storage.block_size), "there was room"
            assert self.cache.pool.num_free == num_free
            return
        except ValueError:
            assert not fits
            assert self.cache.pool.num_free == num_free
            return
        assert fits
        assert pending.row in (None, row)
        assert row.num_visible == num_slots
        pending.row = row
        pending.written = self.new_tokens(context.num_tokens + pending.num_draft_tokens)
        assert row.num_queries == len(pending.written)
        write(self.cache, row, pending.written)

    @rule(i=sessions, branch=branches)
    def commit(self, i: int, branch: str) -> None:
        session, pending = self.open_sessions[i], self.open_sessions[i].pending.get(branch)
        session.state.commit(branch)
        if pending is not None and pending.context.commits and pending.written is not None:
            session.expected[branch].chunks += np.split(pending.written, pending.context.num_chunks)
            del session.pending[branch]

    @rule(i=sessions)
    def abandon(self, i: int) -> None:
        self.open_sessions[i].state.abandon()
        self.open_sessions[i].pending.clear()

    # conditioning

    @rule(i=sessions, branch=branches, kind=st.sampled_from(tuple(KINDS)), name=st.integers(1, 3), fails=st.booleans())
    def condition(self, i: int, branch: str, kind: str, name: int, fails: bool) -> None:
        key, num_free = f"{kind}{name}", self.cache.pool.num_free
        was_stored = key in self.cache.conditioning
        layers = [as_kv(1e6 * name + np.arange(KINDS[kind]), layer) for layer in range(2 - fails)]
        try:
            entry = self.cache.conditioning.publish(key, KINDS[kind], layers)
        except (OutOfBlocks, ValueError):
            assert not was_stored
            assert fails or num_free < blocks_for(KINDS[kind], self.cache.storage.block_size)
            assert self.cache.pool.num_free == num_free
            return
        session = self.open_sessions[i]
        session.state.set_conditioning(branch, kind, entry)
        session.expected[branch].kinds[kind] = key

    # life cycle

    @rule(target=snapshots, i=sessions)
    def snapshot(self, i: int) -> Frozen:
        session = self.open_sessions[i]
        is_running = any(pending.row is not None for pending in session.pending.values())
        num_free = self.cache.pool.num_free
        try:
            snapshot = session.state.snapshot()
        except RuntimeError:
            assert is_running
            return multiple()  # type: ignore[return-value]
        assert not is_running
        assert self.cache.pool.num_free == num_free
        frozen = Frozen(snapshot, {name: expected.copy() for name, expected in session.expected.items()})
        self.frozen.append(frozen)
        return frozen

    @rule(i=sessions, frozen=snapshots)
    def restore_or_fork(self, i: int, frozen: Frozen) -> None:
        session = self.open_sessions[i]
        num_copied = self.cache.storage.num_copied  # type: ignore[attr-defined]
        try:
            session.state.restore(frozen.snapshot)
        except ValueError:
            assert frozen.snapshot.is_released
            return
        assert self.cache.storage.num_copied == num_copied  # type: ignore[attr-defined]
        session.pending.clear()
        session.expected = {name: expected.copy() for name, expected in frozen.expected.items()}

    @rule(frozen=snapshots)
    def release_snapshot(self, frozen: Frozen) -> None:
        frozen.snapshot.release()
        self.frozen = [other for other in self.frozen if other is not frozen]

    @rule(i=sessions, keep_text=st.booleans())
    def reset(self, i: int, keep_text: bool) -> None:
        session = self.open_sessions[i]
        session.state.reset(keep=("text",) if keep_text else ())
        session.pending.clear()
        for expected in session.expected.values():
            expected.chunks = []
            expected.kinds = {kind: key for kind, key in expected.kinds.items() if keep_text and kind == "text"}

    @rule(i=sessions)
    def close_and_open(self, i: int) -> None:
        self.open_sessions[i].state.close()
        self.open_sessions[i].state.close()
        self.open_sessions[i] = Session(self.cache.create_state())

    @precondition(lambda self: any(s.pending for s in self.open_sessions) or self.frozen)
    @rule()
    def everything_goes(self) -> None:
        for session in self.open_sessions:
            session.state.close()
        for frozen in self.frozen:
            frozen.snapshot.release()
        self.frozen = []
        assert self.cache.pool.num_used == 0
        self.open_sessions = [Session(self.cache.create_state()) for _ in range(3)]

    # what holds after every step

    @invariant()
    def the_books_balance(self) -> None:
        pool = self.cache.pool
        pool.check()
        held: Counter[int] = Counter()
        entries = {}
        for branch in [b for s in self.open_sessions for b in s.state.branches.values()]:
            held.update(branch.table.blocks)
            if branch.context is not None and branch.context.staged is not None:
                held.update(branch.context.staged.fresh)
            entries.update({id(entry): entry for entry in branch.conditioning.values()})
        for branch in [b for f in self.frozen for b in f.snapshot.branches.values()]:
            held.update(branch.table.blocks)
            entries.update({id(entry): entry for entry in branch.conditioning.values()})
        for entry in entries.values():
            held.update(entry.blocks.tolist())
        assert len(entries) == len(self.cache.conditioning)
        assert {block: pool.num_references(block) for block in range(pool.num_blocks)} == {
            block: held[block] for block in range(pool.num_blocks)
        }

    @invariant()
    def histories_and_conditioning_are_what_was_committed(self) -> None:
        poison_free_blocks(self.cache)
        for session in self.open_sessions:
            for name, expected in session.expected.items():
                branch = session.state.branches[name]
                assert branch.num_chunks == len(expected.chunks)
                tokens = joined(visible(self.window, expected.chunks))
                np.testing.assert_array_equal(history(self.cache, session.state, name), tokens)
                assert {kind: entry.key for kind, entry in branch.conditioning.items()} == expected.kinds
                for entry in branch.conditioning.values():
                    k, v = self.cache.storage.gather(0, entry.blocks, np.arange(entry.num_tokens))
                    tokens = 1e6 * int(entry.key[-1]) + np.arange(entry.num_tokens)
                    np.testing.assert_array_equal(from_kv(k, v, 0), tokens)  # type: ignore[arg-type]

    @invariant()
    def snapshots_do_not_change(self) -> None:
        for frozen in self.frozen:
            for name, expected in frozen.expected.items():
                branch = frozen.snapshot.branches[name]
                slots = np.arange(self.window.num_slots(branch.num_chunks))
                k, v = self.cache.storage.gather(1, np.asarray(branch.table.blocks, dtype=np.int32), slots)
                tokens = np.sort(joined(visible(self.window, expected.chunks)))
                np.testing.assert_array_equal(np.sort(from_kv(k, v, 1)), tokens)  # type: ignore[arg-type]
                assert {kind: entry.key for kind, entry in branch.conditioning.items()} == expected.kinds

    @invariant()
    def a_forward_sees_its_window_and_its_own_tokens(self) -> None:
        for session in self.open_sessions:
            for name, pending in session.pending.items():
                if pending.row is None or pending.written is None:
                    continue
                num_video = pending.context.num_tokens
                own = np.split(pending.written[:num_video], pending.context.num_chunks)
                chunks = visible(self.window, session.expected[name].chunks + own)
                expected = np.sort(joined([*chunks, pending.written[num_video:]]))
                np.testing.assert_array_equal(seen(self.cache, pending.row), expected)

    @invariant()
    def no_slot_that_is_written_is_anybody_else_s(self) -> None:
        size, chunk = self.cache.storage.block_size, self.spec.chunk_size
        written: list[int] = []
        for pending in [p for s in self.open_sessions for p in s.pending.values() if p.row is not None]:
            assert pending.row is not None
            assert pending.row.write_slots is not None
            written += pending.row.write_slots.tolist()
        assert len(set(written)) == len(written), "two live rows write to one slot"
        committed: set[int] = set()
        tables: list[tuple[BlockTable, int]] = [
            (branch.table, branch.num_chunks) for s in self.open_sessions for branch in s.state.branches.values()
        ]
        tables += [(b.table, b.num_chunks) for f in self.frozen for b in f.snapshot.branches.values()]
        for table, num_chunks in tables:
            logical = np.arange(min(num_chunks, self.window.max_chunks) * chunk)
            committed.update(physical_slots(np.asarray(table.blocks, dtype=np.int32), logical, size).tolist())
        assert not committed & set(written), "a live row writes to a committed slot"

    def teardown(self) -> None:
        if hasattr(self, "cache"):
            for session in self.open_sessions:
                session.state.close()
            for frozen in self.frozen:
                frozen.snapshot.release()
            assert self.cache.pool.num_used == 0
            assert len(self.cache.conditioning) == 0


Sessions.TestCase.settings = settings(
    max_examples=120, stateful_step_count=40, deadline=None, derandomize=True, database=None
)
TestAnyOrderOfCalls = Sessions.TestCase
