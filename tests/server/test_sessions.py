"""When sessions begin and end, and who is told."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from server_fakes import (
    FakePolicy,
    ask,
    closing_code,
    eventually,
    http_get,
    infer_message,
    openpi_observation,
    raw_client,
    receive,
    refusal,
    serving,
    told,
)
from websockets.sync.client import ClientConnection

from worldkv.wire import CloseCode, pack


def test_a_connection_s_session_ends_with_it() -> None:
    policy = FakePolicy()
    with serving(policy) as server:
        with raw_client(server.port) as ws:
            ask(ws, openpi_observation())
            assert len(policy.live) == 1
        eventually(lambda: not policy.live)
    assert policy.closed[0][1] == "its connection was closed (connection_closed)"


def test_a_session_is_opened_by_its_first_request_only() -> None:
    policy = FakePolicy(capacity=0)
    with serving(policy) as server, raw_client(server.port) as ws:
        assert ask(ws, {"endpoint": "reset"}) == "reset successful"
        assert not policy.live


def test_a_client_that_leaves_during_a_tick_ends_its_session_at_once() -> None:
    policy = FakePolicy()
    with serving(policy) as server:
        with raw_client(server.port) as ws:
            ws.send(pack(openpi_observation("slow")))
            assert policy.arrived.acquire(timeout=5)
        eventually(lambda: not policy.live)
        assert not policy.release.is_set()
        eventually(lambda: 'dialect="openpi",outcome="abandoned"} 1.0' in http_get(server.port, "/metrics")[1])


def test_a_named_session_is_resumed_on_another_socket() -> None:
    policy = FakePolicy()
    with serving(policy, session_grace_s=30) as server:
        with raw_client(server.port) as ws:
            assert told(ask(ws, infer_message("robot")))[0] == 1
        with raw_client(server.port) as ws:
            assert told(ask(ws, infer_message("robot", resume=True)))[0] == 2


def test_a_named_session_whose_socket_was_lost_in_a_tick_finishes_it() -> None:
    policy = FakePolicy()
    with serving(policy) as server:
        with raw_client(server.port) as ws:
            ws.send(pack(infer_message("robot", "slow")))
            assert policy.arrived.acquire(timeout=5)
        policy.release.set()
        eventually(lambda: policy.live["robot"].num_ticks == 1)
        with raw_client(server.port) as ws:
            assert told(ask(ws, infer_message("robot")))[0] == 2


@pytest.mark.parametrize("how", ["endpoint", "key"])
def test_a_reset_or_an_explicit_start_after_the_end_is_no_surprise(how: str) -> None:
    policy = FakePolicy()
    with serving(policy, session_grace_s=0.05) as server:
        with raw_client(server.port) as ws:
            ask(ws, infer_message("robot"))
        eventually(lambda: not policy.live)
        with raw_client(server.port) as ws:
            if how == "endpoint":
                assert ask(ws, {"endpoint": "reset", "session_id": "robot"}) == "reset successful"
            assert told(ask(ws, infer_message("robot", reset=how == "key")))[0] == 1


def test_resuming_a_session_that_nobody_knows_is_refused() -> None:
    with serving(FakePolicy()) as server, raw_client(server.port) as ws:
        text, code = refusal(ws, infer_message("robot", resume=True))
        assert (code, "was the server restarted?" in text) == (CloseCode.SESSION_NOT_FOUND, True)


@pytest.mark.parametrize("message", [openpi_observation(), infer_message("robot")], ids=["openpi", "roboarena"])
def test_an_idle_session_ends_and_its_client_is_told(message: dict[str, Any]) -> None:
    policy = FakePolicy()
    with serving(policy, session_idle_s=0.15) as server, raw_client(server.port) as ws:
        ask(ws, message)
        eventually(lambda: not policy.live)
        text, code = refusal(ws, message)
        assert (code, "it had no request for 0.15 s" in text) == (CloseCode.SESSION_NOT_FOUND, True)
        assert 'worldkv_sessions_ended_total{reason="idle"} 1.0' in http_get(server.port, "/metrics")[1]


def test_a_session_is_not_idle_while_its_tick_runs() -> None:
    policy = FakePolicy()
    with serving(policy, session_idle_s=0.1) as server, raw_client(server.port) as ws:
        ws.send(pack(infer_message("robot", "slow")))
        time.sleep(0.4)
        policy.release.set()
        assert told(receive(ws))[0] == 1


@pytest.mark.parametrize("message", [openpi_observation(), infer_message("robot")], ids=["openpi", "roboarena"])
@pytest.mark.parametrize("idle_s", [60.0, 0.1], ids=["still open", "idle meanwhile"])
def test_a_pause_longer_than_the_gap_begins_an_episode(message: dict[str, Any], idle_s: float) -> None:
    def ticks(ws: ClientConnection) -> int:
        reply = ask(ws, message)
        return told(reply["actions"] if isinstance(reply, dict) else reply)[0]

    with (
        serving(FakePolicy(), episode_gap_s=0.3, session_idle_s=idle_s) as server,
        raw_client(server.port) as ws,
    ):
        assert [ticks(ws), ticks(ws)] == [1, 2]
        time.sleep(0.5)
        assert [ticks(ws), ticks(ws)] == [1, 2]


def test_the_second_concurrent_tick_of_a_session_is_refused_and_the_first_unharmed() -> None:
    policy = FakePolicy()
    with serving(policy) as server, raw_client(server.port) as first, raw_client(server.port) as second:
        first.send(pack(infer_message("robot", "slow")))
        assert policy.arrived.acquire(timeout=5)
        text, code = refusal(second, infer_message("robot"))
        assert (code, "session_busy" in text) == (CloseCode.SESSION_BUSY, True)
        policy.release.set()
        assert told(receive(first))[0] == 1
        assert told(ask(first, infer_message("robot")))[0] == 2


def test_a_reset_from_another_socket_ends_the_tick_in_flight_with_a_reason() -> None:
    policy = FakePolicy()
    with serving(policy) as server, raw_client(server.port) as first, raw_client(server.port) as second:
        first.send(pack(infer_message("robot", "slow")))
        assert policy.arrived.acquire(timeout=5)
        assert ask(second, {"endpoint": "reset", "session_id": "robot"}) == "reset successful"
        text = receive(first)
        assert "session_ended: session robot was reset, during this tick" in text
        assert closing_code(first) == CloseCode.SESSION_NOT_FOUND
        assert told(ask(second, infer_message("robot")))[0] == 1


def test_a_reset_behind_a_tick_on_the_same_socket_waits_for_it() -> None:
    policy = FakePolicy()
    with serving(policy) as server, raw_client(server.port) as ws:
        ws.send(pack(infer_message("robot", "slow")))
        ws.send(pack({"endpoint": "reset"}))
        policy.release.set()
        assert told(receive(ws))[0] == 1
        assert receive(ws) == "reset successful"
        assert told(ask(ws, infer_message("robot")))[0] == 1


def test_two_sockets_that_bring_the_same_new_id_share_one_session() -> None:
    policy = FakePolicy()
    with serving(policy) as server, raw_client(server.port) as first, raw_client(server.port) as second:
        threads = [
            threading.Thread(target=ws.send, args=(pack(infer_message("new", "slow")),)) for ws in (first, second)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert policy.arrived.acquire(timeout=5)
        eventually(lambda: 'worldkv_errors_total{code="session_busy"} 1.0' in http_get(server.port, "/metrics")[1])
        assert list(policy.live) == ["new"]


def test_a_client_with_a_new_id_per_episode_is_served_for_ever_if_it_resets() -> None:
    policy = FakePolicy(capacity=2)
    with serving(policy) as server, raw_client(server.port) as ws:
        for episode in range(6):
            assert told(ask(ws, infer_message(f"episode {episode}")))[0] == 1
            assert ask(ws, {"endpoint": "reset"}) == "reset successful"
        assert told(ask(ws, infer_message("episode 0")))[0] == 1, "making room loses nothing"


def test_a_session_that_the_engine_has_ended_is_told_and_can_be_opened_again() -> None:
    policy = FakePolicy()
    with serving(policy) as server:
        with raw_client(server.port) as ws:
            ask(ws, infer_message("robot"))
            policy.live["robot"].close("the engine had enough")
            assert refusal(ws, infer_message("robot"))[1] == CloseCode.SESSION_NOT_FOUND
        with raw_client(server.port) as ws:
            assert told(ask(ws, infer_message("robot")))[0] == 1


def test_a_session_that_comes_to_use_while_another_makes_room_is_left_alone() -> None:
    policy = FakePolicy(capacity=2)
    with serving(policy) as server, raw_client(server.port) as ws, raw_client(server.port) as newcomer:
        for name in ("a", "b"):
            ask(ws, infer_message(name))
            ask(ws, {"endpoint": "reset", "session_id": name})
        first, closing, may_close = policy.live["a"], threading.Event(), threading.Event()
        close = first.close

        def slow_close(reason: str) -> Any:
            closing.set()
            assert may_close.wait(20)
            return close(reason)

        first.close = slow_close  # type: ignore[method-assign]
        newcomer.send(pack(infer_message("c")))
        assert closing.wait(10)
        ws.send(pack(infer_message("b", "slow")))
        eventually(lambda: policy.live["b"].pending is not None)
        may_close.set()
        assert told(receive(newcomer))[0] == 1
        policy.release.set()
        assert told(receive(ws))[0] == 1
        assert [name for name, _ in policy.closed] == ["a"]
