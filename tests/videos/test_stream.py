"""When blocks are begun and due, what a viewer may say, and what becomes of pictures: no model, no socket."""

from __future__ import annotations

import gc
import io
import os
from typing import Any

import numpy as np
import pytest

from worldkv.errors import BadRequest
from worldkv.videos.messages import NewPrompt, Start, field_of, parse, read_message
from worldkv.videos.stream import AHEAD, Schedule

BLOCK_S = 0.75


def test_a_viewer_that_shows_nothing_gets_no_more_than_a_few_blocks() -> None:
    for pace, ahead in AHEAD.items():
        schedule, now, made = Schedule(pace, BLOCK_S), 0.0, 0
        while (wait := schedule.wait_s(now)) is not None:
            now += wait
            schedule.begin(now)
            schedule.made(made, BLOCK_S, now)
            made += 1
        assert made == ahead
        schedule.shown(0)
        assert schedule.wait_s(now + 100) == 0
        schedule.shown(17)  # it was not sent
        assert not schedule.is_full


def test_live_blocks_are_begun_as_long_before_they_are_due_as_the_last_ones_took_and_half_more() -> None:
    schedule = Schedule("live", BLOCK_S)
    assert (schedule.wait_s(10.0), schedule.begin(10.0), schedule.lead_s) == (0.0, None, BLOCK_S)
    assert schedule.made(0, 0.5625, 10.4) == 0
    schedule.shown(0)
    assert schedule.lead_s == pytest.approx(0.7)
    assert schedule.wait_s(10.4) == 0, "it is due at 10.9625"
    assert schedule.begin(10.4) == 10.9625
    assert schedule.made(1, BLOCK_S, 10.7) == 0
    schedule.shown(1)
    assert schedule.wait_s(10.7) == pytest.approx(10.9625 + 0.75 - 0.7 - 10.7)
    for took, lead_s in ((0.01, 0.375), (0.6, 1.0), (9.0, 1.5)):
        schedule = Schedule("live", BLOCK_S)
        schedule.begin(0.0)
        schedule.made(0, BLOCK_S, took)
        assert schedule.lead_s == pytest.approx(lead_s)


def test_a_model_that_just_keeps_up_is_begun_early_enough_to_be_never_late() -> None:
    schedule, now, late = Schedule("live", BLOCK_S), 0.0, []
    shown_at: list[tuple[float, int]] = []
    for block in range(40):
        while (wait := schedule.wait_s(now)) != 0:
            now = min(at for at, _ in shown_at) if wait is None else now + wait
            for at, number in [each for each in shown_at if each[0] <= now]:
                schedule.shown(number)
                shown_at.remove((at, number))
        due = schedule.begin(now)
        now += 0.74
        late.append(schedule.made(block, BLOCK_S, now))
        shown_at.append((now if due is None else max(due, now), block))
    assert sum(late[5:]) == 0, late


def test_a_late_block_moves_those_after_it_and_says_by_how_much() -> None:
    schedule = Schedule("live", BLOCK_S)
    schedule.begin(0.0)
    schedule.made(0, BLOCK_S, 1.0)
    assert schedule.begin(1.0) == 1.75
    assert schedule.made(1, BLOCK_S, 2.0) == 0.25
    schedule.shown(1)
    assert schedule.begin(2.0) == 2.75


def test_what_a_viewer_takes_longer_for_or_pauses_is_nobodys_delay() -> None:
    schedule = Schedule("live", BLOCK_S)
    for block in range(2):
        schedule.begin(0.0)
        schedule.made(block, BLOCK_S, 0.0)
    assert schedule.wait_s(60.0) is None
    schedule.shown(1)
    assert schedule.begin(60.0) == 60.375
    assert schedule.made(2, BLOCK_S, 60.37) == 0
    schedule.shown(2)
    schedule.pause()
    assert schedule.begin(90.0) is None
    assert schedule.made(3, BLOCK_S, 95.0) == 0


def test_who_goes_elsewhere_is_not_waited_for() -> None:
    schedule = Schedule("live", BLOCK_S)
    for block in range(2):
        schedule.begin(0.0)
        schedule.made(block, BLOCK_S, 0.0)
    schedule.jump()
    assert schedule.wait_s(0.0) == 0


