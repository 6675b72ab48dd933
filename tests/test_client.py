"""The robot's side against our server. client/tests has what needs no server of ours."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from server_fakes import (
    EXTERIOR_0,
    METADATA,
    FakePolicy,
    eventually,
    openpi_observation,
    roboarena_observation,
    serving,
    told,
)

from worldkv.client import PolicyClient
from worldkv.errors import BadRequest, ConnectionLost, RemoteError
from worldkv.server.server import PolicyServer, ServerConfig
from worldkv.wire import CloseCode


@pytest.fixture(scope="module")
def server() -> Iterator[PolicyServer]:
    with serving(FakePolicy(capacity=1000)) as server:
        yield server


def test_roboarena_s_dialect_end_to_end(server: PolicyServer) -> None:
    with PolicyClient(port=server.port) as client:
        assert client.metadata == METADATA
        actions = client.infer(roboarena_observation())
        assert isinstance(actions, np.ndarray)
        assert (actions.dtype, actions.shape) == (np.float32, (24, 8))
        assert told(actions) == (1, 10, 20, 30)
        assert told(client.infer(roboarena_observation()))[0] == 2
        client.reset()
        assert told(client.infer(roboarena_observation()))[0] == 1


def test_openpi_s_dialect_end_to_end(server: PolicyServer, caplog: pytest.LogCaptureFixture) -> None:
    with PolicyClient(port=server.port, dialect="openpi") as client, caplog.at_level(logging.WARNING):
        reply = client.infer(openpi_observation())
        assert isinstance(reply, dict)
        assert told(reply["actions"]) == (1, 10, -1, 30)
        assert reply["sequence"] == 0
        assert "the model sees a black view" in caplog.text, "the server's warnings reach the robot's log"
        reply = client.infer(openpi_observation())
        assert isinstance(reply, dict)
        assert (told(reply["actions"])[0], reply["sequence"]) == (2, 1)
        client.reset()
        reply = client.infer(openpi_observation())
        assert isinstance(reply, dict)
        assert told(reply["actions"])[0] == 1


def test_a_client_without_with_connects_when_first_used(server: PolicyServer) -> None:
    client = PolicyClient(port=server.port)
    assert told(client.infer(roboarena_observation()))[0] == 1
    client.close()
    client.close()
    assert told(client.infer(roboarena_observation()))[0] == 2, "the session outlives the socket"
    client.close()


def test_a_refused_request_raises_the_server_s_text_and_code_and_the_session_goes_on(server: PolicyServer) -> None:
    with PolicyClient(port=server.port) as client:
        client.infer(roboarena_observation())
        for _ in range(2):
            with pytest.raises(RemoteError, match=f"bad_request: {EXTERIOR_0}: expected uint8") as refused:
                client.infer(roboarena_observation() | {EXTERIOR_0: np.zeros((4, 6, 3))})
            assert refused.value.close_code == CloseCode.BAD_REQUEST
        assert told(client.infer(roboarena_observation()))[0] == 2


def test_what_cannot_be_sent_is_named_and_the_connection_stays(server: PolicyServer) -> None:
    with PolicyClient(port=server.port) as client:
        client.infer(roboarena_observation())
        with pytest.raises(BadRequest, match=r"^observation/joint_position: cannot be sent"):
            client.infer(roboarena_observation() | {"observation/joint_position": object()})
        assert told(client.infer(roboarena_observation()))[0] == 2


def test_the_key_is_sent_and_a_wrong_one_is_an_error_at_once() -> None:
    with serving(FakePolicy(), api_key="key") as server:
        with PolicyClient(port=server.port, api_key="key") as client:
            assert told(client.infer(roboarena_observation()))[0] == 1
        start = time.monotonic()
        with pytest.raises(RemoteError, match="unauthorised") as refused:
            PolicyClient(port=server.port, api_key="another", connect_wait=30).__enter__()
        assert refused.value.close_code == CloseCode.UNAUTHORISED
        assert time.monotonic() - start < 5, "waiting longer would not help"


def test_a_late_reply_is_never_taken_for_the_next_one() -> None:
    policy = FakePolicy()
    with serving(policy) as server, PolicyClient(port=server.port, timeout=0.3) as client:
        with pytest.raises(ConnectionLost, match=r"did not answer within 0\.3 s; the socket is closed"):
            client.infer(roboarena_observation("slow", greys=(1, 1, 1)))
        policy.release.set()
        eventually(lambda: policy.live[client.session_id].num_ticks == 1)
        assert told(client.infer(roboarena_observation(greys=(2, 2, 2)))) == (2, 2, 2, 2)


def test_a_timeout_while_the_tick_still_runs_is_busy_not_wrong() -> None:
    policy = FakePolicy()
    with serving(policy) as server, PolicyClient(port=server.port, timeout=0.3) as client:
        with pytest.raises(ConnectionLost):
            client.infer(roboarena_observation("slow"))
        with pytest.raises(RemoteError, match="session_busy") as refused:
            client.infer(roboarena_observation())
        assert refused.value.close_code == CloseCode.SESSION_BUSY


def test_an_interrupted_call_closes_the_socket() -> None:
    policy = FakePolicy()
    with serving(policy) as server, PolicyClient(port=server.port) as client:
        ws = client._connected()

        def interrupted(timeout: float | None = None) -> Any:
            raise KeyboardInterrupt

        ws.recv = interrupted  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            client.infer(roboarena_observation())
        mine = told(client.infer(roboarena_observation(greys=(2, 2, 2))))
        assert mine[1:] == (2, 2, 2), "its own answer, on another socket"


def test_a_socket_lost_between_requests_is_replaced_and_the_session_resumed(server: PolicyServer) -> None:
    with PolicyClient(port=server.port) as client:
        client.infer(roboarena_observation())
        cut(client)
        assert told(client.infer(roboarena_observation()))[0] == 2


def test_in_openpi_s_dialect_a_lost_socket_is_told_once_since_its_session_is_lost(server: PolicyServer) -> None:
    with PolicyClient(port=server.port, dialect="openpi") as client:
        client.infer(openpi_observation())
        cut(client)
        with pytest.raises(ConnectionLost, match="the next request starts a new one"):
            client.infer(openpi_observation())
        reply = client.infer(openpi_observation())
        assert isinstance(reply, dict)
        assert told(reply["actions"])[0] == 1


def test_after_a_reset_in_openpi_s_dialect_a_lost_socket_loses_nothing(server: PolicyServer) -> None:
    with PolicyClient(port=server.port, dialect="openpi") as client:
        client.infer(openpi_observation())
        client.reset()
        cut(client)
        reply = client.infer(openpi_observation())
        assert isinstance(reply, dict)
        assert told(reply["actions"])[0] == 1


def cut(client: PolicyClient) -> None:
    """What a network does: the client's socket dies, and it has noticed."""
    ws = client._connected()
    ws.socket.shutdown(socket.SHUT_RDWR)
    ws.recv_events_thread.join()


