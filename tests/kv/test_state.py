"""A session's K/V: drafts, commits, failures, resets, snapshots and forks."""

from __future__ import annotations

import numpy as np
import pytest
from numpy_storage import (
    Tokens,
    commit,
    forward,
    free_blocks,
    history,
    make_cache,
    make_spec,
    poison_free_blocks,
    seen,
    write,
)

from worldkv.errors import OutOfBlocks
from worldkv.kv.block_table import blocks_for
from worldkv.kv.cache import KVCache
from worldkv.kv.state import KVState

CHUNK = 6
BRANCHES = ("conditional", "unconditional")


@pytest.fixture
def cache() -> KVCache:
    return make_cache(make_spec(CHUNK, window=3))


def chunks(first: int, stop: int, size: int = CHUNK) -> Tokens:
    """The tokens of chunks [first, stop), numbered through."""
    return np.arange(first * size, stop * size, dtype=np.float64)


def bytes_of(cache: KVCache, state: KVState) -> list[bytes]:
    """The committed K and V of every branch and layer, bit for bit."""
    layers = range(cache.storage.num_layers)
    return [t.tobytes() for name in state.branches for layer in layers for t in state.layer_kv(name, layer)]


# forwards


def test_building_a_context_allocates_nothing(cache: KVCache) -> None:
    state = cache.create_state()
    for branch in BRANCHES:
        context = state.prepare(branch, 2 * CHUNK, commit=True)
        assert (context.num_chunks, context.num_tokens, context.is_active) == (2, 2 * CHUNK, False)
    assert cache.pool.num_used == 0
    state.prepare("conditional", CHUNK, commit=True).activate()
    assert cache.pool.num_used == 1, "the branch that is not executed was charged"


def test_activating_twice_gives_the_same_row_and_takes_blocks_once(cache: KVCache) -> None:
    context = cache.create_state().prepare("conditional", 3 * CHUNK, commit=True)
    row = context.activate()
    assert context.activate() is row
    assert cache.pool.num_used == 2


@pytest.mark.parametrize("seq_len", [0, -6, 1, 5, 7, 13])
def test_an_unaligned_length_raises_and_says_what_is_expected(cache: KVCache, seq_len: int) -> None:
    with pytest.raises(ValueError, match=f"'conditional': seq_len .*multiple of chunk_size=6, got {seq_len}$"):
        cache.create_state().prepare("conditional", seq_len, commit=False)


def test_an_unaligned_length_leaves_the_previous_context_in_place(cache: KVCache) -> None:
    state = cache.create_state()
    context = state.prepare("conditional", CHUNK, commit=False)
    with pytest.raises(ValueError, match="chunk_size=6, got 7"):
        state.prepare("conditional", 7, commit=False)
    assert state.branches["conditional"].context is context
    assert not context.closed


def test_drafts_may_repeat_and_change_nothing(cache: KVCache) -> None:
    state = cache.create_state()
    commit(cache, state, "conditional", chunks(0, 2))
    before, num_free = bytes_of(cache, state), cache.pool.num_free
    for step in range(4):
        tokens = np.concatenate([chunks(10 + step, 11 + step), [900.0, 901.0]])
        context = forward(cache, state, "conditional", tokens, commit=False, num_draft_tokens=2)
        expected = np.sort(np.concatenate([chunks(0, 2), tokens]))
        np.testing.assert_array_equal(seen(cache, context.activate(2)), expected)
        assert bytes_of(cache, state) == before
    state.commit("conditional")
    assert state.branches["conditional"].num_chunks == 2, "a draft became history"
    state.abandon()
    assert (bytes_of(cache, state), cache.pool.num_free) == (before, num_free)


def test_one_draft_context_may_be_written_again_and_again(cache: KVCache) -> None:
    state = cache.create_state()
    commit(cache, state, "conditional", chunks(0, 1))
    row = state.prepare("conditional", CHUNK, commit=False).activate()
    for step in range(3):
        write(cache, row, chunks(5 + step, 6 + step))
        np.testing.assert_array_equal(seen(cache, row), np.concatenate([chunks(0, 1), chunks(5 + step, 6 + step)]))


