"""Health on a port of its own: a small process that answers whatever the server does, and lives as long as it."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from server_fakes import FakePolicy, eventually, serving

from worldkv.server import health, health_process
from worldkv.server.config import ServerConfig
from worldkv.server.health import HealthServer
from worldkv.server.health_process import HealthProcess
from worldkv.server.server import PolicyServer

ROOT = Path(__file__).resolve().parents[2]
HOLDER = """
import signal, sys, time
from worldkv.server.health import HealthServer
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda *_: print("told", flush=True))
with HealthServer("127.0.0.1", 0) as server:
    print(server.port, server.pid, flush=True)
    while True:
        time.sleep(60)
"""

LOADING = """
import sys, time
import worldkv.cli.main as cli
import worldkv.cli.serve_also as serve_also
def load(*arguments, **options):
    print("loading", flush=True)
    time.sleep(60)
serve_also.load_app_for = load
sys.exit(cli.main(["serve", "--checkpoint", ".", "--port", "0", "--health-port", sys.argv[1]]))
"""


def reached(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
    except OSError:
        return False
    return True


def get(port: int | None, path: str = "/healthz", method: str = "GET", **headers: str) -> tuple[int, str]:
    assert port is not None
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def reason(port: int | None) -> str:
    status, body = get(port)
    told = json.loads(body)
    assert (status == 200) == (told["status"] == "ready")
    return str(told.get("reason", "ready"))


def is_running(pid: int) -> bool:
    """A process that has ended and that nobody has asked about yet does not run."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def test_it_answers_from_warm_up_to_the_end() -> None:
    policy = FakePolicy(warm=False)
    with serving(policy, until_ready=False, health_port=0) as server:
        port = server.health_port
        assert port is not None
        eventually(lambda: reason(port) == "warming up")
        policy.may_warm_up.set()
        eventually(lambda: get(port) == (200, '{"status": "ready"}'))
        policy.sick = "it coughs"
        eventually(lambda: reason(port) == "it coughs")
        assert "worldkv_sessions 0.0" in get(port, "/metrics")[1]
        assert get(port, "/metrics", method="HEAD") == (200, "")
        assert "it coughs" in get(port, Host="evil.example")[1], "probes ask under any name"
        status, text = get(port, "/metrics", Host="evil.example")
        assert status == 401
        assert "--allowed-host evil.example" in text
        assert get(port, "/v1/sessions")[0] == 404
        assert get(port, method="POST")[0] == 400
    assert not reached(port)


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6 here")
def test_it_answers_in_both_families() -> None:
    with HealthServer("::", 0) as server:
        for address in ("127.0.0.1", "::1"):
            with socket.create_connection((address, server.port), timeout=5) as raw:
                raw.sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
                assert raw.recv(4096).startswith(b"HTTP/1.1 503"), address


def test_a_taken_port_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1 port {port}"):
            PolicyServer(FakePolicy(), ServerConfig(port=0, health_port=port))


@contextlib.contextmanager
def started(program: str, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """(A process in a group of its own, its first line.)"""
    process = subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "client")])},
        start_new_session=True,
    )
    assert process.stdout is not None
    try:
        yield process, process.stdout.readline()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_it_is_small_and_outlives_signals_but_not_its_server_s_death() -> None:
    with started(HOLDER) as (process, line):
        port, pid = map(int, line.split())
        assert reason(port) == "loading the model"
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        assert pages * os.sysconf("SC_PAGE_SIZE") < 20 << 20, "it has imported more than it needs"
        assert process.stdout is not None
        for number in (signal.SIGINT, signal.SIGTERM):
            os.killpg(process.pid, number)  # as Ctrl-C and systemd do
            assert process.stdout.readline() == "told\n"
        os.kill(pid, signal.SIGHUP)
        assert reason(port) == "loading the model"
        process.send_signal(signal.SIGKILL)
        eventually(lambda: not is_running(pid))
        assert not reached(port)


def test_it_answers_while_the_model_is_loaded() -> None:
    pytest.importorskip("torch")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with started(LOADING, str(port)) as (process, line):
        assert line == "loading\n"
        assert reason(port) == "loading the model"
        assert get(port, "/metrics") == (503, "loading the model\n")
        process.terminate()
        assert process.wait(20) == 0
        assert not reached(port)


