"""`worldkv replay`: the schedule of the reference's test client, and what a replay leaves behind."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("diffusers")
pytest.importorskip("transformers")
pytest.importorskip("av")
pytest.importorskip("matplotlib")

from engines import random_checkpoint

from worldkv.cli.main import main
from worldkv.show.clip import CAMERAS, frame_schedule
from worldkv.show.video import read_video, write_video

PNG = b"\x89PNG"


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two seconds and a half of three cameras that see gradients move."""
    folder = tmp_path_factory.mktemp("clip")
    row = np.linspace(0, 255, 320).astype(np.uint8)
    for shift, name in enumerate(CAMERAS):
        frames = np.stack([np.roll(row, 3 * t + 80 * shift) for t in range(40)])
        write_video(folder / f"{name}.mp4", np.broadcast_to(frames[:, None, :, None], (40, 180, 320, 3)), fps=15)
    return folder


def test_the_schedule_is_the_reference_s() -> None:
    schedule = frame_schedule(419)
    assert schedule[:3] == [[0], [0, 7, 15, 23], [24, 31, 39, 47]]
    assert schedule[-1] == [384, 391, 399, 407]
    assert len(schedule) == 1 + 17
    assert frame_schedule(23) == [[0]]
    assert frame_schedule(24) == [[0], [0, 7, 15, 23]]


def test_a_replay_writes_actions_video_and_plots(
    clip: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "new" / "folder"
    checkpoint = str(random_checkpoint("ti2v"))
    assert main(["replay", "--checkpoint", checkpoint, "--clip", str(clip), "--output", str(output)]) == 0
    out = capsys.readouterr().out
    assert "requests: 2, windows started: 1, actions: 12, all finite" in out
    assert str(output) in out
    with np.load(output / "actions.npz") as saved:
        actions, seconds = saved["actions"], saved["seconds"]
        assert saved["restart_reason"].tolist() == ["first tick", ""]
    assert actions.shape == (2, 6, 8)
    assert np.isfinite(actions).all()
    assert seconds.tolist() == [0.0, pytest.approx(23 / 15)]
    rows = list(csv.DictReader((output / "actions.csv").read_text().splitlines()))
    assert [(row["tick"], row["step"]) for row in rows[5:7]] == [("0", "5"), ("1", "0")]
    assert float(rows[7]["seconds"]) == pytest.approx(24 / 15, abs=1e-3)
    np.testing.assert_allclose([float(row["joint_3"]) for row in rows], actions[:, :, 2].ravel(), atol=1e-5)
    assert len(read_video(output / "predicted.mp4")) == 16
    # request 0 imagines frames 3, 6 .. 24; request 1, at frame 23, 26 .. 38: the clip ends at 39
    assert len(read_video(output / "seen_and_predicted.mp4")) == 8 + 5
    for name in ("actions.png", "cache.png", "latency.png"):
        assert (output / name).read_bytes().startswith(PNG)
        assert name in out


def test_a_clip_that_is_incomplete_or_uneven_is_told(
    clip: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = str(random_checkpoint("ti2v"))
    assert main(["replay", "--checkpoint", checkpoint, "--clip", str(tmp_path)]) == 2
    assert "wrist_image_left.mp4" in capsys.readouterr().err
    for name in CAMERAS:
        length = 30 if name.startswith("wrist") else 40
        write_video(tmp_path / f"{name}.mp4", read_video(clip / f"{name}.mp4")[:length], fps=15)
    assert main(["replay", "--checkpoint", checkpoint, "--clip", str(tmp_path)]) == 2
    assert "one length" in capsys.readouterr().err
    assert main(["replay", "--checkpoint", checkpoint, "--clip", str(clip), "--max-calls", "0"]) == 2


def test_the_real_episode_runs_through_every_window(
    golden_ti2v: Path, droid_clip: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All requests of its schedule, and a new window whenever one is full. How well it guides is not asked."""
    quick = ["--steps", "5", "--cfg-scale", "1"]
    folders = ["--checkpoint", str(golden_ti2v), "--clip", str(droid_clip), "--output", str(tmp_path)]
    assert main(["replay", *folders, *quick]) == 0
    out = capsys.readouterr().out
    assert "requests: 18, windows started: 5" in out
    with np.load(tmp_path / "actions.npz") as saved:
        actions, reasons = saved["actions"], saved["restart_reason"].tolist()
    assert np.isfinite(actions).all()
    assert actions.std(axis=0).min() > 0, "what is seen must change what is done"
    assert reasons == ["first tick" if k == 0 else "window full" if k % 4 == 0 else "" for k in range(18)]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--clip", "c"], "--checkpoint: expected a folder"),
        (["--clip", "c", "--checkpoint", "k", "--url", "ws://h:1"], "--url: a server has its own checkpoint"),
        (["--recording", "r", "--url", "ws://h:1"], "--url: a server has its own checkpoint"),
        (["--recording", "r", "--checkpoint", "k", "--ticks", "3"], "--ticks: is for a clip"),
        (["--clip", "c", "--checkpoint", "k", "--lerobot", "l"], "--lerobot: is for a recording"),
        (["--clip", "c", "--checkpoint", "k", "--tolerance", "0.1"], "--tolerance: is for a recording"),
    ],
)
def test_no_option_is_taken_and_then_ignored(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", *options]) == 2
    assert words in capsys.readouterr().err
