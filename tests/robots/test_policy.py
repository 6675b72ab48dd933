"""Sessions of a policy: frame buffers, failure and retry, interleaving, reset and close at every stage."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, wait

import numpy as np
import policy_fakes as fakes
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from worldkv.engine.engine import Health
from worldkv.errors import (
    BadRequest,
    EngineStopped,
    OutOfBlocks,
    SessionBusy,
    SessionEnded,
    SessionNotFound,
    WorldKVError,
)
from worldkv.robots.policy import Policy, PolicyReply, PolicySession
from worldkv.robots.tiling import tile_views
from worldkv.robots.transforms import prepare_view

TIMEOUT = 10


@pytest.fixture
def model() -> fakes.FakeModel:
    return fakes.FakeModel()


@pytest.fixture
def policy(model: fakes.FakeModel) -> Iterator[Policy]:
    policy = fakes.make_policy(model)
    yield policy
    fakes.end(policy)


def _run(session: PolicySession, *args, **changes) -> PolicyReply:
    return session.infer(fakes.observation(*args, **changes)).result(TIMEOUT)


def _tiled(frames: list[dict], policy: Policy) -> np.ndarray:
    """What the model should see of these single-frame observations."""
    robot = policy.embodiment
    fields = ("exterior_image_0_left", "exterior_image_1_left", "wrist_image_left")
    stacks = [np.concatenate([frame[f"observation/{field}"] for frame in frames]) for field in fields]
    return tile_views([prepare_view(stack, robot) for stack in stacks], robot.layout)


def test_a_tick_answers_with_absolute_actions_and_times(policy: Policy, model: fakes.FakeModel) -> None:
    reply = _run(policy.open_session("robot"))
    assert reply.actions.shape == (fakes.HORIZON, 8)
    assert reply.actions.dtype == np.float32
    assert list(reply.timings) == ["queue", "preprocess", "encode", "postprocess", "total"]
    stages = [milliseconds for stage, milliseconds in reply.timings.items() if stage != "total"]
    assert sum(stages) == pytest.approx(reply.timings["total"], rel=0.02)
    assert reply.timings["total"] >= reply.timings["preprocess"] > 0
    assert reply.warnings == ()
    assert reply.result.restart_reason == "first tick"
    (inputs,) = model.submitted
    assert inputs.frames.shape == (1, *policy.embodiment.image_size, 3)
    assert inputs.state.shape == (1, 16)
    assert inputs.token_ids.shape == inputs.attention_mask.shape == (1, fakes.TEXT_LEN)
    assert inputs.token_ids.dtype == np.int64


def test_the_first_tick_sends_one_frame_and_later_ticks_four(policy: Policy, model: fakes.FakeModel) -> None:
    session = policy.open_session()
    seen = [fakes.observation(seed) for seed in range(6)]
    for observation in seen:
        session.infer(observation).result(TIMEOUT)
    frames = [inputs.frames for inputs in model.submitted]
    assert [len(f) for f in frames] == [1, 4, 4, 4, 4, 4]
    assert np.array_equal(frames[0], _tiled(seen[:1], policy))
    assert np.array_equal(frames[1], _tiled([seen[0]] * 3 + [seen[1]], policy)), "padded with the oldest, in front"
    assert np.array_equal(frames[2], _tiled([seen[0]] * 2 + seen[1:3], policy))
    assert np.array_equal(frames[5], _tiled(seen[2:6], policy))


def test_a_stack_extends_the_buffer_and_its_newest_frames_count(policy: Policy, model: fakes.FakeModel) -> None:
    session = policy.open_session()
    single = [fakes.observation(seed) for seed in range(9)]

    def stack(observations: list[dict]) -> dict:
        images = {name: np.concatenate([o[name] for o in observations]) for name in observations[0] if "image" in name}
        return {**observations[0], **images}

    session.infer(stack(single[:2])).result(TIMEOUT)
    session.infer(stack(single[2:3])).result(TIMEOUT)
    session.infer(stack(single[3:9])).result(TIMEOUT)
    frames = [inputs.frames for inputs in model.submitted]
    assert np.array_equal(frames[0], _tiled(single[1:2], policy))
    assert np.array_equal(frames[1], _tiled([single[0], *single[:3]], policy)), "the first stack is remembered"
    assert np.array_equal(frames[2], _tiled(single[5:9], policy))


@settings(max_examples=15, deadline=None)
@given(counts=st.lists(st.integers(1, 6), min_size=1, max_size=5))
def test_any_mixture_of_stacks_gives_the_last_four_frames(counts: list[int]) -> None:
    model = fakes.FakeModel()
    policy = fakes.make_policy(model)
    session = policy.open_session()
    values: list[int] = []
    for count in counts:
        values += range(len(values) + 1, len(values) + 1 + count)
        new = np.array(values[-count:], np.uint8)[:, None, None, None] * np.ones((1, 180, 320, 3), np.uint8)
        cameras = ("exterior_image_0_left", "exterior_image_1_left", "wrist_image_left")
        observation = fakes.observation() | {f"observation/{camera}": new for camera in cameras}
        session.infer(observation).result(TIMEOUT)
        expected = values[-1:] if len(values) == counts[0] else ([values[0]] * 3 + values)[-4:]
        got = model.submitted[-1].frames[:, 0, 0, 0]
        assert np.abs(got.astype(int) - expected).max() <= 1  # /255 and x255 may round down
    fakes.end(policy)


def test_the_prompt_is_encoded_when_it_changes_only(model: fakes.FakeModel) -> None:
    tokenizer = fakes.FakeTokenizer()
    policy = fakes.make_policy(model, tokenizer)
    session = policy.open_session()
    for prompt in ("Lift", "Lift", "Push", "Lift"):
        _run(session, prompt=prompt)
    fakes.end(policy)
    assert [text.rsplit(" ", 1)[1] for text in tokenizer.texts] == ["lift", "push", "lift"]
    ids = [inputs.token_ids for inputs in model.submitted]
    assert np.array_equal(ids[0], ids[1])
    assert not np.array_equal(ids[1], ids[2])


@pytest.mark.parametrize("stage", ["observation", "engine"])
def test_a_failed_tick_can_be_retried_with_the_identical_result(
    policy: Policy, model: fakes.FakeModel, stage: str
) -> None:
    undisturbed, failing = policy.open_session("a"), policy.open_session("b")
    _run(undisturbed, 0)
    _run(failing, 0)
    for attempt in range(3):
        if stage == "engine":
            model.fail_next = OutOfBlocks("no room now")
            with pytest.raises(OutOfBlocks):
                _run(failing, 1 + attempt)
        else:
            with pytest.raises(BadRequest):
                _run(failing, 1 + attempt, observation__joint_position=np.full(7, np.nan))
    expected, got = _run(undisturbed, 9), _run(failing, 9)
    np.testing.assert_array_equal(model.submitted[-1].frames, model.submitted[-2].frames)
    np.testing.assert_array_equal(got.actions, expected.actions)


def test_a_first_tick_that_fails_is_still_the_first_when_retried(policy: Policy, model: fakes.FakeModel) -> None:
    session = policy.open_session()
    model.fail_next = OutOfBlocks("no room now")
    with pytest.raises(OutOfBlocks):
        _run(session)
    _run(session)
    assert [len(inputs.frames) for inputs in model.submitted] == [1, 1]


def test_two_interleaved_sessions_get_what_each_would_get_alone() -> None:
    def episode(seeds: dict[str, list[int]], order: list[str]) -> dict[str, list[np.ndarray]]:
        model = fakes.FakeModel()
        policy = fakes.make_policy(model)
        sessions = {name: policy.open_session(name) for name in seeds}
        queues = {name: list(values) for name, values in seeds.items()}
        replies: dict[str, list[np.ndarray]] = {name: [] for name in seeds}
        for name in order:
            reply = _run(sessions[name], queues[name].pop(0), prompt=f"do {name}")
            replies[name].append(reply.actions)
        fakes.end(policy)
        return replies

    seeds = {"a": [1, 2, 3, 4], "b": [5, 6, 7]}
    together = episode(seeds, ["a", "b", "b", "a", "a", "b", "a"])
    for name, values in seeds.items():
        alone = episode({name: values}, [name] * len(values))
        np.testing.assert_array_equal(together[name], alone[name])


def test_many_sessions_from_many_threads_do_not_disturb_each_other(policy: Policy) -> None:
    def drive(name: str, out: dict[str, list[np.ndarray]]) -> None:
        session = policy.open_session(name)
        out[name] = [_run(session, seed, prompt=name).actions for seed in range(4)]
        session.close("done")

    together: dict[str, list[np.ndarray]] = {}
    threads = [threading.Thread(target=drive, args=(f"robot {i}", together)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT)
    alone: dict[str, list[np.ndarray]] = {}
    for name in sorted(together):
        drive(name, alone)
        np.testing.assert_array_equal(together[name], alone[name])


def test_infer_returns_before_the_engine_answers_and_refuses_a_second_tick() -> None:
    model = fakes.FakeModel(held=True)
    policy = fakes.make_policy(model)
    session = policy.open_session()
    started = time.perf_counter()
    future = session.infer(fakes.observation())
    assert time.perf_counter() - started < 0.5
    assert model.arrived.acquire(timeout=TIMEOUT)
    second = session.infer(fakes.observation())
    assert not future.done()
    model.go_on.set()
    with pytest.raises(SessionBusy, match="in flight"):
        second.result(TIMEOUT)
    assert future.result(TIMEOUT).actions.shape == (fakes.HORIZON, 8)
    session.infer(fakes.observation()).cancel()
    fakes.end(policy)


def test_no_policy_thread_waits_for_the_engine() -> None:
    model = fakes.FakeModel(held=True)
    policy = fakes.make_policy(model)
    sessions = [policy.open_session(str(i)) for i in range(12)]
    futures = [session.infer(fakes.observation(i)) for i, session in enumerate(sessions)]
    assert model.arrived.acquire(timeout=TIMEOUT)
    assert policy.engine.core.executor.on_host(lambda: True).result(TIMEOUT), "a tick in the engine holds a host thread"
    model.go_on.set()
    assert wait(futures, TIMEOUT).not_done == set()
    fakes.end(policy)


def test_the_next_tick_may_be_sent_from_the_callback_of_the_last(policy: Policy) -> None:
    session = policy.open_session()
    second: Future[PolicyReply] = Future()

    def send_next(done: Future[PolicyReply]) -> None:
        session.infer(fakes.observation(1)).add_done_callback(lambda d: second.set_result(d.result()))

    session.infer(fakes.observation(0)).add_done_callback(send_next)
    assert second.result(TIMEOUT).actions.shape == (fakes.HORIZON, 8)


def test_a_caller_cannot_cancel_a_tick_by_half(policy: Policy) -> None:
    session = policy.open_session()
    future = session.infer(fakes.observation())
    assert not future.cancel()
    assert future.result(TIMEOUT).actions.shape == (fakes.HORIZON, 8)
    _run(session)


def test_reset_starts_a_new_window_and_ends_a_tick_in_flight() -> None:
    model = fakes.FakeModel(held=True)
    policy = fakes.make_policy(model)
    session = policy.open_session("robot")
    future = session.infer(fakes.observation())
    assert model.arrived.acquire(timeout=TIMEOUT)
    session.reset()
    model.go_on.set()
    with pytest.raises(SessionEnded, match="session robot was reset"):
        future.result(TIMEOUT)
    _run(session, 1)
    _run(session, 2)
    session.reset()
    _run(session, 3)
    assert [len(inputs.frames) for inputs in model.submitted] == [1, 1, 4, 1]
    fakes.end(policy)


def test_a_reset_during_preprocessing_keeps_the_tick_from_the_engine(
    policy: Policy, model: fakes.FakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, go_on = threading.Event(), threading.Event()
    prepare = policy._preparation.prepare

    def slow_prepare(*args):
        entered.set()
        assert go_on.wait(TIMEOUT)
        return prepare(*args)

    monkeypatch.setattr(policy._preparation, "prepare", slow_prepare)
    session = policy.open_session()
    future = session.infer(fakes.observation())
    assert entered.wait(TIMEOUT)
    session.reset()
    with pytest.raises(SessionEnded):
        future.result(TIMEOUT)
    go_on.set()
    _run(session, 5)
    assert len(model.submitted) == 1, "the abandoned tick must not reach the model"


def test_close_is_safe_twice_and_says_why_nothing_works_any_more(policy: Policy) -> None:
    session = policy.open_session("robot")
    _run(session)
    session.close("client went away")
    session.close("again")
    for call in (lambda: session.infer(fakes.observation()), session.reset):
        with pytest.raises(SessionNotFound, match=r"session robot is closed \(client went away\)"):
            call().result(TIMEOUT)


def test_close_ends_a_tick_in_flight_even_if_the_policy_is_closed_first() -> None:
    model = fakes.FakeModel(held=True)
    policy = fakes.make_policy(model)
    sessions = [policy.open_session(str(i)) for i in range(2)]
    futures = [session.infer(fakes.observation()) for session in sessions]
    assert model.arrived.acquire(timeout=TIMEOUT)
    policy.close()
    policy.close()
    sessions[0].close("shutdown")
    threading.Timer(0.2, model.go_on.set).start()
    policy.engine.shutdown()
    outcomes = [future.exception(TIMEOUT) for future in futures]
    assert all(error is None or isinstance(error, SessionEnded | EngineStopped) for error in outcomes)
    assert isinstance(outcomes[0], SessionEnded | EngineStopped)
    with pytest.raises(EngineStopped):
        policy.open_session().infer(fakes.observation())


def test_a_warning_is_given_once_per_session_and_not_lost_with_a_failed_tick(
    policy: Policy, model: fakes.FakeModel
) -> None:
    session = policy.open_session()
    broken = {"observation__exterior_image_1_left": None, "observation__gripper_position": np.array([40.0])}
    model.fail_next = OutOfBlocks("no room now")
    with pytest.raises(OutOfBlocks):
        _run(session, **broken)
    first = _run(session, num_frames=4, **broken).warnings
    assert [w.split(" ")[0] for w in first] == [
        "observation/exterior_image_1_left",
        "observation/gripper_position",
    ]
    assert _run(session, num_frames=4, **broken).warnings == ()
    session.reset()
    assert _run(session, num_frames=4, **broken).warnings == ()
    assert len(_run(policy.open_session(), **broken).warnings) == 2, "another session is warned for itself"


def test_one_frame_per_tick_draws_a_warning_about_the_clock(policy: Policy) -> None:
    session = policy.open_session()
    assert _run(session).warnings == ()
    assert "the model expects 4, spread over the 6 steps" in _run(session).warnings[0]
    assert _run(session).warnings == ()


def test_a_missing_second_camera_is_black_and_can_come_back(policy: Policy, model: fakes.FakeModel) -> None:
    session = policy.open_session()
    _run(session, observation__exterior_image_1_left=None)
    _run(session)
    height, width = (size // 2 for size in policy.embodiment.image_size)
    first, second = (inputs.frames for inputs in model.submitted)
    assert not first[:, height:, width:].any()
    assert first[:, height:, :width].any()
    assert not second[:3, height:, width:].any()
    assert second[3, height:, width:].any()


@pytest.mark.parametrize("number", [np.nan, np.inf, 3e38], ids=["NaN", "infinite", "infinite once it is added"])
def test_actions_that_are_not_finite_never_reach_a_robot(policy: Policy, model: fakes.FakeModel, number: float) -> None:
    model.actions_override = np.full((fakes.HORIZON, 10), number, np.float32)
    with pytest.raises(WorldKVError, match="not finite"):
        _run(policy.open_session(), observation__joint_position=np.full(7, 3.4e38))


def test_metadata_is_the_six_keys_of_roboarena(policy: Policy) -> None:
    assert policy.greeting == {
        "image_resolution": [180, 320],
        "needs_wrist_camera": True,
        "n_external_cameras": 2,
        "needs_stereo_camera": False,
        "needs_session_id": True,
        "action_space": "joint_position",
    }


def test_it_is_ready_after_warming_up_in_a_session_that_is_gone(policy: Policy, model: fakes.FakeModel) -> None:
    assert policy.health() == Health(False, "warming up")
    policy.warm_up()
    assert policy.health().ready
    assert [len(inputs.frames) for inputs in model.submitted] == [1, 4]
    assert policy.engine.inspect(lambda core: core.sessions) == {}, "its session is still open"
