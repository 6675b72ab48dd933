"""`worldkv doctor`, from the robot's side of a real server."""

from __future__ import annotations

import http.server
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("diffusers")
pytest.importorskip("fastapi")

from engines import random_checkpoint
from fake_proxy import PROXY_VARIABLES, fake_proxy
from server_fakes import eventually, http_get
from video_viewers import running_app

from worldkv.cli.main import main
from worldkv.engine.engine import EngineConfig
from worldkv.load import load_policy
from worldkv.server.server import PolicyServer, ServerConfig

KEY = "a-robots-key"


@pytest.fixture(scope="module")
def server() -> Iterator[PolicyServer]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        policy = load_policy(random_checkpoint("ti2v"), EngineConfig(max_sessions=2))
    with PolicyServer(policy, ServerConfig(port=0, api_key=KEY)) as server:
        eventually(lambda: http_get(server.port, "/healthz")[0] == 200, 30)
        yield server
    policy.close()
    policy.engine.shutdown()


def doctor(server: PolicyServer, *more: str, key: str = KEY) -> int:
    return main(["doctor", "--url", f"ws://127.0.0.1:{server.port}", "--api-key", key, "--ticks", "2", *more])


def own(tmp_path: Path, **changes: Any) -> Path:
    rng = np.random.default_rng(0)
    images = {
        f"observation/{name}": rng.integers(0, 256, (180, 320, 3), dtype=np.uint8)
        for name in ("exterior_image_0_left", "exterior_image_1_left", "wrist_image_left")
    }
    rest = {"observation/joint_position": np.zeros(7), "observation/gripper_position": np.zeros(1)}
    whole: dict[str, Any] = {**images, **rest, "prompt": np.array("stack the cups")} | changes
    np.savez(tmp_path / "seen.npz", **{name: value for name, value in whole.items() if value is not None})
    return tmp_path / "seen.npz"


def test_a_healthy_server_passes_and_keeps_nothing(server: PolicyServer, capsys: pytest.CaptureFixture[str]) -> None:
    code = doctor(server)
    out = capsys.readouterr().out
    # the tiny model's chunk lasts 0.4 s: whether two cores are fast enough is not this test's business
    assert code == 0 or ("FAIL  speed" in out and "1 failure," in out)
    for words in (
        "ok    server       is ready",
        "for 2 more sessions",
        "ok    robot        oxe_droid, 15 Hz",
        "observation/wrist_image_left: uint8 180 x 320, top, twice as wide",
        "observation/gripper_position: 1 number 0 (open) to 1 (closed)",
        "action_space joint_position",
        "6 actions of 8 numbers",
        "a chunk lasts 0.40 s",
    ):
        assert words in out
    assert server._service.app.engine.capacity().num_sessions == 0, "its session is deleted"


