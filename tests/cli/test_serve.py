"""`worldkv serve` in a process of its own: it says where it is, serves, and ends when told to."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("diffusers")
pytest.importorskip("transformers")
pytest.importorskip("uvicorn")

from causal import random_folder
from engines import random_checkpoint
from server_fakes import eventually, http_get

from worldkv.cli.main import main
from worldkv.client import PolicyClient
from worldkv.demo.server_process import ServerProcess
from worldkv.demo.synthetic import SyntheticArm
from worldkv.demo.viewer import viewer
from worldkv.errors import EngineStopped
from worldkv_client.console import console_feed


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_it_serves_a_robot_and_ends_gracefully_at_sigterm(tmp_path: Path) -> None:
    arm = SyntheticArm()
    log = tmp_path / "server.log"
    with ServerProcess(random_checkpoint("ti2v"), log, ["--device", "cpu", "--block-size", "16"]) as server:
        server.wait_until_ready()
        with PolicyClient(port=server.port) as robot:
            actions = robot.infer(arm.observe())
            arm.execute(actions)
            reply = robot.infer(arm.observe(), details=True)
    assert actions.shape == (6, 8)
    assert reply["predicted_video"].shape == (8, 32, 96, 3)
    assert reply["cache"]["frames_cached"] == 3
    assert server.exit_code == 0
    assert not is_running(server.pid)
    text = log.read_text()
    assert f"listening on ws://127.0.0.1:{server.port}" in text
    assert "/healthz" in text
    assert "PolicyClient(" in text
    assert "random weights" in text
    assert "stopped; every session was closed" in text
    assert "Traceback" not in text


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of websockets, at how the stock client connects
@pytest.mark.parametrize("dialect", ["openpi", "roboarena"])
def test_the_stock_openpi_client_drives_it_in_either_dialect(dialect: str, tmp_path: Path) -> None:
    stock = pytest.importorskip("openpi_client.websocket_client_policy", reason="openpi-client is missing")
    arm = SyntheticArm()
    with ServerProcess(random_checkpoint("ti2v"), tmp_path / "server.log", ["--device", "cpu"]) as server:
        server.wait_until_ready()
        client = stock.WebsocketClientPolicy("127.0.0.1", server.port)
        assert client.get_server_metadata()["n_external_cameras"] == 2
        for _ in range(3):
            observation = arm.observe()
            if dialect == "roboarena":
                actions = client.infer({**observation, "endpoint": "infer", "session_id": "stock"})
            else:
                observation["observation/exterior_image_1_left"] = observation.pop("observation/exterior_image_0_left")
                reply = client.infer(observation)
                actions = reply["actions"]
                assert reply["server_timing"]["denoise_ms"] > 0
            assert actions.shape == (6, 8)
            assert actions.dtype == np.float32
            assert np.isfinite(actions).all()
            arm.execute(actions)
        client._ws.close()
    assert "Traceback" not in (tmp_path / "server.log").read_text()


def test_a_server_that_cannot_start_is_reported_with_its_last_words(tmp_path: Path) -> None:
    with (
        ServerProcess(tmp_path, tmp_path / "server.log") as server,
        pytest.raises(EngineStopped, match="exit code 2") as told,
    ):
        server.wait_until_ready()
    assert "is not a DreamZero checkpoint folder" in str(told.value)
    assert not is_running(server.pid)


def test_a_server_is_stopped_when_its_user_fails(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), ServerProcess(random_checkpoint("ti2v"), tmp_path / "server.log") as server:
        raise RuntimeError("the robot fell over")
    assert not is_running(server.pid)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--host", "0.0.0.0"], "set --api-key"),
        (["--port", "70000"], "--port: expected a whole number of at least 0 and at most 65535, got '70000'"),
        (["--episode-gap", "-1"], "--episode-gap: expected"),
        (["--session-grace", "-1"], "--session-grace: expected"),
        (["--session-idle", "0"], "--session-idle: expected"),
        (["--device", "cuda:99"], "--device cuda:99"),
        (["--device", "toaster"], "'toaster'"),
        (["--max-sessions", "0"], "--max-sessions: expected"),
        (["--block-size", "100"], "power of two"),
        (["--attention", "hope"], "--attention: expected one of"),
        (["--embodiment", "octopus"], "octopus"),
    ],
    ids=lambda value: "=".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_option_is_named_and_nothing_is_served(
    options: list[str], told: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLDKV_API_KEY", raising=False)
    assert main(["serve", "--checkpoint", str(random_checkpoint("ti2v")), "--port", "0", *options]) == 2
    said = capsys.readouterr()
    assert "listening" not in said.out
    error = said.err.partition("error: ")[2]
    assert told in error, said.err


def test_a_taken_port_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "--checkpoint", str(random_checkpoint("ti2v")), "--port", str(port)]) == 2
    assert f"cannot listen on 127.0.0.1 port {port}" in capsys.readouterr().err


def test_videos_are_served_beside_robots_by_one_process_and_each_page_leads_to_the_other(tmp_path: Path) -> None:
    arm, log = SyntheticArm(), tmp_path / "server.log"
    options = ["--also", str(random_folder()), "--height", "32", "--width", "48", "--max-sessions", "2"]
    options += ["--device", "cpu", "--block-size", "16", "--steps", "8"]
    with ServerProcess(random_checkpoint("ti2v"), log, options) as server, (tmp_path / "film.mp4").open("wb") as film:
        server.wait_until_ready()
        found = re.search(r"^also on port (\d+)", log.read_text(), re.MULTILINE)
        assert found is not None
        port = int(found[1])
        eventually(lambda: http_get(port, "/healthz")[0] == 200, 60)
        with viewer(port, film) as watching, PolicyClient(port=server.port) as robot:
            watching.start("a lake", "world")
            for number in range(3):
                arm.execute(np.array(robot.infer(arm.observe())))
                assert watching.block().number == number
        for asked, other, serves in ((server.port, port, "video"), (port, server.port, "robots")):
            with console_feed(f"ws://127.0.0.1:{asked}") as (_, hello):
                assert hello["beside"] == [{"serves": serves, "port": other}]
    assert server.exit_code == 0
    assert "Traceback" not in log.read_text()


def test_two_models_on_a_gpu_are_told_how_many_sessions_each_has(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["serve", str(random_checkpoint("ti2v")), "--also", str(random_folder()), "--port", "0"]
    assert main(command) == 2
    assert "--max-sessions: expected a number beside --also" in capsys.readouterr().err
    assert main([*command[:3], "no-such-folder", "--port", "0"]) == 2
    assert "no-such-folder" in capsys.readouterr().err
