"""Videos survive a round trip, odd sizes are padded, broken files are named."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("av")

from worldkv.show.video import read_video, write_video


def _gradient(num_frames: int = 6, height: int = 48, width: int = 64) -> np.ndarray:
    y, x = np.mgrid[0:height, 0:width]
    picture = np.stack([y * 4, x * 3, np.full_like(x, 90)], axis=-1).clip(0, 255)
    return np.stack([np.roll(picture, step, axis=1) for step in range(num_frames)]).astype(np.uint8)


def test_frames_survive_a_round_trip_nearly_unchanged(tmp_path: Path) -> None:
    frames = _gradient()
    write_video(tmp_path / "a.mp4", frames, fps=5)
    calls: list[tuple[int, int]] = []
    read = read_video(tmp_path / "a.mp4", lambda *done: calls.append(done))
    assert calls == [(i, 6) for i in range(1, 7)]
    assert read.shape == frames.shape
    assert read.dtype == np.uint8
    assert np.abs(read.astype(int) - frames).mean() < 6


def test_odd_sizes_are_padded_with_the_last_row_and_column(tmp_path: Path) -> None:
    write_video(tmp_path / "odd.mp4", iter(_gradient(height=33, width=47)), fps=29.97)
    read = read_video(tmp_path / "odd.mp4")
    assert read.shape == (6, 34, 48, 3)
    assert np.abs(read[:, 33].astype(int) - read[:, 32]).mean() < 8


def test_a_missing_broken_or_empty_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"gone\.mp4: no such video file"):
        read_video(tmp_path / "gone.mp4")
    (tmp_path / "text.mp4").write_text("this is not a video" * 50)
    with pytest.raises(ValueError, match=r"text\.mp4: not a readable video"):
        read_video(tmp_path / "text.mp4")
    write_video(tmp_path / "whole.mp4", _gradient(), fps=5)
    half = (tmp_path / "whole.mp4").read_bytes()[:600]
    (tmp_path / "half.mp4").write_bytes(half)
    with pytest.raises(ValueError, match=r"half\.mp4: not a readable video"):
        read_video(tmp_path / "half.mp4")


def test_a_video_that_cannot_be_finished_leaves_no_file(tmp_path: Path) -> None:
    for frames, words in (
        ([], "at least one"),
        (_gradient().astype(np.float32), "expected uint8"),
        ([_gradient()[0], _gradient(height=20)[0]], "frame 1: expected the first frame's size"),
    ):
        with pytest.raises(ValueError, match=words):
            write_video(tmp_path / "bad.mp4", frames, fps=5)
        assert not (tmp_path / "bad.mp4").exists()


def test_the_recorded_episode_is_read_whole(droid_clip: Path) -> None:
    frames = read_video(droid_clip / "wrist_image_left.mp4")
    assert frames.shape == (419, 180, 320, 3)
