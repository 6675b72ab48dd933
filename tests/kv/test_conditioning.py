"""Conditioning K/V: published whole or not at all, stored once, shared by reference count."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from numpy_storage import Tokens, as_kv, from_kv, make_cache, make_spec

from worldkv.errors import ConditioningMissing, OutOfBlocks
from worldkv.kv.cache import KVCache
from worldkv.kv.conditioning import ConditioningEntry

KINDS = {"text": 20, "image": 5}
BLOCKS = {"text": 2, "image": 1}


@pytest.fixture
def cache() -> KVCache:
    return make_cache(make_spec(conditioning=KINDS), num_blocks=8)


def layers(num_tokens: int, first: float = 0.0, num_layers: int = 2) -> Iterator[tuple[Tokens, Tokens]]:
    for layer in range(num_layers):
        yield as_kv(first + np.arange(num_tokens), layer)


def publish(cache: KVCache, kind: str, key: str | None = None) -> ConditioningEntry:
    return cache.conditioning.publish(key or kind, KINDS[kind], layers(KINDS[kind]))


def test_a_published_half_reads_back_through_a_read_only_row(cache: KVCache) -> None:
    row = publish(cache, "text").row(num_queries=3)
    assert (row.num_visible, row.num_queries, row.write_slots) == (20, 3, None)
    for layer in range(2):
        k, v = cache.storage.gather(layer, row.blocks, np.arange(20))
        np.testing.assert_array_equal(from_kv(k, v, layer), np.arange(20))  # type: ignore[arg-type]


def test_equal_conditioning_is_projected_and_stored_once(cache: KVCache) -> None:
    first = publish(cache, "text")

    def never() -> Iterator[tuple[Tokens, Tokens]]:
        pytest.fail("the entry is stored and was projected again")
        yield

    assert cache.conditioning.publish("text", 20, never()) is first
    assert cache.conditioning.acquire("text") is first
    assert cache.conditioning.share(first) is first
    assert (first.num_references, cache.pool.num_used) == (4, BLOCKS["text"])


def test_the_last_reference_frees_the_blocks_and_forgets_the_key(cache: KVCache) -> None:
    entry = publish(cache, "text")
    cache.conditioning.share(entry)
    cache.conditioning.release(entry)
    assert "text" in cache.conditioning
    cache.conditioning.release(entry)
    assert "text" not in cache.conditioning
    assert (len(cache.conditioning), cache.pool.num_used) == (0, 0)
    assert cache.conditioning.acquire("text") is None
    with pytest.raises(AssertionError, match="released twice"):
        cache.conditioning.release(entry)
    with pytest.raises(AssertionError, match="freed"):
        cache.conditioning.share(entry)


def test_a_projection_that_fails_half_way_publishes_nothing(cache: KVCache) -> None:
    def failing() -> Iterator[tuple[Tokens, Tokens]]:
        assert "text" not in cache.conditioning
        yield as_kv(np.zeros(20), 0)
        assert "text" not in cache.conditioning, "a half-projected entry is visible"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cache.conditioning.publish("text", 20, failing())
    assert "text" not in cache.conditioning
    assert cache.pool.num_used == 0
    assert publish(cache, "text").num_references == 1


@pytest.mark.parametrize(
    ("projected", "message"),
    [
        (layers(20, num_layers=1), "expected 2 layers, got 1"),
        (layers(20, num_layers=3), "expected 2 layers, got more"),
        (layers(19), "expected 20 tokens, got 19 of K and 19 of V"),
        (iter([(as_kv(np.zeros(20), 0)[0], as_kv(np.zeros(21), 0)[1])]), "expected 20 tokens, got 20 of K and 21 of V"),
    ],
    ids=["too few layers", "too many layers", "too few tokens", "K and V differ"],
)
def test_a_projection_of_another_shape_is_refused_and_publishes_nothing(
    cache: KVCache, projected: Iterator[tuple[Tokens, Tokens]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        cache.conditioning.publish("text", 20, projected)
    assert (len(cache.conditioning), cache.pool.num_used) == (0, 0)


def test_one_key_cannot_stand_for_two_lengths(cache: KVCache) -> None:
    entry = publish(cache, "text")
    with pytest.raises(ValueError, match="key: 'text' is stored with 20 tokens, now come 5"):
        cache.conditioning.publish("text", 5, layers(5))
    assert entry.num_references == 1


def test_no_room_for_a_half_raises_and_takes_nothing(cache: KVCache) -> None:
    cache.pool.allocate(7)
    with pytest.raises(OutOfBlocks, match="conditioning of 20 tokens: 1 blocks are free"):
        publish(cache, "text")
    assert cache.pool.num_free == 1
    assert "text" not in cache.conditioning


def test_reading_conditioning_before_it_is_populated_raises_with_the_branch_and_both_flags(cache: KVCache) -> None:
    state = cache.create_state()
    with pytest.raises(ConditioningMissing, match=r"'conditional'.*text=missing, image=missing"):
        state.conditioning("conditional")
    state.set_conditioning("conditional", "text", publish(cache, "text"))
    with pytest.raises(ConditioningMissing, match=r"'conditional'.*text=set, image=missing"):
        state.conditioning("conditional")
    state.set_conditioning("unconditional", "image", publish(cache, "image"))
    with pytest.raises(ConditioningMissing, match=r"'unconditional'.*text=missing, image=set"):
        state.conditioning("unconditional")
    state.set_conditioning("conditional", "image", publish(cache, "image"))
    assert set(state.conditioning("conditional")) == {"text", "image"}


def test_replacing_a_half_releases_the_one_before(cache: KVCache) -> None:
    state = cache.create_state()
    state.set_conditioning("conditional", "text", publish(cache, "text", "old prompt"))
    state.set_conditioning("conditional", "text", publish(cache, "text", "new prompt"))
    assert "old prompt" not in cache.conditioning
    state.set_conditioning("conditional", "text", publish(cache, "text", "new prompt"))
    assert (state.branches["conditional"].conditioning["text"].num_references, cache.pool.num_used) == (1, 2)


def test_a_half_that_the_spec_does_not_have_is_refused(cache: KVCache) -> None:
    entry = publish(cache, "text")
    with pytest.raises(ValueError, match=r"kind: expected one of \['text', 'image'\], got 'audio'"):
        cache.create_state().set_conditioning("conditional", "audio", entry)


def test_reset_drops_both_halves_or_keeps_the_text_half_on_request(cache: KVCache) -> None:
    state = cache.create_state()
    for branch in state.branches:
        for kind in KINDS:
            state.set_conditioning(branch, kind, publish(cache, kind))
    assert cache.pool.num_used == 3
    state.reset(keep=("text",))
    assert ["text" in cache.conditioning, "image" in cache.conditioning] == [True, False]
    with pytest.raises(ConditioningMissing, match="text=set, image=missing"):
        state.conditioning("unconditional")
    state.reset()
    assert (len(cache.conditioning), cache.pool.num_used) == (0, 0)


def test_a_snapshot_keeps_its_conditioning_and_brings_it_back(cache: KVCache) -> None:
    state = cache.create_state()
    state.set_conditioning("conditional", "text", publish(cache, "text", "first prompt"))
    frozen = state.snapshot()
    assert frozen.num_blocks == BLOCKS["text"]
    state.set_conditioning("conditional", "text", publish(cache, "text", "second prompt"))
    state.restore(frozen)
    assert state.branches["conditional"].conditioning["text"].key == "first prompt"
    assert "second prompt" not in cache.conditioning
    state.close()
    assert "first prompt" in cache.conditioning
    frozen.release()
    assert cache.pool.num_used == 0
