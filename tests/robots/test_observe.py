"""Frames that are sent as they are taken, ahead of their request: the reply is the plain request's, bit for bit."""

from __future__ import annotations

import logging
import random
import time
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")

import policy_fakes as fakes  # noqa: E402
from engines import droid_observation, inside, random_checkpoint, rest  # noqa: E402

from worldkv.app import KeptAhead  # noqa: E402
from worldkv.engine.engine import EngineConfig  # noqa: E402
from worldkv.errors import BadRequest, OutOfBlocks  # noqa: E402
from worldkv.load import load_policy  # noqa: E402
from worldkv.robots.policy import Policy, PolicyReply, PolicySession  # noqa: E402

TIMEOUT = 60
BETWEEN = [*["nothing"] * 6, "park", "snapshot", "reset", "imagine", "failure", "all"]
SIZE = (45, 80)  # of the cameras' aspect: less to resize


@pytest.fixture(scope="module")
def policies() -> Iterator[dict[str, Policy]]:
    made = {}
    for kind in ("i2v", "ti2v"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # the byte-level tokenizer
            config = EngineConfig(max_sessions=4, batch_invariant=True)
            made[kind] = load_policy(random_checkpoint(kind), config)
    yield made
    for policy in made.values():
        policy.close()
        policy.engine.shutdown()


@pytest.fixture
def policy(policies: dict[str, Policy]) -> Policy:
    return policies["ti2v"]


@pytest.fixture(autouse=True)
def _no_session_is_left_open(policies: dict[str, Policy]) -> Iterator[None]:
    yield
    for policy in policies.values():
        _close_all(policy)
        rest(policy.engine)


def _close_all(policy: Policy) -> None:
    for handle in policy.engine.inspect(lambda core: list(core.sessions)):
        policy.engine.close(handle, "test").result(TIMEOUT)


def taken(seed: int, num_frames: int, prompt: str = "stack the cups") -> dict[str, Any]:
    return droid_observation(np.random.default_rng(seed), num_frames, prompt, SIZE)


def frames_of(observation: dict[str, Any], start: int, stop: int) -> dict[str, Any]:
    """Its cameras alone, of these frames."""
    return {name: value[start:stop] for name, value in observation.items() if "image" in name}


def rest_of(observation: dict[str, Any], num_ahead: int) -> dict[str, Any]:
    """What is left to be asked once so many frames were sent ahead."""
    images = frames_of(observation, num_ahead, 99)
    left = {name: value for name, value in images.items() if len(value)}
    others = {name: value for name, value in observation.items() if name not in images}
    return {**others, **left, "frames_ahead": num_ahead}


def observe(policy: Policy, session: PolicySession, fields: dict[str, Any]) -> KeptAhead[Any]:
    return session.observe(policy.read_ahead(fields)).result(TIMEOUT)


def infer(policy: Policy, session: PolicySession, fields: dict[str, Any]) -> PolicyReply:
    return session.infer(policy.read(fields)).result(TIMEOUT)


def send_ahead(policy: Policy, session: PolicySession, whole: dict[str, Any], counts: list[int]) -> dict[str, Any]:
    """Send so many frames of `whole` in one message each; returns what is left to be asked."""
    sent = 0
    for count in counts:
        prompt = {"prompt": whole["prompt"]}
        kept = observe(policy, session, frames_of(whole, sent, sent + count) | prompt)
        sent += count
        assert kept.num_frames == sent
    return rest_of(whole, sent) if sent else whole


def await_begun(policy: Policy, session: PolicySession) -> None:
    deadline = time.monotonic() + TIMEOUT
    while inside(policy.engine, session.handle).ahead is None:
        assert time.monotonic() < deadline, "its tick has not begun"


def assert_equal(got: PolicyReply, expected: PolicyReply) -> None:
    assert np.array_equal(got.actions, expected.actions)
    assert torch.equal(got.result.video_latents, expected.result.video_latents)
    assert torch.equal(got.result.observed_latents, expected.result.observed_latents)
    facts = [{k: v for k, v in each.facts.items() if not k.startswith("blocks")} for each in (got, expected)]
    assert facts[0] == facts[1]
    assert got.observation is not None
    assert expected.observation is not None
    assert got.observation.num_frames == expected.observation.num_frames
    for name, frames in expected.observation.frames.items():
        assert np.array_equal(got.observation.frames[name], frames), "recordings hold the tick's frames"


@pytest.mark.parametrize(("kind", "seed"), [("ti2v", 0), ("ti2v", 1)])  # i2v: tests/models/test_dreamzero_ahead.py
def test_any_mix_of_frames_ahead_is_answered_as_the_plain_request(
    policies: dict[str, Policy], kind: str, seed: int
) -> None:
    """Two robots in turns, each beside a plain one; restarts, prompts, resets, parking, snapshots, imagination."""
    policy, rng = policies[kind], random.Random(seed)
    pairs = [(policy.open_session(f"plain {n}"), policy.open_session(f"ahead {n}")) for n in range(2)]
    prompts, begun = ["stack the cups"] * 2, 0
    for number in range(20):
        n = rng.randrange(2)
        plain, ahead = pairs[n]
        prompts[n] = rng.choice([*[prompts[n]] * 4, "pour the tea"])
        whole = taken(100 * seed + number, rng.choice([1, 2, 4, 4, 4]), prompts[n])
        num_frames = len(whole["observation/wrist_image_left"])
        counts: list[int] = []
        while sum(counts) < num_frames and rng.random() < 0.97:
            counts.append(rng.randint(1, num_frames - sum(counts)))
        left = send_ahead(policy, ahead, whole, counts)
        between = rng.choice(
            ["nothing", "nothing", "nothing", "park", "snapshot", "reset", "imagine", "failure", "all"]
        )
        if between == "park":
            ahead.park()
        elif between == "snapshot":
            frozen = ahead.snapshot()
            if sum(counts) < 4:
                observe(policy, ahead, frames_of(taken(9, 1), 0, 1))
            ahead.restore(frozen)
            policy.release(frozen)
        elif between == "reset":
            for session in (plain, ahead):
                session.reset()
            left = whole
        elif between == "imagine" and plain.describe()["frames_seen"]:
            for session in (plain, ahead):
                session.imagine().result(TIMEOUT)
        elif between == "failure":
            with pytest.raises(BadRequest):
                infer(policy, ahead, {**left, "frames_ahead": 3 + sum(counts)})
        elif between == "all":
            left = whole  # as if nothing had been sent ahead: the newest frames count
        expected, got = infer(policy, plain, whole), infer(policy, ahead, left)
        if between == "all" and counts and num_frames < 4:
            _match(policy, plain, ahead)  # a mix that the plain request cannot have
            continue
        assert_equal(got, expected)
        begun += "commit" not in got.timings
    assert begun >= 3, "some of the ticks were to begin ahead"


def _match(policy: Policy, plain: PolicySession, ahead: PolicySession) -> None:
    for session in (plain, ahead):
        session.reset()
        infer(policy, session, taken(0, 1))
        infer(policy, session, taken(1, 4))


def test_a_reply_whose_frames_came_ahead_waits_for_denoising_only(policy: Policy) -> None:
    session = policy.open_session()
    for number in range(6):
        whole = taken(number, 4 if number else 1)
        left = send_ahead(policy, session, whole, [1] * (4 if number else 1))
        await_begun(policy, session)
        reply = infer(policy, session, left)
        assert set(reply.timings) == {"queue", "preprocess", "denoise", "postprocess", "total"}


def test_a_request_with_a_frame_too_many_has_the_newest_and_takes_back_what_began(policy: Policy) -> None:
    plain, ahead = policy.open_session(), policy.open_session()
    for session in (plain, ahead):
        infer(policy, session, taken(0, 1))
    five = {name: np.concatenate([taken(1, 4)[name], value]) for name, value in frames_of(taken(2, 1), 0, 1).items()}
    expected = infer(policy, plain, {**taken(1, 4), **five})
    send_ahead(policy, ahead, taken(1, 4), [1, 1, 1, 1])
    await_begun(policy, ahead)
    assert_equal(infer(policy, ahead, {**taken(1, 4), **frames_of(taken(2, 1), 0, 1), "frames_ahead": 4}), expected)


def test_a_fork_goes_on_with_the_frames_that_were_sent_ahead(policy: Policy) -> None:
    plain, ahead = policy.open_session(), policy.open_session()
    for session in (plain, ahead):
        infer(policy, session, taken(0, 1))
    left = send_ahead(policy, ahead, taken(1, 4), [2, 2])
    fork = policy.fork(ahead)
    expected = infer(policy, plain, taken(1, 4))
    assert_equal(infer(policy, fork, left), expected)
    assert_equal(infer(policy, ahead, left), expected)


def test_another_prompt_than_the_frames_were_sent_with_starts_the_window_as_ever(policy: Policy) -> None:
    plain, ahead = policy.open_session(), policy.open_session()
    for session in (plain, ahead):
        infer(policy, session, taken(0, 1))
    left = send_ahead(policy, ahead, taken(1, 4), [4])
    expected = infer(policy, plain, taken(1, 4, "pour the tea"))
    assert expected.result.restart_reason == "prompt changed"
    assert_equal(infer(policy, ahead, {**left, "prompt": "pour the tea"}), expected)


def test_a_beginning_that_fails_is_made_up_for_by_the_request(
    policy: Policy, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plain, ahead = policy.open_session(), policy.open_session("arm")
    for session in (plain, ahead):
        infer(policy, session, taken(0, 1))
    model = policy.engine.core.model

    def fail(*_: object) -> None:
        raise OutOfBlocks("no room now")

    with monkeypatch.context() as patched, caplog.at_level(logging.WARNING, "worldkv"):
        patched.setattr(model, "forward", fail)
        left = send_ahead(policy, ahead, taken(1, 4), [3, 1])
        while "session arm: its next tick could not begin ahead: no room now" not in caplog.text:
            rest(policy.engine)
    expected = infer(policy, plain, taken(1, 4))
    assert_equal(infer(policy, ahead, left), expected)


def test_a_request_that_fails_keeps_the_frames_for_its_retry(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, ahead = policy.open_session(), policy.open_session()
    for session in (plain, ahead):
        infer(policy, session, taken(0, 1))
    left = send_ahead(policy, ahead, taken(1, 4), [4])
    await_begun(policy, ahead)

    def fail(*_: object) -> None:
        raise OutOfBlocks("no room now")

    with monkeypatch.context() as patched:
        patched.setattr(policy.engine.core.model, "forward", fail)
        with pytest.raises(OutOfBlocks):
            infer(policy, ahead, left)
    expected = infer(policy, plain, taken(1, 4))
    assert_equal(infer(policy, ahead, left), expected)


def test_a_request_in_process_may_be_a_map(policy: Policy) -> None:
    session = policy.open_session()
    left = send_ahead(policy, session, taken(0, 1), [1])
    await_begun(policy, session)
    assert "commit" not in session.infer(left).result(TIMEOUT).timings


def test_no_more_frames_are_kept_than_a_tick_takes(policy: Policy) -> None:
    session = policy.open_session()
    infer(policy, session, taken(0, 1))
    send_ahead(policy, session, taken(1, 3), [2, 1])
    wrong = "observe: expected at most 4 frames of each camera between two requests.*3 wait already and 2 more came"
    with pytest.raises(BadRequest, match=wrong):
        observe(policy, session, frames_of(taken(2, 2), 0, 2))
    assert observe(policy, session, frames_of(taken(2, 1), 0, 1)).num_frames == 4, "nothing was kept of it"


@pytest.mark.parametrize(("told", "said"), [(3, "expected 2"), (0, "wrist_image_left: missing|exterior_image_0_left")])
def test_a_request_that_counts_other_frames_than_came_is_refused(policy: Policy, told: int, said: str) -> None:
    session = policy.open_session()
    left = send_ahead(policy, session, taken(0, 2), [2])
    with pytest.raises(BadRequest, match=said):
        infer(policy, session, {**left, "frames_ahead": told})
    assert infer(policy, session, left).actions.any()


def test_frames_without_a_prompt_wait_for_the_first_request(policy: Policy) -> None:
    session = policy.open_session()
    assert observe(policy, session, frames_of(taken(0, 1), 0, 1)).begin is None
    assert "commit" in infer(policy, session, rest_of(taken(0, 1), 1)).timings
    kept = observe(policy, session, frames_of(taken(1, 4), 0, 4))
    assert kept.begin is not None, "later ones are probably for the same prompt"


def test_frames_for_a_model_that_cannot_work_ahead_are_kept_and_told_as_one_request() -> None:
    model = fakes.FakeModel()
    policy = fakes.make_policy(model)
    plain, ahead = policy.open_session(), policy.open_session()
    infer(policy, plain, fakes.observation(0))
    infer(policy, ahead, fakes.observation(0))
    whole = fakes.observation(1, 4)
    expected = infer(policy, plain, whole)
    assert [observe(policy, ahead, frames_of(whole, n, n + 1)).begin for n in range(4)] == [None] * 4
    assert np.array_equal(infer(policy, ahead, rest_of(whole, 4)).actions, expected.actions)
    assert np.array_equal(model.submitted[-1].frames, model.submitted[-2].frames)
    fakes.end(policy)


def test_a_missing_camera_is_black_in_the_frames_that_came_without_it() -> None:
    model = fakes.FakeModel()
    policy = fakes.make_policy(model)
    session = policy.open_session()
    infer(policy, session, fakes.observation(0))
    whole, optional = fakes.observation(1, 4), "observation/exterior_image_1_left"
    first = observe(policy, session, {k: v for k, v in frames_of(whole, 0, 2).items() if k != optional})
    assert "black view" in first.warnings[0]
    assert observe(policy, session, frames_of(whole, 2, 4)).warnings == ()
    reply = infer(policy, session, rest_of(whole, 4))
    assert reply.warnings == ()
    assert reply.observation is not None
    second = reply.observation.frames["exterior_image_2_left"]
    assert second is not None
    assert not second[:2].any()
    assert np.array_equal(second[2:], whole[optional][2:])
    fakes.end(policy)
