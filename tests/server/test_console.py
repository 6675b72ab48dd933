"""The console's socket and files: what a page is told, to whom, and that nothing is kept for nobody."""

from __future__ import annotations

import base64
import json
import re
import struct
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("diffusers")
pytest.importorskip("fastapi")

from engines import droid_observation, random_checkpoint
from server_fakes import eventually, http_get
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from worldkv.client import PolicyClient
from worldkv.engine.engine import EngineConfig
from worldkv.load import load_policy
from worldkv.server.server import PolicyServer, ServerConfig

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
PAGE = Path(__file__).resolve().parents[2] / "worldkv" / "server" / "console" / "page"


@contextmanager
def serving(**config: Any) -> Iterator[PolicyServer]:
    policy = load_policy(random_checkpoint("ti2v"), EngineConfig(block_size=16, max_sessions=4))
    try:
        with PolicyServer(policy, ServerConfig(port=0, **config)) as server:
            eventually(lambda: http_get(server.port, "/healthz")[0] == 200, 30)
            yield server
    finally:
        policy.close()
        policy.engine.shutdown()


@pytest.fixture(scope="module")
def server() -> Iterator[PolicyServer]:
    with serving() as server:
        yield server


@contextmanager
def page(server: PolicyServer, key: str | None = None, **headers: str) -> Iterator[ClientConnection]:
    with connect(f"ws://127.0.0.1:{server.port}/v1/console", additional_headers=headers) as socket:
        with suppress(ConnectionClosed):  # a page of another site is refused before
            socket.send(json.dumps({"key": key}))
        yield socket


def hear(socket: ClientConnection, kind: str) -> Any:
    """The next message of that kind: JSON, or (header, pixels)."""
    for _ in range(50):
        message = socket.recv(timeout=20)
        if isinstance(message, str):
            told = json.loads(message)
            if told["type"] == kind:
                return told
            continue
        (length,) = struct.unpack("<I", message[:4])
        header = json.loads(message[4 : 4 + length])
        if header["type"] == kind:
            return header, np.frombuffer(message[4 + length :], np.uint8)
    raise AssertionError(f"no {kind} came")


def observation(tick: int) -> dict[str, Any]:
    return droid_observation(np.random.default_rng(tick), 1 if tick == 0 else 4)


def call(server: PolicyServer, method: str, path: str, body: Any = None, key: str | None = None) -> Any:
    headers = {"content-type": "application/json"} | ({"authorization": f"Api-Key {key}"} if key else {})
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{server.port}/v1/{path}", data, headers, method=method)
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


def test_a_browser_gets_the_page_and_others_what_they_got(server: PolicyServer) -> None:
    request = urllib.request.Request(f"http://127.0.0.1:{server.port}/", headers={"accept": "text/html,*/*"})
    with urllib.request.urlopen(request) as answer:
        text = answer.read().decode()
        assert "default-src 'self'" in answer.headers["content-security-policy"]
    assert http_get(server.port, "/")[0] == 404
    for path in re.findall(r'(?:src|href)="(/console/[^"]+)"', text):
        assert http_get(server.port, path)[0] == 200, path
    assert http_get(server.port, "/console/../metrics.py")[0] == 404


def test_the_page_needs_nothing_from_elsewhere_and_its_modules_import_what_is_there() -> None:
    for file in PAGE.iterdir():
        text = file.read_text()
        assert not re.search(r"https?://|//cdn|@import", text), file.name
        assert len(text.splitlines()) <= 400, file.name
        for module, names in re.findall(r'import \{([^}]+)\} from "\./([\w.]+)"', text):
            exported = (PAGE / names).read_text()
            for name in (part.strip() for part in module.split(",")):
                assert re.search(rf"export (async )?(function|const|class) {name}\b", exported), f"{file.name}: {name}"


def test_an_overview_holds_sessions_blocks_and_rows(server: PolicyServer) -> None:
    with PolicyClient(port=server.port, session_id="arm") as robot, page(server) as socket:
        hello = hear(socket, "hello")
        assert hello["random_weights"] is True
        assert hello["about"]["cameras"][2]["place"] == "top, twice as wide"
        assert hello["weight_bytes"] > 1e5
        assert hello["about"]["axes"] == {
            "joint_position": {"meaning": "radians", "range": None},
            "gripper_position": {"meaning": "0 (open) to 1 (closed)", "range": [0, 1]},
        }
        before = hear(socket, "overview")
        robot.infer(observation(0))
        robot.infer(observation(1))
        told = hear(socket, "overview")
        while told["rows"] == before["rows"] or not told["sessions"] or told["sessions"][0]["ticks"] < 2:
            told = hear(socket, "overview")
        (session,) = told["sessions"]
        assert (session["id"], session["ticks"], session["state"], session["connections"]) == ("arm", 2, "live", 1)
        assert 0 < session["latency_span_s"] < session["age_s"] < 60
        assert session["margin_s"] == pytest.approx(0.4 - session["latency_ms"][-1] / 1e3, abs=1e-3)
        cells = {name: base64.b64decode(told["blocks"][name]) for name in ("owner", "branch", "shared")}
        assert len(cells["owner"]) == told["blocks"]["num"] == told["memory"]["total"]
        assert sum(owner == 4 for owner in cells["owner"]) == session["blocks"]
        assert {branch for owner, branch in zip(cells["owner"], cells["branch"], strict=True) if owner == 4} == {0, 1}
        assert sum(owner != 0 for owner in cells["owner"]) == told["memory"]["used"]
    call(server, "DELETE", "sessions/arm")


