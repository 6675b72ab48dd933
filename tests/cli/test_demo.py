"""`worldkv demo`: two processes, a websocket, an output folder; and no process that outlives it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("diffusers")
pytest.importorskip("transformers")
pytest.importorskip("uvicorn")
pytest.importorskip("av")
pytest.importorskip("matplotlib")

from fake_proxy import PROXY_VARIABLES, fake_proxy

from worldkv.cli.main import main
from worldkv.show.video import read_video

ROOT = Path(__file__).resolve().parents[2]


def server_pid(said: str) -> int:
    return int(said.partition("runs as process ")[2].split()[0])


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_it_shows_ticks_and_leaves_video_and_plots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "demo"
    with fake_proxy() as proxy:  # which refuses: nothing between two processes of one machine goes through it
        for name in PROXY_VARIABLES[:4]:
            monkeypatch.setenv(name, proxy.url)
        assert main(["demo", "--ticks", "3", "--output", str(output)]) == 0
        assert proxy.asked == []
    out = capsys.readouterr().out
    assert "random weights" in out
    assert not is_running(server_pid(out))
    with np.load(output / "actions.npz") as saved:
        assert saved["actions"].shape == (3, 24, 8)
        assert np.isfinite(saved["actions"]).all()
    assert read_video(output / "observed.mp4").shape == (1 + 3 * 4, 384, 640, 3)
    assert len(read_video(output / "predicted.mp4")) == len(read_video(output / "seen_and_predicted.mp4")) == 3 * 8
    closing = out.partition("look into ")[2]
    listed = [line.split()[0] for line in closing.partition("next\n")[0].splitlines()[1:]]
    assert {"actions.png", "cache.png", "latency.png", "actions.csv", "server.log"} <= set(listed)
    assert all((output / name).stat().st_size > 0 for name in listed)
    assert "worldkv replay --checkpoint" in closing


def test_a_world_from_words_leaves_the_film_that_its_viewer_got(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "demo"
    assert main(["demo", "--video", "--ticks", "6", "--once", "--output", str(output)]) == 0
    out = capsys.readouterr().out
    assert "random weights" in out
    assert not is_running(server_pid(out))
    assert read_video(output / "world.mp4").shape == (9 + 5 * 12, 96, 160, 3)
    assert "69 frames, other words 2 times" in out
    closing = out.partition("look into ")[2]
    listed = [line.split()[0] for line in closing.partition("next\n")[0].splitlines()[1:]]
    assert listed == ["world.mp4", "world.png", "server.log"]
    assert all((output / name).stat().st_size > 0 for name in listed)
    assert "worldkv generate" in closing


def test_whoever_stops_it_stops_its_server_too(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "worldkv.cli.main", "demo", "--ticks", "1000", "--output", str(tmp_path)]
    said = tmp_path / "said"
    with said.open("wb") as file:
        demo = subprocess.Popen(
            command, cwd=ROOT, stdout=file, stderr=file, env={**os.environ, "PYTHONUNBUFFERED": "1"}
        )
    try:
        deadline = time.monotonic() + 120
        while "first tick" not in said.read_text():
            assert demo.poll() is None, said.read_text()
            assert time.monotonic() < deadline, said.read_text()
            time.sleep(0.1)
        assert is_running(server_pid(said.read_text()))
        demo.send_signal(signal.SIGTERM)
        assert demo.wait(30) == 130
    finally:
        demo.kill()
        demo.wait()
    assert not is_running(server_pid(said.read_text()))
    assert "Traceback" not in said.read_text()


def test_it_stays_with_its_console_until_it_is_stopped(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "worldkv.cli.main", "demo", "--ticks", "1", "--stay", "--output", str(tmp_path)]
    said = tmp_path / "said"
    with said.open("wb") as file:
        demo = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=file)
    try:
        deadline = time.monotonic() + 120
        while "the arm goes on" not in said.read_text():
            assert demo.poll() is None, said.read_text()
            assert time.monotonic() < deadline, said.read_text()
            time.sleep(0.1)
        address = re.search(r"watch it at (http://\S+) and", said.read_text())
        assert address is not None
        request = urllib.request.Request(address[1], headers={"accept": "text/html"})
        with urllib.request.urlopen(request, timeout=10) as page:
            assert b"worldkv" in page.read()
        demo.send_signal(signal.SIGTERM)
        assert demo.wait(30) == 0
    finally:
        demo.kill()
        demo.wait()
    assert not is_running(server_pid(said.read_text()))


def test_a_folder_that_holds_something_else_is_not_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "thesis.txt").write_text("years of work")
    assert main(["demo", "--output", str(tmp_path)]) == 2
    assert "is not empty" in capsys.readouterr().err
    assert main(["demo", "--ticks", "0", "--output", str(tmp_path)]) == 2
