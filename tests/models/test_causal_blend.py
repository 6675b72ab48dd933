"""A prompt that another one goes over into, block by block."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")

from causal import make_engine, make_request, run, same  # noqa: E402
from engines import inside  # noqa: E402

from worldkv.models.causal_wan.config import BRANCH  # noqa: E402


def begun(engine: Any, num_blocks: int = 2) -> Any:
    session = engine.open_session()
    for _ in range(num_blocks):
        run(engine, session, make_request(0, seed=2))
    return session


def embedding(engine: Any, prompt: int) -> Any:
    request = make_request(prompt)
    return engine.model.encoders.text.encode(request.token_ids, request.attention_mask)[0]


def text_in_force(engine: Any, session: Any) -> list[Any]:
    """Layer by layer K and V."""
    kv = inside(engine, session).kv
    entry = kv.conditioning(BRANCH)["text"]
    storage = kv.cache.storage
    slots = torch.arange(entry.num_tokens).numpy()
    return [t for layer in range(2) for t in storage.gather(layer, entry.blocks, slots)]


def projected(engine: Any, text: Any) -> list[Any]:
    return [t for kv in engine.model.dit.project_text(text) for t in kv]


def assert_text(engine: Any, session: Any, expected: Any) -> None:
    ours = text_in_force(engine, session)
    assert all(torch.allclose(*pair, atol=1e-6) for pair in zip(ours, projected(engine, expected), strict=True))


def blend(prompt: int, num_blocks: int = 4, **more: Any) -> Any:
    return make_request(prompt, switch="blend", blend_blocks=num_blocks, **more)


def test_each_block_has_its_share_of_the_new_prompt_and_history_is_kept() -> None:
    engine = make_engine(decodes=False)
    session = begun(engine)
    old, new = embedding(engine, 0), embedding(engine, 1)
    for number in range(6):
        before = torch.stack(inside(engine, session).kv.layer_kv(BRANCH, 1))[:, : 3 * 6]
        block = run(engine, session, blend(1) if number == 0 else make_request(1))
        share = min(1.0, (number + 1) / 4)
        assert_text(engine, session, (1 - share) * old + share * new)
        assert block.num_recached == 0
        assert torch.equal(torch.stack(inside(engine, session).kv.layer_kv(BRANCH, 1))[:, : 3 * 6], before), "the sink"
        assert (inside(engine, session).state.blend is None) == (number >= 3)
    engine.shutdown()


def test_at_its_end_it_is_the_prompt_s_own_entry() -> None:
    engine = make_engine(decodes=False)
    blended, kept = begun(engine), begun(engine)
    for switch in (blend(1, 2), make_request(1)):
        run(engine, blended, switch)
    for _ in range(2):
        run(engine, kept, make_request(1, switch="keep"))
    entries = [inside(engine, session).kv.conditioning(BRANCH)["text"] for session in (blended, kept)]
    assert entries[0] is entries[1]
    for session in (blended, kept):
        engine.close(session, "done").result()
    assert engine.core.cache.pool.num_used == 0, "a mixture is kept after its session"
    engine.shutdown()


def test_within_one_block_it_is_keep() -> None:
    engine = make_engine(decodes=False)
    one, other = begun(engine), begun(engine)
    assert same(run(engine, one, blend(1, 1)), run(engine, other, make_request(1, switch="keep")))
    engine.shutdown()


def test_another_prompt_in_between_goes_on_from_the_mixture() -> None:
    engine = make_engine(decodes=False)
    session = begun(engine)
    old, new, newer = (embedding(engine, prompt) for prompt in range(3))
    run(engine, session, blend(1))
    run(engine, session, blend(1))
    run(engine, session, blend(2, 2))
    mixture = 0.5 * old + 0.5 * new
    assert_text(engine, session, 0.5 * mixture + 0.5 * newer)
    run(engine, session, blend(0, 2))
    assert_text(engine, session, 0.5 * (0.5 * mixture + 0.5 * newer) + 0.5 * old)
    block = run(engine, session, make_request(1))
    assert_text(engine, session, new)
    assert block.num_recached == 9, "recache is at once, and for good"
    assert inside(engine, session).state.blend is None
    engine.shutdown()


@pytest.mark.parametrize("block_size", [16, 64])
def test_forks_snapshots_and_parked_sessions_go_on_with_it(block_size: int) -> None:
    engine = make_engine(block_size=block_size)
    session = begun(engine)
    run(engine, session, blend(1))
    snapshot, fork = engine.snapshot(session), engine.fork(session)
    following = [make_request(1), blend(2, 3), make_request(2), make_request(2), make_request(2)]
    engine.model.texts._embeddings.clear()  # what a session needs it knows itself
    expected = [run(engine, session, request) for request in following]
    engine.park(fork)
    engine.model.texts._embeddings.clear()
    assert all(same(run(engine, fork, r), block) for r, block in zip(following, expected, strict=True))
    engine.restore(session, snapshot)
    engine.model.texts._embeddings.clear()
    assert all(same(run(engine, session, r), block) for r, block in zip(following, expected, strict=True))
    assert len(engine.core.cache.conditioning._entries) <= 4, "mixtures of the past are kept"
    engine.shutdown()


def test_a_block_that_fails_leaves_the_mixture_as_it_was() -> None:
    engine = make_engine(decodes=False)
    session = begun(engine)
    run(engine, session, blend(1))
    whole, used = engine.fork(session), engine.stats().blocks_used
    expected = run(engine, whole, make_request(1))
    engine.close(whole, "done").result()
    forward, calls = engine.model.forward, []

    def fails(cache: Any, rows: Any) -> Any:
        calls.append(forward(cache, rows))
        if len(calls) == 3:
            raise RuntimeError("fails once")
        return calls[-1]

    engine.model.forward = fails
    with pytest.raises(RuntimeError, match="fails once"):
        run(engine, session, make_request(1))
    assert engine.stats().blocks_used == used
    assert same(run(engine, session, make_request(1)), expected)
    engine.shutdown()


def test_the_first_prompt_of_a_session_is_at_once() -> None:
    engine = make_engine(decodes=False)
    one, other = engine.open_session(), engine.open_session()
    assert same(run(engine, one, blend(1)), run(engine, other, make_request(1)))
    assert inside(engine, one).state.blend is None
    engine.shutdown()
