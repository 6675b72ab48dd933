"""The server around an app that is no robot: sessions, snapshots, forks, console and metrics know nothing of robots."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
from server_fakes import eventually, http_get

torch = pytest.importorskip("torch")

from test_rest import call, delete  # noqa: E402

from worldkv.app import App, Reply  # noqa: E402
from worldkv.engine.engine import EngineConfig, TickReply  # noqa: E402
from worldkv.errors import BadRequest, CheckpointError  # noqa: E402
from worldkv.load import load_app, load_engine  # noqa: E402
from worldkv.models.dots.random import write_random_dots  # noqa: E402
from worldkv.server.server import PolicyServer, ServerConfig  # noqa: E402
from worldkv_client.console import console_feed, hear, receive  # noqa: E402


@dataclass(frozen=True, kw_only=True)
class DotsReply(Reply):
    frame: np.ndarray

    @property
    def output(self) -> Mapping[str, object]:
        return {"frame": self.frame}

    @property
    def shown(self) -> Mapping[str, object]:
        return {"brightness": round(float(self.frame.mean()), 3)}

    @property
    def seen(self) -> Mapping[str, np.ndarray] | None:
        return {"dots": np.zeros((1, 4, 8, 3), np.uint8)}

    @property
    def events(self) -> tuple[str, ...]:
        return ("a frame of dots",)


class DotsApp(App):
    speaks = "dots"
    name = "a field of dots"
    greeting = MappingProxyType({"hello": "dots"})
    period_s = 0.5

    def describe(self) -> Mapping[str, object]:
        return {"shape": [4, 32]}

    def read(self, fields: Mapping[str, object]) -> object:
        raise BadRequest("frame: this app has no socket")

    def imagined(self, noise_seed: int | None) -> object:
        return torch.full((4, 32), float(noise_seed or 0))

    def reply(self, ticked: TickReply) -> DotsReply:
        frame = ticked.result.numpy()
        video = np.zeros((1, 4, 8, 3), np.uint8)
        facts = {"mean": float(frame.mean())}
        return DotsReply(timings=ticked.info.timings, warnings=(), facts=facts, decode_video=lambda: video, frame=frame)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PolicyServer]:
    folder = write_random_dots(tmp_path_factory.mktemp("app") / "dots")
    engine = load_engine(folder, EngineConfig(block_size=4, max_sessions=4, batch_invariant=True))
    app = DotsApp(engine, random_weights=True)
    with PolicyServer(app, ServerConfig(port=0)) as server:
        eventually(lambda: http_get(server.port, "/healthz")[0] == 200)
        yield server
    app.close()
    engine.shutdown()


def test_sessions_tick_fork_and_go_back_over_http(server: PolicyServer) -> None:
    assert call(server, "GET", "/v1/app") == (
        200,
        {"speaks": "dots", "name": "a field of dots", "about": {"shape": [4, 32]}},
    )
    call(server, "POST", "/v1/sessions", {"session_id": "one"})
    assert call(server, "POST", "/v1/sessions/one/imagine", {"noise_seed": 3})[1]["frames_seen"] == 1
    _, snapshot = call(server, "POST", "/v1/sessions/one/snapshot")
    _, fork = call(server, "POST", "/v1/sessions/one/fork", {"session_id": "two"})
    assert (fork["session_id"], fork["frames_seen"]) == ("two", 1)
    assert call(server, "POST", "/v1/sessions/one/imagine", {"noise_seed": 4})[1]["frames_seen"] == 2
    assert call(server, "POST", "/v1/sessions/one/park")[1]["state"] == "parked"
    assert call(server, "POST", "/v1/sessions/one/restore", {"snapshot_id": snapshot["snapshot_id"]})[0] == 200
    assert call(server, "GET", "/v1/sessions/one")[1]["frames_seen"] == 1
    call(server, "DELETE", f"/v1/snapshots/{snapshot['snapshot_id']}")
    delete(server, "one", "two")


def test_what_robots_alone_have_is_not_there(server: PolicyServer) -> None:
    status, answer = call(server, "GET", "/v1/embodiment")
    assert (status, answer["code"]) == (404, "not_found")


def test_the_console_shows_what_the_app_says(server: PolicyServer) -> None:
    call(server, "POST", "/v1/sessions", {"session_id": "seen"})
    with console_feed(f"ws://127.0.0.1:{server.port}") as (socket, hello):
        assert (hello["app"], hello["name"], hello["about"]) == ("dots", "a field of dots", {"shape": [4, 32]})
        socket.send(json.dumps({"watch": ["seen"]}))
        hear(socket, "detail")  # as it was before its tick
        call(server, "POST", "/v1/sessions/seen/imagine", {"noise_seed": 1})
        detail = hear(socket, "detail")
        assert "tick 0: a frame of dots" in [event["text"] for event in detail["events"]]
        assert isinstance(detail["brightness"], float)
        assert detail["ticks"][0]["facts"].keys() == {"mean"}
        assert isinstance(receive(socket), bytes), "what it was shown"
    metrics = http_get(server.port, "/metrics")[1]
    assert 'worldkv_tick_stage_seconds_count{stage="denoise"}' in metrics
    delete(server, "seen")


def test_a_family_that_nothing_serves_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"family dots, which no app serves.*load_engine"):
        load_app(write_random_dots(tmp_path / "dots"))
