"""The tensors: where tokens land, what a copy copies, what reading back gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy_storage import make_spec

torch = pytest.importorskip("torch")

from worldkv.kv.pages import PageFormat  # noqa: E402
from worldkv.kv.spec import KVSpec  # noqa: E402
from worldkv.kv.storage import KVStorage  # noqa: E402
from worldkv.kv.window import Window  # noqa: E402

LAYERS = range(2)
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int16, torch.float8_e4m3fn)


@pytest.fixture
def storage() -> KVStorage:
    storage = KVStorage(make_spec(), num_blocks=6, block_size=4)
    generator = torch.Generator().manual_seed(0)
    for tensor in (*storage.k, *storage.v):
        tensor.normal_(generator=generator)
    return storage


def test_k_and_v_of_each_layer_are_allocations_of_their_own_and_begin_as_zeros() -> None:
    storage = KVStorage(make_spec(), num_blocks=3, block_size=8, dtype=torch.bfloat16)
    tensors = [*storage.k, *storage.v]
    assert storage.num_layers == 2
    assert {tuple(t.shape) for t in tensors} == {(3, 8, 1, 1)}
    assert {t.dtype for t in tensors} == {torch.bfloat16}
    assert len({t.untyped_storage().data_ptr() for t in tensors}) == 4
    assert all(t.untyped_storage().nbytes() == 3 * 8 * 2 for t in tensors)
    assert all(not t.any() for t in tensors)
    assert storage.num_bytes == 4 * 3 * 8 * 2


@pytest.mark.parametrize("block_size", [0, -8, 3, 24, 100])
def test_a_block_size_that_is_no_power_of_two_is_refused(block_size: int) -> None:
    with pytest.raises(ValueError, match=f"block_size: expected a power of two, got {block_size}"):
        KVStorage(make_spec(), num_blocks=1, block_size=block_size)


def test_slots_are_views_in_physical_order(storage: KVStorage) -> None:
    k, v = storage.slots(1)
    assert k.shape == v.shape == (24, 1, 1)
    k[9] = 7.0
    assert storage.k[1][2, 1].item() == 7.0
    assert storage.k[0][2, 1].item() != 7.0


def test_copying_blocks_moves_every_layer_bit_for_bit_and_nothing_else(storage: KVStorage) -> None:
    before = [t.clone() for t in (*storage.k, *storage.v)]
    storage.copy_blocks([(0, 3), (1, 5)])
    for tensor, old in zip((*storage.k, *storage.v), before, strict=True):
        assert torch.equal(tensor, old[[0, 1, 2, 0, 4, 1]])


def test_copying_nothing_changes_nothing(storage: KVStorage) -> None:
    before = storage.k[0].clone()
    storage.copy_blocks([])
    assert torch.equal(storage.k[0], before)


def test_written_blocks_read_back_and_the_rest_of_the_last_one_is_zeroed(storage: KVStorage) -> None:
    k, v = torch.randn(6, 1, 1), torch.randn(6, 1, 1)
    before = storage.k[0].clone()
    storage.write_blocks(0, [4, 1], k, v)
    got_k, got_v = storage.gather(0, np.asarray([4, 1], dtype=np.int32), np.arange(6))
    assert torch.equal(got_k, k)
    assert torch.equal(got_v, v)
    assert not storage.k[0][1, 2:].any()
    assert torch.equal(storage.k[0][[0, 2, 3, 5]], before[[0, 2, 3, 5]])


@pytest.mark.parametrize("num_tokens", [4, 9])
def test_tokens_that_do_not_fill_the_blocks_are_refused(storage: KVStorage, num_tokens: int) -> None:
    tokens = torch.zeros(num_tokens, 1, 1)
    with pytest.raises(ValueError, match=f"{num_tokens} tokens do not fill 2 blocks of 4 slots"):
        storage.write_blocks(0, [0, 1], tokens, tokens)


def test_gather_follows_the_block_table_and_gives_copies(storage: KVStorage) -> None:
    logical = np.asarray([5, 0, 7, 11])
    k, _ = storage.gather(1, np.asarray([2, 5, 0], dtype=np.int32), logical)
    assert torch.equal(k, torch.stack([storage.k[1][b, o] for b, o in ((5, 1), (2, 0), (5, 3), (0, 3))]))
    k.zero_()
    assert storage.k[1][5, 1].item() != 0.0
    assert storage.gather(1, np.asarray([], dtype=np.int32), np.asarray([], dtype=np.int64))[0].shape == (0, 1, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_are_written_to_their_slots_in_the_cache_s_numbers_and_nowhere_else(dtype: Any) -> None:
    storage = KVStorage(make_spec(), num_blocks=6, block_size=4, dtype=dtype)
    slots, k, v = torch.tensor([9, 0, 23]), torch.randn(3, 1, 1), torch.randn(3, 1, 1)
    storage.write(1, slots, k, v)
    for pool, tokens in zip(storage.slots(1), (k, v), strict=True):
        assert torch.equal(pool[slots], tokens.to(dtype))
        assert pool.count_nonzero() == 3
    assert not any(pool.any() for pool in storage.slots(0))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_format_says_what_a_block_costs(dtype: Any) -> None:
    spec = make_spec()
    storage = KVStorage(spec, num_blocks=6, block_size=4, dtype=dtype)
    assert storage.bytes_per_block == storage.format.bytes_per_block(spec, 4) == storage.num_bytes // 6
    trial = storage.like(num_layers=1, num_blocks=3)
    assert trial.bytes_per_block == trial.num_bytes // 3


def test_scales_cost_their_bytes_for_each_head_of_k_and_of_v() -> None:
    spec = KVSpec(40, 40, 128, Window(880, 9), ("conditional",))
    plain, scaled = PageFormat(torch.float8_e4m3fn), PageFormat(torch.float8_e4m3fn, scales=torch.float32)
    assert plain.bytes_per_block(spec, 128) == 128 * 2 * 40 * 40 * 128
    assert scaled.bytes_per_block(spec, 128) == 128 * 2 * 40 * 40 * (128 + 4)
    assert str(scaled) == "torch.float8_e4m3fn with scales in torch.float32"


def test_only_plain_half_precision_is_what_gpu_kernels_read() -> None:
    assert [dtype for dtype in DTYPES if PageFormat(dtype).is_half_precision] == [torch.bfloat16, torch.float16]
    assert not PageFormat(torch.bfloat16, scales=torch.float32).is_half_precision
