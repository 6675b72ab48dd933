"""The robot's side alone, against servers of a few lines: some behave, most do not.

tests/test_client.py has what is tested against our own server.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from websockets.http11 import Request, Response
from websockets.server import ServerProtocol
from websockets.sync.server import ServerConnection, serve

from worldkv_client.client import PolicyClient
from worldkv_client.errors import ConnectionLost, RemoteError
from worldkv_client.wire import RESET_REPLY, CloseCode, infer_reply, observe_reply, pack, parse_request, unpack
from worldkv_client.wire.robots import InferRequest

METADATA = {"image_resolution": [180, 320], "needs_session_id": True}
ROBOARENA = {"observation/exterior_image_0_left": np.full((4, 6, 3), 10, np.uint8), "prompt": "pick"}
OPENPI = {"observation/exterior_image_1_left": np.full((4, 6, 3), 10, np.uint8), "prompt": "pick"}


@contextlib.contextmanager
def misbehaving(handler: Callable[[ServerConnection], None], **options: Any) -> Iterator[int]:
    """A websocket server that greets and then does what `handler` does; its port."""

    def greet(ws: ServerConnection) -> None:
        ws.send(pack(METADATA))
        handler(ws)

    with serve(greet, "127.0.0.1", 0, compression=None, **options) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.socket.getsockname()[1]
        server.shutdown()
        thread.join()


class CountingServer:
    """Answers as a server does: in actions [1, 8] the ticks of the session, and whether the request had `resume`."""

    def __init__(self) -> None:
        self.num_ticks: dict[Any, int] = {}

    def __call__(self, ws: ServerConnection) -> None:
        for message in ws:
            request = parse_request(unpack(message, max_bytes=1 << 20))
            session = request.session_id or ws.id
            if not isinstance(request, InferRequest):
                self.num_ticks.pop(session, None)
                ws.send(RESET_REPLY)
                continue
            if request.observation["prompt"] == "fail":
                ws.send("session_not_found: it is gone [error 1f]")
                ws.close(CloseCode.SESSION_NOT_FOUND)
                return
            if request.restart:
                self.num_ticks.pop(session, None)
            self.num_ticks[session] = self.num_ticks.get(session, 0) + 1
            actions = np.zeros((1, 8), np.float32)
            actions[0, :2] = self.num_ticks[session], request.resume
            ws.send(pack(infer_reply(request, actions, {"infer_ms": 1.0})))


def ticked(client: PolicyClient, observation: dict[str, Any]) -> tuple[int, bool]:
    """(ticks of the session, whether it was resumed)."""
    reply = client.infer(observation)
    num_ticks, resumed = (reply["actions"] if isinstance(reply, dict) else reply)[0, :2]
    return int(num_ticks), bool(resumed)


@pytest.mark.parametrize(("dialect", "observation"), [("roboarena", ROBOARENA), ("openpi", OPENPI)])
def test_a_session_ticks_and_is_reset_in_either_dialect(dialect: str, observation: dict[str, Any]) -> None:
    with misbehaving(CountingServer()) as port, PolicyClient(port=port, dialect=dialect) as client:
        assert client.metadata == METADATA
        assert [ticked(client, observation) for _ in range(2)] == [(1, False), (2, False)]
        client.reset()
        assert ticked(client, observation) == (1, False)


def test_after_a_lost_socket_the_session_is_resumed_by_name() -> None:
    with misbehaving(CountingServer()) as port, PolicyClient(port=port) as client:
        assert ticked(client, ROBOARENA) == (1, False)
        client.close()
        assert [ticked(client, ROBOARENA) for _ in range(2)] == [(2, True), (3, False)]


def test_a_refusal_raises_its_text_and_close_code_and_the_next_call_starts_anew() -> None:
    with misbehaving(CountingServer()) as port, PolicyClient(port=port) as client:
        client.infer(ROBOARENA)
        with pytest.raises(RemoteError, match="session_not_found: it is gone") as refused:
            client.infer({**ROBOARENA, "prompt": "fail"})
        assert refused.value.close_code == CloseCode.SESSION_NOT_FOUND
        assert ticked(client, ROBOARENA) == (2, False), "told once, so it asks for no history"


def test_a_reply_to_another_request_is_refused() -> None:
    def answer_the_one_before(ws: ServerConnection) -> None:
        for message in ws:
            request = unpack(message, max_bytes=1 << 20)
            ws.send(pack({"actions": np.zeros((24, 8)), "sequence": request["sequence"] - 1}))

    with misbehaving(answer_the_one_before) as port:
        client = PolicyClient(port=port, dialect="openpi")
        with pytest.raises(ConnectionLost, match="it answers request -1, not 0"):
            client.infer(OPENPI)


@pytest.mark.parametrize(
    ("reply", "reason"),
    [(b"\xc1", "expected one msgpack value"), (pack(None), "expected actions, got NoneType"), (pack([]), "got list")],
)
def test_a_reply_that_holds_no_actions_is_refused(reply: bytes, reason: str) -> None:
    def answer(ws: ServerConnection) -> None:
        for _ in ws:
            ws.send(reply)

    with misbehaving(answer) as port:
        client = PolicyClient(port=port)
        with pytest.raises(ConnectionLost, match=f"sent a reply that cannot be used: .*{reason}"):
            client.infer(ROBOARENA)


def test_a_connection_closed_instead_of_a_reply_is_lost_and_not_asked_again() -> None:
    requests = []

    def take_one_and_leave(ws: ServerConnection) -> None:
        requests.append(ws.recv())

    with misbehaving(take_one_and_leave) as port:
        client = PolicyClient(port=port)
        with pytest.raises(ConnectionLost, match="closed the connection before a reply"):
            client.infer(ROBOARENA)
    assert len(requests) == 1, "the tick may have run: only the caller can know whether to repeat it"


def test_a_server_that_stops_reading_cannot_hold_the_client() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=greet_and_read_no_more, args=(listener,))
        thread.start()
        client = PolicyClient(port=listener.getsockname()[1], timeout=0.5)
        start = time.monotonic()
        with pytest.raises(ConnectionLost, match="did not take the request"):
            client.infer({"image": np.zeros(40_000_000, np.uint8)})
        assert 0.4 < time.monotonic() - start < 5
        thread.join()


def greet_and_read_no_more(listener: socket.socket) -> None:
    connection, _ = listener.accept()
    with connection:
        protocol = ServerProtocol()
        while not (events := list(protocol.events_received())):
            protocol.receive_data(connection.recv(4096))
        protocol.send_response(protocol.accept(events[0]))  # type: ignore[arg-type]
        protocol.send_binary(pack(METADATA))
        for data in protocol.data_to_send():
            connection.sendall(data)
        time.sleep(1.0)


def test_a_server_that_never_comes_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with pytest.raises(
        ConnectionLost, match=rf"no policy server answers at ws://127.0.0.1:{port} .*check host and port"
    ):
        PolicyClient(port=port, connect_wait=0.2).infer(ROBOARENA)


def test_a_port_where_something_else_listens_is_given_up_at_once() -> None:
    def not_found(ws: ServerConnection, request: Request) -> Response:
        return ws.respond(404, "this is another service")

    with misbehaving(lambda ws: None, process_request=not_found) as port:
        start = time.monotonic()
        with pytest.raises(ConnectionLost, match="HTTP 404"):
            PolicyClient(port=port, connect_wait=30).infer(ROBOARENA)
        assert time.monotonic() - start < 5, "waiting longer would not help"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"dialect": "klingon"}, "dialect: expected one of openpi, roboarena"),
        ({"dialect": "openpi", "session_id": "a"}, "session_id: expected None"),
        ({"session_id": ""}, "session_id: expected 1 to 256"),
        ({"timeout": 0}, "timeout and connect_wait: expected"),
        ({"connect_wait": -1}, "timeout and connect_wait: expected"),
    ],
)
def test_a_client_that_could_never_work_is_refused(arguments: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        PolicyClient(**arguments)


@pytest.mark.parametrize(
    ("host", "port", "uri"),
    [
        ("127.0.0.1", 8000, "ws://127.0.0.1:8000"),
        ("::1", 8000, "ws://[::1]:8000"),
        ("[::1]", 8000, "ws://[::1]:8000"),
        ("wss://robots.example.org", None, "wss://robots.example.org"),
        ("ws://robots.example.org", 81, "ws://robots.example.org:81"),
    ],
)
def test_hosts_become_uris(host: str, port: int | None, uri: str) -> None:
    assert PolicyClient(host, port).uri == uri


class KeepingServer:
    """Keeps frames for the next request; in a reply's actions [1, 8] how many it says were sent ahead. `told`: all
    requests, without their frames."""

    def __init__(self) -> None:
        self.told: list[dict[str, Any]] = []
        self.drop_next = False

    def __call__(self, ws: ServerConnection) -> None:
        waiting = 0
        for message in ws:
            fields = unpack(message, max_bytes=1 << 20)
            request = parse_request(fields)
            self.told.append({name: value for name, value in fields.items() if "image" not in name})
            if self.drop_next:
                self.drop_next = False
                ws.close()
                return
            if not isinstance(request, InferRequest):
                ws.send(RESET_REPLY)
            elif request.observes:
                waiting += 1
                ws.send(pack(observe_reply(request, waiting)))
            else:
                waiting = 0
                actions = np.full((1, 8), request.observation.get("frames_ahead", 0), np.float32)
                ws.send(pack(infer_reply(request, actions, {"infer_ms": 1.0})))


@pytest.mark.parametrize("dialect", ["roboarena", "openpi"])
def test_a_request_says_how_many_frames_were_sent_ahead_of_it(dialect: str) -> None:
    server, observation = KeepingServer(), ROBOARENA if dialect == "roboarena" else OPENPI

    def told(reply: Any) -> int:
        return int((reply["actions"] if isinstance(reply, dict) else reply)[0, 0])

    with misbehaving(server) as port, PolicyClient(port=port, dialect=dialect) as client:
        assert told(client.infer(observation)) == 0
        assert [client.observe(observation), client.observe(observation)] == [1, 2]
        assert told(client.infer({"prompt": "pick"})) == 2
        assert told(client.infer(observation)) == 0
        client.observe({**observation, "env_id": 1})
        assert told(client.infer(observation)) == 0, "another environment's"
        assert told(client.infer({"prompt": "pick", "env_id": 1})) == 1
        client.observe(observation)
        client.reset()
        assert told(client.infer(observation)) == 0, "the server has forgotten them"
    marked = {"endpoint": "observe"} if dialect == "roboarena" else {"observe": True}
    assert marked.items() <= server.told[1].items()
    assert "frames_ahead" not in server.told[1]


def test_a_lost_connection_forgets_how_many_frames_were_sent_ahead() -> None:
    server = KeepingServer()
    with misbehaving(server) as port, PolicyClient(port=port) as client:
        client.observe(ROBOARENA)
        server.drop_next = True
        with pytest.raises(ConnectionLost):
            client.observe(ROBOARENA)
        client.infer(ROBOARENA)
    assert "frames_ahead" not in server.told[-1]
    assert server.told[-1]["resume"] is True, "or a session that is gone would be begun anew"


def test_a_server_that_takes_frames_for_a_request_is_told_from_one_that_keeps_them() -> None:
    with misbehaving(CountingServer()) as port, PolicyClient(port=port) as client:
        with pytest.raises(ConnectionLost, match="it is older than this client"):
            client.observe(ROBOARENA)
        assert ticked(client, ROBOARENA) == (2, True)
