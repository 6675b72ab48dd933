"""The scheduler under robots at their own pace, on a simulated clock and a device whose times were measured.

An H200 and DreamZero-5B: a video encoder's batch, a forward of sessions, in milliseconds. No torch here.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from worldkv.bench.paced import Pace
from worldkv.engine.config import EngineConfig
from worldkv.engine.scheduler import Scheduler
from worldkv.engine.session import Tick
from worldkv.kv.spec import KVSpec, Step
from worldkv.kv.window import Window
from worldkv.models.base import BatchLimits, Encode, Forward

PERIOD_S = 1.6
FORWARDS = 9  # a clean pass and 8 evaluated steps
SPEC = KVSpec(30, 24, 128, Window(50, 9), ("a", "b"), ticks=((Step(2, commits=True), Step(2, num_draft_tokens=25)),))


def encode_s(count: int) -> float:
    return (5.0 + 6.95 * count) / 1e3


def forward_s(count: int) -> float:
    return (3.1 + 3.53 * count) / 1e3


@dataclass
class Device:
    """Runs what the scheduler picks, a batch at a time. `stall`: from when on it does nothing, for how long."""

    scheduler: Scheduler = field(default_factory=lambda: Scheduler(EngineConfig().limits(SPEC)))
    stall: tuple[float, float] = (1e9, 0.0)
    now: float = 0.0
    batches: list[list[Tick]] = field(default_factory=list)

    def serve(self, asks: list[tuple[float, int]], deadline_s: float | None = PERIOD_S) -> list[tuple[float, float]]:
        """`asks`: (when, robot). Returns (when, latency) of each; a robot's ask waits for its one before."""
        waiting: dict[int, list[float]] = {robot: [] for _, robot in asks}
        running: dict[int, tuple[Tick, Iterator[Any], float]] = {}
        queue, latencies = sorted(asks), []
        heapq.heapify(queue)

        def begin(robot: int, asked: float) -> None:
            session: Any = SimpleNamespace()
            deadline = None if deadline_s is None else self.now + deadline_s
            tick, requests = Tick(session, Future(), deadline=deadline, submitted=self.now), requests_of_a_tick()
            tick.request = next(requests)
            running[robot] = (tick, requests, asked)

        while queue or running:
            if not running:
                self.now = max(self.now, queue[0][0])
            while queue and queue[0][0] <= self.now:
                asked, robot = heapq.heappop(queue)
                if robot in running:
                    waiting[robot].append(asked)
                else:
                    begin(robot, asked)
            batch = self.scheduler.next_batch(tick for tick, _, _ in running.values())
            assert batch, "somebody waits and the device does nothing"
            self.batches.append(batch)
            is_encoder = isinstance(batch[0].request, Encode)
            self.now += encode_s(len(batch)) if is_encoder else forward_s(len(batch))
            if self.now > self.stall[0]:
                self.now, self.stall = self.now + self.stall[1], (1e9, 0.0)
            for robot, (tick, requests, asked) in list(running.items()):
                if tick not in batch:
                    continue
                tick.request = next(requests, None)
                if tick.request is None:
                    latencies.append((asked, self.now - asked))
                    del running[robot]
                    if waiting[robot]:
                        begin(robot, waiting[robot].pop(0))
        return latencies


def requests_of_a_tick() -> Iterator[Any]:
    row: Any = SimpleNamespace()
    yield Encode("video", None)
    for _ in range(FORWARDS):
        yield Forward((row, row), "denoise")


def asks_of(num_robots: int, seconds: float = 60.0) -> list[tuple[float, int]]:
    pace = Pace(period_s=PERIOD_S, seconds=seconds)
    return [(at, robot) for robot in range(num_robots) for episode in pace.episodes(robot) for at in episode]


def p99(latencies: list[tuple[float, float]], begin: float = 0.0, end: float = 1e9) -> float:
    return float(np.percentile([latency for asked, latency in latencies if begin <= asked < end], 99))


@pytest.mark.parametrize(("num_robots", "most_s"), [(4, 0.2), (16, 0.3), (32, 0.75)])
def test_nobody_is_late_at_his_own_pace(num_robots: int, most_s: float) -> None:
    assert p99(Device().serve(asks_of(num_robots))) < most_s


def test_without_deadlines_it_is_as_good() -> None:
    assert p99(Device().serve(asks_of(32), deadline_s=None)) < 0.75


def test_a_stall_of_two_seconds_leaves_no_convoy() -> None:
    """What came in meanwhile is worked off one batch after the other: those that are done do not wait for the rest."""
    device = Device(stall=(20.0, 2.0))
    latencies = device.serve(asks_of(24))
    undisturbed = p99(latencies, 5.0, 18.0)
    assert p99(latencies, 22.0 + 3 * PERIOD_S, 40.0) < 1.2 * undisturbed, "three periods later it is forgotten"
    ended = sorted(asked + latency for asked, latency in latencies if 18.4 < asked < 22.0)
    gaps = np.diff([at for at in ended if at > 21.9])
    assert gaps.max() < 0.35, "answers come one batch after the other, not all at the end"


def test_at_32_robots_a_stall_is_worked_off_as_fast_as_the_device_allows() -> None:
    """No idle moment while somebody waits, and no larger share of small batches: what is left is arithmetic."""
    asks = asks_of(32)
    stalled, undisturbed = Device(stall=(20.0, 2.0)), Device()
    latencies = stalled.serve(asks)
    undisturbed.serve(asks)
    busy_s = sum(forward_s(8) / 8 for _ in range(FORWARDS)) + encode_s(8) / 8  # of a tick, in full batches
    spare = 1 - 32 * busy_s / PERIOD_S
    bound = 2.0 * (1 - spare) / spare  # seconds until a backlog of two seconds is gone
    assert p99(latencies, 22.0 + 1.5 * bound, 60.0) < 0.75


def test_what_all_share_at_once_ends_later_for_half_of_them() -> None:
    """The other choice, measured: every waiting tick carried on together."""

    class Together(Scheduler):
        def next_batch(self, ticks: Any) -> list[Tick]:
            served = list(ticks)
            for tick in served:
                tick.deadline = None
            encoders = [tick for tick in served if isinstance(tick.request, Encode)]
            return encoders or served

    ours = [latency for _, latency in Device().serve(asks_of(32))]
    theirs = [latency for _, latency in Device(Together(BatchLimits(1000, 1000))).serve(asks_of(32))]
    assert np.median(ours) < 0.9 * np.median(theirs)
