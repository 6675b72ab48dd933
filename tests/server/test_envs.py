"""Several environments on one socket, told apart by `env_id`: each is a session of its own."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
from server_fakes import FakePolicy, ask, eventually, infer_message, openpi_observation, raw_client, serving, told
from websockets.sync.client import ClientConnection

from worldkv.server.names import in_env, is_within

NAMES = ["a", "a/env=b", "env=", "x/env=", "100%"]


def ticks(ws: ClientConnection, dialect: str, env_id: Any = None, **more: Any) -> int:
    """How many ticks the history has that this one belongs to."""
    env = {} if env_id is None else {"env_id": env_id}
    if dialect == "openpi":
        return told(ask(ws, openpi_observation() | env | more)["actions"])[0]
    return told(ask(ws, infer_message(more.pop("session_id", None), **env, **more)))[0]


@pytest.mark.parametrize("dialect", ["openpi", "roboarena"])
def test_each_env_id_of_a_socket_has_a_history_of_its_own_which_ends_with_the_socket(dialect: str) -> None:
    policy = FakePolicy()
    with serving(policy) as server:
        with raw_client(server.port) as ws, raw_client(server.port) as other:
            assert [ticks(ws, dialect, env) for env in (0, 1, 0, None, 1, 0)] == [1, 1, 2, 1, 2, 3]
            assert ticks(other, dialect, 0) == 1, "another socket's"
            assert len(policy.live) == 4
        eventually(lambda: not policy.live)


@pytest.mark.parametrize("dialect", ["openpi", "roboarena"])
def test_a_reset_of_one_environment_is_of_that_one_and_a_reset_of_none_is_of_all(dialect: str) -> None:
    with serving(FakePolicy()) as server, raw_client(server.port) as ws, raw_client(server.port) as other:
        ticks(other, dialect, 0)
        for env in (None, 0, 1):
            ticks(ws, dialect, env)
        assert ask(ws, {"endpoint": "reset", "env_id": 0}) == "reset successful"
        assert [ticks(ws, dialect, env) for env in (None, 0, 1)] == [2, 1, 2]
        assert ask(ws, {"endpoint": "reset"}) == "reset successful"
        assert [ticks(ws, dialect, env) for env in (None, 0, 1)] == [1, 1, 1]
        assert ticks(ws, dialect, 1, reset=True) == 1
        assert [ticks(ws, dialect, env) for env in (None, 0, 1)] == [2, 2, 2], "the key `reset` is of its own tick's"
        assert ticks(other, dialect, 0) == 2


def test_an_environment_of_a_named_session_outlives_its_socket_under_both_names() -> None:
    with serving(FakePolicy()) as server:
        with raw_client(server.port) as ws:
            assert [ticks(ws, "roboarena", env, session_id="robot") for env in (0, 1, 0)] == [1, 1, 2]
        with raw_client(server.port) as ws:
            assert ticks(ws, "roboarena", 0, session_id="robot", resume=True) == 3
            assert ticks(ws, "roboarena", session_id="robot/env=0") == 4, "which is what people see"
            assert ask(ws, {"endpoint": "reset", "session_id": "robot"}) == "reset successful"
            assert [ticks(ws, "roboarena", env, session_id="robot") for env in (0, 1)] == [1, 1]


def test_a_reset_of_all_takes_back_what_was_to_be_told_of_their_ends() -> None:
    policy = FakePolicy()
    with serving(policy, session_idle_s=0.1) as server, raw_client(server.port) as ws:
        ticks(ws, "openpi", 0)
        eventually(lambda: not policy.live)
        assert ask(ws, {"endpoint": "reset"}) == "reset successful"
        assert ticks(ws, "openpi", 0) == 1


def test_no_two_environments_have_one_name() -> None:
    pairs = [(session, env) for session in NAMES for env in NAMES]
    assert len({in_env(*pair) for pair in pairs}) == len(pairs)
    for session, env in pairs:
        assert is_within(in_env(session, env), session)
        assert not is_within(in_env(session, env), session + "x")
    assert not is_within("a/env=b/env=c", "a"), "an environment of another session"


def test_an_env_id_that_is_too_long_for_a_name_is_refused_by_its_field() -> None:
    with serving(FakePolicy()) as server, raw_client(server.port) as ws:
        text = ask(ws, openpi_observation() | {"env_id": "e" * 250})
        assert text.startswith("bad_request: env_id: expected"), text


def test_fields_of_a_reset_that_nothing_reads_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    with serving(FakePolicy()) as server, raw_client(server.port) as ws, caplog.at_level(logging.INFO):
        for more in ({}, {}, {"seed": 1}, {"seed": 2}):
            assert ask(ws, {"endpoint": "reset", "episode_index": 7} | more) == "reset successful"
    told = [record.getMessage().partition("a reset's fields that nothing reads: ")[2] for record in caplog.records]
    assert [which for which in told if which] == ["episode_index", "seed"]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_two_environments_on_one_socket_equal_two_sockets_bit_for_bit() -> None:
    pytest.importorskip("torch")
    pytest.importorskip("diffusers")
    from test_rest import observation
    from test_rest import serving as serving_tiny

    script = ["tick 0", "tick 1", "tick 0", "reset 0", "tick 0", "tick 1", "tick 0", "reset 1", "tick 1", "tick 0"]
    with serving_tiny() as server:

        def play(sockets: list[ClientConnection], *, shared: bool) -> list[Any]:
            counts, actions = [0, 0], []
            for step in script:
                what, env = step.split()[0], int(step.split()[1])
                named = {"env_id": env} if shared else {}
                if what == "reset":
                    counts[env] = 0
                    ask(sockets[env], {"endpoint": "reset"} | named)
                    continue
                fields = observation(counts[env], seed=env)
                fields["observation/exterior_image_1_left"] = fields.pop("observation/exterior_image_0_left")
                actions.append(ask(sockets[env], fields | named)["actions"])
                counts[env] += 1
            return actions

        with raw_client(server.port, greeted=False) as one:
            one.recv()
            together = play([one, one], shared=True)
        with raw_client(server.port, greeted=False) as first, raw_client(server.port, greeted=False) as second:
            first.recv(), second.recv()
            apart = play([first, second], shared=False)
    assert len(together) == 8
    assert all(np.array_equal(*pair) for pair in zip(together, apart, strict=True))
    assert not np.array_equal(together[0], together[1])
