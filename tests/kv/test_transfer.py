"""To the host and back: bit for bit, in three parts, and whatever fails, nothing leaks."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from numpy_storage import make_spec

torch = pytest.importorskip("torch")

from worldkv.attention.backend import load_backend  # noqa: E402
from worldkv.errors import OutOfBlocks  # noqa: E402
from worldkv.kv.cache import KVCache  # noqa: E402
from worldkv.kv.state import KVState  # noqa: E402
from worldkv.kv.storage import KVStorage  # noqa: E402
from worldkv.kv.transfer import (  # noqa: E402
    ParkedKV,
    begin_park,
    begin_resume,
    finish_park,
    finish_resume,
)

CHUNK, LAYERS = 6, 2
KINDS = {"text": 20, "image": 5}
NUM_BLOCKS = 3 * 2 + 3 + 1  # of 8 slots: three chunks in each branch, a text, an image
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]


@pytest.fixture(params=DEVICES)
def cache(request: pytest.FixtureRequest) -> KVCache:
    return make(request.param)


def make(device: str = "cpu", num_blocks: int = 32) -> KVCache:
    spec = make_spec(CHUNK, window=3, num_layers=LAYERS, conditioning=KINDS)
    return KVCache(spec, KVStorage(spec, num_blocks, 8, device), load_backend("reference"))


def park(cache: KVCache, state: KVState) -> ParkedKV:
    """All three parts; whatever fails, the session is as it was."""
    job = begin_park(cache, state)
    try:
        job.copy()
        return finish_park(cache, state, job)
    except BaseException:
        job.abandon()
        raise


def resume(cache: KVCache, state: KVState, parked: ParkedKV) -> None:
    """All three parts; whatever fails, nothing has changed."""
    job = begin_resume(cache, state, parked)
    try:
        job.copy()
        finish_resume(cache, state, job)
    except BaseException:
        job.abandon()
        raise


def layers(num_tokens: int, seed: int) -> Iterator[tuple[Any, Any]]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(LAYERS):
        yield tuple(torch.randn(2, num_tokens, 1, 1, generator=generator))


def commit(cache: KVCache, state: KVState, branch: str, seed: int) -> None:
    row = state.prepare(branch, CHUNK, commit=True).activate()
    for layer, (k, v) in enumerate(layers(CHUNK, seed)):
        for slots, tokens in zip(cache.storage.slots(layer), (k, v), strict=True):
            slots[torch.as_tensor(row.write_slots, device=slots.device)] = tokens.to(slots.device)
    state.commit(branch)


def attach(cache: KVCache, state: KVState, kind: str, key: str, seed: int) -> None:
    """The same conditioning for all branches."""
    entry = cache.conditioning.publish(key, KINDS[kind], layers(KINDS[kind], seed))
    for branch in state.branches:
        state.set_conditioning(branch, kind, cache.conditioning.share(entry))
    cache.conditioning.release(entry)


def open_session(cache: KVCache, seed: int = 0, num_commits: int = 4) -> KVState:
    state = cache.create_state()
    for i in range(num_commits):
        for j, branch in enumerate(state.branches):
            commit(cache, state, branch, 100 * seed + 10 * j + i)
    attach(cache, state, "text", f"text {seed}", 1000 + seed)
    attach(cache, state, "image", f"image {seed}", 2000 + seed)
    return state


def bytes_of(cache: KVCache, state: KVState) -> list[bytes]:
    """History and conditioning of every branch and layer, bit for bit."""
    found = []
    for name, branch in state.branches.items():
        for layer in range(LAYERS):
            found += [t.cpu().numpy().tobytes() for t in state.layer_kv(name, layer)]
            for entry in branch.conditioning.values():
                whole = cache.storage.k[layer], cache.storage.v[layer]
                found += [t[entry.blocks.tolist()].cpu().numpy().tobytes() for t in whole]
    return found


def poison_free_blocks(cache: KVCache) -> None:
    free = [block for block in range(cache.pool.num_blocks) if not cache.pool.num_references(block)]
    for tensor in (*cache.storage.k, *cache.storage.v):
        tensor[free] = math.nan


def on_another_thread(job: Any) -> None:
    thread = threading.Thread(target=job.copy)
    thread.start()
    thread.join()


def fail(*_: Any) -> None:
    raise MemoryError("pinned host memory")


@pytest.mark.parametrize("num_commits", [0, 1, 3, 5])
def test_what_is_parked_holds_no_block_and_comes_back_bit_for_bit(cache: KVCache, num_commits: int) -> None:
    state = open_session(cache, num_commits=num_commits)
    before, num_used = bytes_of(cache, state), cache.pool.num_used
    for _ in range(2):
        parked = park(cache, state)
        assert (cache.pool.num_used, len(cache.conditioning)) == (0, 0)
        poison_free_blocks(cache)
        resume(cache, state, parked)
        assert (bytes_of(cache, state), cache.pool.num_used) == (before, num_used)
        assert [branch.num_chunks for branch in state.branches.values()] == [num_commits] * 2
    state.close()
    cache.pool.check()
    assert cache.pool.num_used == 0


def test_what_branches_share_is_parked_once(cache: KVCache) -> None:
    parked = park(cache, open_session(cache))
    assert sorted(parked.entries) == ["image 0", "text 0"]
    assert num_blocks_of(parked) == NUM_BLOCKS
    assert parked.num_bytes == NUM_BLOCKS * 8 * 2 * LAYERS * 4


def num_blocks_of(parked: ParkedKV) -> int:
    return sum(part.blocks.num_blocks for part in (*parked.branches.values(), *parked.entries.values()))


def test_the_cache_goes_on_while_another_thread_copies_both_ways(cache: KVCache) -> None:
    state, other = open_session(cache, 1), open_session(cache, 2)
    before = bytes_of(cache, state)
    parking = begin_park(cache, state)
    commit(cache, other, "conditional", seed=7)
    on_another_thread(parking)
    commit(cache, other, "conditional", seed=8)
    assert bytes_of(cache, state) == before, "it is parked at the end, and not before"
    parked = finish_park(cache, state, parking)
    commit(cache, other, "unconditional", seed=9)
    poison_free_blocks(cache)
    of_other = bytes_of(cache, other)

    coming = begin_resume(cache, state, parked)
    assert state.num_blocks == 0
    assert "text 1" not in cache.conditioning, "conditioning was published before it was copied"
    third = open_session(cache, 3, num_commits=1)
    on_another_thread(coming)
    third.close()
    finish_resume(cache, state, coming)
    assert (bytes_of(cache, state), bytes_of(cache, other)) == (before, of_other)
    state.close()
    other.close()
    assert cache.pool.num_used == 0


def test_a_session_that_is_closed_while_it_is_copied_leaves_its_blocks_until_the_copy_has_ended(cache: KVCache) -> None:
    state = open_session(cache)
    num_used = cache.pool.num_used
    job = begin_park(cache, state)
    state.close()
    assert cache.pool.num_used == num_used, "blocks were freed under the copy's hands"
    job.copy()
    job.abandon()
    job.abandon()
    assert (cache.pool.num_used, len(cache.conditioning)) == (0, 0)


def test_nothing_is_parked_during_a_forward(cache: KVCache) -> None:
    state = open_session(cache)
    state.prepare("conditional", CHUNK, commit=False).activate()
    with pytest.raises(RuntimeError, match="at a commit, not during a forward"):
        begin_park(cache, state)


@pytest.mark.parametrize("after", [0, 1, 2, 3])
def test_a_copy_to_the_host_that_fails_leaves_the_session_as_it_was(
    cache: KVCache, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    state = open_session(cache)
    before, num_used = bytes_of(cache, state), cache.pool.num_used
    with monkeypatch.context() as patch:
        fail_after(patch, cache, "read_blocks", after)
        with pytest.raises(MemoryError):
            park(cache, state)
    assert (bytes_of(cache, state), cache.pool.num_used) == (before, num_used)
    assert cache.pool.num_shared == 0, "a reference stayed behind"
    resume(cache, state, park(cache, state))
    assert bytes_of(cache, state) == before


@pytest.mark.parametrize("after", [0, 1, 2, 3])
def test_a_copy_to_the_device_that_fails_gives_every_block_back_and_can_be_tried_again(
    cache: KVCache, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    state = open_session(cache)
    before = bytes_of(cache, state)
    parked = park(cache, state)
    with monkeypatch.context() as patch:
        fail_after(patch, cache, "load_blocks", after)
        with pytest.raises(MemoryError):
            resume(cache, state, parked)
    cache.pool.check()
    assert (cache.pool.num_used, len(cache.conditioning), state.num_blocks) == (0, 0, 0)
    resume(cache, state, parked)
    assert bytes_of(cache, state) == before


def fail_after(patch: pytest.MonkeyPatch, cache: KVCache, name: str, count: int) -> None:
    """Let a method of the storage work `count` times, then fail."""
    works, calls = getattr(cache.storage, name), iter(range(count))
    patch.setattr(cache.storage, name, lambda *given: works(*given) if next(calls, None) is not None else fail())


def test_without_room_nothing_comes_back_and_nothing_is_taken() -> None:
    cache = make(num_blocks=12)
    state = open_session(cache)
    parked = park(cache, state)
    held = cache.pool.allocate(12 - num_blocks_of(parked) + 1)
    assert held is not None
    with pytest.raises(OutOfBlocks, match="no room for 10 parked blocks; 9 of 12 are free"):
        begin_resume(cache, state, parked)
    assert cache.pool.num_used == len(held)
    cache.pool.release(held[:1])
    resume(cache, state, parked)
    assert cache.pool.num_free == 0


def test_conditioning_that_another_session_reads_is_shared_and_needs_no_room(cache: KVCache) -> None:
    state, other = open_session(cache, 1), cache.create_state()
    attach(cache, other, "text", "text 1", 1001)
    before, text = bytes_of(cache, state), other.branches["conditional"].conditioning["text"]
    parked, num_used = park(cache, state), cache.pool.num_used
    job = begin_resume(cache, state, parked)
    assert cache.pool.num_used == num_used + num_blocks_of(parked) - len(text.blocks)
    other.close()
    job.copy()
    finish_resume(cache, state, job)
    assert state.branches["conditional"].conditioning["text"] is text
    assert (bytes_of(cache, state), text.num_references) == (before, 2)
    state.close()
    assert (cache.pool.num_used, len(cache.conditioning)) == (0, 0)


@pytest.mark.parametrize("when", ["before the copy", "after the copy"])
def test_conditioning_that_is_published_while_it_is_copied_is_shared_and_our_blocks_go_back(
    cache: KVCache, when: str
) -> None:
    state, other = open_session(cache, 1), cache.create_state()
    before = bytes_of(cache, state)
    parked = park(cache, state)
    job = begin_resume(cache, state, parked)
    if when == "after the copy":
        job.copy()
    attach(cache, other, "text", "text 1", 1001)
    if when == "before the copy":
        job.copy()
    finish_resume(cache, state, job)
    text = other.branches["conditional"].conditioning["text"]
    assert {id(branch.conditioning["text"]) for branch in state.branches.values()} == {id(text)}
    assert (bytes_of(cache, state), text.num_references) == (before, 4)
    assert cache.pool.num_used == num_blocks_of(parked), "the blocks of what was copied twice did not go back"
    for each in (state, other):
        each.close()
    cache.pool.check()
    assert (cache.pool.num_used, len(cache.conditioning)) == (0, 0)


def test_two_sessions_that_come_back_together_store_what_they_share_once(cache: KVCache) -> None:
    states = [open_session(cache, 1), open_session(cache, 1)]
    before = [bytes_of(cache, state) for state in states]
    num_used = cache.pool.num_used
    parked = [park(cache, state) for state in states]
    jobs = [begin_resume(cache, state, kv) for state, kv in zip(states, parked, strict=True)]
    for state, job in reversed(list(zip(states, jobs, strict=True))):
        on_another_thread(job)
        finish_resume(cache, state, job)
    assert ([bytes_of(cache, state) for state in states], cache.pool.num_used) == (before, num_used)
    assert len(cache.conditioning) == 2


@pytest.mark.parametrize("copied", [False, True])
def test_coming_back_can_be_abandoned_and_holds_nothing_afterwards(cache: KVCache, copied: bool) -> None:
    state, other = open_session(cache, 1), cache.create_state()
    attach(cache, other, "text", "text 1", 1001)
    parked, num_used = park(cache, state), cache.pool.num_used
    job = begin_resume(cache, state, parked)
    if copied:
        job.copy()
    job.abandon()
    job.abandon()
    assert (cache.pool.num_used, state.num_blocks, len(cache.conditioning)) == (num_used, 0, 1)
    resume(cache, state, parked)


def test_other_branches_than_were_parked_are_refused(cache: KVCache) -> None:
    parked = park(cache, open_session(cache))
    with pytest.raises(ValueError, match=r"parked are branches \['conditional', 'unconditional'\], this state has"):
        begin_resume(cache, cache.create_state(("conditional",)), parked)
    assert cache.pool.num_used == 0
