"""Staged writes: what is taken, copied, replaced and given back."""

from __future__ import annotations

import pytest

from worldkv.kv.block_pool import BlockPool
from worldkv.kv.block_table import BlockTable, StagedWrite, blocks_for


@pytest.fixture
def pool() -> BlockPool:
    return BlockPool(12)


def table_of(pool: BlockPool, num_slots: int, block_size: int = 4) -> BlockTable:
    """A table with `num_slots` committed slots."""
    table = BlockTable(pool, block_size)
    table.commit(stage(table, [range(num_slots)], 0, num_slots), num_slots)
    return table


def stage(table: BlockTable, writes: list[range], num_committed: int, num_visible: int) -> StagedWrite:
    staged = table.stage(writes, num_committed, num_visible)
    assert staged is not None
    return staged


@pytest.mark.parametrize(("num_slots", "expected"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2)])
def test_blocks_for_rounds_up(num_slots: int, expected: int) -> None:
    assert blocks_for(num_slots, 4) == expected


def test_a_staged_write_leaves_the_table_as_it_was_until_it_is_committed(pool: BlockPool) -> None:
    table = table_of(pool, 6)
    before = list(table.blocks)
    staged = stage(table, [range(6, 12)], 6, 12)
    assert table.blocks == before
    assert staged.blocks[:2] == before
    table.commit(staged, 12)
    assert table.blocks == staged.blocks
    assert pool.num_used == 3


def test_an_aborted_write_gives_every_block_back(pool: BlockPool) -> None:
    table = table_of(pool, 6)
    num_free, before = pool.num_free, list(table.blocks)
    table.abort(stage(table, [range(6, 20)], 6, 20))
    assert (pool.num_free, table.blocks) == (num_free, before)
    pool.check()


def test_the_unused_end_of_the_last_block_is_written_in_place(pool: BlockPool) -> None:
    table = table_of(pool, 6)
    staged = stage(table, [range(6, 8)], 6, 8)
    assert staged.blocks == table.blocks
    assert (staged.fresh, staged.copies) == ([], [])


def test_committed_slots_are_never_written_in_place(pool: BlockPool) -> None:
    table = table_of(pool, 8)
    staged = stage(table, [range(2, 4)], 8, 8)
    assert staged.replaced == table.blocks[:1]
    assert staged.copies == [(table.blocks[0], staged.fresh[0])]
    assert staged.blocks[1] == table.blocks[1]


def test_a_block_that_is_overwritten_whole_is_not_copied(pool: BlockPool) -> None:
    table = table_of(pool, 8)
    staged = stage(table, [range(4, 8)], 8, 8)
    assert (staged.replaced, staged.copies) == (table.blocks[1:], [])


def test_two_runs_that_together_overwrite_a_block_need_no_copy(pool: BlockPool) -> None:
    table = table_of(pool, 8)
    assert stage(table, [range(6, 8), range(4, 6)], 8, 8).copies == []


def test_a_shared_block_is_copied_before_the_first_write_and_only_then(pool: BlockPool) -> None:
    table = table_of(pool, 6)
    num_free = pool.num_free
    fork = table.fork()
    assert pool.num_free == num_free, "a fork moved bytes"
    staged = stage(fork, [range(6, 8)], 6, 8)
    assert staged.copies == [(table.blocks[1], staged.fresh[0])]
    fork.commit(staged, 8)
    assert fork.blocks[0] == table.blocks[0]
    assert fork.blocks[1] != table.blocks[1]
    again = stage(fork, [range(8, 10)], 8, 10)
    assert (again.replaced, again.copies) == ([], [])


def test_the_last_owner_of_a_block_writes_in_place_again(pool: BlockPool) -> None:
    table = table_of(pool, 6)
    table.fork().release()
    assert stage(table, [range(6, 8)], 6, 8).fresh == []


def test_a_write_that_the_pool_has_no_room_for_takes_nothing(pool: BlockPool) -> None:
    table = table_of(pool, 8)
    fork = table.fork()
    taken = pool.allocate(pool.num_free - 1)
    before = list(table.blocks)
    assert table.stage([range(8)], 8, 8) is None
    assert (pool.num_free, table.blocks) == (1, before)
    pool.release(taken or [])
    fork.release()
    table.release()
    assert pool.num_used == 0
    pool.check()


def test_a_commit_gives_back_what_lies_past_the_history(pool: BlockPool) -> None:
    table = BlockTable(pool, 4)
    table.commit(stage(table, [range(6), range(6, 11)], 0, 11), 6)
    assert (len(table.blocks), pool.num_used) == (2, 2)


def test_a_write_that_leaves_a_hole_is_our_bug(pool: BlockPool) -> None:
    with pytest.raises(AssertionError, match="leaves a hole"):
        BlockTable(pool, 4).stage([range(4, 8)], 0, 8)


def test_release_is_safe_twice(pool: BlockPool) -> None:
    table = table_of(pool, 6)
    table.release()
    table.release()
    assert pool.num_used == 0