def test_one_that_was_killed_is_begun_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "_ANOTHER_AFTER_S", 0.05)
    with HealthServer("127.0.0.1", 0) as server:
        killed = server.pid
        os.kill(killed, signal.SIGKILL)
        assert reason(server.port) == "loading the model", "who asks meanwhile waits"
        assert server.pid != killed


def test_a_server_whose_event_loop_stands_still_is_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "STALE_S", 0.3)
    with serving(FakePolicy(), health_port=0) as server:
        eventually(lambda: reason(server.health_port) == "ready")
        assert server._health is not None
        assert server._health._loop is not None
        server._health._loop.call_soon_threadsafe(time.sleep, 1.5)
        eventually(lambda: reason(server.health_port).startswith("the event loop has stood still for "))
        eventually(lambda: reason(server.health_port) == "ready")


@contextlib.contextmanager
def answering() -> Iterator[tuple[socket.socket, int]]:
    """(The server's end of the channel, the port) of a process's inside that runs on a thread."""
    ours, theirs = socket.socketpair()
    with ours, theirs, socket.create_server(("127.0.0.1", 0), backlog=512) as listening:
        process = HealthProcess(theirs, os.getppid(), [listening])
        thread = threading.Thread(target=process.run)
        thread.start()
        try:
            yield ours, listening.getsockname()[1]
        finally:
            ours.shutdown(socket.SHUT_RDWR)
            thread.join(10)
            assert not thread.is_alive(), "it outlives its channel"


def test_the_last_word_holds_for_a_while_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health_process, "STALE_S", 0.3)
    with answering() as (server, port):
        server.sendall(b'{"reason": null}\n')
        eventually(lambda: reason(port) == "ready")
        eventually(lambda: reason(port).startswith("the server has said nothing for 0."), 2)
        server.sendall(b'{"reason": null}\n')
        eventually(lambda: reason(port) == "ready")


def test_metrics_that_do_not_come_are_told_late_and_health_is_told_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health_process, "WITHIN_S", 0.4)
    monkeypatch.setattr(health_process, "_LOOK_S", 0.05)
    with answering() as (server, port), socket.create_connection(("127.0.0.1", port), timeout=5) as first:
        first.sendall(b"GET /metrics HTTP/1.1\r\nHost: here\r\n\r\n")
        assert server.recv(4096) == b'{"metrics": "here"}\n'
        assert reason(port) == "loading the model"
        assert get(port, "/metrics") == (503, "the server did not tell its metrics within 0.4 s\n")
        assert first.recv(4096).startswith(b"HTTP/1.1 503")
        server.settimeout(0.05)
        with pytest.raises(TimeoutError):
            server.recv(4096)  # one at a time: those who were told late are asked for no more
        server.sendall(b'{"status": 200, "kind": "text/plain", "body": "too late"}\n')
        told: list[tuple[int, str]] = []
        asks = threading.Thread(target=lambda: told.append(get(port, "/metrics", Host="there")))
        asks.start()
        server.settimeout(5)
        assert server.recv(4096) == b'{"metrics": "there"}\n'
        server.sendall(b'{"status": 200, "kind": "text/plain", "body": "now"}\n')
        asks.join()
        assert told == [(200, "now")], "an answer for somebody else was told"


def test_sockets_that_say_nothing_keep_nobody_out() -> None:
    with contextlib.ExitStack() as stack, answering() as (_, port):
        for _ in range(400):
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=5))
        start = time.monotonic()
        assert reason(port) == "loading the model"
        assert time.monotonic() - start < 2


def test_a_head_without_end_is_hung_up_on() -> None:
    with answering() as (_, port), socket.create_connection(("127.0.0.1", port), timeout=5) as raw:
        with contextlib.suppress(OSError):
            raw.sendall(b"GET /healthz HTTP/1.1\r\nX: " + b"x" * 20_000)
        with contextlib.suppress(ConnectionError):
            assert raw.recv(4096) == b""
        assert reason(port) == "loading the model"


def test_who_comes_from_where() -> None:
    origin = health_process.origin_of
    assert origin("127.0.0.1") == origin("::ffff:127.0.0.1")
    assert origin("2001:db8::1") == origin("2001:db8::2:3%eth0") != origin("2001:db8:0:1::1")
