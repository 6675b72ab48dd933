"""Frames ahead of their requests over the wire, in both dialects, to a real tiny engine: replies equal to the bit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("diffusers")
pytest.importorskip("fastapi")

from engines import droid_observation, random_checkpoint
from server_fakes import EXTERIOR_0, EXTERIOR_1, WRIST, ask, eventually, http_get, raw_client
from websockets.exceptions import ConnectionClosed

from worldkv.client import PolicyClient
from worldkv.engine.engine import EngineConfig
from worldkv.errors import ConnectionLost, RemoteError
from worldkv.load import load_policy
from worldkv.server.server import PolicyServer, ServerConfig
from worldkv.wire import CloseCode

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
SIZE = (45, 80)


@pytest.fixture(scope="module")
def server() -> Iterator[PolicyServer]:
    policy = load_policy(random_checkpoint("ti2v"), EngineConfig(block_size=16, max_sessions=8, batch_invariant=True))
    try:
        with PolicyServer(policy, ServerConfig(port=0)) as server:
            eventually(lambda: http_get(server.port, "/healthz")[0] == 200, 30)
            yield server
    finally:
        policy.close()
        policy.engine.shutdown()
        policy.engine.core.cache.pool.check()
        assert policy.engine.core.cache.pool.num_used == 0


def taken(seed: int, num_frames: int, prompt: str = "stack the cups", dialect: str = "roboarena") -> dict[str, Any]:
    observation = droid_observation(np.random.default_rng(seed), num_frames, prompt, SIZE)
    if dialect == "openpi":
        del observation[EXTERIOR_0]
    return observation


def cameras(observation: dict[str, Any], start: int, stop: int) -> dict[str, Any]:
    return {name: value[start:stop] for name, value in observation.items() if "image" in name}


def others(observation: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in observation.items() if "image" not in name}


def actions(reply: Any) -> np.ndarray:
    found: np.ndarray = reply["actions"] if isinstance(reply, dict) else reply
    return found


@pytest.mark.parametrize("dialect", ["roboarena", "openpi"])
def test_replies_to_frames_ahead_are_those_of_plain_requests(server: PolicyServer, dialect: str) -> None:
    """All ahead, some ahead and the rest with the request, none ahead; a reset; another prompt."""
    plain, ahead = (PolicyClient(port=server.port, dialect=dialect) for _ in range(2))
    plan = [(1, [1]), (4, [1, 1, 1, 1]), (4, [2]), (4, [1, 2]), (4, []), (4, [4]), (4, [3, 1])]
    with plain, ahead:
        for number, (num_frames, counts) in enumerate(plan):
            if number == 4:
                plain.reset()
                ahead.observe(cameras(taken(99, 1, dialect=dialect), 0, 1))
                ahead.reset()
            whole = taken(number, num_frames, "pour the tea" if number > 5 else "stack the cups", dialect)
            sent = 0
            for count in counts:
                part = cameras(whole, sent, sent + count) | {"prompt": whole["prompt"]}
                sent += count
                assert ahead.observe(part) == sent
            left = {name: value for name, value in cameras(whole, sent, 9).items() if len(value)}
            expected, got = plain.infer(whole), ahead.infer({**others(whole), **left})
            assert np.array_equal(actions(got), actions(expected)), f"tick {number}"
            if dialect == "openpi":
                assert isinstance(got, dict)
                assert "prev_total_ms" in got["server_timing"] or number == 0
                assert ("commit_ms" in got["server_timing"]) == (sent < num_frames)


def test_the_answer_to_frames_is_a_map_in_either_dialect(server: PolicyServer) -> None:
    whole = taken(0, 2)
    with raw_client(server.port) as ws:
        named = {"session_id": "a", **cameras(whole, 0, 1)}
        first = ask(ws, {"endpoint": "observe", **named, "sequence": 7})
        assert (first["frames_ahead"], first["sequence"]) == (1, 7)
        assert "resized" in first["warnings"][0]
        assert ask(ws, {"endpoint": "infer", "observe": True, **named}) == {"frames_ahead": 2}, "told once a session"
    with raw_client(server.port) as ws:
        openpi = {name: value for name, value in cameras(whole, 0, 2).items() if name != EXTERIOR_0}
        assert ask(ws, {"observe": True, **openpi})["frames_ahead"] == 2
        assert ask(ws, {**others(whole), "frames_ahead": 2})["actions"].shape[1] == 8


def test_environments_of_a_session_have_frames_of_their_own(server: PolicyServer) -> None:
    with PolicyClient(port=server.port) as together, PolicyClient(port=server.port) as alone:
        for env in (0, 1):
            whole = taken(env, 1)
            together.observe({"env_id": env, **cameras(whole, 0, 1)})
        for env in (1, 0):
            got = together.infer({"env_id": env, **others(taken(env, 1))})
            assert np.array_equal(actions(got), actions(alone.infer({"env_id": env, **taken(env, 1)})))


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no camera": ({"prompt": "go"}, "observation/exterior_image_0_left: missing"),
    "a camera too few": ({WRIST: np.zeros((1, *SIZE, 3), np.uint8)}, "observation/exterior_image_0_left: missing"),
    "floats": (cameras(taken(0, 1), 0, 1) | {WRIST: np.zeros((1, *SIZE, 3))}, "expected uint8"),
    "too many": (cameras(taken(0, 4), 0, 4), "observe: expected at most 4 frames of each camera between two requests"),
    "another count": (cameras(taken(0, 4), 0, 4) | {EXTERIOR_1: np.zeros((1, *SIZE, 3), np.uint8)}, "same number"),
    "empty prompt": (cameras(taken(0, 1), 0, 1) | {"prompt": ""}, "prompt: expected an instruction"),
    "misspelt": (cameras(taken(0, 1), 0, 1) | {"promt": "go"}, "did you mean prompt"),
    "no flag": (cameras(taken(0, 1), 0, 1) | {"observe": 3}, "observe: expected a bool, got 3"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_frames_that_cannot_be_kept_are_told_and_a_plain_request_works(server: PolicyServer, wrong: str) -> None:
    fields, said = WRONG[wrong]
    name = f"wrong {wrong}"
    with raw_client(server.port) as ws:
        ask(ws, {"endpoint": "infer", "session_id": name, **taken(0, 1)})
        assert ask(ws, {"endpoint": "observe", "session_id": name, **cameras(taken(1, 4), 0, 3)})["frames_ahead"] == 3
        answer = ask(ws, {"endpoint": "observe", "session_id": name, **fields})
        assert answer.startswith("bad_request: ")
        assert said in answer
        with pytest.raises(ConnectionClosed) as closed:
            ws.recv(timeout=5)
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == CloseCode.BAD_REQUEST
    with raw_client(server.port) as ws, PolicyClient(port=server.port) as plain:
        plain.infer(taken(0, 1))
        expected = plain.infer(taken(1, 4))
        again = {"endpoint": "infer", "session_id": name, "resume": True}
        assert np.array_equal(ask(ws, {**again, **taken(1, 4)}), expected), "the newest frames are the request's"


def test_a_client_that_lost_count_is_told_and_goes_on_with_whole_requests(server: PolicyServer) -> None:
    with PolicyClient(port=server.port) as robot, PolicyClient(port=server.port) as plain:
        for client in (robot, plain):
            client.infer(taken(0, 1))
        robot.observe(cameras(taken(1, 4), 0, 2))
        with pytest.raises(RemoteError, match="frames_ahead: expected 2, as many frames of each camera as"):
            robot.infer({**taken(1, 4), "frames_ahead": 3})
        with pytest.raises(RemoteError, match="exterior_image_0_left: missing"):
            robot.infer(others(taken(1, 4)))
        assert np.array_equal(actions(robot.infer(taken(1, 4))), actions(plain.infer(taken(1, 4))))


def test_a_client_that_is_newer_than_its_server_says_so(server: PolicyServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with PolicyClient(port=server.port, dialect="openpi") as robot:
        whole = taken(0, 1, dialect="openpi")
        monkeypatch.setattr(robot, "_controls", lambda sequence, endpoint: {"sequence": sequence})  # `observe` unread
        with pytest.raises(ConnectionLost, match="it is older than this client"):
            robot.observe(whole)


def test_frames_ahead_are_no_ticks_and_end_with_a_private_session(server: PolicyServer) -> None:
    def ticks() -> float:
        lines = http_get(server.port, "/metrics")[1].splitlines()
        return sum(float(line.split()[-1]) for line in lines if 'seconds_count{stage="total"}' in line)

    before = ticks()
    with raw_client(server.port) as ws:
        kept = ask(ws, {"endpoint": "observe", **cameras(taken(0, 1), 0, 1), "prompt": "stack the cups"})
        assert kept["frames_ahead"] == 1
    with raw_client(server.port) as ws:
        text = ask(ws, {"endpoint": "infer", **others(taken(0, 1)), "frames_ahead": 1})
        assert "frames_ahead: expected 0" in text
    assert ticks() == before


def test_another_prompt_begins_an_episode_of_an_unnamed_session_with_its_first_frames(server: PolicyServer) -> None:
    with (
        PolicyClient(port=server.port, dialect="openpi") as robot,
        PolicyClient(port=server.port, dialect="openpi") as fresh,
    ):
        robot.infer(taken(0, 1, dialect="openpi"))
        robot.infer(taken(1, 4, dialect="openpi"))
        whole = taken(2, 1, "pour the tea", "openpi")
        robot.observe(cameras(whole, 0, 1) | {"prompt": whole["prompt"]})
        assert np.array_equal(actions(robot.infer(others(whole))), actions(fresh.infer(whole)))


def test_the_contract_says_how_many_frames_may_be_sent_ahead(server: PolicyServer) -> None:
    assert json.loads(http_get(server.port, "/v1/embodiment")[1])["max_frames_ahead"] == 4
