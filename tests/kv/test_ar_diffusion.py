"""The face that DreamZero-style model code sees: per-layer contexts, two branches by a flag, on real pages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from numpy_storage import make_spec

torch = pytest.importorskip("torch")

from worldkv.attention.backend import load_backend  # noqa: E402
from worldkv.errors import ConditioningMissing, OutOfBlocks  # noqa: E402
from worldkv.kv.cache import KVCache  # noqa: E402
from worldkv.kv.storage import KVStorage  # noqa: E402
from worldkv.models.dreamzero.bridge import ARDiffusionKVState, BranchHistory  # noqa: E402

CHUNK, LAYERS = 6, 2
KINDS = {"text": 20, "image": 5}
BLOCKS = {"text": 2, "image": 1}


def make(num_blocks: int = 32, **sizes: Any) -> KVCache:
    spec = make_spec(CHUNK, window=3, num_layers=LAYERS, conditioning=KINDS, **sizes)
    return KVCache(spec, KVStorage(spec, num_blocks, block_size=16), load_backend("reference"))


@pytest.fixture
def cache() -> KVCache:
    return make()


@pytest.fixture
def kv(cache: KVCache) -> ARDiffusionKVState:
    return open_state(cache)


def open_state(cache: KVCache) -> ARDiffusionKVState:
    names = ("conditional", "unconditional")
    return ARDiffusionKVState(cache, *(BranchHistory(f"request-{name}", name) for name in names), num_layers=LAYERS)


def qkv(seed: int, num_tokens: int = CHUNK) -> list[Any]:
    return list(torch.randn(3, num_tokens, 1, 1, generator=torch.Generator().manual_seed(seed)))


def run(layers: list[Any], seed: int, num_tokens: int = CHUNK) -> list[Any]:
    """One forward as a model runs it: every layer once."""
    return [context.attend(*qkv(100 * seed + i, num_tokens)) for i, context in enumerate(layers)]


def commit(kv: ARDiffusionKVState, is_negative: bool, seed: int, num_chunks: int = 1) -> None:
    size = num_chunks * CHUNK
    run(kv.get_kv_caches(is_negative, seq_len=size, commit_current=True), seed, size)
    kv.commit_paged_context(is_negative)


def num_chunks(kv: ARDiffusionKVState, is_negative: bool) -> int:
    return kv.state.branches[kv.history(is_negative).branch].num_chunks


def committed(kv: ARDiffusionKVState) -> list[bytes]:
    return [t.numpy().tobytes() for b in kv.state.branches for i in range(LAYERS) for t in kv.state.layer_kv(b, i)]


def populate(kv: ARDiffusionKVState) -> None:
    for is_negative in (False, True):
        for kind, num_tokens in KINDS.items():
            layers = ((torch.randn(num_tokens, 1, 1), torch.randn(num_tokens, 1, 1)) for _ in range(LAYERS))
            kv.set_cross_kv(is_negative, kind, f"{kind} of {is_negative if kind == 'text' else 'both'}", layers)


# construction


def test_false_is_the_conditional_branch_and_true_the_unconditional_one(kv: ARDiffusionKVState) -> None:
    assert kv.history(False) == BranchHistory("request-conditional", "conditional")
    assert kv.history(True) == BranchHistory("request-unconditional", "unconditional")
    commit(kv, True, seed=1)
    assert (num_chunks(kv, False), num_chunks(kv, True)) == (0, 1)


def test_a_number_of_layers_that_is_not_the_cache_s_is_refused(cache: KVCache) -> None:
    with pytest.raises(ValueError, match="num_layers: the cache has 2, got 3"):
        ARDiffusionKVState(cache, BranchHistory("a", "conditional"), BranchHistory("b", "unconditional"), num_layers=3)


def test_one_branch_cannot_be_both(cache: KVCache) -> None:
    with pytest.raises(ValueError, match="must not share a history"):
        ARDiffusionKVState(cache, BranchHistory("a", "one"), BranchHistory("b", "one"), num_layers=LAYERS)


# forwards


def test_get_kv_caches_without_seq_len_raises_and_builds_nothing(kv: ARDiffusionKVState) -> None:
    with pytest.raises(ValueError, match="seq_len: expected the number of current video tokens"):
        kv.get_kv_caches(False)
    assert kv.state.branches["conditional"].context is None


def test_getting_contexts_gives_one_per_layer_and_allocates_nothing(cache: KVCache, kv: ARDiffusionKVState) -> None:
    assert len(kv.get_kv_caches(False, seq_len=CHUNK)) == LAYERS
    kv.prepare_paged_context(True, 2 * CHUNK, commit_current=True)
    assert cache.pool.num_used == 0


def test_a_rank_that_runs_one_branch_pays_for_one(cache: KVCache, kv: ARDiffusionKVState) -> None:
    branches = [kv.get_kv_caches(is_negative, seq_len=CHUNK) for is_negative in (False, True)]
    run(branches[0], seed=1)
    assert cache.pool.num_used == 1


@pytest.mark.parametrize("seq_len", [0, 5, 7])
def test_an_unaligned_seq_len_raises(kv: ARDiffusionKVState, seq_len: int) -> None:
    with pytest.raises(ValueError, match=f"'unconditional'.*multiple of chunk_size=6, got {seq_len}"):
        kv.prepare_paged_context(True, seq_len, commit_current=False)
    with pytest.raises(ValueError, match="chunk_size=6"):
        kv.get_kv_caches(True, seq_len=seq_len)


def test_attend_writes_and_attends_in_one_call(kv: ARDiffusionKVState) -> None:
    commit(kv, False, seed=1)
    context = kv.get_kv_caches(False, seq_len=CHUNK)[1]
    q, k, v = qkv(5)
    old_k, old_v = kv.state.layer_kv("conditional", 1)
    keys, values = torch.cat([old_k, k])[:, 0], torch.cat([old_v, v])[:, 0]
    weights = torch.softmax(q[:, 0] @ keys.T, dim=-1)
    torch.testing.assert_close(context.attend(q, k, v)[:, 0], weights @ values)


def test_draft_tokens_past_seq_len_are_attended_and_never_history(cache: KVCache, kv: ARDiffusionKVState) -> None:
    commit(kv, False, seed=1)
    before = committed(kv)
    with_actions = run(kv.get_kv_caches(False, seq_len=CHUNK), seed=2, num_tokens=CHUNK + 3)
    assert with_actions[0].shape == (CHUNK + 3, 1, 1)
    kv.commit_paged_context(False)
    kv.abandon_paged_contexts()
    assert (committed(kv), cache.pool.num_used) == (before, 1)


def test_drafts_may_repeat_and_give_the_same_result_and_change_nothing(kv: ARDiffusionKVState) -> None:
    commit(kv, False, seed=1)
    before = committed(kv)
    first = run(kv.get_kv_caches(False, seq_len=CHUNK), seed=2)
    run(kv.get_kv_caches(False, seq_len=2 * CHUNK), seed=3, num_tokens=2 * CHUNK)
    again = kv.get_kv_caches(False, seq_len=CHUNK)
    for outputs in (run(again, seed=2), run(again, seed=2)):
        assert all(torch.equal(a, b) for a, b in zip(first, outputs, strict=True))
    assert committed(kv) == before


def test_commit_advances_one_chunk_at_a_time_seq_len_over_chunk_size_times(kv: ARDiffusionKVState) -> None:
    commit(kv, False, seed=1, num_chunks=2)
    assert num_chunks(kv, False) == 2
    commit(kv, False, seed=2, num_chunks=3)
    assert num_chunks(kv, False) == 5


def test_commit_is_a_no_op_for_drafts_and_when_nothing_is_pending(kv: ARDiffusionKVState) -> None:
    kv.commit_paged_context(False)
    run(kv.get_kv_caches(False, seq_len=CHUNK), seed=1)
    kv.commit_paged_context(False)
    kv.get_kv_caches(True, seq_len=CHUNK, commit_current=True)
    kv.commit_paged_context(True)
    assert (num_chunks(kv, False), num_chunks(kv, True)) == (0, 0)


def test_replacing_an_allocated_uncommitted_commit_raises_and_it_can_still_be_committed(kv: ARDiffusionKVState) -> None:
    layers = kv.get_kv_caches(False, seq_len=CHUNK, commit_current=True)
    layers[0].attend(*qkv(1))
    with pytest.raises(RuntimeError, match="commit or abandon it"):
        kv.get_kv_caches(False, seq_len=CHUNK)
    with pytest.raises(RuntimeError, match="commit or abandon it"):
        kv.prepare_paged_context(False, CHUNK, commit_current=True)
    layers[1].attend(*qkv(2))
    kv.commit_paged_context(False)
    assert num_chunks(kv, False) == 1


def test_a_commit_that_took_no_blocks_may_be_replaced(kv: ARDiffusionKVState) -> None:
    kv.prepare_paged_context(False, CHUNK, commit_current=True)
    commit(kv, False, seed=1, num_chunks=2)
    assert num_chunks(kv, False) == 2


@pytest.mark.parametrize("history", [0, 1, 3, 5])
def test_a_forward_that_fails_is_abandoned_and_retried_with_an_identical_result(
    cache: KVCache, kv: ARDiffusionKVState, history: int
) -> None:
    for seed in range(history):
        commit(kv, False, seed)
    before, num_free = committed(kv), cache.pool.num_free
    kv.get_kv_caches(False, seq_len=CHUNK, commit_current=True)[0].attend(*qkv(70))  # layer 1 never comes
    kv.get_kv_caches(True, seq_len=CHUNK, commit_current=True)[0].attend(*qkv(71))
    kv.abandon_paged_contexts()
    assert (committed(kv), cache.pool.num_free) == (before, num_free)
    expected = run(kv.get_kv_caches(False, seq_len=CHUNK, commit_current=True), seed=9)
    kv.abandon_paged_contexts()
    outputs = run(kv.get_kv_caches(False, seq_len=CHUNK, commit_current=True), seed=9)
    assert all(torch.equal(a, b) for a, b in zip(expected, outputs, strict=True))
    kv.commit_paged_context(False)
    assert num_chunks(kv, False) == history + 1


def test_contexts_of_a_forward_that_is_over_write_nowhere(cache: KVCache, kv: ARDiffusionKVState) -> None:
    stale = []
    for end in (lambda: kv.commit_paged_context(False), kv.abandon_paged_contexts, kv.reset, kv.close):
        layers = kv.get_kv_caches(False, seq_len=CHUNK, commit_current=True)
        run(layers, seed=1)
        end()
        stale.append(layers[0])
    stale.append(kv.get_kv_caches(False, seq_len=CHUNK)[0])
    kv.get_kv_caches(False, seq_len=CHUNK)
    before = [t.clone() for t in (*cache.storage.k, *cache.storage.v)]
    for context in stale:
        with pytest.raises(RuntimeError, match="ask for the layers' contexts anew"):
            context.attend(*qkv(2))
    assert all(map(torch.equal, (*cache.storage.k, *cache.storage.v), before)), "a stale context wrote to the pool"


def test_too_few_tokens_or_action_tokens_in_a_commit_are_refused(cache: KVCache, kv: ARDiffusionKVState) -> None:
    for commits, num_tokens in ((False, CHUNK - 1), (True, CHUNK - 1), (True, CHUNK + 2)):
        context = kv.get_kv_caches(False, seq_len=CHUNK, commit_current=commits)[0]
        with pytest.raises(ValueError, match=f"expected 6 tokens in this forward, got {num_tokens}"):
            context.attend(*qkv(1, num_tokens))
    assert cache.pool.num_used == 0


def test_layers_of_one_forward_bring_equally_many_tokens(kv: ARDiffusionKVState) -> None:
    first, second = kv.get_kv_caches(False, seq_len=CHUNK)
    first.attend(*qkv(1, CHUNK + 2))
    with pytest.raises(ValueError, match="this forward began with 8 tokens, this layer brings 7"):
        second.attend(*qkv(2, CHUNK + 1))


def test_running_out_of_blocks_leaves_the_session_as_it_was() -> None:
    kv = open_state(make(num_blocks=1))
    commit(kv, False, seed=1)
    before = committed(kv)
    with pytest.raises(OutOfBlocks, match="0 of 1 blocks are free"):
        run(kv.get_kv_caches(True, seq_len=CHUNK, commit_current=True), seed=2)
    kv.abandon_paged_contexts()
    assert committed(kv) == before


def test_two_branches_and_two_sessions_do_not_see_each_other(cache: KVCache) -> None:
    first, second = open_state(cache), open_state(cache)
    alone = open_state(make())
    for seed in range(5):
        for kv, is_negative, offset in ((first, False, 0), (first, True, 20), (second, False, 40), (second, True, 60)):
            commit(kv, is_negative, seed + offset)
        commit(alone, False, seed)
    expected = [alone.state.layer_kv("conditional", i) for i in range(LAYERS)]
    got = [first.state.layer_kv("conditional", i) for i in range(LAYERS)]
    assert all(torch.equal(a, b) for x, y in zip(expected, got, strict=True) for a, b in zip(x, y, strict=True))


# conditioning


def test_reading_conditioning_before_it_is_populated_names_the_branch_and_both_flags(kv: ARDiffusionKVState) -> None:
    with pytest.raises(ConditioningMissing, match=r"'unconditional'.*text=missing, image=missing"):
        kv.get_cross_kv_caches(True)
    layers = [(torch.randn(20, 1, 1), torch.randn(20, 1, 1)) for _ in range(LAYERS)]
    kv.set_cross_kv(True, "text", "prompt", layers)
    with pytest.raises(ConditioningMissing, match=r"'unconditional'.*text=set, image=missing"):
        kv.get_cross_kv_caches(True)
    with pytest.raises(ConditioningMissing, match=r"'conditional'.*text=missing, image=missing"):
        kv.get_cross_kv_caches(False)


def test_a_half_that_does_not_exist_is_refused(kv: ARDiffusionKVState) -> None:
    with pytest.raises(ValueError, match=r"kind: expected one of \['text', 'image'\], got 'audio'"):
        kv.set_cross_kv(False, "audio", "key", [])


def test_cross_kv_is_read_back_and_attended_in_pages(kv: ARDiffusionKVState) -> None:
    projected = {k: [(torch.randn(n, 1, 1), torch.randn(n, 1, 1)) for _ in range(LAYERS)] for k, n in KINDS.items()}
    for kind, layers in projected.items():
        kv.set_cross_kv(False, kind, kind, layers)
    caches = kv.get_cross_kv_caches(False)
    assert len(caches) == LAYERS
    q = torch.randn(4, 1, 1)
    for layer, cross in enumerate(caches):
        for kind in KINDS:
            k, v = projected[kind][layer]
            assert all(map(torch.equal, cross.kv(kind), (k, v)))
            expected = torch.softmax(q[:, 0] @ k[:, 0].T, dim=-1) @ v[:, 0]
            torch.testing.assert_close(cross.attend(kind, q)[:, 0], expected)


def test_a_projection_that_fails_leaves_the_half_unpopulated(cache: KVCache, kv: ARDiffusionKVState) -> None:
    def failing() -> Iterator[tuple[Any, Any]]:
        yield torch.zeros(20, 1, 1), torch.zeros(20, 1, 1)
        raise OSError("device lost")

    with pytest.raises(OSError, match="device lost"):
        kv.set_cross_kv(False, "text", "prompt", failing())
    with pytest.raises(ConditioningMissing, match="text=missing"):
        kv.get_cross_kv_caches(False)
    assert cache.pool.num_used == 0


def test_equal_halves_of_branches_and_sessions_are_stored_once(cache: KVCache, kv: ARDiffusionKVState) -> None:
    populate(kv)
    populate(open_state(cache))
    assert len(cache.conditioning) == 3
    assert cache.pool.num_used == 2 * BLOCKS["text"] + BLOCKS["image"]


# life cycle


def test_reset_keeps_the_object_and_its_request_ids_and_forgets_both_halves(
    cache: KVCache, kv: ARDiffusionKVState
) -> None:
    populate(kv)
    commit(kv, False, seed=1)
    run(kv.get_kv_caches(True, seq_len=CHUNK, commit_current=True), seed=2)
    kv.reset()
    assert cache.pool.num_used == 0
    assert [kv.history(n).request_id for n in (False, True)] == ["request-conditional", "request-unconditional"]
    with pytest.raises(ConditioningMissing, match="text=missing, image=missing"):
        kv.get_cross_kv_caches(False)
    commit(kv, False, seed=3)
    assert num_chunks(kv, False) == 1


def test_reset_keeps_the_text_half_on_request_and_always_forgets_the_image_half(
    cache: KVCache, kv: ARDiffusionKVState
) -> None:
    populate(kv)
    commit(kv, True, seed=1)
    kv.reset(keep_cross_text=True)
    assert cache.pool.num_used == 2 * BLOCKS["text"]
    for is_negative in (False, True):
        assert num_chunks(kv, is_negative) == 0
        with pytest.raises(ConditioningMissing, match="text=set, image=missing"):
            kv.get_cross_kv_caches(is_negative)


def test_close_returns_both_branches_blocks_and_is_safe_twice(cache: KVCache, kv: ARDiffusionKVState) -> None:
    populate(kv)
    commit(kv, False, seed=1)
    commit(kv, True, seed=2)
    run(kv.get_kv_caches(False, seq_len=CHUNK), seed=3)
    kv.close()
    kv.close()
    assert cache.pool.num_used == 0
    cache.pool.check()
