"""Sessions in bytes: whatever process goes on with one computes what its own would have, bit for bit."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")

import causal  # noqa: E402
from engines import make_engine, make_inputs, pause, random_checkpoint, rest  # noqa: E402
from safetensors.torch import load as load_safetensors  # noqa: E402

from worldkv.engine.engine import Engine  # noqa: E402
from worldkv.errors import AdmissionRefused, BadRequest, SessionNotFound  # noqa: E402
from worldkv.models.causal_wan.random import TINY  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def tick(engine: Engine, session: Any, seed: int, prompt: int = 0) -> Any:
    return engine.submit(session, make_inputs(engine, seed, 1 if seed == 0 else 4, prompt)).result().result


def same(a: Any, b: Any) -> bool:
    videos = torch.equal(a.video_latents, b.video_latents) and torch.equal(a.observed_latents, b.observed_latents)
    return bool(np.array_equal(a.actions, b.actions)) and videos and a.restart_reason == b.restart_reason


def nothing_is_held(engine: Engine) -> bool:
    rest(engine)
    capacity = engine.capacity()
    engine.core.cache.pool.check()
    return capacity.num_charged == capacity.blocks_shared and engine.core.cache.pool.num_used == 0


@pytest.mark.parametrize(("kind", "policy"), [("i2v", "reset"), ("ti2v", "reset"), ("ti2v", "slide")])
def test_an_imported_session_goes_on_bit_for_bit_at_every_tick(kind: str, policy: str) -> None:
    here = make_engine(kind, block_size=16, window_policy=policy)
    there = make_engine(kind, block_size=32, window_policy=policy, max_sessions=2)
    session = here.open_session()
    prompts = [0, 0, 0, 0, 0, 0, 1, 1]
    for number, prompt in enumerate(prompts):
        export = here.export(session)
        if number % 3 == 2:
            here.park(session)
            assert here.export(session).to_bytes() == export.to_bytes(), "a parked session's export is another one"
        data = export.to_bytes()
        assert len(data) == export.num_bytes
        expected = tick(here, session, number, prompt)
        copy = there.import_session(data)
        fork = there.fork(copy)
        again = there.export(copy).to_bytes()
        assert same(tick(there, copy, number, prompt), expected), f"tick {number} in another engine"
        assert same(tick(there, fork, number, prompt), expected), f"tick {number} of a fork of it"
        there.close(copy, "done").result()
        there.close(fork, "done").result()
        assert nothing_is_held(there)
        twice = there.import_session(again)
        assert same(tick(there, twice, number, prompt), expected), f"tick {number} after two moves"
        there.close(twice, "done").result()
    here.close(session, "done").result()
    assert nothing_is_held(here)
    here.shutdown()
    there.shutdown()


@pytest.mark.parametrize("rope", ["absolute", "relative"])
def test_an_imported_video_goes_on_bit_for_bit_its_decoder_and_words_included(rope: str) -> None:
    settings = replace(TINY, rope=rope)
    here, there = causal.make_engine(settings, 16), causal.make_engine(settings, 64, max_sessions=2)
    session = here.open_session()
    plan = [{}, {}, {"switch": "blend", "blend_blocks": 3}, {}, {"switch": "keep"}, {}, {}]
    prompts = [0, 0, 1, 1, 2, 2, 0]
    for number, (prompt, more) in enumerate(zip(prompts, plan, strict=True)):
        data = here.export(session).to_bytes()
        request = causal.make_request(prompt, seed=4 if number == 0 else None, **more)
        expected = causal.run(here, session, request)
        copy = there.import_session(data)
        fork = there.fork(copy)
        assert causal.same(causal.run(there, copy, request), expected), f"block {number} in another engine"
        there.park(fork)
        assert causal.same(causal.run(there, fork, request), expected), f"block {number} of a parked fork"
        there.close(copy, "done").result()
        there.close(fork, "done").result()
        assert nothing_is_held(there)
    here.shutdown()
    there.shutdown()


OTHER_PROCESS = """
import sys, warnings, hashlib
warnings.simplefilter("ignore")
from pathlib import Path
from worldkv.engine.engine import EngineConfig
from worldkv.load import load_engine
import engines
folder, export = map(Path, sys.argv[1:])
engine = load_engine(folder, EngineConfig(max_sessions=1, block_size=64))
session = engine.import_session(export.read_bytes(), "moved")
result = engine.submit(session, engines.make_inputs(engine, 3)).result().result
print(hashlib.sha256(result.actions.tobytes() + result.video_latents.numpy().tobytes()).hexdigest())
engine.shutdown()
"""


def test_a_session_survives_its_process(tmp_path: Path) -> None:
    import hashlib

    engine = make_engine("ti2v", block_size=16)
    session = engine.open_session()
    for seed in range(3):
        tick(engine, session, seed)
    (tmp_path / "export").write_bytes(engine.export(session).to_bytes())
    expected = tick(engine, session, 3)
    engine.shutdown()
    digest = hashlib.sha256(expected.actions.tobytes() + expected.video_latents.numpy().tobytes()).hexdigest()
    paths = f"import sys; sys.path[:0] = {[str(Path(__file__).parents[1]), *sys.path]!r}\n"
    arguments = [str(random_checkpoint("ti2v")), str(tmp_path / "export")]
    done = subprocess.run(
        [sys.executable, "-c", paths + OTHER_PROCESS, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout.strip() == digest, done.stderr[-2000:]


def test_an_export_waits_for_its_turn_and_the_next_tick_for_it() -> None:
    engine = make_engine("ti2v", block_size=16)
    session = engine.open_session()
    tick(engine, session, 0)
    go_on = pause(engine)
    first = engine.submit(session, make_inputs(engine, 1))
    export = engine.begin_export(session)
    second = engine.submit(session, make_inputs(engine, 2), waits_its_turn=True)
    go_on.set()
    copy = engine.import_session(export.result().to_bytes())
    first.result()
    assert same(tick(engine, copy, 2), second.result().result), "the export is not of the moment between the two"
    engine.shutdown()


def test_an_import_that_finds_no_room_leaves_nothing_behind() -> None:
    engine = make_engine("ti2v", block_size=16, max_sessions=1, park_when_full=False)
    session = engine.open_session("mine")
    tick(engine, session, 0)
    data = engine.export(session).to_bytes()
    used = engine.core.cache.pool.num_used
    with pytest.raises(AdmissionRefused):
        engine.import_session(data, "other")
    with pytest.raises(BadRequest, match="open already"):
        engine.import_session(data, "mine")
    assert engine.core.cache.pool.num_used == used
    engine.close(session, "done").result()
    assert nothing_is_held(engine)
    with pytest.raises(SessionNotFound):
        engine.export(session)
    again = engine.import_session(data, "other")
    assert tick(engine, again, 1).restart_reason is None
    engine.close(again, "done").result()
    assert nothing_is_held(engine)
    engine.shutdown()


def test_an_import_changes_nobody_else_s_conditioning() -> None:
    """Whoever makes up K/V for a prompt must not be read by sessions of that prompt."""
    engine = make_engine("ti2v", block_size=16, max_sessions=3)
    session = engine.open_session()
    expected = [tick(engine, session, seed) for seed in range(2)]
    data = engine.export(session).to_bytes()
    engine.close(session, "done").result()
    copy = engine.import_session(data, trusts=False)
    store = engine.core.cache.conditioning
    assert not any(key.startswith(("text:", "image:")) for key in store._entries), "found by its key"
    other = engine.open_session()
    hits = store.num_hits
    assert same(tick(engine, other, 0), expected[0])
    assert store.num_hits - hits <= 1, "another session reads what was imported"
    assert same(tick(engine, other, 1), expected[1])
    capacity = engine.capacity()
    assert capacity.num_charged == 2 * capacity.blocks_per_session + 2 * capacity.blocks_shared
    snapshot = engine.snapshot(copy)
    engine.restore(other, snapshot)
    assert same(tick(engine, other, 2), tick(engine, copy, 2))
    engine.release(snapshot)
    for each in (copy, other):
        engine.close(each, "done").result()
    assert nothing_is_held(engine)
    engine.shutdown()


def test_an_export_is_a_safetensors_file() -> None:
    engine = make_engine("ti2v", block_size=16)
    session = engine.open_session()
    tick(engine, session, 0)
    tensors = load_safetensors(engine.export(session).to_bytes())
    assert "state.prediction" in tensors
    engine.shutdown()
