"""Single rules of who keeps a session and who is told of its end, on a clock that the test moves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from clocked_server import ClockedServer, CountingApp, Socket
from server_fakes import infer_message

Start = Callable[..., ClockedServer]


@pytest.fixture
def start() -> Iterator[Start]:
    servers: list[ClockedServer] = []

    def make(capacity: int = 9, **config: Any) -> ClockedServer:
        config = {"session_grace_s": 10.0, "session_idle_s": 100.0} | config
        servers.append(ClockedServer(CountingApp(capacity), ["key"], **config))
        return servers[0]

    yield make
    for server in servers:
        server.stop()


def ask(socket: Socket, session_id: str | None, **more: Any) -> Any:
    """The number of a tick in its history, or a text."""
    socket.send(infer_message(session_id, **more))
    answer = socket.read()
    return answer if isinstance(answer, str) else int(answer[0, 0])


def test_an_operator_s_request_begins_the_grace_time_anew(start: Start) -> None:
    server = start()
    robot = Socket(server, "key")
    assert ask(robot, "a") == 1
    robot.close()
    for _ in range(4):
        server.pass_time(8)
        assert server.http("key", "POST", "/v1/sessions/a/park").result()[0] == 200
    server.pass_time(8)
    assert ask(Socket(server, "key"), "a", resume=True) == 2
    assert ask(Socket(server, "key"), "a") == 3


def test_a_private_session_that_another_socket_uses_does_not_end_with_that_one(start: Start) -> None:
    server = start()
    robot, guest = Socket(server, "key"), Socket(server, "key")
    assert ask(robot, None) == 1
    assert ask(guest, robot.own_name) == 2
    guest.close()
    assert ask(robot, None) == 3, "the robot's history started afresh, and nobody told it"


def test_an_open_that_is_refused_forgets_no_end_that_is_still_to_be_told(start: Start) -> None:
    server = start(max_sessions=1)
    robot, other = Socket(server, "key"), Socket(server, "key")
    assert ask(robot, "a") == 1
    assert server.http("key", "DELETE", "/v1/sessions/a").result()[0] == 200
    assert ask(other, "b") == 1
    assert server.http("key", "POST", "/v1/sessions", {"session_id": "a"}).result()[0] == 429
    assert "has ended: it was deleted" in ask(robot, "a")


def test_whoever_is_told_of_an_end_is_told_once(start: Start) -> None:
    server = start()
    robot = Socket(server, "key")
    assert ask(robot, "a") == 1
    robot.close()
    server.pass_time(15)
    assert "has ended" in ask(Socket(server, "key"), "a")
    assert ask(Socket(server, "key"), "a") == 1


def test_a_key_s_limit_is_no_hindrance_where_its_sessions_have_no_history(start: Start) -> None:
    server = start(max_sessions=2)
    robot = Socket(server, "key")
    for episode in range(5):
        assert ask(robot, f"episode {episode}") == 1
        robot.send({"endpoint": "reset"})
        assert robot.read() == "reset successful"


def test_a_refusal_counts_the_session_that_its_own_socket_leaves(start: Start) -> None:
    server = start(max_sessions=1)
    robot = Socket(server, "key")
    assert ask(robot, "a") == 1
    assert "retry_after_ms=10000)" in ask(robot, "b")
    server.pass_time(10)
    assert ask(Socket(server, "key"), "b") == 1


def test_a_session_that_the_engine_has_ended_hides_no_other_one(start: Start) -> None:
    server = start()
    robot = Socket(server, "key")
    assert [ask(robot, name) for name in "ab"] == [1, 1]
    server.service.app.live["a"].ended_by_engine = True
    status, listed = server.http("key", "GET", "/v1/sessions").result()
    assert (status, [state["session_id"] for state in listed["sessions"]]) == (200, ["b"])
    robot.send({"endpoint": "reset", "session_id": "a"})
    assert robot.read() == "reset successful", "a history that is gone is forgotten"
