"""Pieces of host memory for parked blocks: whatever is copied out and back is what it was, and little is wasted."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from worldkv.kv.host import HostPieces  # noqa: E402
from worldkv.kv.spec import KVSpec  # noqa: E402
from worldkv.kv.storage import KVStorage  # noqa: E402
from worldkv.kv.window import Window  # noqa: E402


class Pageable(HostPieces):
    """Pieces as a GPU's, of memory that is not pinned."""

    def __init__(self, *arguments: Any, num_blocks: int) -> None:
        super().__init__(*arguments, pinned=True)
        self.num_blocks = num_blocks
        self.num_made = 0

    def _new_piece(self) -> torch.Tensor:
        self.num_made += 1
        return torch.full((self.num_blocks, *self._block_shape), torch.nan, dtype=self._dtype)


@given(st.lists(st.integers(0, 39), min_size=1, max_size=40, unique=True), st.integers(1, 16), st.data())
def test_blocks_come_back_into_whatever_blocks_as_they_were(blocks: list[int], piece: int, data: st.DataObject) -> None:
    storage = KVStorage(KVSpec(2, 2, 4, Window(8, 4), ("a",)), 40, 4)
    for pool in (*storage.k, *storage.v):
        pool.normal_()
    storage._host = Pageable((4, 2, 4), torch.float32, num_blocks=piece)
    expected = [(k[blocks].clone(), v[blocks].clone()) for k, v in zip(storage.k, storage.v, strict=True)]
    parked = storage.read_blocks(blocks)
    assert parked.num_blocks == len(blocks)
    assert parked.num_bytes == storage.host_bytes(len(blocks))
    assert parked.num_bytes >= sum(k.nbytes + v.nbytes for k, v in expected)
    elsewhere = data.draw(st.permutations(range(40)))[: len(blocks)]
    others = [block for block in range(40) if block not in elsewhere]
    before = [pool[others].clone() for pool in (*storage.k, *storage.v)]
    storage.load_blocks(elsewhere, parked)
    for (k, v), own_k, own_v in zip(expected, storage.k, storage.v, strict=True):
        assert torch.equal(own_k[elsewhere], k)
        assert torch.equal(own_v[elsewhere], v)
    assert all(torch.equal(a, b) for a, b in zip(before, [p[others] for p in (*storage.k, *storage.v)], strict=True))


@pytest.mark.parametrize(("heads", "most_waste"), [(40, 1.07), (24, 1.07), (12, 1.07), (16, 1.0)])
def test_pieces_of_released_sizes_waste_little_of_what_is_pinned(heads: int, most_waste: float) -> None:
    pieces = HostPieces((128, heads, 128), torch.bfloat16, pinned=True)
    used = pieces.num_blocks * 128 * heads * 128 * 2
    assert used >= 2**20, "a copy is long enough to be worth its call"
    assert pieces.bytes_for(pieces.num_blocks) <= most_waste * used
    assert pieces.bytes_for(pieces.num_blocks + 1) == 2 * pieces.bytes_for(1)


def test_what_was_pinned_is_used_again_by_whoever_parks_next() -> None:
    storage = KVStorage(KVSpec(2, 2, 4, Window(8, 4), ("a",)), 40, 4)
    storage._host = pieces = Pageable((4, 2, 4), torch.float32, num_blocks=3)
    storage.pin_ahead(7)  # of two layers, K and V
    assert pieces.num_made == -(-7 * 4 // 3)
    first = storage.read_blocks(range(6))
    assert pieces.num_made == 10, "taken from what was pinned ahead"
    second = storage.read_blocks(range(6))
    assert pieces.num_made == 16
    del first, second
    again = [storage.read_blocks(range(6)), storage.read_blocks(range(3))]
    assert pieces.num_made == 16
    assert len({piece.data_ptr() for host in again for layer in host.layers for p in layer for piece in p}) == 12


def test_a_copy_takes_pieces_while_others_are_being_pinned() -> None:
    pieces = Pageable((4, 2, 4), torch.float32, num_blocks=1)
    taken: list[torch.Tensor] = []
    new_piece = pieces._new_piece

    def parked_meanwhile() -> torch.Tensor:
        if len(pieces._free) > 0 and len(taken) < 5:
            taken.append(pieces.copy(torch.zeros(1, 4, 2, 4)))
        return new_piece()

    pieces._new_piece = parked_meanwhile  # type: ignore[method-assign]
    pieces.pin_ahead(4)
    assert len(pieces._free) == 4
    assert pieces.num_made == 4 + len(taken), "none is pinned twice"


def test_nothing_is_made_where_nothing_is_pinned() -> None:
    HostPieces((4, 2, 4), torch.float32, pinned=False).pin_ahead(10**9)