def test_a_message_is_read_whole_or_refused_by_field() -> None:
    text = '{"type": "start", "prompt": "a", "seed": 7, "format": "mp4", "session_id": "s", "pace": "fast"}'
    assert read_message(parse(text)) == Start("a", None, 7, "mp4", "s", "fast")
    assert read_message({"type": "prompt", "prompt": "b", "id": [1]}) == NewPrompt("b", id=[1])
    with pytest.raises(BadRequest, match="'x' is not known; play takes no fields"):
        read_message({"type": "play", "x": 1})
    assert field_of(BadRequest("seed: expected a number")) == "seed"
    assert field_of(BadRequest("what it is")) is None


# what becomes of pictures


def pictures(count: int, seed: int = 0, height: int = 32, width: int = 48) -> np.ndarray:
    """Smooth ones, as a video's are."""
    y, x = np.mgrid[0:height, 0:width]
    waves = [np.stack([x * 3 + 5 * t, y * 4 + seed, x + y + 2 * t], -1) for t in range(count)]
    return np.abs(np.stack(waves) % 256 - 128).astype(np.uint8)


def opened(data: bytes) -> tuple[list[float], np.ndarray]:
    """Times and pictures of an mp4 file."""
    import av

    with av.open(io.BytesIO(data)) as container:
        frames = list(container.decode(container.streams.video[0]))
        return [float(f.pts * f.time_base) for f in frames], np.stack([f.to_ndarray(format="rgb24") for f in frames])


def film_of(sizes: list[int], **kept: Any) -> Any:
    from worldkv.videos.muxer import mp4_of
    from worldkv.videos.reel import Reel

    reel, first = Reel(**kept), 0
    for size in sizes:
        reel.add(mp4_of(pictures(size, first), first, 16), first, size)
        first += size
    return reel


def test_jpegs_are_packed_with_their_lengths() -> None:
    av = pytest.importorskip("av")
    from worldkv.videos.muxer import packed_jpegs, unpacked

    frames = pictures(3)
    packed = unpacked(packed_jpegs(frames))
    assert len(packed) == 3
    for jpeg, frame in zip(packed, frames, strict=True):
        with av.open(io.BytesIO(jpeg)) as container:
            shown = next(container.decode(video=0)).to_ndarray(format="rgb24")
        assert np.abs(shown.astype(int) - frame).mean() < 4


def test_blocks_of_mp4_one_after_the_other_are_one_film_with_exact_times() -> None:
    pytest.importorskip("av")
    from worldkv.videos.muxer import mp4_of

    blocks = [mp4_of(pictures(size, first), first, 16) for size, first in ((9, 0), (12, 9), (12, 21), (12, 12_000))]
    assert len({block.init for block in blocks}) == 1
    assert blocks[0].mime.startswith('video/mp4; codecs="')
    times, shown = opened(blocks[0].init + b"".join(block.fragment for block in blocks))
    assert times == [n / 16 for n in (*range(33), *range(12_000, 12_012))]
    assert np.abs(shown[9:21].astype(int) - pictures(12, 9)).mean() < 6
    times, _ = opened(blocks[0].init + blocks[2].fragment)
    assert times == [n / 16 for n in range(21, 33)], "a viewer may begin at any block"


def test_a_reel_is_the_film_of_what_was_shown_and_loses_its_beginning_when_it_is_long() -> None:
    pytest.importorskip("av")
    reel = film_of([9, 12, 12], max_bytes=1 << 20)
    film = reel.film()
    assert (film.first_frame, film.num_frames) == (0, 33)
    data = b"".join(film.parts())
    assert len(data) == film.num_bytes
    assert opened(data)[0] == [n / 16 for n in range(33)]
    short = film_of([9, *[12] * 60], max_bytes=len(data))
    film = short.film()
    assert 0 < film.first_frame < film.first_frame + film.num_frames == 9 + 60 * 12
    assert film.num_bytes < 2 * len(data)
    assert opened(b"".join(film.parts()))[0] == [n / 16 for n in range(film.first_frame, 9 + 60 * 12)]


def test_who_reads_a_reel_reads_it_to_its_end_and_its_files_are_gone_then() -> None:
    pytest.importorskip("av")
    before = len(os.listdir("/proc/self/fd"))
    reel = film_of([9, 12], max_bytes=1 << 20)
    film = reel.film()
    expected = b"".join(film.parts())
    reel.close()
    assert reel.film() is None
    assert b"".join(film.parts()) == expected
    del film, reel
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before
    assert film_of([9], max_bytes=0).film() is None
