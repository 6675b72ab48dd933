"""A tick whose observation was encoded and committed before it was asked for: equal to the bit to one that was not."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")

from engines import inside, make_engine, make_inputs, rest  # noqa: E402

from worldkv.models.base import Encode, Forward, Request  # noqa: E402
from worldkv.models.world_action import TickResult  # noqa: E402

# (frames, prompt) of each tick: two window restarts, a change of prompt, a single frame in between, eight frames
EPISODE = [
    (1, 0),
    (4, 0),
    (4, 0),
    (4, 0),
    (4, 0),
    (4, 0),
    (4, 1),
    (4, 1),
    (1, 1),
    (8, 1),
    (4, 1),
    (4, 1),
    (4, 1),
    (4, 1),
]


def assert_equal(got: TickResult, expected: TickResult) -> None:
    assert np.array_equal(got.actions, expected.actions)
    assert torch.equal(got.video_latents, expected.video_latents)
    assert torch.equal(got.observed_latents, expected.observed_latents)
    assert (got.restart_reason, got.start_frame) == (expected.restart_reason, expected.start_frame)


def begun_inputs(inputs: Any) -> Any:
    """What is known of it ahead: no state of the robot."""
    return dataclasses.replace(inputs, state=np.zeros_like(inputs.state))


@pytest.mark.parametrize(("window_policy", "kind"), [("reset", "i2v"), ("reset", "ti2v"), ("slide", "ti2v")])
def test_ticks_that_begin_ahead_are_equal_to_the_bit(kind: str, window_policy: str) -> None:
    """Some right, some with other frames or another prompt, of which nothing may remain."""
    engine = make_engine(kind, window_policy=window_policy, max_sessions=2, park_when_full=False)
    plain, ahead = engine.open_session(), engine.open_session()
    rng = random.Random(0)
    reasons = []
    for number, (num_frames, prompt) in enumerate(EPISODE):
        inputs = make_inputs(engine, number, num_frames, prompt)
        guess = rng.choice(["right", "right", "other frames", "other prompt", "twice"])
        if guess in ("other frames", "twice"):
            engine.work_ahead(ahead, begun_inputs(make_inputs(engine, 1000 + number, num_frames, prompt))).result(60)
        elif guess == "other prompt":
            engine.work_ahead(ahead, begun_inputs(make_inputs(engine, number, num_frames, 7))).result(60)
        if guess in ("right", "twice"):
            engine.work_ahead(ahead, begun_inputs(inputs)).result(60)
        expected, got = (engine.submit(session, inputs).result(60) for session in (plain, ahead))
        assert ("commit" in got.info.timings) == (guess not in ("right", "twice"))
        assert_equal(got.result, expected.result)
        reasons.append(expected.result.restart_reason)
    wanted = {"first tick", "prompt changed", "single frame"} | ({"window full"} if window_policy == "reset" else set())
    assert set(reasons) - {None} == wanted, "the episode is to have every kind of tick"
    for branch in ("conditional", "unconditional"):
        for layer in (0, 1):
            pairs = [inside(engine, session).kv.layer_kv(branch, layer) for session in (plain, ahead)]
            assert all(torch.equal(one, other) for one, other in zip(*pairs, strict=True))
    for session in (plain, ahead):
        engine.close(session, "test")
    rest(engine)
    engine.shutdown()
    assert engine.core.cache.pool.num_used == 0


def test_a_reply_after_a_beginning_encodes_nothing_and_commits_nothing() -> None:
    ran: list[Request] = []
    engine = make_engine("i2v", observer=lambda kv, request, result: ran.append(request))
    session = engine.open_session()
    for number, (num_frames, prompt) in enumerate(EPISODE[:6]):
        inputs = make_inputs(engine, number, num_frames, prompt)
        engine.work_ahead(session, begun_inputs(inputs)).result(60)
        ran.clear()
        engine.submit(session, inputs).result(60)
        assert not [each for each in ran if isinstance(each, Encode)]
        assert {each.stage for each in ran if isinstance(each, Forward)} == {"denoise"}
    engine.shutdown()


def test_an_imagined_tick_takes_nothing_of_what_was_begun_with_frames() -> None:
    engine = make_engine("ti2v", max_sessions=2)
    sessions = [engine.open_session() for _ in range(2)]
    first, imagined = make_inputs(engine, 0, 1), dataclasses.replace(make_inputs(engine, 0), frames=None)
    for session in sessions:
        engine.submit(session, first).result(60)
    engine.work_ahead(sessions[1], make_inputs(engine, 1)).result(60)
    expected, got = (engine.submit(session, imagined).result(60).result for session in sessions)
    assert_equal(got, expected)
    engine.shutdown()
