"""The reference backend against the definition: softmax(q k^T / sqrt(d)) v in float64 over concatenated tensors."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from worldkv.attention.backend import BACKENDS, load_backend  # noqa: E402
from worldkv.kv.block_table import blocks_for  # noqa: E402
from worldkv.kv.cache import KVCache  # noqa: E402
from worldkv.kv.row import AttentionRow  # noqa: E402
from worldkv.kv.spec import KVSpec  # noqa: E402
from worldkv.kv.state import KVState  # noqa: E402
from worldkv.kv.storage import KVStorage  # noqa: E402
from worldkv.kv.window import Window  # noqa: E402

LAYERS, HEADS, HEAD_DIM, ACTIONS = 2, 2, 8, 5
# absolute; outputs are of order 1, and one key too many or too few of 3000 changes them by 3e-4
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def tokens(count: int, dtype: Any, generator: Any) -> Any:
    """[layers, count, heads, head_dim], already rounded to the cache's dtype."""
    return torch.randn(LAYERS, count, HEADS, HEAD_DIM, generator=generator).to(dtype)


def dense(q_THD: Any, k_THD: Any, v_THD: Any) -> Any:
    """Attention as it is defined, one head at a time."""
    q, k, v = (t.double() for t in (q_THD, k_THD, v_THD))
    outputs = []
    for head in range(q.shape[1]):
        scores = q[:, head] @ k[:, head].T / math.sqrt(q.shape[2])
        weights = torch.exp(scores - scores.max(dim=1, keepdim=True).values)
        outputs.append(weights / weights.sum(dim=1, keepdim=True) @ v[:, head])
    return torch.stack(outputs, dim=1)


@dataclass
class Rollout:
    """One branch on pages, and beside it the plain tensors [layers, tokens, heads, head_dim] of its chunks."""

    state: KVState
    chunks: list[tuple[Any, Any]] = field(default_factory=list)


class Fixture:
    """A cache in which every free block is full of NaN whenever a forward starts."""

    def __init__(self, window: Window, block_size: int, dtype: Any = torch.float32, num_sessions: int = 1) -> None:
        self.window, self.dtype = window, dtype
        spec = KVSpec(LAYERS, HEADS, HEAD_DIM, window, ("only",))
        blocks = 2 * blocks_for(window.num_slots(window.max_chunks) + ACTIONS, block_size) + 2
        storage = KVStorage(spec, num_sessions * blocks, block_size, dtype=dtype)
        self.cache = KVCache(spec, storage, load_backend("reference"))
        self.rollouts = [Rollout(self.cache.create_state()) for _ in range(num_sessions)]
        self.generator = torch.Generator().manual_seed(1)

    def poison(self) -> None:
        pool, storage = self.cache.pool, self.cache.storage
        free = [block for block in range(pool.num_blocks) if not pool.num_references(block)]
        for tensor in (*storage.k, *storage.v):
            tensor[free] = math.nan

    def visible(self, chunks: list[Any]) -> list[Any]:
        sink = self.window.sink
        return chunks[:sink] + chunks[sink:][-self.window.window :]

    def forward(self, who: list[int], num_chunks: list[int], commits: bool, num_actions: int = 0) -> None:
        """One call over a row per rollout named; every layer is compared with dense attention."""
        self.poison()
        size = self.window.chunk_size
        rows, current = [], []
        for i, num in zip(who, num_chunks, strict=True):
            rows.append(self.rollouts[i].state.prepare("only", num * size, commits).activate(num_actions))
            current.append([tokens(num * size + num_actions, self.dtype, self.generator) for _ in range(3)])
        plan = self.cache.backend.plan(self.cache.storage, rows)
        for layer in range(LAYERS):
            q, k, v = (torch.cat([qkv[part][layer] for qkv in current]) for part in range(3))
            output = plan.run(layer, q, k, v)
            assert output.dtype == self.dtype
            outputs = torch.split(output, [row.num_queries for row in rows])
            for i, num, qkv, got in zip(who, num_chunks, current, outputs, strict=True):
                expected = dense(qkv[0][layer], *self.keys_and_values(i, num, qkv, layer))
                torch.testing.assert_close(got.double(), expected, rtol=0, atol=TOLERANCE[self.dtype])
        for i, num, qkv in zip(who, num_chunks, current, strict=True):
            if commits:
                self.rollouts[i].state.commit("only")
                self.rollouts[i].chunks += self.split(num, qkv)
            else:
                self.rollouts[i].state.abandon()

    def split(self, num_chunks: int, qkv: list[Any]) -> list[tuple[Any, Any]]:
        size = self.window.chunk_size
        k, v = (t[:, : num_chunks * size].split(size, dim=1) for t in qkv[1:])
        return list(zip(k, v, strict=True))

    def keys_and_values(self, i: int, num_chunks: int, qkv: list[Any], layer: int) -> tuple[Any, Any]:
        """What the rollout sees in temporal order: its window, the current chunks, then the action tokens."""
        num_video = num_chunks * self.window.chunk_size
        chunks = self.visible(self.rollouts[i].chunks + self.split(num_chunks, qkv))
        actions = [t[:, num_video:] for t in qkv[1:]]
        k, v = (torch.cat([*(chunk[part] for chunk in chunks), actions[part]], dim=1)[layer] for part in range(2))
        return k, v


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("chunk_size", [6, 20, 24, 50, 220])
@pytest.mark.parametrize("block_size", [16, 64, 128])
def test_a_window_filling_full_and_sliding_past_its_sink_equals_dense_attention(
    block_size: int, chunk_size: int, dtype: Any
) -> None:
    fixture = Fixture(Window(chunk_size, window=2, sink=1), block_size, dtype)
    for _ in range(6):
        fixture.forward([0], [1], commits=False, num_actions=ACTIONS)
        fixture.forward([0], [1], commits=True)


