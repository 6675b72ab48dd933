"""A server's start, its health, its end, and that a tick never keeps the event loop busy."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from server_fakes import (
    METADATA,
    FakePolicy,
    ask,
    eventually,
    http_get,
    infer_message,
    openpi_observation,
    raw_client,
    receive,
    serving,
    told,
)
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from worldkv.server.server import PolicyServer, ServerConfig
from worldkv.wire import CloseCode, pack


def test_health_is_unready_until_warm_up_is_done() -> None:
    policy = FakePolicy(warm=False)
    with serving(policy, until_ready=False) as server:
        eventually(lambda: http_get(server.port, "/healthz")[0] == 503)
        assert json.loads(http_get(server.port, "/healthz")[1]) == {
            "status": "unready",
            "reason": "warming up",
        }
        assert "worldkv_ready 0.0" in http_get(server.port, "/metrics")[1]
        policy.may_warm_up.set()
        eventually(lambda: http_get(server.port, "/healthz")[0] == 200)
        assert json.loads(http_get(server.port, "/healthz")[1]) == {"status": "ready"}
        assert "worldkv_ready 1.0" in http_get(server.port, "/metrics")[1]


def test_health_is_unready_when_the_engine_says_so() -> None:
    policy = FakePolicy()
    with serving(policy) as server:
        policy.sick = "no tick ended for 60 s"
        status, body = http_get(server.port, "/healthz")
    assert (status, json.loads(body)["reason"]) == (503, "no tick ended for 60 s")


def test_a_request_before_warm_up_is_done_waits_for_it() -> None:
    policy = FakePolicy(warm=False)
    with serving(policy, until_ready=False) as server, raw_client(server.port) as ws:
        ws.send(pack(openpi_observation()))
        with pytest.raises(TimeoutError):
            ws.recv(timeout=0.2)
        assert not policy.live, "no session is opened in a cold engine"
        policy.may_warm_up.set()
        assert told(receive(ws)["actions"])[0] == 1


def test_waiting_for_warm_up_has_a_limit() -> None:
    policy = FakePolicy(warm=False)
    with serving(policy, until_ready=False, request_timeout_s=0.2) as server, raw_client(server.port) as ws:
        assert "request_timed_out: no answer within 0.2 s" in ask(ws, openpi_observation())
        assert goodbye(ws)[0] == CloseCode.REQUEST_TIMED_OUT


def test_a_client_that_leaves_before_warm_up_is_done_leaves_nothing_behind() -> None:
    policy = FakePolicy(warm=False)
    with serving(policy, until_ready=False) as server:
        with raw_client(server.port) as ws:
            ws.send(pack(openpi_observation()))
        eventually(lambda: "worldkv_connections 0.0" in http_get(server.port, "/metrics")[1])
        policy.may_warm_up.set()
        eventually(lambda: http_get(server.port, "/healthz")[0] == 200)
        time.sleep(0.05)
        assert not policy.live
        assert not policy.closed


def test_a_failed_warm_up_ends_the_server_and_tells_who_waits() -> None:
    policy = FakePolicy(warm=False)
    policy.warm_up_error = MemoryError("no room for the graphs")
    server = PolicyServer(policy, ServerConfig(port=0))
    server.listen()
    told_client: list[str] = []

    def robot() -> None:
        with raw_client(server.port) as ws:
            ws.send(pack(openpi_observation()))
            policy.may_warm_up.set()
            told_client.append(receive(ws))

    client = threading.Thread(target=robot)
    client.start()
    with pytest.raises(MemoryError, match="no room for the graphs"):
        server.run()
    client.join()
    assert told_client[0].startswith("engine_stopped: warm-up failed")


def test_pings_and_other_clients_are_answered_while_a_tick_runs() -> None:
    policy = FakePolicy()
    with serving(policy) as server, raw_client(server.port) as busy, raw_client(server.port) as other:
        busy.send(pack(openpi_observation("slow")))
        assert policy.arrived.acquire(timeout=5)
        for _ in range(3):
            assert busy.ping().wait(1), "the event loop must answer pings during a tick"
            assert told(ask(other, infer_message(None)))[0] >= 1
            assert http_get(server.port, "/healthz")[0] == 200
        busy.send(pack(openpi_observation()))
        assert busy.ping().wait(1), "also with a request waiting behind the tick"
        policy.release.set()
        assert told(receive(busy)["actions"])[0] == 1
        assert told(receive(busy)["actions"])[0] == 1, "another prompt: a new history"


def test_metrics_tell_stages_connections_and_sessions() -> None:
    with serving(FakePolicy()) as server, raw_client(server.port) as ws:
        ask(ws, openpi_observation())
        status, metrics = http_get(server.port, "/metrics")
    assert status == 200
    for line in (
        'worldkv_requests_total{dialect="openpi",outcome="ok"} 1.0',
        'worldkv_tick_stage_seconds_count{stage="denoise"} 1.0',
        'worldkv_tick_stage_seconds_sum{stage="denoise"} 0.004',
        'worldkv_tick_stage_seconds_count{stage="total"} 1.0',
        "worldkv_connections 1.0",
        "worldkv_sessions 1.0",
    ):
        assert line in metrics


def test_two_servers_in_one_process_share_nothing() -> None:
    with serving(FakePolicy()) as one, serving(FakePolicy()) as other:
        with raw_client(one.port) as ws:
            ask(ws, openpi_observation())
        assert one.port != other.port
        assert 'outcome="ok"' in http_get(one.port, "/metrics")[1]
        assert 'outcome="ok"' not in http_get(other.port, "/metrics")[1]


def test_a_shutdown_lets_the_tick_in_flight_end_and_says_goodbye() -> None:
    policy = FakePolicy()
    with serving(policy) as server, raw_client(server.port) as busy, raw_client(server.port) as idle:
        busy.send(pack(infer_message("robot", "slow")))
        assert policy.arrived.acquire(timeout=5)
        stopping = threading.Thread(target=server.stop)
        stopping.start()
        assert goodbye(idle) == (CloseCode.GOING_AWAY, "the server is shutting down")
        policy.release.set()
        assert told(receive(busy))[0] == 1, "the tick in flight is answered"
        assert goodbye(busy) == (CloseCode.GOING_AWAY, "the server is shutting down")
        stopping.join(10)
        assert not stopping.is_alive()
    assert policy.closed == [("robot", "the server is shutting down (shutdown)")]
    with pytest.raises(ConnectionRefusedError), raw_client(server.port):
        pass


def goodbye(ws: ClientConnection) -> tuple[int, str]:
    with pytest.raises(ConnectionClosed) as closed:
        ws.recv(timeout=5)
    assert closed.value.rcvd is not None
    return closed.value.rcvd.code, closed.value.rcvd.reason


def test_a_taken_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1 port {port}: "):
            PolicyServer(FakePolicy(), ServerConfig(port=port)).start()


def test_the_port_is_known_once_it_listens() -> None:
    server = PolicyServer(FakePolicy(), ServerConfig(port=0))
    with pytest.raises(ValueError, match="not listening yet"):
        _ = server.port
    with server:
        assert server.port > 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_run_in_good_order_and_control_returns(number: signal.Signals) -> None:
    with server_process() as (process, port):
        with raw_client(port) as ws:
            ask(ws, infer_message("robot"))
            process.send_signal(number)
            assert goodbye(ws)[0] == CloseCode.GOING_AWAY
        assert process.communicate(timeout=10) == ("cleaned up after 1 session\n", "")
        assert process.returncode == 0


def test_a_second_interrupt_ends_the_tick_in_flight_and_its_client_is_told() -> None:
    with server_process() as (process, port):
        with raw_client(port) as ws:
            ws.send(pack(infer_message("robot", "slow")))
            eventually(lambda: "worldkv_sessions 1.0" in http_get(port, "/metrics")[1])
            process.send_signal(signal.SIGINT)
            eventually(lambda: http_get(port, "/healthz")[0] == 503)
            process.send_signal(signal.SIGINT)
            assert "session robot was closed: the server is shutting down (shutdown), during this tick" in receive(ws)
        assert process.communicate(timeout=10)[0] == "cleaned up after 1 session\n"
        assert process.returncode == 0


@contextlib.contextmanager
def server_process() -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A server in a process of its own, and its port."""
    script = """
        from server_fakes import FakePolicy
        from worldkv.server.server import PolicyServer, ServerConfig

        policy = FakePolicy()
        server = PolicyServer(policy, ServerConfig(port=0))
        print(server.listen(), flush=True)
        server.run()
        print("cleaned up after", len(policy.closed), "session", flush=True)
    """
    tests = Path(__file__).resolve().parents[1]
    with subprocess.Popen(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(tests), str(tests.parent), str(tests.parent / "client")]),
        },
    ) as process:
        try:
            assert process.stdout is not None
            yield process, int(process.stdout.readline())
        finally:
            process.kill()


def test_any_path_upgrades_even_that_of_health() -> None:
    with serving(FakePolicy()) as server:
        for path in ("", "/", "/healthz", "/v1/policy"):
            with connect(f"ws://127.0.0.1:{server.port}{path}", compression="deflate") as ws:
                assert receive(ws) == METADATA
                assert not ws.protocol.extensions, "no compression, whoever asks for it"
        assert http_get(server.port, "/no/such/page")[0] == 404
