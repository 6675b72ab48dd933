"""People at the console and programs at /v1 beside robots: they wait between two ticks, and cost no robot one."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("diffusers")
pytest.importorskip("fastapi")

from server_fakes import ask, eventually, raw_client, receive
from test_rest import call, observation, serving

from worldkv.server.server import PolicyServer
from worldkv.wire import pack

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
NUM_REQUESTS = 200


@pytest.fixture(scope="module")
def server() -> Iterator[PolicyServer]:
    with serving(room=10) as server:
        yield server


class Held:
    """In the `with` the engine computes nothing."""

    def __init__(self, server: PolicyServer) -> None:
        self._executor = server._service.app.engine.core.executor
        self.go_on = threading.Event()

    def __enter__(self) -> Held:
        self._run = self._executor.run

        def held(requests: list[Any]) -> list[Any]:
            assert self.go_on.wait(20)
            return list(self._run(requests))

        self._executor.run = held
        return self

    def __exit__(self, *_: object) -> None:
        self.go_on.set()
        self._executor.run = self._run


def infer(number: int, session_id: str) -> bytes:
    return pack(observation(number) | {"endpoint": "infer", "session_id": session_id})


def drive(server: PolicyServer, session_id: str, until: threading.Event, replies: list[Any]) -> None:
    """A robot in a tight loop."""
    with raw_client(server.port) as ws:
        while not until.is_set() or len(replies) < 4:
            replies.append(ask(ws, infer(len(replies), session_id)))


def test_a_robot_in_a_tight_loop_and_200_operators_do_not_meet(server: PolicyServer) -> None:
    done, disturbed, failures = threading.Event(), [], []
    robot = threading.Thread(target=drive, args=(server, "robot", done, disturbed))
    robot.start()
    eventually(lambda: len(disturbed) > 0, 30)

    def operate(number: int) -> None:
        for turn in range(NUM_REQUESTS // 4):
            verb = ("snapshot", "fork", "park")[(number + turn) % 3]
            status, answer = call(server, "POST", f"/v1/sessions/robot/{verb}")
            if status >= 400:
                failures.append((verb, status, answer))
            elif verb == "snapshot":
                call(server, "DELETE", f"/v1/snapshots/{answer['snapshot_id']}")
            elif verb == "fork":
                call(server, "DELETE", f"/v1/sessions/{answer['session_id']}")

    operators = [threading.Thread(target=operate, args=(number,)) for number in range(4)]
    for operator in operators:
        operator.start()
    for operator in operators:
        operator.join(120)
    done.set()
    robot.join(60)
    assert not failures
    assert not [reply for reply in disturbed if isinstance(reply, str)], "the robot's tick failed"
    undisturbed: list[Any] = []
    with raw_client(server.port) as ws:
        for number in range(len(disturbed)):
            undisturbed.append(ask(ws, infer(number, "alone")))
    assert len(disturbed) > 3
    assert all(np.array_equal(*pair) for pair in zip(disturbed, undisturbed, strict=True)), "a bit was changed"
    for name in ("robot", "alone"):
        assert call(server, "DELETE", f"/v1/sessions/{name}")[0] == 200


def test_a_robots_tick_waits_for_an_imagined_one(server: PolicyServer) -> None:
    """What somebody imagines in a live session is not the robot's fault."""
    with raw_client(server.port) as ws:
        ask(ws, infer(0, "dreamer"))
        with Held(server) as held:
            imagining = threading.Thread(target=call, args=(server, "POST", "/v1/sessions/dreamer/imagine", {}))
            imagining.start()
            eventually(lambda: call(server, "GET", "/v1/sessions/dreamer")[1]["busy"])
            ws.send(infer(1, "dreamer"))
            held.go_on.set()
            assert isinstance(receive(ws), np.ndarray)
            imagining.join(10)
    assert call(server, "DELETE", "/v1/sessions/dreamer")[0] == 200


def test_operators_who_wait_take_no_thread_from_robots_and_give_up_in_time() -> None:
    with serving(request_timeout_s=1.0) as server, raw_client(server.port) as ws:
        ask(ws, infer(0, "robot"))
        answers: list[Any] = []
        with Held(server):
            ws.send(infer(1, "robot"))
            eventually(lambda: call(server, "GET", "/v1/sessions/robot")[1]["busy"])
            operators = [
                threading.Thread(target=lambda: answers.append(call(server, "POST", "/v1/sessions/robot/snapshot")))
                for _ in range(40)  # more than the server has threads
            ]
            for operator in operators:
                operator.start()
            assert call(server, "GET", "/healthz")[0] == 200
            for operator in operators:
                operator.join(20)
        assert {(status, answer["code"]) for status, answer in answers} == {(504, "request_timed_out")}
        assert "has not ended within 1 s; nothing was done" in answers[0][1]["message"]
        eventually(lambda: not call(server, "GET", "/v1/sessions/robot")[1]["busy"])
        assert call(server, "GET", "/v1/snapshots")[1]["snapshots"] == []