@pytest.mark.parametrize("chunk_size", [880, 1560])
@pytest.mark.parametrize("block_size", [16, 64, 128])
def test_frames_of_the_large_models_slide_as_well(block_size: int, chunk_size: int) -> None:
    fixture = Fixture(Window(chunk_size, window=1, sink=1), block_size)
    for num_actions in (0, 0, ACTIONS):
        fixture.forward([0], [1], commits=not num_actions, num_actions=num_actions)


@pytest.mark.parametrize("policy", ["slide", "reset"])
@pytest.mark.parametrize("chunk_size", [6, 50])
@pytest.mark.parametrize("block_size", [16, 128])
def test_forwards_of_several_chunks_wrap_around_the_ring(block_size: int, chunk_size: int, policy: Any) -> None:
    fixture = Fixture(Window(chunk_size, window=5, policy=policy), block_size)
    for num_chunks in [1, 2] if policy == "reset" else [1, 2, 2, 3, 2]:
        fixture.forward([0], [2], commits=False, num_actions=ACTIONS)
        fixture.forward([0], [num_chunks], commits=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("chunk_size", [6, 24, 220])
@pytest.mark.parametrize("block_size", [16, 64, 128])
def test_rows_of_different_queries_and_keys_run_in_one_call(block_size: int, chunk_size: int, dtype: Any) -> None:
    fixture = Fixture(Window(chunk_size, window=3, sink=1), block_size, dtype, num_sessions=3)
    fixture.forward([0], [3], commits=True)
    fixture.forward([0], [2], commits=True)
    fixture.forward([2], [1], commits=True)
    for _ in range(2):
        fixture.forward([0, 1, 2], [1, 3, 2], commits=False, num_actions=ACTIONS)
        fixture.forward([2, 0, 1], [2, 1, 3], commits=True)


def test_a_draft_and_a_commit_share_a_call() -> None:
    fixture = Fixture(Window(6, window=3), 16, num_sessions=2)
    states = [rollout.state for rollout in fixture.rollouts]
    rows = [states[0].prepare("only", 12, True).activate(), states[1].prepare("only", 6, False).activate(ACTIONS)]
    q, k, v = (tokens(12 + 6 + ACTIONS, torch.float32, fixture.generator)[0] for _ in range(3))
    got = fixture.cache.backend.plan(fixture.cache.storage, rows).run(0, q, k, v)
    expected = torch.cat([dense(q[:12], k[:12], v[:12]), dense(q[12:], k[12:], v[12:])])
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=TOLERANCE[torch.float32])