def test_a_restarted_server_is_an_error_and_not_an_empty_history() -> None:
    with serving(FakePolicy()) as server, PolicyClient(port=server.port) as client:
        client.infer(roboarena_observation())
        port = server.port
        server.stop()
        with PolicyServer(FakePolicy(), ServerConfig(port=port)):
            with pytest.raises(RemoteError, match="was the server restarted") as refused:
                client.infer(roboarena_observation())
            assert refused.value.close_code == CloseCode.SESSION_NOT_FOUND
            assert told(client.infer(roboarena_observation()))[0] == 1, "told once, it may start anew"


def test_an_expired_session_is_an_error_and_a_reset_avoids_it() -> None:
    policy = FakePolicy()
    with serving(policy, session_grace_s=0.05) as server, PolicyClient(port=server.port) as client:
        for with_reset in (False, True):
            client.infer(roboarena_observation())
            client.close()
            eventually(lambda: not policy.live)
            if with_reset:
                client.reset()
            else:
                with pytest.raises(RemoteError, match="nobody resumed it"):
                    client.infer(roboarena_observation())
            assert told(client.infer(roboarena_observation()))[0] == 1


def test_two_clients_may_hold_one_session_one_after_the_other(server: PolicyServer) -> None:
    with PolicyClient(port=server.port, session_id=np.array([77])) as client:
        client.infer(roboarena_observation())
    with PolicyClient(port=server.port, session_id="77") as client:
        assert told(client.infer(roboarena_observation()))[0] == 2


def test_a_server_that_is_not_up_yet_is_waited_for_with_progress() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    waits: list[tuple[float, str]] = []
    server = PolicyServer(FakePolicy(), ServerConfig(port=port))

    def on_wait(seconds: float, reason: str) -> None:
        waits.append((seconds, reason))
        if len(waits) == 3:
            server.start()

    with PolicyClient(port=port, connect_wait=20, on_wait=on_wait) as client:
        assert told(client.infer(roboarena_observation()))[0] == 1
    server.stop()
    assert len(waits) >= 3
    assert [seconds for seconds, _ in waits] == sorted(seconds for seconds, _ in waits)
    assert "refused" in waits[0][1]
