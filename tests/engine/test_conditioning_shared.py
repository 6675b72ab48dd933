"""Equal conditioning is stored once: sixteen sessions with two prompts hold the text of two, and its true K/V."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")

from engines import inside, make_engine, make_inputs, rest  # noqa: E402

from worldkv.engine.engine import Engine  # noqa: E402
from worldkv.kv.block_table import blocks_for  # noqa: E402
from worldkv.models.dreamzero.model import CONDITIONAL, UNCONDITIONAL  # noqa: E402

SESSIONS, PROMPTS, BLOCK = 16, 2, 8


@pytest.fixture(params=["ti2v", "i2v"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    engine = make_engine(request.param, block_size=BLOCK, max_sessions=SESSIONS)
    yield engine
    engine.shutdown()
    assert len(engine.core.cache.conditioning) == 0
    assert engine.core.cache.pool.num_used == 0
    engine.core.cache.pool.check()


def first_tick(engine: Engine, number: int, own_image: bool = True) -> Any:
    """A new session, robot `number`: every other one has the same prompt."""
    session = engine.open_session()
    inputs = make_inputs(engine, number if own_image else 0, num_frames=1, prompt=number % PROMPTS)
    engine.submit(session, inputs).result()
    return session


def blocks_of(engine: Engine, half: str) -> int:
    """Blocks that the K/V of one entry takes."""
    return blocks_for(engine.core.cache.spec.conditioning[half], BLOCK)


def text_blocks(engine: Engine, sessions: Iterable[Any]) -> set[int]:
    """All blocks in which these sessions find the text of their branches."""
    branches = [branch for session in sessions for branch in inside(engine, session).kv.branches.values()]
    return {int(block) for branch in branches for block in branch.conditioning["text"].blocks}


def referenced_bytes(engine: Engine) -> int:
    """Of the tensors: the blocks to which somebody refers."""
    pool, storage = engine.core.cache.pool, engine.core.cache.storage
    held = [block for block in range(pool.num_blocks) if pool.num_references(block)]
    return sum(tensor[held].nbytes for tensor in (*storage.k, *storage.v))


@pytest.mark.parametrize(
    ("engine", "own_image", "at_once"),
    [("ti2v", True, False), ("ti2v", True, True), ("ti2v", False, True), ("i2v", True, True), ("i2v", False, True)],
    indirect=["engine"],
)
def test_sixteen_sessions_with_two_prompts_store_the_text_of_two(
    engine: Engine, own_image: bool, at_once: bool
) -> None:
    alone = first_tick(engine, 0)
    rest(engine)
    num_alone, bytes_alone = engine.core.cache.pool.num_used, referenced_bytes(engine)
    engine.close(alone, "it was measured")
    rest(engine)
    assert engine.core.cache.pool.num_used == 0
    before = engine.stats()

    if at_once:
        sessions = [engine.open_session() for _ in range(SESSIONS)]
        inputs = [make_inputs(engine, n if own_image else 0, 1, prompt=n % PROMPTS) for n in range(SESSIONS)]
        for future in [engine.submit(s, x) for s, x in zip(sessions, inputs, strict=True)]:
            future.result()
    else:
        sessions = [first_tick(engine, number, own_image) for number in range(SESSIONS)]

    capacity, stats = engine.capacity(), engine.stats()
    text, image = blocks_of(engine, "text"), blocks_of(engine, "image")
    num_images = SESSIONS if own_image else 1
    saved = (SESSIONS * 2 - PROMPTS - 1) * text + (SESSIONS - num_images) * image  # the 1: everybody's negative prompt
    assert len(text_blocks(engine, sessions)) == (PROMPTS + 1) * text, (
        "text is stored once for a prompt, not for a session"
    )
    assert capacity.num_used == engine.core.cache.pool.num_used == stats.blocks_used == SESSIONS * num_alone - saved
    assert capacity.bytes_per_block * capacity.num_blocks == engine.core.cache.storage.num_bytes, (
        "books and tensors differ"
    )
    assert referenced_bytes(engine) == capacity.num_used * capacity.bytes_per_block
    assert referenced_bytes(engine) == SESSIONS * bytes_alone - saved * capacity.bytes_per_block
    assert capacity.blocks_shared == text, "the negative prompt is charged once"
    num_projected = stats.conditioning_misses - before.conditioning_misses
    num_found = stats.conditioning_hits - before.conditioning_hits
    assert num_projected == PROMPTS + 1 + num_images
    assert num_projected + num_found == SESSIONS * 3, "two texts and an image a session, each found or projected"
    assert capacity.num_used <= capacity.num_charged == capacity.blocks_shared + SESSIONS * capacity.blocks_per_session


def test_what_the_blocks_hold_is_what_the_model_projects(engine: Engine) -> None:
    sessions = [first_tick(engine, number) for number in range(4)]
    for number, session in enumerate(sessions):
        inputs = make_inputs(engine, number, num_frames=1, prompt=number % PROMPTS)
        prompts = {CONDITIONAL: (inputs.token_ids, inputs.attention_mask), UNCONDITIONAL: engine.model.negative_prompt}
        with torch.no_grad():
            feature = engine.model.encode("image", [(engine.model.encoding.pixels(inputs.frames)[:, :, 0],)])[0]
            for branch, prompt in prompts.items():
                halves = inside(engine, session).kv.branches[branch].conditioning
                embedding = engine.model.encode("text", [tuple(torch.from_numpy(part) for part in prompt)])[0]
                assert_holds(engine, halves["text"], engine.model.dit.project_text(embedding[0]))
                assert_holds(engine, halves["image"], engine.model.dit.project_image(feature[0]))
    first, second = (
        inside(engine, sessions[number]).kv.branches[CONDITIONAL].conditioning["text"] for number in (0, 1)
    )
    assert not np.array_equal(*(engine.core.cache.storage.k[0][entry.blocks] for entry in (first, second)))


def assert_holds(engine: Engine, entry: Any, layers: Iterable[tuple[Any, Any]]) -> None:
    for layer, (k, v) in enumerate(layers):
        stored_k, stored_v = engine.core.cache.storage.gather(layer, entry.blocks, np.arange(entry.num_tokens))
        assert torch.equal(stored_k, k), f"other K than projected in layer {layer}"
        assert torch.equal(stored_v, v), f"other V than projected in layer {layer}"


def test_an_entry_lives_as_long_as_its_last_reader_and_comes_back_from_the_host_once(engine: Engine) -> None:
    sessions = [first_tick(engine, number) for number in range(4)]
    held, text = text_blocks(engine, sessions), blocks_of(engine, "text")
    for session in sessions[2:]:
        engine.close(session, "done")
    rest(engine)
    assert text_blocks(engine, sessions[:2]) == held, "an entry moved or went although it is read"

    num_projected = engine.stats().conditioning_misses
    inputs = make_inputs(engine, 99, 1, prompt=1)
    engine.submit(sessions[0], inputs).result()
    assert engine.stats().conditioning_misses == num_projected + 1, "the new image only: the other prompt is stored"
    assert len(text_blocks(engine, sessions[:2])) == 2 * text, "nobody reads the first prompt any more"

    for session in sessions[:2]:
        engine.park(session)
    assert engine.core.cache.pool.num_used == len(engine.core.cache.conditioning) == 0
    for session in sessions[:2]:
        engine.submit(session, make_inputs(engine, 100, 4, prompt=1)).result()
    assert len(text_blocks(engine, sessions[:2])) == 2 * text, "what was parked twice came back twice"
