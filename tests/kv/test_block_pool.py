"""Block ids and their books."""

from __future__ import annotations

import pytest

from worldkv.kv.block_pool import BlockPool


def test_a_new_pool_is_all_free_and_hands_out_low_ids_first() -> None:
    pool = BlockPool(4)
    assert (pool.num_free, pool.num_used) == (4, 0)
    assert pool.allocate(3) == [0, 1, 2]
    assert (pool.num_free, pool.num_used) == (1, 3)
    pool.check()


def test_a_pool_without_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="num_blocks: expected at least 1, got 0"):
        BlockPool(0)


def test_asking_for_more_than_is_free_gives_none_and_takes_nothing() -> None:
    pool = BlockPool(3)
    pool.allocate(1)
    assert pool.allocate(3) is None
    assert pool.num_free == 2
    pool.check()


def test_asking_for_no_blocks_succeeds_even_when_none_is_free() -> None:
    pool = BlockPool(1)
    pool.allocate(1)
    assert pool.allocate(0) == []


def test_a_shared_block_is_free_only_after_its_last_reference_is_gone() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    assert blocks is not None
    pool.share(blocks)
    assert pool.num_references(blocks[0]) == 2
    pool.release(blocks)
    assert pool.num_free == 1
    pool.release(blocks)
    assert pool.num_free == 2
    pool.check()


def test_a_released_block_is_handed_out_again() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(2)
    assert blocks is not None
    pool.release(blocks[:1])
    assert pool.allocate(1) == blocks[:1]


def test_releasing_a_free_block_is_our_bug() -> None:
    pool = BlockPool(2)
    with pytest.raises(AssertionError, match="block 1 is released twice"):
        pool.release([1])


def test_sharing_a_free_block_is_our_bug() -> None:
    pool = BlockPool(2)
    with pytest.raises(AssertionError, match="block 0 is free and cannot be shared"):
        pool.share([0])


def test_check_catches_a_block_that_is_both_free_and_referenced() -> None:
    pool = BlockPool(2)
    pool._num_references[0] = 1
    with pytest.raises(AssertionError, match="both free and referenced"):
        pool.check()


def test_check_catches_a_block_that_stands_twice_in_the_free_list() -> None:
    pool = BlockPool(2)
    pool._free.append(1)
    with pytest.raises(AssertionError, match="twice in the free list"):
        pool.check()


def test_check_catches_a_block_that_is_lost() -> None:
    pool = BlockPool(2)
    pool._free.pop()
    with pytest.raises(AssertionError, match=r"1 free \+ 0 referenced != 2 blocks"):
        pool.check()
