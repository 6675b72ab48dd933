"""Plots are pngs that show what they are given, and say what that is, whatever the length of the episode."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from matplotlib.figure import Figure
from matplotlib.text import Text

from worldkv.show.captions import captioned
from worldkv.show.episode import Episode, EpisodeTick
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


class Drawn:
    """A figure that was saved: what stands in it, as it is drawn."""

    def __init__(self, figure: Figure) -> None:
        self.figure = figure
        self.texts = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text().strip()]
        self.words = " ".join(text.get_text() for text in self.texts)

    def cut_off(self) -> list[str]:
        """Texts that leave the picture."""
        width, height = self.figure.canvas.get_width_height()
        numbers = {label for axes in self.figure.axes for label in (*axes.get_xticklabels(), *axes.get_yticklabels())}
        boxes = [(text.get_text(), text.get_window_extent()) for text in self.texts if text not in numbers]
        return [words for words, box in boxes if box.x0 < 0 or box.y0 < 0 or box.x1 > width or box.y1 > height]


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Drawn]]:
    """The figures in the order in which they were saved."""
    saved: list[Drawn] = []
    save = Figure.savefig

    def savefig(figure: Figure, path: Any, **options: Any) -> None:
        save(figure, path, **options)
        if isinstance(path, Path):  # and no caption
            saved.append(Drawn(figure))

    monkeypatch.setattr(Figure, "savefig", savefig)
    yield saved
    assert [drawing.cut_off() for drawing in saved] == [[] for _ in saved], "words leave the picture"


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
    assert _size(tmp_path / "c.png") == (1650, 900)
    assert _size(tmp_path / "l.png") == (1650, 750)


def test_the_picture_of_the_actions_says_what_they_are_and_where_the_robot_went(
    tmp_path: Path, drawn: list[Drawn]
) -> None:
    chunks = [_wave(24), _wave(24, 24)]
    chunks[1][:12, 7] = 1.7  # a quarter of all that the gripper is told
    followed = [np.clip(chunk, -0.5, 1.0) for chunk in chunks]
    note = "Random weights: nothing was learned, so the motions mean nothing."
    plot_actions(tmp_path / "a.png", chunks, rate_hz=15, followed=followed, note=note)
    (picture,) = drawn
    for words in (
        "What the robot was told to do",
        "2 chunks, at 15 actions a second. A chunk is what one answer holds: the actions of the next 1.6 s.",
        note,
        "gripper: 25% outside of 0 to 1, where it stops",
        "0 open, 1 closed",
        "seconds of the robot's time",
    ):
        assert words in picture.words
    assert picture.words.count("radians") == 7
    (legend,) = picture.figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [
        "answered",
        "first action of a chunk",
        "where the robot went",
    ]
    for column, axes in enumerate(picture.figure.axes[i] for i in (0, 2, 4, 6, 1, 3, 5, 7)):
        lines = [line.get_ydata() for line in axes.lines]
        for chunk in (*chunks, *followed):
            assert any(np.array_equal(line, chunk[:, column]) for line in lines), f"number {column} is not drawn"


def test_a_gripper_that_stays_in_its_range_and_a_robot_that_nobody_followed_are_drawn_without_a_word_on_them(
    tmp_path: Path, drawn: list[Drawn]
) -> None:
    plot_actions(tmp_path / "a.png", [_wave(24)], rate_hz=15)
    assert "outside" not in drawn[0].words
    assert "where the robot went" not in drawn[0].words


def test_the_picture_of_the_cache_says_what_a_bar_is_and_what_the_pool_has(tmp_path: Path, drawn: list[Drawn]) -> None:
    plot_cache(tmp_path / "c.png", _records(9, 3), window_frames=9, note="To look at: this.")
    plot_cache(tmp_path / "unknown.png", _records(9), window_frames=0)
    picture, unknown = drawn
    for words in (
        "9 ticks; a tick is one request and its answer.",
        "Windows that began: window full (3).",
        "To look at: this.",
        "a full window: 9 frames, those included that a tick imagines",
        "the pool has 32 blocks; at most 7 were in use at the end of a tick",
        "session robot 0",
        "session robot 2",
        "a window begins, and why",
    ):
        assert words in picture.words
    assert "a full window" not in unknown.words, "nobody knows how long it is"


def test_the_picture_of_the_latency_says_what_each_stage_is_and_how_long_an_answer_lasts(
    tmp_path: Path, drawn: list[Drawn]
) -> None:
    records = _records(5)  # 55, 60, 65, 70 and 75 ms
    plot_latency(tmp_path / "l.png", records, chunk_s=0.07, note="To look at: this.")
    plot_latency(tmp_path / "fast.png", records, chunk_s=1.6)
    plot_latency(tmp_path / "unknown.png", records)
    picture, fast, unknown = drawn
    assert "5 ticks, half of them within 65 ms, the slowest 75 ms" in picture.words
    assert "a bar above that line is a robot that waits" in picture.words
    assert "To look at: this." in picture.words
    for stage in (*STAGES, "other"):
        assert f"{stage}: " in picture.words, f"nobody is told what {stage} is"
    assert picture.words.count("new window") == 2
    assert "an answer's actions last 1.6 s: no robot waited" in fast.words
    assert "actions last" not in unknown.words


def test_an_episode_tells_its_note_and_what_to_look_at_where_it_belongs(tmp_path: Path, drawn: list[Drawn]) -> None:
    pytest.importorskip("av")
    remarks = {name: f"To look at: {name}." for name in ("actions", "cache", "latency")}
    episode = Episode(15, 9, "random weights", remarks=remarks)
    frames = np.zeros((2, 48, 64, 3), np.uint8)
    for number, record in enumerate(_records(3)):
        episode.ticks.append(EpisodeTick(record, _wave(24), 1.6 * number, frames, frames, _wave(24)))
    assert set(episode.save(tmp_path, lambda *_: None)) == {path.name for path in tmp_path.iterdir()}
    actions, cache, latency = drawn
    assert "Random weights: nothing was learned, so the motions mean nothing. To look at: actions." in actions.words
    assert "where the robot went" in actions.words
    assert "To look at: cache." in cache.words
    assert "To look at: latency." in latency.words
    assert "an answer's actions last 1.6 s" in latency.words


def test_a_caption_stands_above_the_picture_and_fits_into_its_part() -> None:
    frame = np.full((40, 400, 3), 7, np.uint8)
    for words in (("seen",), ("seen by the cameras, all of them, this morning", "imagined")):
        picture = captioned(frame, *words)
        strip = picture[: -len(frame)]
        assert np.array_equal(picture[-len(frame) :], frame)
        ink = np.nonzero((strip < 128).any(axis=(0, 2)))[0]
        assert ink.min() >= 2, "cut off at the left"
        assert ink.max() <= 397, "cut off at the right"
        if len(words) == 2:
            assert not ((ink > 196) & (ink < 202)).any(), "one part runs into the other"


def test_no_ticks_at_all_is_said_and_not_drawn(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="records: expected at least one tick"):
        plot_cache(tmp_path / "c.png", [], window_frames=9)
    with pytest.raises(ValueError, match="records: expected at least one tick"):
        plot_latency(tmp_path / "l.png", [])


def test_the_total_is_the_sum_of_the_stages_where_nobody_measured_it() -> None:
    record = TickRecord(0, "a", {"encode": 2.0, "denoise": 3.0, "unknown": 9.0}, 1, 1, 1)
    assert record.total_ms == 5.0
    assert TickRecord(0, "a", {"encode": 2.0, "total": 7.0}, 1, 1, 1).total_ms == 7.0