def test_a_commit_advances_its_branch_by_all_chunks_and_the_state_counts_the_longest_branch(cache: KVCache) -> None:
    state = cache.create_state()
    assert state.num_chunks == 0
    commit(cache, state, "conditional", chunks(0, 3))
    commit(cache, state, "unconditional", chunks(0, 1))
    assert state.branches["conditional"].num_tokens == 3 * CHUNK
    assert [state.branches[name].num_chunks for name in BRANCHES] == [3, 1]
    assert state.num_chunks == 3


def test_a_commit_writes_all_layers_first_and_the_count_last(cache: KVCache) -> None:
    state = cache.create_state()
    forward(cache, state, "conditional", chunks(0, 2), commit=True)
    assert state.branches["conditional"].num_chunks == 0
    assert len(history(cache, state, "conditional")) == 0
    state.commit("conditional")
    np.testing.assert_array_equal(history(cache, state, "conditional"), chunks(0, 2))


def test_commit_is_a_no_op_when_nothing_is_pending(cache: KVCache) -> None:
    state = cache.create_state()
    state.commit("conditional")
    state.prepare("conditional", CHUNK, commit=True)
    state.commit("conditional")
    assert state.branches["conditional"].num_chunks == 0, "a forward that never ran became history"
    commit(cache, state, "conditional", chunks(0, 1))
    state.commit("conditional")
    assert state.branches["conditional"].num_chunks == 1, "one forward became history twice"


def test_replacing_an_allocated_uncommitted_commit_raises_and_loses_nothing(cache: KVCache) -> None:
    state = cache.create_state()
    forward(cache, state, "conditional", chunks(0, 1), commit=True)
    for commits in (True, False):
        with pytest.raises(RuntimeError, match=r"'conditional'.*not committed; commit or abandon it"):
            state.prepare("conditional", CHUNK, commit=commits)
    state.prepare("unconditional", CHUNK, commit=True)
    state.commit("conditional")
    np.testing.assert_array_equal(history(cache, state, "conditional"), chunks(0, 1))


def test_a_commit_that_took_no_blocks_may_be_replaced(cache: KVCache) -> None:
    state = cache.create_state()
    replaced = state.prepare("conditional", CHUNK, commit=True)
    state.prepare("conditional", CHUNK, commit=False)
    with pytest.raises(AssertionError, match="a closed forward context cannot run again"):
        replaced.activate()


@pytest.mark.parametrize("commits", [True, False])
@pytest.mark.parametrize("num_committed", [0, 1, 3, 4])
def test_an_abandoned_forward_gives_every_block_back_and_leaves_the_committed_kv_bit_identical(
    cache: KVCache, num_committed: int, commits: bool
) -> None:
    state = cache.create_state()
    for i in range(num_committed):
        commit(cache, state, "conditional", chunks(i, i + 1))
    before, num_free = bytes_of(cache, state), cache.pool.num_free
    for _ in range(2):
        forward(cache, state, "conditional", chunks(20, 22), commit=commits)
        forward(cache, state, "unconditional", chunks(30, 31), commit=commits)
        state.abandon()
        poison_free_blocks(cache)
        assert (bytes_of(cache, state), cache.pool.num_free) == (before, num_free)
    cache.pool.check()
    state.abandon()


def test_a_forward_that_fails_half_way_through_the_layers_can_be_retried_with_the_same_result(cache: KVCache) -> None:
    state = cache.create_state()
    commit(cache, state, "conditional", chunks(0, 3))
    row = state.prepare("conditional", CHUNK, commit=True).activate()
    cache.storage.slots(0)[0][row.write_slots] = np.nan  # layer 0 is written, layer 1 fails
    state.abandon()
    commit(cache, state, "conditional", chunks(3, 4))
    np.testing.assert_array_equal(history(cache, state, "conditional"), chunks(1, 4))