def test_a_session_that_the_engine_has_ended_is_left_out_and_the_page_goes_on(server: PolicyServer) -> None:
    sessions, engine = server._service.sessions, server._service.app.engine
    with PolicyClient(port=server.port, session_id="gone") as gone, PolicyClient(port=server.port) as stays:
        gone.infer(observation(0))
        stays.infer(observation(0))
        with page(server) as socket:
            assert len(hear(socket, "overview")["sessions"]) == 2
            (entry,) = (entry for entry in sessions.of("") if entry.public_id == "gone")
            engine.close(entry.session.handle, "the engine's own reasons").result(10)
            for _ in range(2):
                told = hear(socket, "overview")
            assert [session["id"] for session in told["sessions"]] == [
                entry.public_id for entry in sessions.of("") if entry.public_id != "gone"
            ]
            assert told["num_other_sessions"] == 0
    call(server, "DELETE", "sessions/gone")


def test_a_watched_session_shows_frames_actions_and_futures_and_nobody_keeps_them_after(server: PolicyServer) -> None:
    sessions = server._service.sessions
    with PolicyClient(port=server.port, session_id="left") as robot:
        robot.infer(observation(0))
        assert sessions.get("left").history.latest is None, "nobody looks"
        with page(server) as socket:
            hear(socket, "hello")
            socket.send(json.dumps({"watch": ["left", "nobody"]}))
            hear(socket, "detail")
            actions = robot.infer(observation(1))
            detail = hear(socket, "detail")
            np.testing.assert_allclose(detail["actions"], actions, atol=1e-5)
            assert detail["prompt"] == "stack the cups"
            assert [tick["facts"]["restart_reason"] for tick in detail["ticks"]] == ["first tick", None]
            header, pixels = hear(socket, "observed")
            shapes = {image["name"]: image["shape"] for image in header["images"]}
            assert shapes["wrist_image_left"] == [180, 320, 3]
            first = pixels[: 180 * 320 * 3].reshape(180, 320, 3)
            assert np.array_equal(first, observation(1)["observation/exterior_image_0_left"][-1])
            header, pixels = hear(socket, "imagined")
            assert len(pixels) == np.prod(header["shape"])
            call(server, "POST", "sessions/left/fork", {"session_id": "fork"})
            socket.send(json.dumps({"watch": ["left", "fork"]}))
            call(server, "POST", "sessions/fork/imagine", {"noise_seed": 3})
            while True:
                detail = hear(socket, "detail")
                if detail["id"] == "fork" and detail["ticks"]:
                    break
            assert (detail["parent"], detail["ticks"][0]["imagined"]) == ("left", True)
            assert any("goes on from left" in event["text"] for event in detail["events"])
        eventually(lambda: sessions.get("left").history.latest is None)
    for name in ("left", "fork"):
        call(server, "DELETE", f"sessions/{name}")


def test_two_seeds_are_two_futures_and_a_session_that_saw_nothing_has_none(server: PolicyServer) -> None:
    with PolicyClient(port=server.port, session_id="right") as robot:
        robot.infer(observation(0))
    latents = []
    for seed in (1, 1, 2):
        call(server, "POST", "sessions/right/fork", {"session_id": "future"})
        session = server._service.sessions.get("future").session
        latents.append(session.imagine(seed).result().result.video_latents)
        call(server, "DELETE", "sessions/future")
    assert latents[0].equal(latents[1])
    assert not latents[0].equal(latents[2])
    call(server, "POST", "sessions", {"session_id": "new"})
    with pytest.raises(urllib.error.HTTPError) as refused:
        call(server, "POST", "sessions/new/imagine", {})
    with refused.value:
        assert "nothing was observed yet" in refused.value.read().decode()
    for name in ("right", "new"):
        call(server, "DELETE", f"sessions/{name}")
    ends = [(end.public_id, end.num_ticks) for end in server._service.sessions.ends.recent("")]
    assert ends[-1] == ("new", 0)


def test_a_wrong_key_and_a_foreign_page_are_told_and_each_key_sees_its_own() -> None:
    with serving(api_key="one,two") as server:
        for key in (None, "three"):
            with page(server, key) as socket:
                assert hear(socket, "refused")["why"].startswith("expected the header")
        with page(server, "three", Origin="http://evil.example") as socket:
            assert hear(socket, "refused")["why"].startswith("expected the header")
        with page(server, "one", Origin="https://behind.a.proxy.example") as socket:
            hear(socket, "hello")
        with PolicyClient(port=server.port, session_id="arm", api_key="two") as robot:
            robot.infer(observation(0))
            with page(server, "one") as socket:
                told = hear(socket, "overview")
                assert (told["sessions"], told["num_other_sessions"]) == ([], 1)
                while 3 not in base64.b64decode(told["blocks"]["owner"]):  # blocks of somebody else
                    told = hear(socket, "overview")  # the map is drawn twice a second
                socket.send(json.dumps({"watch": ["arm"]}))
                hear(socket, "overview")
                assert server._service.sessions.get("arm@key2").history.num_viewers == 0
            with page(server, "two") as socket:
                assert hear(socket, "overview")["sessions"][0]["id"] == "arm"


def test_nonsense_closes_the_page_and_a_shutdown_says_goodbye(server: PolicyServer) -> None:
    for nonsense in ("[]", '{"watch": 7}', '{"watch": [[]]}'):
        with page(server) as socket:
            hear(socket, "hello")
            socket.send(nonsense)
            assert hear(socket, "overview")["type"] == "overview"
    with connect(f"ws://127.0.0.1:{server.port}/v1/console") as socket:
        socket.send(b"\xff\xfe")
        assert "expected a JSON object" in hear(socket, "refused")["why"]
    eventually(lambda: http_get(server.port, "/healthz")[0] == 200)
