"""A storage without torch, and the few verbs with which the tests of this folder drive a cache over it.

Tokens are plain numbers, so that what a forward sees can be read off: token t has K = t + 0.5 * layer, V = -K.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from worldkv.kv.block_table import blocks_for
from worldkv.kv.branch import ForwardContext
from worldkv.kv.cache import KVCache
from worldkv.kv.row import AttentionRow
from worldkv.kv.spec import KVSpec
from worldkv.kv.state import KVState
from worldkv.kv.window import Window

Tokens = npt.NDArray[np.float64]


class NumpyStorage:
    """What KVStorage is to the cache, in numpy; counts the blocks it is told to copy."""

    def __init__(self, spec: KVSpec, num_blocks: int, block_size: int) -> None:
        self.num_blocks, self.block_size, self.num_layers = num_blocks, block_size, spec.num_layers
        shape = (num_blocks, block_size, spec.num_heads, spec.head_dim)
        self.k = [np.zeros(shape) for _ in range(spec.num_layers)]
        self.v = [np.zeros(shape) for _ in range(spec.num_layers)]
        self.num_copied = 0

    def slots(self, layer: int) -> tuple[Tokens, Tokens]:
        """K and V of a layer as [num_blocks * block_size, heads, head_dim] views."""
        return tuple(t[layer].reshape(-1, *t[layer].shape[2:]) for t in (self.k, self.v))  # type: ignore[return-value]

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        self.num_copied += len(copies)
        for source, destination in copies:
            for tensor in (*self.k, *self.v):
                tensor[destination] = tensor[source]

    def write_blocks(self, layer: int, blocks: Sequence[int], k_THD: Tokens, v_THD: Tokens) -> None:
        assert blocks_for(len(k_THD), self.block_size) == len(blocks)
        index = physical_slots(np.asarray(blocks), np.arange(len(k_THD)), self.block_size)
        k, v = self.slots(layer)
        k[index], v[index] = k_THD, v_THD

    def gather(
        self, layer: int, blocks: npt.NDArray[np.int32], logical_slots: npt.NDArray[np.int64]
    ) -> tuple[Tokens, Tokens]:
        index = physical_slots(blocks, logical_slots, self.block_size)
        k, v = self.slots(layer)
        return k[index], v[index]

    def poison(self, blocks: Iterable[int]) -> None:
        """Fill blocks with NaN: whoever reads them afterwards is caught."""
        index = list(blocks)
        for tensor in (*self.k, *self.v):
            tensor[index] = np.nan


def make_spec(
    chunk_size: int = 6,
    window: int = 3,
    sink: int = 0,
    policy: str = "slide",
    num_layers: int = 2,
    conditioning: dict[str, int] | None = None,
    **sizes: Any,
) -> KVSpec:
    """A spec with one head of one number; `sizes` are KVSpec's own fields."""
    return KVSpec(
        num_layers=num_layers,
        num_heads=1,
        head_dim=1,
        window=Window(chunk_size, window, sink, policy),  # type: ignore[arg-type]
        branches=("conditional", "unconditional"),
        conditioning={} if conditioning is None else conditioning,
        **sizes,
    )


def make_cache(spec: KVSpec, num_blocks: int = 64, block_size: int = 16) -> KVCache:
    return KVCache(spec, NumpyStorage(spec, num_blocks, block_size), backend=None)  # type: ignore[arg-type]


def physical_slots(blocks: npt.NDArray[np.int32], logical: npt.NDArray[np.int64], size: int) -> npt.NDArray[np.int64]:
    return blocks[logical // size].astype(np.int64) * size + logical % size


def as_kv(tokens: Tokens, layer: int) -> tuple[Tokens, Tokens]:
    """K and V [T, 1, 1] of numbered tokens."""
    k = (tokens + 0.5 * layer)[:, None, None]
    return k, -k


def from_kv(k: Tokens, v: Tokens, layer: int) -> Tokens:
    """The numbers of the tokens whose K and V these are."""
    np.testing.assert_array_equal(v, -k)
    return k[:, 0, 0] - 0.5 * layer


def write(cache: KVCache, row: AttentionRow, tokens: Tokens) -> None:
    """Write the row's current tokens, in every layer."""
    for layer in range(cache.storage.num_layers):
        k_slots, v_slots = cache.storage.slots(layer)
        k_slots[row.write_slots], v_slots[row.write_slots] = as_kv(tokens, layer)


def seen(cache: KVCache, row: AttentionRow) -> Tokens:
    """The numbers, sorted, of the tokens that a forward over this row attends to; every layer has to agree."""
    visible = np.arange(row.num_visible)
    layers = [
        from_kv(*cache.storage.gather(layer, row.blocks, visible), layer) for layer in range(cache.storage.num_layers)
    ]
    for tokens in layers[1:]:
        np.testing.assert_array_equal(tokens, layers[0])
    return np.sort(layers[0])


def history(cache: KVCache, state: KVState, branch: str) -> Tokens:
    """The numbers of a branch's committed tokens, in temporal order; every layer has to agree."""
    layers = [
        from_kv(*state.layer_kv(branch, layer), layer)  # type: ignore[arg-type]
        for layer in range(cache.storage.num_layers)
    ]
    for tokens in layers[1:]:
        np.testing.assert_array_equal(tokens, layers[0])
    return layers[0]


def forward(
    cache: KVCache, state: KVState, branch: str, tokens: Tokens, *, commit: bool, num_draft_tokens: int = 0
) -> ForwardContext:
    """One whole forward, its commit not included; the last `num_draft_tokens` of the tokens are never history."""
    context = state.prepare(branch, len(tokens) - num_draft_tokens, commit)
    write(cache, context.activate(num_draft_tokens), tokens)
    return context


def commit(cache: KVCache, state: KVState, branch: str, tokens: Tokens) -> None:
    """A committing forward and its commit."""
    forward(cache, state, branch, tokens, commit=True)
    state.commit(branch)


def free_blocks(cache: KVCache) -> list[int]:
    return [block for block in range(cache.pool.num_blocks) if not cache.pool.num_references(block)]


def poison_free_blocks(cache: KVCache) -> None:
    cache.storage.poison(free_blocks(cache))  # type: ignore[attr-defined]