def test_a_copy_that_fails_gives_every_block_back(cache: KVCache, monkeypatch: pytest.MonkeyPatch) -> None:
    state = cache.create_state()
    commit(cache, state, "conditional", chunks(0, 3))
    num_free = cache.pool.num_free

    def fail(copies: list[tuple[int, int]]) -> None:
        assert copies
        raise OSError("device lost")

    with monkeypatch.context() as patch:
        patch.setattr(cache.storage, "copy_blocks", fail)
        with pytest.raises(OSError, match="device lost"):
            forward(cache, state, "conditional", chunks(3, 4), commit=True)
    assert cache.pool.num_free == num_free
    commit(cache, state, "conditional", chunks(3, 4))
    np.testing.assert_array_equal(history(cache, state, "conditional"), chunks(1, 4))


def test_running_out_of_blocks_leaves_everything_unchanged_and_says_what_is_free() -> None:
    cache = make_cache(make_spec(CHUNK, window=8), num_blocks=2, block_size=8)
    state = cache.create_state()
    commit(cache, state, "conditional", chunks(0, 2))
    before = bytes_of(cache, state)
    context = state.prepare("conditional", CHUNK, commit=True)
    with pytest.raises(OutOfBlocks, match=r"'conditional': no room for 6 tokens; 0 of 2 blocks are free"):
        context.activate()
    assert (bytes_of(cache, state), context.is_active) == (before, False)
    state.commit("conditional")
    assert bytes_of(cache, state) == before
    cache.pool.check()


def test_a_reset_window_that_is_full_refuses_the_forward_and_takes_nothing() -> None:
    cache = make_cache(make_spec(CHUNK, window=2, policy="reset"))
    state = cache.create_state()
    commit(cache, state, "conditional", chunks(0, 2))
    num_free = cache.pool.num_free
    with pytest.raises(ValueError, match="expects the session to restart"):
        state.prepare("conditional", CHUNK, commit=True).activate()
    assert cache.pool.num_free == num_free


@pytest.mark.parametrize("sink", [0, 1])
@pytest.mark.parametrize("chunk_size", [6, 20, 24, 50, 220, 880, 1560])
@pytest.mark.parametrize("block_size", [16, 64, 128])
def test_any_frame_size_fills_and_slides_through_blocks_of_any_size(
    block_size: int, chunk_size: int, sink: int
) -> None:
    spec = make_spec(chunk_size, window=3, sink=sink, num_layers=1)
    full = spec.window.max_chunks * chunk_size
    cache = make_cache(spec, num_blocks=3 * blocks_for(full + 5, block_size), block_size=block_size)
    state = cache.create_state()
    came = [chunks(i, i + 1, chunk_size) for i in range(9)]
    extra = np.arange(1.0, 6.0) * 1e6
    for i, tokens in enumerate(came):
        visible = [*came[:sink], *came[sink : i + 1][-3:]] if i >= sink else came[: i + 1]
        draft = np.concatenate([tokens, extra])
        context = forward(cache, state, "conditional", draft, commit=False, num_draft_tokens=5)
        np.testing.assert_array_equal(seen(cache, context.activate(5)), np.sort(np.concatenate([*visible, extra])))
        commit(cache, state, "conditional", tokens)
        poison_free_blocks(cache)
        np.testing.assert_array_equal(history(cache, state, "conditional"), np.concatenate(visible))
        assert cache.pool.num_used == blocks_for(len(visible) * chunk_size, block_size), "the table grew"
    cache.pool.check()


# branches and sessions


