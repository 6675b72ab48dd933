"""One action a step, whatever the server's latency: nothing executed twice, nothing stale, errors told once."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from worldkv_client.broker import ActionBroker, frame_offsets
from worldkv_client.errors import BadRequest, ConnectionLost

HORIZON = 24


class SlowClient:
    """Answers request n when told to, with actions [n, i]."""

    def __init__(self, *, at_once: bool = False) -> None:
        self.requests: list[dict[str, Any]] = []
        self.resets = 0
        self.go = threading.Semaphore(10_000 if at_once else 0)
        self.arrived = threading.Semaphore(0)
        self.error: Exception | None = None

    def infer(self, observation: Mapping[str, Any]) -> np.ndarray:
        number = len(self.requests)
        self.requests.append(dict(observation))
        self.arrived.release()
        assert self.go.acquire(timeout=10)
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        return np.stack([np.full(HORIZON, number), np.arange(HORIZON)], axis=1).astype(np.float32)

    def reset(self) -> None:
        self.resets += 1


def seen(step: int) -> dict[str, Any]:
    return {"camera": np.full((2, 2, 3), step % 256, np.uint8), "joints": np.zeros(7), "prompt": "go"}


def steps(broker: ActionBroker, count: int, start: int = 0) -> list[tuple[int, int]]:
    return [tuple(int(v) for v in broker.step(seen(start + n))) for n in range(count)]


def test_whole_chunks_one_after_the_other_as_the_stock_client() -> None:
    client = SlowClient(at_once=True)
    with ActionBroker(client, execute=HORIZON) as broker:
        assert steps(broker, 48) == [(n // 24, n % 24) for n in range(48)]
    first, second = client.requests
    assert first["camera"].shape == (1, 2, 2, 3)
    assert "executed_steps" not in first
    assert second["camera"][:, 0, 0, 0].tolist() == [1, 8, 16, 24], "the last ends on the step that asks"
    assert second["executed_steps"] == HORIZON


def test_a_late_reply_goes_on_where_the_robot_is_and_the_old_chunk_bridges() -> None:
    client = SlowClient()
    client.go.release()
    with ActionBroker(client, execute=8) as broker:
        assert steps(broker, 8) == [(0, n) for n in range(8)]
        assert steps(broker, 5, 8) == [(0, n) for n in range(8, 13)], "asked at step 8, not here yet"
        client.go.release()
        wait_for_reply(broker)
        assert steps(broker, 3, 13) == [(1, 5), (1, 6), (1, 7)], "five steps of it have passed"
        assert client.requests[1]["executed_steps"] == 8
        assert broker.num_late_steps == 0


@pytest.mark.parametrize("when_late", ["hold", "wait"])
def test_at_the_end_of_a_chunk_it_holds_or_waits(when_late: Any) -> None:
    client = SlowClient()
    client.go.release()
    with ActionBroker(client, execute=HORIZON, when_late=when_late) as broker:
        steps(broker, 24)
        if when_late == "wait":
            threading.Timer(0.1, client.go.release).start()
            assert steps(broker, 2, 24) == [(1, 0), (1, 1)]
            assert broker.num_late_steps == 1
        else:
            assert steps(broker, 2, 24) == [(0, 23), (0, 23)]
            assert broker.num_late_steps == 2
            client.go.release()


def test_a_hold_ends_with_one_error_and_the_next_step_starts_over(caplog: pytest.LogCaptureFixture) -> None:
    client = SlowClient()
    client.go.release()
    with ActionBroker(client, execute=8, when_late="hold", hold_limit_s=0.2) as broker, caplog.at_level("WARNING"):
        steps(broker, 24)
        started, held = time.monotonic(), 0
        said = ""
        while not said and time.monotonic() - started < 10:
            try:
                assert steps(broker, 1, 24 + held) == [(0, 23)]
            except ConnectionLost as error:
                said = str(error)
            else:
                held += 1
                time.sleep(0.01)
        assert "last action was held for 0.2 s (hold_limit_s); the next step asks again and waits" in said
        assert 0.2 < time.monotonic() - started < 2
        assert broker.num_late_steps == held + 1
        assert caplog.messages == ["no new chunk yet: its last action is held, for at most 0.2 s"], "told once"
        client.go.release(2)  # the late one, and the one that is asked for now
        assert steps(broker, 2) == [(2, 0), (2, 1)], "of what is seen now; the late one is of another time"
        assert broker.num_dropped == 1
        assert client.requests[2]["camera"].shape[0] == 1
        assert "executed_steps" not in client.requests[2]


def test_a_new_chunk_gives_the_next_hold_its_whole_time() -> None:
    client = SlowClient()
    client.go.release()
    with ActionBroker(client, execute=HORIZON, when_late="hold", hold_limit_s=0.5) as broker:
        for chunk in range(3):
            assert steps(broker, 1) == [(chunk, 0 if chunk == 0 else 1)]
            steps(broker, 23 if chunk == 0 else 22)
            assert steps(broker, 1) == [(chunk, 23)], "held"
            time.sleep(0.3)
            client.go.release()
            wait_for_reply(broker)


def test_a_chunk_whose_steps_have_all_passed_is_dropped_and_asked_for_again() -> None:
    client = SlowClient()
    client.go.release()
    with ActionBroker(client, execute=8, when_late="hold") as broker:
        steps(broker, 40)  # the second is asked for at step 8, and is of no use from step 32 on
        client.go.release()
        wait_for_reply(broker)
        assert steps(broker, 1, 40) == [(0, 23)]
        client.go.release()
        wait_for_reply(broker)
        assert steps(broker, 2, 41) == [(2, 1), (2, 2)]
        assert broker.num_dropped == 1
        assert client.requests[2]["executed_steps"] == 32, "since the tick that was answered too late"


def wait_for_reply(broker: ActionBroker) -> None:
    deadline = time.monotonic() + 10
    while broker._replies.empty():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_camera_without_a_frame_at_every_step_is_sent_what_it_saw_before() -> None:
    client = SlowClient(at_once=True)
    with ActionBroker(client, execute=HORIZON) as broker:
        for step in range(49):
            wrist = {"wrist": np.full((2, 2, 3), step, np.uint8)} if step % 5 == 4 else {}
            broker.step({**seen(step), **wrist})
    first, second, third = client.requests
    assert "wrist" not in first
    assert second["camera"][:, 0, 0, 0].tolist() == [1, 8, 16, 24]
    assert second["wrist"][:, 0, 0, 0].tolist() == [4, 4, 14, 24], "at step 1 it had seen nothing yet"
    assert third["wrist"][:, 0, 0, 0].tolist() == [29, 29, 39, 44]


def test_what_was_asked_before_a_reset_is_dropped_when_it_comes() -> None:
    client = SlowClient()
    client.go.release()
    with ActionBroker(client, execute=4) as broker:
        steps(broker, 5)
        for _ in range(2):
            client.arrived.acquire(timeout=10)  # the second request is under way
        broker.reset()
        for _ in range(2):
            client.go.release()
        assert steps(broker, 2, 5) == [(2, 0), (2, 1)]
        assert (broker.num_dropped, client.resets) == (1, 1)
        assert client.requests[2]["camera"].shape[0] == 1, "a new episode begins with one frame"


def test_an_error_is_told_once_and_the_next_step_asks_again() -> None:
    client = SlowClient(at_once=True)
    client.error = ConnectionLost("gone")
    with ActionBroker(client, execute=4) as broker:
        with pytest.raises(ConnectionLost, match="gone"):
            broker.step(seen(0))
        assert steps(broker, 1) == [(1, 0)]


def test_what_can_never_work_is_refused() -> None:
    with pytest.raises(ValueError, match="execute and num_frames"):
        ActionBroker(SlowClient(), execute=0)
    for limit in (0, -1, float("nan")):
        with pytest.raises(ValueError, match="hold_limit_s: expected seconds > 0"):
            ActionBroker(SlowClient(), execute=1, when_late="hold", hold_limit_s=limit)
    with pytest.raises(ValueError, match="when_late"):
        ActionBroker(SlowClient(), execute=1, when_late="panic")  # type: ignore[arg-type]
    client = SlowClient(at_once=True)
    with ActionBroker(client, execute=HORIZON + 1) as broker:
        with pytest.raises(BadRequest, match="execute: 25 steps of a chunk of shape"):
            broker.step(seen(0))
        with pytest.raises(BadRequest, match="at least one image"):
            broker.step({"prompt": "go"})


def test_the_frames_of_a_request_are_spread_over_its_steps() -> None:
    assert frame_offsets(24, 4) == [-23, -16, -8, 0]
    assert frame_offsets(8, 4) == [-7, -5, -3, 0]
    assert frame_offsets(1, 4) == [0, 0, 0, 0]
    assert frame_offsets(24, 1) == [0]


@settings(max_examples=30, deadline=None)
@given(st.integers(1, HORIZON), st.lists(st.booleans(), min_size=10, max_size=80))
def test_actions_of_a_chunk_come_in_order_at_their_own_step(execute: int, arrivals: list[bool]) -> None:
    client = SlowClient()
    client.go.release()
    with ActionBroker(client, execute=execute, when_late="hold") as broker:
        executed = []
        for step, arrives in enumerate(arrivals):
            executed.append(tuple(int(v) for v in broker.step(seen(step))))
            if arrives:
                client.go.release()
        for step, (chunk, index) in enumerate(executed):
            asked_at = next(s for s, (c, i) in enumerate(executed) if c == chunk) - next(
                i for c, i in executed if c == chunk
            )
            assert index == min(step - asked_at, HORIZON - 1)
        client.go.release(len(arrivals) + 2)
