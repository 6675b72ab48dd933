"""Plots are pngs that show what they are given, whatever the length of the episode."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from worldkv.show.plots import plot_actions, plot_cache, plot_latency
from worldkv.show.records import STAGES, TickRecord

PNG = b"\x89PNG\r\n\x1a\n"


def _records(count: int, sessions: int = 1) -> list[TickRecord]:
    return [
        TickRecord(
            tick=i // sessions,
            session=f"robot {i % sessions}",
            timings={**dict.fromkeys(STAGES, 10.0 + i), "total": 55.0 + 5 * i},
            frames_cached=1 + 2 * (i % 4),
            blocks_used=4 + i % 4,
            blocks_free=28 - i % 4,
            restart_reason="window full" if i % 4 == 0 else None,
        )
        for i in range(count)
    ]


def _size(path: Path) -> tuple[int, int]:
    """(width, height) of a png that is whole and not blank."""
    data = path.read_bytes()
    assert data.startswith(PNG)
    assert data.rstrip().endswith(b"IEND\xaeB`\x82")
    assert len(data) > 10_000, "the picture is nearly empty"
    return int.from_bytes(data[16:20]), int.from_bytes(data[20:24])


def _wave(steps: int, start: int = 0) -> np.ndarray:
    time = np.arange(start, start + steps)[:, None] / 15
    joints = np.sin(time * np.arange(1, 8))
    return np.concatenate([joints, (time > 1).astype(float)], axis=1)


@pytest.mark.parametrize("chunks", [1, 5])
def test_actions_are_drawn_for_every_joint(tmp_path: Path, chunks: int) -> None:
    plot_actions(tmp_path / "a.png", [_wave(24, 24 * i) for i in range(chunks)], rate_hz=15)
    width, height = _size(tmp_path / "a.png")
    assert width > height > 800


def test_actions_of_another_shape_are_refused(tmp_path: Path) -> None:
    for chunks in ([], [np.zeros((4, 7))], [np.zeros((0, 8))]):
        with pytest.raises(ValueError, match=r"chunks: expected arrays \[N, 8\]"):
            plot_actions(tmp_path / "a.png", chunks, rate_hz=15)


@pytest.mark.parametrize(("count", "sessions"), [(1, 1), (17, 1), (18, 3), (90, 1)])
def test_cache_and_latency_are_drawn_for_short_and_long_episodes(tmp_path: Path, count: int, sessions: int) -> None:
    records = _records(count, sessions)
    plot_cache(tmp_path / "c.png", records, window_frames=9)
    plot_latency(tmp_path / "l.png", records)
    assert _size(tmp_path / "c.png") == (1650, 840)
    assert _size(tmp_path / "l.png") == (1650, 660)


def test_no_ticks_at_all_is_said_and_not_drawn(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="records: expected at least one tick"):
        plot_cache(tmp_path / "c.png", [], window_frames=9)
    with pytest.raises(ValueError, match="records: expected at least one tick"):
        plot_latency(tmp_path / "l.png", [])


def test_the_total_is_the_sum_of_the_stages_where_nobody_measured_it() -> None:
    record = TickRecord(0, "a", {"encode": 2.0, "denoise": 3.0, "unknown": 9.0}, 1, 1, 1)
    assert record.total_ms == 5.0
    assert TickRecord(0, "a", {"encode": 2.0, "total": 7.0}, 1, 1, 1).total_ms == 7.0
