"""How long sessions live beside the sockets that use them, and what a refusal promises."""

from __future__ import annotations

import re
import time

import pytest
from server_fakes import (
    FakePolicy,
    ask,
    eventually,
    http_get,
    infer_message,
    openpi_observation,
    raw_client,
    refusal,
    serving,
    told,
)

from worldkv.wire import CloseCode


def retry_after_ms(text: str) -> int | None:
    found = re.search(r"retry_after_ms=(\d+)", text)
    return None if found is None else int(found[1])


@pytest.mark.parametrize("kind", ["session_id", "env_id"])
def test_a_socket_that_names_every_episode_anew_is_served_for_ever(kind: str) -> None:
    """It never resets and never closes; what it has left ages, so neither the limit nor memory is ever reached."""
    policy, most = FakePolicy(capacity=1000), 0
    with serving(policy, session_grace_s=0.1, max_sessions=100) as server, raw_client(server.port) as ws:
        for episode in range(400):
            name = {"session_id": f"episode {episode}"} if kind == "session_id" else {"env_id": episode}
            assert told(ask(ws, infer_message(**({"session_id": None} | name))))[0] == 1
            most = max(most, len(policy.live))
            time.sleep(0.004)
        assert most < 100
        eventually(lambda: len(policy.live) == 1)
        assert told(ask(ws, infer_message(**({"session_id": None} | name))))[0] == 2, "the one it is with lives"


@pytest.mark.parametrize("how", ["closed", "left"])
def test_a_session_lives_on_with_one_socket_where_another_was_closed_or_left_it(how: str) -> None:
    with serving(FakePolicy(), session_grace_s=0.1) as server, raw_client(server.port) as second:
        with raw_client(server.port) as first:
            assert told(ask(second, infer_message("shared")))[0] == 1
            assert told(ask(first, infer_message("shared")))[0] == 2
            if how == "left":
                ask(first, infer_message("other"))
                time.sleep(0.3)
        time.sleep(0.3)
        assert told(ask(second, infer_message("shared")))[0] == 3


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("closed", "its connection was lost and nobody resumed it within 0.05 s (grace_over)"),
        ("left", "its connection went on to other sessions and did not come back within 0.05 s (grace_over)"),
    ],
)
def test_whoever_comes_back_too_late_is_told_once_and_why(how: str, why: str) -> None:
    with serving(FakePolicy(), session_grace_s=0.05) as server, raw_client(server.port) as ws:
        with raw_client(server.port) as first:
            ask(first, infer_message("a"))
            if how == "left":
                ask(first, infer_message("b"))
                eventually(lambda: 'reason="grace_over"} 1.0' in http_get(server.port, "/metrics")[1])
        eventually(lambda: 'reason="grace_over"} ' in http_get(server.port, "/metrics")[1])
        text, code = refusal(ws, infer_message("a"))
        assert (code, f"session a has ended: {why}" in text) == (CloseCode.SESSION_NOT_FOUND, True), text
        with raw_client(server.port) as ws:
            assert told(ask(ws, infer_message("a")))[0] == 1


@pytest.mark.parametrize("kind", ["session_id", "env_id"])
def test_a_socket_that_drives_robots_in_turn_keeps_them_all(kind: str) -> None:
    policy = FakePolicy()
    with serving(policy, session_grace_s=0.4) as server, raw_client(server.port) as ws:
        for turn in range(1, 11):
            for name in ("a", "b", "c"):
                named = infer_message(**({"session_id": None} | {kind: name}))
                assert told(ask(ws, named))[0] == turn
            time.sleep(0.1)


def test_the_session_of_a_socket_itself_ages_while_it_asks_for_others() -> None:
    policy = FakePolicy()
    with serving(policy, session_grace_s=0.05) as server, raw_client(server.port) as ws:
        ask(ws, openpi_observation())
        ask(ws, infer_message("named"))
        eventually(lambda: list(policy.live) == ["named"])
        assert "has ended" in refusal(ws, openpi_observation())[0]


