"""Whatever a robot sends wrongly to a real tiny engine: it is told what, its session is as it was, the server is up."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import msgpack
import msgpack_numpy
import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("diffusers")
pytest.importorskip("fastapi")

from engines import random_checkpoint
from server_fakes import ask, eventually, http_get, raw_client, receive
from websockets.exceptions import ConnectionClosed

from worldkv.client import PolicyClient
from worldkv.engine.engine import EngineConfig
from worldkv.load import load_policy
from worldkv.server.server import PolicyServer, ServerConfig
from worldkv.wire import CloseCode, pack

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

LEFT, RIGHT, WRIST = (f"observation/{name}_left" for name in ("exterior_image_0", "exterior_image_1", "wrist_image"))
JOINTS, GRIPPER = "observation/joint_position", "observation/gripper_position"
LIMIT = 3_000_000


@pytest.fixture(scope="module")
def server() -> Iterator[PolicyServer]:
    policy = load_policy(random_checkpoint("ti2v"), EngineConfig(block_size=16, max_sessions=4, batch_invariant=True))
    try:
        with PolicyServer(policy, ServerConfig(port=0, max_message_bytes=LIMIT)) as server:
            eventually(lambda: http_get(server.port, "/healthz")[0] == 200, 30)
            yield server
    finally:
        policy.close()
        policy.engine.shutdown()
        policy.engine.core.cache.pool.check()
        assert policy.engine.core.cache.pool.num_used == 0


def observation(num_frames: int = 4, seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng([seed, num_frames])
    frames = rng.integers(0, 256, (3, num_frames, 90, 160, 3), dtype=np.uint8)
    named = dict(zip((LEFT, RIGHT, WRIST), frames, strict=True))
    return named | {JOINTS: rng.uniform(-0.5, 0.5, 7), GRIPPER: rng.uniform(0, 1, 1), "prompt": "wipe the table"}


def without(field: str) -> dict[str, Any]:
    return {key: value for key, value in observation().items() if key != field}


def images(*shape: int, dtype: Any = np.uint8) -> np.ndarray:
    return np.zeros(shape, dtype)


def lying_array(shape: list[int]) -> bytes:
    """A header that announces an image which is not there."""
    array = {b"__ndarray__": True, b"data": b"\0" * 12, b"dtype": "|u1", b"shape": shape}
    return bytes(msgpack.packb({"endpoint": "infer", "session_id": "victim", LEFT: array}))


BAD: dict[str, tuple[Any, str]] = {
    **{f"no {field}": (without(field), f"{field}: missing") for field in (LEFT, WRIST, JOINTS, GRIPPER, "prompt")},
    "image flat": (observation() | {LEFT: images(90)}, f"{LEFT}: expected uint8"),
    "image channels first": (observation() | {LEFT: images(3, 90, 160)}, "move the channels last"),
    "image of four channels": (observation() | {LEFT: images(90, 160, 4)}, "got uint8 [90, 160, 4]"),
    "image of five axes": (observation() | {LEFT: images(1, 1, 90, 160, 3)}, "got uint8 [1, 1, 90, 160, 3]"),
    "image of floats": (observation() | {LEFT: images(90, 160, 3, dtype=np.float32)}, "these are all 0: send uint8"),
    "image of floats to 255": (observation() | {LEFT: np.full((90, 160, 3), 200.0)}, "np.round(x).astype(np.uint8)"),
    "image of int64": (observation() | {LEFT: images(90, 160, 3, dtype=np.int64)}, "send them as uint8"),
    "image as a list": (observation() | {LEFT: [[1, 2, 3]]}, "expected an array"),
    "image as text": (observation() | {LEFT: "jpeg"}, "expected an array"),
    "image of no frames": (observation() | {LEFT: images(0, 90, 160, 3)}, "expected at least one frame"),
    "image of no pixels": (observation() | {LEFT: images(4, 0, 0, 3)}, "expected at least one frame"),
    "image of another aspect": (observation() | {LEFT: images(4, 160, 160, 3)}, "do not stretch it"),
    "cameras of two lengths": (observation() | {LEFT: images(2, 90, 160, 3)}, "the same number of frames from each"),
    "joints NaN": (observation() | {JOINTS: np.full(7, np.nan)}, f"{JOINTS}: expected 7 finite numbers"),
    "joints infinite": (observation() | {JOINTS: np.array([np.inf] + [0] * 6)}, "expected 7 finite numbers"),
    "six joints": (observation() | {JOINTS: np.zeros(6)}, "got shape [6]"),
    "a history of joints": (observation() | {JOINTS: np.zeros((4, 7))}, "send the newest state only"),
    "joints as text": (observation() | {JOINTS: "0 0 0"}, f"{JOINTS}: expected 7 finite numbers"),
    "joints as bools": (observation() | {JOINTS: np.zeros(7, bool)}, f"{JOINTS}: expected 7 finite numbers"),
    "gripper NaN": (observation() | {GRIPPER: float("nan")}, f"{GRIPPER}: expected 1 finite number"),
    "prompt empty": (observation() | {"prompt": " \n"}, "prompt: expected an instruction"),
    "prompt of 100 kB": (observation() | {"prompt": "x" * 100_000}, "at most 4096 characters, got 100000"),
    "prompt None": (observation() | {"prompt": None}, "prompt: expected a text, got None"),
    "prompt misspelt": (without("prompt") | {"promt": "wipe"}, "promt: nothing reads this field; did you mean prompt?"),
    "session id misspelt": (observation() | {"sesion_id": "a"}, "sesion_id: nothing reads this field; did you mean"),
    "environment misspelt": (observation() | {"env-id": 1}, "env-id: nothing reads this field; did you mean env_id?"),
    "camera misspelt": (
        without(LEFT) | {LEFT.replace("image_", "image"): images(90, 160, 3)}, f"did you mean {LEFT}?",
    ),
    "environment a list": (observation() | {"env_id": [1]}, "env_id: expected a str"),
    "prompt a number": (observation() | {"prompt": 7}, "prompt: expected a text, got int"),
    "prompt a list": (observation() | {"prompt": ["wipe"]}, "prompt: expected a text, got list"),
    "session id a float": (observation() | {"session_id": 1.5}, "session_id: expected a str"),
    "session id a bool": (observation() | {"session_id": True}, "session_id: expected a str"),
    "session id a map": (observation() | {"session_id": {}}, "session_id: expected a str"),
    "session id empty": (observation() | {"session_id": ""}, "1 to 256 printable characters"),
    "session id of 1000": (observation() | {"session_id": "x" * 1000}, "1 to 256 printable characters"),
    "session id with a newline": (observation() | {"session_id": "a\nb"}, "1 to 256 printable characters"),
    "session id no UTF-8": (observation() | {"session_id": b"\xff"}, "session_id: expected UTF-8"),
    "session id of two": (observation() | {"session_id": np.array([1, 2])}, "session_id: expected a str"),
    "endpoint unknown": (observation() | {"endpoint": "dance"}, "endpoint: expected 'infer', 'observe' or 'reset'"),
    "reset of an unknown kind": ({"endpoint": "reset", "session_id": 2.0}, "session_id: expected a str"),
    "a list": ([1, 2], "message: expected a map, got list"),
    "nothing": (None, "message: expected a map, got NoneType"),
    "no message": (b"", "message: expected one msgpack value"),
    "a broken message": (pack(observation())[:-7], "message: expected one msgpack value"),
    "a message and a half": (pack({"prompt": "x"}) + b"\x81", "message: expected one msgpack value"),
    "a bomb of lists": (b"\x91" * 100_000, "levels of lists and maps"),
    "a bomb of maps": (b"\x81\xa1a" * 50_000, "levels of lists and maps"),
    "a list of four billion": (b"\xdd\xff\xff\xff\xff", "message: expected one msgpack value"),
    "an image of a terabyte": (lying_array([1 << 20, 1 << 20, 1]), ""),
    "an image of negative size": (lying_array([-1, 4, 3]), ""),
    "an image of objects": (
        bytes(msgpack.packb({LEFT: {b"__ndarray__": True, b"data": b"", b"dtype": "|O", b"shape": [0]}})), "",
    ),
    "msgpack-numpy's objects": (msgpack_numpy.packb({LEFT: np.array([{}])}), "a pickle, which is never opened"),
    "msgpack-numpy's records": (msgpack_numpy.packb({LEFT: np.zeros(2, "<f4,<f4")}), "got a record"),
    "msgpack-numpy's complex": (
        msgpack_numpy.packb(observation() | {"endpoint": "infer", "session_id": "victim", JOINTS: np.full(7, 1j)}),
        f"{JOINTS}: expected 7 finite numbers, got ndarray of complex128",
    ),
    "text where binary belongs": ("infer", "message: expected a binary frame of msgpack, got str"),
}  # fmt: skip
LEAKS = re.compile(r"Traceback|File \"|/\w+/\w+|\.py\b|0x[0-9a-f]{6}|\d+\.\d+\.\d+")


def named(message: Any, session_id: str) -> Any:
    if isinstance(message, bytes | str):
        return message
    return pack({"endpoint": "infer", "session_id": session_id} | message if isinstance(message, dict) else message)


def failure(server: PolicyServer, message: bytes | str) -> tuple[str, int]:
    with raw_client(server.port, greeted=False) as ws:
        receive(ws)
        ws.send(message)
        text = receive(ws)
        with pytest.raises(ConnectionClosed) as closed:
            ws.recv(timeout=10)
    assert isinstance(text, str), "it was accepted"
    assert closed.value.rcvd is not None
    return text, closed.value.rcvd.code


@pytest.fixture(scope="module")
def undisturbed(server: PolicyServer) -> list[np.ndarray]:
    """A first and a second tick that nothing came between."""
    with PolicyClient(port=server.port, session_id="undisturbed") as client:
        return [np.array(client.infer(observation(n))) for n in (1, 4)]


@pytest.mark.parametrize(("message", "reason"), BAD.values(), ids=BAD)
def test_it_is_told_and_the_session_goes_on_as_if_it_had_not_been_sent(
    server: PolicyServer, undisturbed: list[np.ndarray], message: Any, reason: str
) -> None:
    with PolicyClient(port=server.port, session_id="victim") as client:
        client.reset()
        first = np.array(client.infer(observation(1)))
        text, code = failure(server, named(message, "victim"))
        assert text.startswith("bad_request: ")
        assert code == CloseCode.BAD_REQUEST
        assert reason in text
        assert not LEAKS.search(text.rsplit(" [error", 1)[0].replace("observation/", "")), text
        second = np.array(client.infer(observation(4)))
    assert np.array_equal(first, undisturbed[0])
    assert np.array_equal(second, undisturbed[1]), "the bad request left a trace"
    assert http_get(server.port, "/healthz")[0] == 200


def test_a_message_over_the_limit_has_a_code_of_its_own(server: PolicyServer) -> None:
    huge = observation() | {LEFT: images(4, 360, 640, 3)}
    text, code = failure(server, named(huge, "victim"))
    assert f"expected at most {LIMIT} bytes" in text
    assert code == CloseCode.MESSAGE_TOO_LARGE


@pytest.mark.parametrize("num_frames", [1, 2, 3, 4, 5, 9, 13])
def test_any_number_of_frames_is_served_by_the_newest_four(server: PolicyServer, num_frames: int) -> None:
    """A client that sends more frames than the model takes loses the oldest; with fewer, the oldest is repeated."""
    many = observation(num_frames)
    newest = {key: value[-4:] if key in (LEFT, RIGHT, WRIST) else value for key, value in many.items()}
    replies = []
    for sent in (many, newest):
        with PolicyClient(port=server.port) as client:
            client.infer(observation(1))
            replies.append(np.array(client.infer(sent)))
    assert np.array_equal(*replies)


def test_bad_requests_take_no_room_and_open_nothing(server: PolicyServer) -> None:
    engine = server._service.app.engine
    eventually(lambda: engine.capacity().num_sessions == len(server._service.sessions.of("")))
    before = engine.capacity()
    for number in range(20):
        failure(server, named(without("prompt"), f"nobody {number}"))
    after = engine.capacity()
    assert (after.num_charged, after.num_sessions) == (before.num_charged, before.num_sessions)
    assert not [entry for entry in server._service.sessions.of("") if "nobody" in entry.session_id]


def test_fields_that_nothing_reads_are_told_once_a_session_in_reply_and_log(
    server: PolicyServer, caplog: pytest.LogCaptureFixture
) -> None:
    message = {"endpoint": "infer", "session_id": "unread", "details": True, "observation/depth": np.zeros((4, 4))}
    with raw_client(server.port, greeted=False) as ws, caplog.at_level("WARNING"):
        receive(ws)
        first, second = (ask(ws, observation(seed=seed) | message) for seed in range(2))
    told = [text for text in first["warnings"] if "nothing reads the field observation/depth" in text]
    assert len(told) == 1
    assert f"this robot's are executed_steps, frames_ahead, {LEFT}" in told[0]
    assert not any("nothing reads" in text for text in second.get("warnings", ()))
    assert sum("nothing reads the field observation/depth" in text for text in caplog.messages) == 1
