"""The dialect of vLLM-Omni's `/v1/realtime/video`, spoken to the same stream."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("diffusers")
pytest.importorskip("fastapi")
pytest.importorskip("av")

from video_viewers import PATIENCE_S, running_app, serving
from websockets.sync.client import ClientConnection, connect

from worldkv.server.server import PolicyServer


@pytest.fixture(scope="module")
def server() -> Iterator[PolicyServer]:
    with running_app() as app, serving(app) as server:
        yield server


@pytest.fixture
def socket(server: PolicyServer) -> Iterator[ClientConnection]:
    with connect(f"ws://127.0.0.1:{server.port}/v1/realtime/video", compression=None, max_size=None) as socket:
        yield socket


def say(socket: ClientConnection, kind: str, **fields: Any) -> None:
    socket.send(json.dumps({"type": kind, **fields}))


def hear(socket: ClientConnection) -> dict[str, Any]:
    return json.loads(socket.recv(timeout=PATIENCE_S))


def chunks_until_done(socket: ClientConnection) -> tuple[list[tuple[dict[str, Any], bytes]], list[dict[str, Any]]]:
    """Chunks with their metadata, and what else was said, the end last."""
    chunks, said = [], []
    while True:
        message = hear(socket)
        if message["type"] == "video.chunk_metadata":
            data = socket.recv(timeout=PATIENCE_S)
            assert isinstance(data, bytes)
            assert len(data) == message["byte_length"]
            chunks.append((message, data))
            continue
        said.append(message)
        if message["type"] == "session.done":
            return chunks, said


def test_a_session_of_so_many_frames_is_one_file(socket: ClientConnection) -> None:
    import av

    sampling = {"width": 48, "height": 32, "fps": 16, "num_frames": 30, "guidance_scale": 1.0}
    say(socket, "session.start", model="any", prompt="a quiet lake", seed=3, format="m4s", **sampling)
    started = hear(socket)
    assert started["type"] == "video.start"
    assert started["config"]["ignored"] == ["guidance_scale"]
    chunks, (done,) = chunks_until_done(socket)
    assert (done["chunks"], done["stopped"], done["request_id"]) == (3, False, started["request_id"])
    assert [about["num_frames"] for about, _ in chunks] == [9, 12, 12]
    assert [about["transport_chunk_index"] for about, _ in chunks] == [0, 1, 2]
    with av.open(io.BytesIO(b"".join(data for _, data in chunks))) as container:
        assert [float(f.pts * f.time_base) for f in container.decode(video=0)] == [n / 16 for n in range(33)]
    say(socket, "session.start", prompt="another one", num_frames=1)
    assert hear(socket)["type"] == "video.start"
    assert len(chunks_until_done(socket)[0]) == 1


def test_words_change_on_the_way_and_a_session_is_stopped(socket: ClientConnection) -> None:
    say(socket, "session.start", prompt="a quiet lake")
    hear(socket)
    say(socket, "session.ping")
    say(socket, "session.interaction", interaction={"event_id": "x", "event": {"prompt": "rain"}})
    say(socket, "session.prompt_update", prompt="a storm", event_id="y")
    applied: list[str] = []
    said: set[str] = set()
    while len(applied) < 2:
        message = json.loads(socket.recv(timeout=PATIENCE_S))
        said.add(message["type"])
        if message["type"] == "video.chunk_metadata":
            socket.recv(timeout=PATIENCE_S)
            applied += message["completed_event_ids"]
    assert applied == ["x", "y"]
    assert {"session.pong", "session.interaction.queued", "session.prompt_update.accepted"} <= said
    say(socket, "session.stop")
    _, said_last = chunks_until_done(socket)
    assert said_last[-1]["stopped"] is True


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"type": "session.start"}, "prompt: expected words"),
        ({"type": "session.start", "prompt": "a", "width": 640}, "width: this server makes 48"),
        ({"type": "session.start", "prompt": "a", "fps": 24}, "fps: this server makes 16"),
        ({"type": "session.start", "prompt": "a", "format": "webm"}, "format: expected 'm4s'"),
        ({"type": "session.start", "prompt": "a", "num_frames": 0}, "num_frames: expected a whole number"),
        ({"type": "session.interaction", "interaction": {"event": {"camera": 1}}}, "prompt: expected words"),
        ({"type": "session.interaction"}, "prompt: expected words"),
        ({"type": "start", "prompt": "a"}, "type: expected session.start"),
    ],
)
def test_what_cannot_be_is_told(socket: ClientConnection, message: dict[str, Any], words: str) -> None:
    socket.send(json.dumps(message))
    error = hear(socket)
    assert error["type"] == "error"
    assert words in error["message"]