@pytest.mark.parametrize("how", ["closed", "left"])
@pytest.mark.parametrize("full", ["its key", "the engine"])
def test_after_the_time_that_a_refusal_names_there_is_room(full: str, how: str) -> None:
    policy = FakePolicy(capacity=3 if full == "the engine" else 9)
    most = 3 if full == "its key" else 9
    with serving(policy, session_grace_s=1.5, session_idle_s=30, max_sessions=most) as server:
        with raw_client(server.port) as ws:
            for name in "abc":
                ask(ws, infer_message(name))
                time.sleep(0.1)
            if how == "left":
                text, code = refusal(ws, infer_message("d"))
        if how == "closed":
            eventually(lambda: "worldkv_connections 0.0" in http_get(server.port, "/metrics")[1])
            with raw_client(server.port) as ws:
                text, code = refusal(ws, infer_message("d"))
        wait_ms = retry_after_ms(text)
        assert code == CloseCode.ADMISSION_REFUSED
        assert wait_ms is not None
        assert 100 < wait_ms <= 1400, "`a` was left first"
        with raw_client(server.port) as ws:
            time.sleep(wait_ms / 1e3)
            assert told(ask(ws, infer_message("d")))[0] == 1


def test_the_idle_time_counts_where_it_comes_first() -> None:
    with serving(FakePolicy(), session_grace_s=60, session_idle_s=0.5, max_sessions=1) as server:
        with raw_client(server.port) as ws:
            ask(ws, infer_message("a"))
        eventually(lambda: "worldkv_connections 0.0" in http_get(server.port, "/metrics")[1])
        with raw_client(server.port) as ws:
            wait_ms = retry_after_ms(refusal(ws, infer_message("b"))[0])
        assert wait_ms is not None
        assert wait_ms <= 500
        time.sleep(wait_ms / 1e3)
        with raw_client(server.port) as ws:
            assert told(ask(ws, infer_message("b")))[0] == 1


@pytest.mark.parametrize("full", ["its key", "the engine"])
def test_no_time_is_promised_where_every_session_has_its_client(full: str) -> None:
    policy = FakePolicy(capacity=1 if full == "the engine" else 9)
    config = {"max_sessions": 1} if full == "its key" else {}
    with serving(policy, **config) as server, raw_client(server.port) as ws, raw_client(server.port) as other:
        ask(ws, infer_message("a"))
        text = refusal(other, infer_message("b"))[0]
        assert retry_after_ms(text) is None
        assert "no session will make room by itself" in text
        assert told(ask(ws, infer_message("a")))[0] == 2


def test_a_socket_too_many_is_promised_nothing() -> None:
    with serving(FakePolicy(), max_connections=1) as server, raw_client(server.port):
        with raw_client(server.port, greeted=False) as ws:
            text = ws.recv(timeout=5)
        assert isinstance(text, str)
        assert retry_after_ms(text) is None
        assert "none closes by itself" in text


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_a_socket_has_left_does_not_fill_the_host_with_parked_sessions() -> None:
    pytest.importorskip("torch")
    pytest.importorskip("diffusers")
    from engines import random_checkpoint
    from test_rest import observation

    from worldkv.engine.engine import EngineConfig
    from worldkv.load import load_policy
    from worldkv.server.server import PolicyServer, ServerConfig
    from worldkv.wire import pack

    policy = load_policy(random_checkpoint("ti2v"), EngineConfig(block_size=16, max_sessions=2))
    most, message = 0, observation(0) | {"endpoint": "infer"}
    try:
        with PolicyServer(policy, ServerConfig(port=0, session_grace_s=0.3, max_sessions=30)) as server:
            eventually(lambda: http_get(server.port, "/healthz")[0] == 200, 30)
            with raw_client(server.port) as ws:
                for episode in range(60):
                    assert not isinstance(ask(ws, pack(message | {"session_id": episode})), str)
                    most = max(most, policy.engine.stats().num_parked)
                    time.sleep(0.02)
                assert 0 < most < 30
                eventually(lambda: policy.engine.stats().bytes_parked == 0)
    finally:
        policy.close()
        policy.engine.shutdown()
