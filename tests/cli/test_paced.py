"""Robots at their own pace: what is asked when, what counts as late, and the picture that comes of it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from server_fakes import FakePolicy, serving

pytest.importorskip("torch")

import itertools

from worldkv.bench.paced import Answer, Ask, Pace, drive, largest_in_time, summarise
from worldkv.bench.paced_ways import measure_server
from worldkv.cli.main import main


def test_robots_ask_at_phases_of_their_own_the_same_in_every_run() -> None:
    pace = Pace(1.0, jitter=0.1, seconds=20)
    (first,), (second,) = list(pace.episodes(0)), list(pace.episodes(1))
    assert [first] == list(pace.episodes(0))
    assert abs(first[0] % 1 - second[0] % 1) > 1e-3
    gaps = [later - earlier for earlier, later in itertools.pairwise(first)]
    assert 19 <= len(first) <= 21
    assert all(0.8 <= gap <= 1.2 for gap in gaps)
    episodes = list(Pace(1.0, episode_s=5, seconds=60).episodes(3))
    assert len(episodes) > 5, "robots leave and others come"
    assert all(before[-1] < after[0] for before, after in itertools.pairwise(episodes))


def test_a_late_reply_does_not_slow_the_asking() -> None:
    """A server that takes twice the period falls behind further and further; a driver that waits would not see it."""

    @contextmanager
    def connect(robot: int) -> Iterator[Ask]:
        yield lambda number, due: time.sleep(0.2)

    answers = drive(connect, 1, Pace(0.1, jitter=0, seconds=1))
    latencies = [answer.latency_s for answer in answers]
    assert len(answers) == 10
    assert latencies == sorted(latencies), "each waits behind the one before"
    assert latencies[-1] > 0.9
    assert summarise(answers, Pace(0.1, seconds=1))["share_late"] == 1


def test_a_failed_reply_is_late_and_its_reason_is_told() -> None:
    @contextmanager
    def connect(robot: int) -> Iterator[Ask]:
        def ask(number: int, due: float) -> None:
            if number == 1:
                raise RuntimeError("no room")

        yield ask

    told = summarise(drive(connect, 2, Pace(0.05, seconds=0.4)), Pace(0.05, seconds=0.4))
    assert (told["failed"], told["errors"]) == (2, ["RuntimeError: no room"])
    assert told["share_late"] >= 2 / told["replies"]


def test_figures_are_told_by_ten_seconds() -> None:
    answers = [Answer(0, float(due), 0.1 if due < 10 else 2.0) for due in range(20)]
    first, second = summarise(answers, Pace(1.6, seconds=20))["by_ten_seconds"]
    assert (first["p50_ms"], first["share_late"], second["p50_ms"], second["share_late"]) == (100.0, 0, 2000.0, 1)


@pytest.mark.parametrize("most", range(10))
def test_the_largest_number_in_time_is_found(most: int) -> None:
    tried: list[int] = []

    def share_late(robots: int) -> float:
        tried.append(robots)
        return 0.0 if robots <= most else 0.5

    assert largest_in_time(share_late, 1, 8) == min(most, 8)
    assert len(tried) == len(set(tried)) <= 5


@pytest.mark.parametrize("dialect", ["openpi", "roboarena"])
def test_any_server_of_the_dialects_is_measured(dialect: str) -> None:
    policy = FakePolicy()
    with serving(policy) as server:
        pace = Pace(0.2, seconds=1.5, episode_s=0.7)
        told = measure_server(f"ws://127.0.0.1:{server.port}", dialect, 3, pace)
    assert told["errors"] == []
    assert told["replies"] >= 15
    assert told["p99_ms"] is not None
    assert len(policy.closed) > 3 or dialect == "roboarena", "robots come and go"
    assert threading.active_count() < 50


def test_the_command_prints_lateness_and_leaves_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paced = ["--parts", "paced", "--robots", "1", "2", "--period", "2", "--seconds", "2.5"]
    assert main(["bench", "--device", "cpu", *paced, "--output", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "1 robots, one reply each 2 s: p50" in printed
    assert "% late" in printed
    assert (tmp_path / "bench.png").stat().st_size > 10_000


def test_frames_are_taken_at_equal_times_in_a_period_the_newest_with_a_lead() -> None:
    assert Pace(1.6).frame_times(10.0) == []
    assert Pace(1.6, lead_s=0.5).frame_times(10.0) == pytest.approx([8.3, 8.7, 9.1, 9.5])


class Observing:
    def __init__(self) -> None:
        self.seen: list[tuple[str, int, int]] = []

    def __call__(self, number: int, due: float) -> None:
        self.seen.append(("ask", number, 0))

    def observe(self, number: int, frame: int) -> None:
        self.seen.append(("observe", number, frame))


@pytest.mark.parametrize("lead_s", [None, 0.02])
def test_frames_come_before_their_ask_where_the_pace_says_so(lead_s: float | None) -> None:
    robot = Observing()

    @contextmanager
    def connect(_: int) -> Iterator[Ask]:
        yield robot

    answers = drive(connect, 1, Pace(0.2, seconds=0.5, lead_s=lead_s))
    whole = [("observe", frame) for frame in range(4)] if lead_s is not None else []
    expected = [(what, n, frame) for n in range(len(answers)) for what, frame in [*whole, ("ask", 0)]]
    assert robot.seen == expected
    assert summarise(answers, Pace(0.2, seconds=0.5))["failed"] == 0


@pytest.mark.parametrize("dialect", ["openpi", "roboarena"])
def test_frames_are_sent_to_a_server_as_they_are_taken(dialect: str) -> None:
    policy = FakePolicy()
    with serving(policy) as server:
        told = measure_server(f"ws://127.0.0.1:{server.port}", dialect, 2, Pace(0.2, seconds=1, lead_s=0.05))
    assert told["errors"] == []
    assert told["replies"] >= 8


def test_the_command_compares_frames_that_are_sent_as_they_are_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paced = ["--parts", "paced", "--robots", "1", "--period", "1", "--seconds", "2.5", "--observe", "0.4"]
    assert main(["bench", "--device", "cpu", *paced, "--output", str(tmp_path)]) == 0
    assert "frames sent as they are taken, the newest 0.4 s ahead: p50" in capsys.readouterr().out
    row = json.loads((tmp_path / "bench.json").read_text())["paced"]["rows"][0]
    assert row["observed"]["replies"] == row["replies"]
    assert row["observed_ratio"] == pytest.approx(row["observed"]["p50_ms"] / row["p50_ms"], abs=1e-3)
