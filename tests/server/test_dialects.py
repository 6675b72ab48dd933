"""What goes over the socket in both dialects: with the stock openpi-client, with the packages msgpack-numpy and
websocket-client, which others build their clients from, and with bare websockets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgpack_numpy
import numpy as np
import pytest
import websocket
from server_fakes import (
    EXTERIOR_0,
    METADATA,
    FakePolicy,
    ask,
    infer_message,
    openpi_observation,
    raw_client,
    receive,
    roboarena_observation,
    serving,
    told,
)
from websockets.sync.client import connect

from worldkv.server.server import PolicyServer
from worldkv.wire import pack, unpack


@pytest.fixture(scope="module")
def server() -> Iterator[PolicyServer]:
    with serving(FakePolicy(capacity=1000)) as server:
        yield server


@pytest.fixture
def stock_client(server: PolicyServer) -> Iterator[Any]:
    module = pytest.importorskip(
        "openpi_client.websocket_client_policy",
        reason="openpi-client is not installed: pip install --no-deps openpi-client==0.1.2",
    )
    client = module.WebsocketClientPolicy("127.0.0.1", server.port)
    yield client
    client._ws.close()  # it has no close of its own


stock = pytest.mark.filterwarnings(r"ignore:connect\(\) must be used as a context manager:DeprecationWarning")


@stock
def test_the_stock_openpi_client_is_served_in_its_own_dialect(stock_client: Any) -> None:
    assert stock_client.get_server_metadata() == METADATA
    first = stock_client.infer(openpi_observation())
    second = stock_client.infer(openpi_observation())
    assert told(first["actions"]) == (1, 10, -1, 30), "its only exterior camera must arrive as the first one"
    assert told(second["actions"])[0] == 2, "the connection is the session"
    assert "prev_total_ms" not in first["server_timing"]
    assert second["server_timing"]["prev_total_ms"] > 0
    assert "sequence" not in first


@stock
def test_the_stock_openpi_client_is_served_in_roboarena_s_dialect(stock_client: Any) -> None:
    message = infer_message("stock")
    actions = stock_client.infer(message)
    assert isinstance(actions, np.ndarray)
    assert (actions.dtype, actions.shape) == (np.float32, (24, 8))
    assert told(actions) == (1, 10, 20, 30)
    assert told(stock_client.infer(message))[0] == 2
    with pytest.raises(RuntimeError, match="reset successful"):  # it takes any text for an error
        stock_client.infer({"endpoint": "reset"})
    assert told(stock_client.infer(message))[0] == 1, "the reset must act on this connection's session"


@stock
def test_the_stock_openpi_client_reads_an_error_as_an_error(stock_client: Any) -> None:
    with pytest.raises(RuntimeError, match="bad_request: observation/wrist_image_left: missing"):
        stock_client.infer({EXTERIOR_0.replace("_0_", "_1_"): np.zeros((4, 6, 3), np.uint8), "prompt": "pick"})


def test_a_client_with_msgpack_numpy_is_served_and_answered_in_its_encoding(server: PolicyServer) -> None:
    with connect(f"ws://127.0.0.1:{server.port}", compression=None, max_size=None) as ws:
        assert msgpack_numpy.unpackb(ws.recv()) == METADATA

        def ask_packed(message: dict[str, Any]) -> Any:
            ws.send(msgpack_numpy.packb(message))
            reply = ws.recv(timeout=10)
            return reply if isinstance(reply, str) else msgpack_numpy.unpackb(reply)

        first = ask_packed(openpi_observation())
        assert isinstance(first["actions"], np.ndarray)
        assert (first["actions"].dtype, first["actions"].shape) == (np.float32, (24, 8))
        assert told(first["actions"]) == (1, 10, -1, 30)
        assert first["server_timing"]["denoise_ms"] == 4.0
        assert told(ask_packed(openpi_observation())["actions"])[0] == 2
        assert told(ask_packed(infer_message(np.array(["packed"])))) == (1, 10, 20, 30), "a bare array"
        assert told(ask_packed(infer_message("packed", reset=np.bool_(False))))[0] == 2
        assert ask_packed({"endpoint": "reset", "session_id": "packed"}) == "reset successful"
        assert told(ask_packed(infer_message("packed")))[0] == 1
        ws.send(pack(infer_message("packed")))
        assert told(unpack(ws.recv(timeout=10), max_bytes=1 << 20))[0] == 2, "each reply as its request"
        said = ask_packed(infer_message("packed") | {"observation/joint_position": np.array([object()])})
        assert "bad_request: array: an array of objects is a pickle" in said


@pytest.mark.parametrize("packb", [pack, msgpack_numpy.packb], ids=["openpi's encoding", "msgpack-numpy's"])
def test_a_websocket_client_drives_a_session(server: PolicyServer, packb: Callable[[Any], bytes]) -> None:
    ws = websocket.create_connection(f"ws://127.0.0.1:{server.port}", timeout=10, suppress_origin=True)
    try:
        assert unpack(ws.recv(), max_bytes=1 << 20) == METADATA
        session_id = f"websocket-client {packb.__module__}"
        for tick in (1, 2):
            ws.send_binary(packb(infer_message(session_id)))
            assert told(unpack(ws.recv(), max_bytes=1 << 20)) == (tick, 10, 20, 30)
        ws.send_binary(packb({"endpoint": "reset", "session_id": session_id}))
        assert ws.recv() == "reset successful"
        ws.send_binary(packb(infer_message(session_id)))
        assert told(unpack(ws.recv(), max_bytes=1 << 20))[0] == 1
    finally:
        ws.close()


def test_a_roboarena_reply_is_a_bare_array_and_its_reset_a_text(server: PolicyServer) -> None:
    with raw_client(server.port) as ws:
        assert isinstance(ask(ws, infer_message("bare")), np.ndarray)
        assert ask(ws, {"endpoint": "reset", "session_id": "bare"}) == "reset successful"
        assert told(ask(ws, infer_message("bare")))[0] == 1


def test_an_openpi_reply_carries_timing_sequence_and_warnings(server: PolicyServer) -> None:
    with raw_client(server.port) as ws:
        reply = ask(ws, openpi_observation() | {"sequence": 41})
        assert set(reply) == {"actions", "server_timing", "sequence", "warnings"}
        assert reply["sequence"] == 41
        assert set(reply["server_timing"]) == {
            "infer_ms",
            "preprocess_ms",
            "queue_ms",
            "read_ms",
            "encode_ms",
            "commit_ms",
            "denoise_ms",
        }
        assert reply["server_timing"]["denoise_ms"] == 4.0
        assert "exterior_image_1_left is missing" in reply["warnings"][0]
        assert "warnings" not in ask(ws, openpi_observation())


@pytest.mark.parametrize(
    "other_form",
    [b"7", np.int64(7), np.array([7]), np.array(["7"]), np.array([b"7"]), 7],
    ids=["bytes", "numpy scalar", "int array", "str array", "bytes array", "int"],
)
def test_all_forms_of_a_session_id_name_the_same_session(server: PolicyServer, other_form: Any) -> None:
    with raw_client(server.port) as ws:
        ask(ws, {"endpoint": "reset", "session_id": "7"})
        assert told(ask(ws, infer_message("7")))[0] == 1
        assert told(ask(ws, infer_message(other_form)))[0] == 2


def test_several_sessions_may_share_a_socket(server: PolicyServer) -> None:
    with raw_client(server.port) as ws:
        ticks = [told(ask(ws, infer_message(name)))[0] for name in ("a1", "b1", "a1", "b1", "a1")]
        assert ticks == [1, 1, 2, 2, 3]
        assert ask(ws, {"endpoint": "reset"}) == "reset successful", "the session of the last request"
        assert [told(ask(ws, infer_message(name)))[0] for name in ("a1", "b1")] == [1, 3]


def test_a_roboarena_request_without_an_id_belongs_to_its_connection(server: PolicyServer) -> None:
    with raw_client(server.port) as one, raw_client(server.port) as other:
        assert [told(ask(one, infer_message(None)))[0] for _ in range(2)] == [1, 2]
        assert told(ask(other, infer_message(None)))[0] == 1
        assert ask(one, {"endpoint": "reset"}) == "reset successful"
        assert told(ask(one, infer_message(None)))[0] == 1


def test_two_clients_take_turns_without_touching_each_other(server: PolicyServer) -> None:
    with raw_client(server.port) as one, raw_client(server.port) as other:
        for tick in range(1, 4):
            assert told(ask(one, openpi_observation(exterior=tick))["actions"]) == (tick, tick, -1, 30)
            assert told(ask(other, infer_message("turns"))) == (tick, 10, 20, 30)


def test_requests_sent_ahead_are_answered_in_order(server: PolicyServer) -> None:
    with raw_client(server.port) as ws:
        for number in range(5):
            ws.send(pack(openpi_observation() | {"sequence": number}))
        assert [receive(ws)["sequence"] for _ in range(5)] == list(range(5))


def test_another_prompt_starts_a_connection_s_session_afresh(server: PolicyServer) -> None:
    with raw_client(server.port) as ws:
        ticks = [told(ask(ws, openpi_observation(prompt))["actions"])[0] for prompt in ("a", "a", "b", "b", "a")]
        assert ticks == [1, 2, 1, 2, 1]


def test_another_prompt_leaves_a_named_session_to_the_model(server: PolicyServer) -> None:
    with raw_client(server.port) as ws:
        assert [told(ask(ws, infer_message("prompts", prompt)))[0] for prompt in ("a", "b")] == [1, 2]


def test_the_key_reset_starts_an_episode_in_both_dialects(server: PolicyServer) -> None:
    with raw_client(server.port) as ws:
        ask(ws, openpi_observation())
        assert told(ask(ws, openpi_observation() | {"reset": True})["actions"])[0] == 1
        assert told(ask(ws, openpi_observation() | {"reset": False})["actions"])[0] == 2
        ask(ws, infer_message("key"))
        assert told(ask(ws, infer_message("key", reset=True)))[0] == 1


def test_frames_may_come_as_stacks(server: PolicyServer) -> None:
    stacks = {
        key: np.stack([image] * 4)
        for key, image in roboarena_observation().items()
        if isinstance(image, np.ndarray) and image.ndim == 3
    }
    with raw_client(server.port) as ws:
        assert told(ask(ws, infer_message("stacks") | stacks)) == (1, 10, 20, 30)