def test_what_the_server_thinks_of_ones_own_observation_is_told_with_a_picture(
    server: PolicyServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    path = own(
        tmp_path, **{"observation/gripper_position": np.array([85.0]), "observation/exterior_image_1_left": None}
    )
    doctor(server, "--observation", str(path), "--output", str(tmp_path / "doctor.png"))
    out = capsys.readouterr().out
    assert "WARN  yours        observation/gripper_position is 85: expected 0 (open) to 1 (closed)" in out
    assert "WARN  yours        observation/exterior_image_1_left is missing: the model sees a black view" in out
    assert (tmp_path / "doctor.png").read_bytes().startswith(b"\x89PNG")


def test_what_fails_is_named_with_what_to_do(
    server: PolicyServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert doctor(server, key="wrong") == 1
    assert "FAIL  key          answers 401" in capsys.readouterr().out
    assert main(["doctor", "--url", "ws://127.0.0.1:9"]) == 1
    assert "FAIL  server       nothing answers" in capsys.readouterr().out
    path = own(tmp_path, **{"observation/wrist_image_left": np.zeros((180, 320, 3), np.float32)})
    assert doctor(server, "--observation", str(path)) == 1
    assert "expected uint8 [180, 320, 3] or [T, 180, 320, 3], got float32" in capsys.readouterr().out
    (tmp_path / "text.npz").write_text("no")
    assert doctor(server, "--observation", str(tmp_path / "text.npz")) == 2
    assert "expected an npz file" in capsys.readouterr().err


def test_top_and_doctor_reach_a_server_by_any_of_its_addresses_and_past_any_proxy(
    server: PolicyServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place = f"127.0.0.1:{server.port}"
    with fake_proxy() as proxy:
        for name in PROXY_VARIABLES[:4]:
            monkeypatch.setenv(name, proxy.url)
        for given in (
            place,
            f"localhost:{server.port}",
            f"ws://{place}/",
            f"http://{place}",
            f"http://{place}/healthz",
        ):
            main(["doctor", "--url", given, "--api-key", KEY, "--ticks", "1"])
            told = capsys.readouterr().out
            assert "ok    server       is ready" in told, given
            assert "ok    first tick" in told, given
            assert main(["top", "--once", "--url", given, "--api-key", KEY]) == 0
            assert "blocks [" in capsys.readouterr().out
        assert proxy.asked == []


def test_elsewhere_top_and_doctor_name_the_proxy_and_an_option_goes_without(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with fake_proxy() as proxy:
        monkeypatch.setenv("all_proxy", proxy.url)
        commands = (["top", "--once"], ["doctor"])
        for command in commands:
            assert main([*command, "--url", "robots.invalid"]) == 1
            said = "".join(capsys.readouterr())
            assert f"through the proxy {proxy.url} (named by all_proxy)" in said
            assert "--proxy none" in said
        num_asked = len(proxy.asked)
        assert {line.split()[0] for line in proxy.asked} == {"CONNECT", "GET"}
        for command in commands:
            assert main([*command, "--url", "robots.invalid", "--proxy", "none"]) == 1
            assert "proxy" not in "".join(capsys.readouterr())
        assert len(proxy.asked) == num_asked


def test_what_is_no_worldkv_server_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"hello")

        def log_message(self, *_: Any) -> None: ...

    with http.server.HTTPServer(("127.0.0.1", 0), Page) as other:
        thread = threading.Thread(target=other.serve_forever)
        thread.start()
        try:
            assert main(["doctor", "--url", f"127.0.0.1:{other.server_address[1]}"]) == 1
        finally:
            other.shutdown()
            thread.join()
    assert "/v1/embodiment is no worldkv server's; check host, port and path" in capsys.readouterr().out


def test_what_is_no_npz_is_said_to_be_what_it_is_and_nothing_unsafe_is_advised(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    objects = np.empty(1, dtype=object)
    objects[0] = {"a": 1}
    np.savez(tmp_path / "objects.npz", state=objects)
    np.save(tmp_path / "one.npy", np.zeros(3))
    (tmp_path / "pickle.npz").write_bytes(b"\x80\x04\x95\x05\x00\x00\x00\x00\x00\x00\x00}\x94.")
    (tmp_path / "text.npz").write_text("state: 1")
    (tmp_path / "empty.npz").write_bytes(b"")
    (tmp_path / "cut.npz").write_bytes((tmp_path / "objects.npz").read_bytes()[:60])
    for name, told in (
        ("objects.npz", "arrays of Python objects"),
        ("one.npy", "is one array"),
        ("pickle.npz", "is a Python pickle"),
        ("text.npz", "is a text file"),
        ("empty.npz", "is empty"),
        ("cut.npz", "is damaged"),
        ("gone.npz", "does not exist"),
        (".", "is a folder"),
    ):
        assert main(["doctor", "--url", "ws://127.0.0.1:9", "--observation", str(tmp_path / name)]) == 2
        said = capsys.readouterr().err
        assert "--observation: expected an npz file" in said
        assert told in said, name
        assert "allow_pickle" not in said
        assert "pickle.load" not in said
        assert len(said.splitlines()) == 1


def test_a_server_of_videos_is_told_from_a_robot_s(capsys: pytest.CaptureFixture[str]) -> None:
    with running_app() as app, PolicyServer(app, ServerConfig(port=0, api_key=KEY)) as server:
        eventually(lambda: http_get(server.port, "/healthz")[0] == 200, 30)
        assert doctor(server) == 1
        said = capsys.readouterr().out
        assert "none is served here: it makes videos of 48 x 32 at 16 frames a second" in said
        assert f"http://127.0.0.1:{server.port}/" in said
