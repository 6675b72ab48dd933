"""Pieces of host memory for parked blocks: whatever is copied out and back is what it was, and little is wasted."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from worldkv.kv import host  # noqa: E402
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

    def _piece(self) -> torch.Tensor:
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


def test_pinning_ahead_holds_all_pieces_at_once_so_that_each_is_made() -> None:
    alive: list[int] = []

    class Counted(Pageable):
        def _piece(self) -> torch.Tensor:
            alive.append(0)
            return super()._piece()

    pieces = Counted((4, 2, 4), torch.float32, num_blocks=3)
    pieces.pin_ahead(10)
    assert len(alive) == 4
    HostPieces((4, 2, 4), torch.float32, pinned=False).pin_ahead(10**9)  # nothing is made where nothing is pinned
    assert host._rounded_up(5) == 8