@pytest.mark.parametrize("num_tokens", [1, 16, 20, 257])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_read_only_rows_attend_and_write_nothing(num_tokens: int, dtype: Any) -> None:
    fixture = Fixture(Window(220, window=2), 16, dtype)
    storage = fixture.cache.storage
    k, v = (tokens(num_tokens, dtype, fixture.generator) for _ in range(2))
    entry = fixture.cache.conditioning.publish("text", num_tokens, zip(k, v, strict=True))
    fixture.poison()
    before = [t.clone() for t in (*storage.k, *storage.v)]
    rows = [entry.row(3), entry.row(7)]
    plan = fixture.cache.backend.plan(storage, rows)
    for layer in range(LAYERS):
        q = tokens(10, dtype, fixture.generator)[layer]
        got = plan.run(layer, q).double()
        torch.testing.assert_close(got, dense(q, k[layer], v[layer]), rtol=0, atol=TOLERANCE[dtype])
    for tensor, old in zip((*storage.k, *storage.v), before, strict=True):
        assert torch.equal(tensor.view(torch.uint8), old.view(torch.uint8))


def test_a_query_of_another_dtype_than_the_cache_gets_its_own_dtype_back() -> None:
    fixture = Fixture(Window(6, window=2), 16, torch.bfloat16)
    row = fixture.rollouts[0].state.prepare("only", 6, True).activate()
    q, k, v = (tokens(6, torch.float32, fixture.generator)[0] for _ in range(3))
    got = fixture.cache.backend.plan(fixture.cache.storage, [row]).run(0, q, k, v)
    assert got.dtype == torch.float32
    expected = dense(q, k.bfloat16(), v.bfloat16())
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=TOLERANCE[torch.float32])


def test_only_the_rows_own_slots_are_written() -> None:
    fixture = Fixture(Window(6, window=2), 16, num_sessions=2)
    fixture.forward([0], [2], commits=True)
    storage = fixture.cache.storage
    row = fixture.rollouts[1].state.prepare("only", 6, True).activate()
    before = storage.slots(0)[0].clone()
    q, k, v = (tokens(6, torch.float32, fixture.generator)[0] for _ in range(3))
    fixture.cache.backend.plan(storage, [row]).run(0, q, k, v)
    after = storage.slots(0)[0]
    changed = (after.view(torch.int32) != before.view(torch.int32)).flatten(1).any(dim=1).nonzero().flatten()
    assert changed.tolist() == sorted(np.asarray(row.write_slots).tolist())


def test_rows_that_write_and_rows_that_only_read_do_not_share_a_plan() -> None:
    fixture = Fixture(Window(6, window=2), 16)
    row = fixture.rollouts[0].state.prepare("only", 6, True).activate()
    reader: AttentionRow = dataclasses.replace(row, write_slots=None)
    with pytest.raises(AssertionError, match="do not share a plan"):
        fixture.cache.backend.plan(fixture.cache.storage, [row, reader])
    plan = fixture.cache.backend.plan(fixture.cache.storage, [reader])
    current = tokens(6, torch.float32, fixture.generator)[0]
    with pytest.raises(AssertionError, match="this plan only reads"):
        plan.run(0, current, current, current)


def test_an_unknown_backend_is_refused_with_the_known_ones() -> None:
    assert load_backend("reference").name == "reference"
    with pytest.raises(ValueError, match=r"attention backend: expected one of .*'reference'.*, got 'flash9'"):
        load_backend("flash9")
    assert "reference" in BACKENDS
