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


class KeepingClient(SlowClient):
    """Keeps frames ahead of their request. `whole`: the frames of each camera that a request had in all."""

    def __init__(self, *, at_once: bool = False, keeps: bool = True) -> None:
        super().__init__(at_once=at_once)
        self.keeps = keeps
        self.kept: list[dict[str, Any]] = []
        self.whole: list[dict[str, list[int]]] = []
        self.num_kept: list[int] = []  # of each request

    def observe(self, observation: Mapping[str, Any]) -> int:
        if not self.keeps:
            raise ConnectionLost("gone")
        self.kept.append(dict(observation))
        return len(self.kept)

    def infer(self, observation: Mapping[str, Any]) -> np.ndarray:
        parts, self.kept = [*self.kept, dict(observation)], []
        self.num_kept.append(len(parts) - 1)
        cameras = dict.fromkeys(name for part in parts for name in part if name in ("camera", "wrist"))
        self.whole.append({c: [int(v) for part in parts for v in part.get(c, _NONE)[:, 0, 0, 0]] for c in cameras})
        return super().infer(observation)

    def reset(self) -> None:
        super().reset()
        self.kept = []


_NONE = np.zeros((0, 1, 1, 1), np.uint8)


def wait_for_requests(client: SlowClient, count: int) -> None:
    for _ in range(count):
        assert client.arrived.acquire(timeout=10)


def test_frames_are_sent_as_they_are_taken_and_the_request_brings_the_rest() -> None:
    client = KeepingClient(at_once=True)
    with ActionBroker(client, execute=HORIZON, lead=0) as broker:
        steps(broker, 25)
        wait_for_requests(client, 2)
    assert client.whole[1] == {"camera": [1, 8, 16, 24]}, "as they are without a lead"
    assert client.num_kept == [0, 3]
    assert client.requests[1]["camera"][:, 0, 0, 0].tolist() == [24]


def test_with_a_lead_a_request_has_no_frames_of_its_own() -> None:
    client = KeepingClient(at_once=True)
    with ActionBroker(client, execute=HORIZON, lead=4) as broker:
        steps(broker, 49)
        wait_for_requests(client, 3)
    assert client.whole[1:] == [{"camera": [1, 7, 13, 20]}, {"camera": [25, 31, 37, 44]}]
    assert client.num_kept == [0, 4, 4]
    assert "camera" not in client.requests[1]
    assert client.requests[1]["joints"].shape == (7,)


def test_a_request_that_waited_for_the_reply_before_it_brings_what_is_seen_now() -> None:
    client = KeepingClient()
    client.go.release()
    with ActionBroker(client, execute=8, lead=2) as broker:
        steps(broker, 20)  # the second is asked for at step 8, the third should have been at 16
        client.go.release()
        wait_for_reply(broker)
        steps(broker, 1, 20)
        wait_for_requests(client, 3)
        assert client.whole[1] == {"camera": [1, 2, 4, 6]}
        assert client.whole[2] == {"camera": [9, 10, 12, 14, 20]}, "the server uses the newest four"
        client.go.release()


def test_frames_that_could_not_be_sent_ahead_come_with_their_request(caplog: pytest.LogCaptureFixture) -> None:
    client = KeepingClient(at_once=True, keeps=False)
    with ActionBroker(client, execute=HORIZON, lead=4) as broker, caplog.at_level("WARNING"):
        steps(broker, 25)
        client.keeps = True
        steps(broker, 24, 25)
        wait_for_requests(client, 3)
    assert client.requests[1]["camera"][:, 0, 0, 0].tolist() == [1, 7, 13, 20]
    assert client.num_kept == [0, 0, 4], "the next ones are tried again"
    assert caplog.messages == ["frames were not sent ahead, their request brings them: gone"], "one of four is enough"


def test_a_camera_that_comes_late_is_sent_with_the_request() -> None:
    client = KeepingClient(at_once=True)
    with ActionBroker(client, execute=8, lead=0) as broker:
        for step in range(17):
            broker.step({**seen(step), **({"wrist": np.full((2, 2, 3), step, np.uint8)} if step >= 12 else {})})
            if step == 8:
                wait_for_reply(broker)
        wait_for_requests(client, 3)
    assert client.requests[2]["wrist"][:, 0, 0, 0].tolist() == [12, 12, 13, 16]
    assert client.requests[2]["camera"][:, 0, 0, 0].tolist() == [9, 11, 13, 16], "all four: these count"


def test_a_reset_forgets_which_frames_were_planned() -> None:
    client = KeepingClient(at_once=True)
    with ActionBroker(client, execute=8, lead=2) as broker:
        steps(broker, 5)
        broker.reset()
        steps(broker, 9, 5)
        wait_for_requests(client, 3)
    assert client.whole == [{"camera": [0]}, {"camera": [5]}, {"camera": [6, 7, 9, 11]}]


def test_a_lead_needs_a_client_that_observes_and_steps_to_be_ahead_of() -> None:
    with pytest.raises(ValueError, match=r"lead: expected None, or 0 to execute - 1 \(7\) steps, got 8"):
        ActionBroker(KeepingClient(), execute=8, lead=8)
    with pytest.raises(ValueError, match="a client that can `observe`, got SlowClient"):
        ActionBroker(SlowClient(), execute=8, lead=1)


@settings(max_examples=30, deadline=None)
@given(st.integers(2, HORIZON), st.data(), st.lists(st.booleans(), min_size=10, max_size=80))
def test_a_server_sees_the_same_frames_however_they_are_sent(execute: int, data: Any, arrivals: list[bool]) -> None:
    lead = data.draw(st.integers(0, execute - 1))
    seen_by = []
    for keeps in (True, False):
        client = KeepingClient(keeps=keeps)
        client.go.release()
        with ActionBroker(client, execute=execute, when_late="hold", lead=lead) as broker:
            asked = 1
            for step, arrives in enumerate(arrivals):
                broker.step(seen(step))
                if arrives and broker._asked is not None:
                    client.go.release()
                    wait_for_reply(broker)
                asked = max(asked, len(client.requests))
            client.go.release(len(arrivals) + 2)
        broker._thread.join(10)
        seen_by.append(client.whole)
    assert seen_by[0] == seen_by[1]