def test_two_branches_and_two_sessions_never_share_a_writable_slot(cache: KVCache) -> None:
    first, second = cache.create_state(), cache.create_state()
    commit(cache, first, "conditional", chunks(0, 2))
    commit(cache, first, "unconditional", chunks(2, 4))
    frozen = first.snapshot()
    second.restore(frozen)
    rows = [
        state.prepare(branch, CHUNK, commit=commits).activate()
        for state, commits in ((first, True), (second, False))
        for branch in BRANCHES
    ]
    written = np.concatenate([row.write_slots for row in rows if row.write_slots is not None])
    assert len(np.unique(written)) == len(rows) * CHUNK
    history_blocks = [b for branch in frozen.branches.values() for b in branch.table.blocks]
    assert not set(written // cache.storage.block_size) & set(history_blocks), "a shared block is written in place"


def test_branches_move_independently(cache: KVCache) -> None:
    state = cache.create_state()
    commit(cache, state, "conditional", chunks(0, 2))
    commit(cache, state, "unconditional", chunks(5, 6))
    np.testing.assert_array_equal(history(cache, state, "conditional"), chunks(0, 2))
    np.testing.assert_array_equal(history(cache, state, "unconditional"), chunks(5, 6))


def test_a_state_over_one_branch_pays_for_one(cache: KVCache) -> None:
    state = cache.create_state(("conditional",))
    assert list(state.branches) == ["conditional"]
    commit(cache, state, "conditional", chunks(0, 1))
    assert (state.num_blocks, cache.pool.num_used) == (1, 1)


def test_an_empty_history_reads_as_no_tokens(cache: KVCache) -> None:
    assert len(history(cache, cache.create_state(), "conditional")) == 0


# life cycle


def test_reset_drops_history_and_pending_forwards_and_keeps_the_object(cache: KVCache) -> None:
    state = cache.create_state()
    commit(cache, state, "conditional", chunks(0, 3))
    forward(cache, state, "conditional", chunks(3, 4), commit=True)
    state.reset()
    assert cache.pool.num_used == 0
    assert state.branches["conditional"].num_chunks == 0
    commit(cache, state, "conditional", chunks(7, 8))
    np.testing.assert_array_equal(history(cache, state, "conditional"), chunks(7, 8))


def test_close_is_safe_twice_and_gives_back_what_a_forward_holds(cache: KVCache) -> None:
    state, other = cache.create_state(), cache.create_state()
    commit(cache, other, "conditional", chunks(0, 1))
    commit(cache, state, "conditional", chunks(0, 3))
    forward(cache, state, "unconditional", chunks(0, 1), commit=False)
    state.close()
    state.close()
    assert cache.pool.num_used == 1
    cache.pool.check()
    np.testing.assert_array_equal(history(cache, other, "conditional"), chunks(0, 1))


# snapshots


def test_a_snapshot_moves_no_bytes_and_takes_no_blocks(cache: KVCache) -> None:
    state = cache.create_state()
    commit(cache, state, "conditional", chunks(0, 3))
    num_free = cache.pool.num_free
    frozen = state.snapshot()
    cache.create_state().restore(frozen)
    assert cache.pool.num_free == num_free
    assert cache.storage.num_copied == 0  # type: ignore[attr-defined]


def test_a_snapshot_outlives_what_the_session_does_next_and_is_restored_bit_for_bit(cache: KVCache) -> None:
    state = cache.create_state()
    for i in range(4):
        commit(cache, state, "conditional", chunks(i, i + 1))
    before, frozen = bytes_of(cache, state), state.snapshot()
    for _ in range(2):
        for i in range(4, 9):
            commit(cache, state, "conditional", chunks(i, i + 1))
            poison_free_blocks(cache)
        state.restore(frozen)
        assert bytes_of(cache, state) == before
        assert state.branches["conditional"].num_chunks == 4
    state.close()
    assert frozen.num_blocks == cache.pool.num_used == 2
    state.restore(frozen)
    assert bytes_of(cache, state) == before


def test_releasing_a_snapshot_gives_its_blocks_back_and_is_safe_twice(cache: KVCache) -> None:
    state = cache.create_state()
    commit(cache, state, "conditional", chunks(0, 3))
    frozen = state.snapshot()
    state.close()
    frozen.release()
    frozen.release()
    assert frozen.is_released
    assert free_blocks(cache) == list(range(cache.pool.num_blocks))


def test_the_first_write_to_a_shared_block_copies_it_and_only_the_first(cache: KVCache) -> None:
    state, fork = cache.create_state(), cache.create_state()
    commit(cache, state, "conditional", chunks(0, 1))
    frozen = state.snapshot()
    fork.restore(frozen)
    frozen.release()
    commit(cache, fork, "conditional", chunks(8, 9))
    assert cache.storage.num_copied == 1  # type: ignore[attr-defined]
    commit(cache, state, "conditional", chunks(1, 2))
    assert cache.storage.num_copied == 1, "the last owner of a block copied it"  # type: ignore[attr-defined]
    np.testing.assert_array_equal(history(cache, state, "conditional"), chunks(0, 2))
    np.testing.assert_array_equal(history(cache, fork, "conditional"), np.concatenate([chunks(0, 1), chunks(8, 9)]))


def test_a_snapshot_during_a_forward_raises(cache: KVCache) -> None:
    state = cache.create_state()
    forward(cache, state, "unconditional", chunks(0, 1), commit=False)
    with pytest.raises(RuntimeError, match="'unconditional': a snapshot is taken at a commit"):
        state.snapshot()


def test_restore_abandons_the_forward_under_way(cache: KVCache) -> None:
    state = cache.create_state()
    commit(cache, state, "conditional", chunks(0, 1))
    frozen = state.snapshot()
    forward(cache, state, "conditional", chunks(1, 2), commit=True)
    state.restore(frozen)
    state.commit("conditional")
    np.testing.assert_array_equal(history(cache, state, "conditional"), chunks(0, 1))
    assert cache.pool.num_used == 1


def test_a_snapshot_that_is_released_of_another_cache_or_of_other_branches_is_refused(cache: KVCache) -> None:
    state = cache.create_state()
    commit(cache, state, "conditional", chunks(0, 1))
    before, frozen = bytes_of(cache, state), state.snapshot()
    with pytest.raises(ValueError, match=r"snapshot has branches .*this state \['conditional'\]"):
        cache.create_state(("conditional",)).restore(frozen)
    with pytest.raises(ValueError, match="another cache"):
        make_cache(cache.spec).create_state().restore(frozen)
    frozen.release()
    with pytest.raises(ValueError, match="released"):
        state.restore(frozen)
    assert bytes_of(cache, state) == before


# rewriting


@pytest.mark.parametrize("num_chunks", [2, 4, 5, 9])
@pytest.mark.parametrize("block_size", [4, 16, 64])
def test_a_rewrite_replaces_the_newest_chunks_and_leaves_an_older_sink_alone(num_chunks: int, block_size: int) -> None:
    cache = make_cache(make_spec(CHUNK, window=3, sink=1), block_size=block_size)
    state = cache.create_state()
    for chunk in range(num_chunks):
        commit(cache, state, "conditional", chunks(chunk, chunk + 1))
    before, frozen, free = history(cache, state, "conditional"), state.snapshot(), cache.pool.num_free
    num_rewritten = min(num_chunks, 4)
    anew = 1000 + chunks(num_chunks - num_rewritten, num_chunks)
    context = state.prepare_rewrite("conditional", len(anew))
    write(cache, context.activate(), anew)
    expected = anew if num_chunks <= 4 else np.concatenate([before[:CHUNK], anew[CHUNK:]])
    assert np.array_equal(seen(cache, context.activate()), np.sort(expected)), "what the forward itself attends to"
    state.abandon()
    assert cache.pool.num_free == free, "an abandoned rewrite keeps blocks"
    assert np.array_equal(history(cache, state, "conditional"), before), "an abandoned rewrite has changed history"

    context = state.prepare_rewrite("conditional", len(anew))
    write(cache, context.activate(), anew)
    state.commit("conditional")
    assert np.array_equal(history(cache, state, "conditional"), expected)
    assert state.num_chunks == num_chunks
    state.restore(frozen)
    assert np.array_equal(history(cache, state, "conditional"), before), "a snapshot sees the rewrite"
    frozen.release()
    state.close()
    cache.pool.check()
    assert cache.pool.num_used == 0


def test_more_than_there_is_cannot_be_rewritten(cache: KVCache) -> None:
    state = cache.create_state()
    commit(cache, state, "conditional", chunks(0, 1))
    with pytest.raises(ValueError, match="2 chunks cannot be rewritten: expected 1 to 1"):
        state.prepare_rewrite("conditional", 2 * CHUNK)
