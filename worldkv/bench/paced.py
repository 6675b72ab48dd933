"""Robots at their own pace: who asks when, how late the answers are, and how many robots a server bears.

Each robot has a period, a phase and a jitter of its own; robots come and go. The loop is open: a late reply does not
slow the asking, so an ask waits behind its robot's own late one, and its latency counts from when it was due. That is
what a robot feels; a driver that waits for its replies would hide it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np

NUM_FRAMES = 4  # of a request, where they are sent as they are taken
ALLOWED_LATE = 0.01  # of all replies: the goodput that is published
_SLICE_S = 10.0
_PATIENCE_S = 60.0  # for what is still unanswered when the time is over

Figures: TypeAlias = dict[str, Any]  # of a run, by name; plain values
# One robot's way to a model. Opened when it comes, closed when it goes; called with its episode's tick number and when
# the reply is due (seconds of time.perf_counter); returns once it is answered.
Ask = Callable[[int, float], None]
Connect = Callable[[int], AbstractContextManager[Ask]]


@runtime_checkable
class Observes(Protocol):
    """An Ask whose frames may be sent as they are taken, before it is called."""

    def observe(self, number: int, frame: int) -> None:
        """Send frame `frame` (of NUM_FRAMES) of tick `number`, the first tick's only one being the last."""
        ...


@dataclass(frozen=True)
class Pace:
    """How robots ask. `period_s`: a reply is late after that. `jitter`: of the period, uniform, to both sides.
    `episode_s`: how long a robot stays, a quarter more or less; then another takes its place. None: all stay. `lead_s`:
    frames are sent as they are taken, at equal times in a period, the newest so long before its ask. None: with it.
    """

    period_s: float = 1.6
    jitter: float = 0.05
    episode_s: float | None = None
    seconds: float = 60.0
    seed: int = 0
    lead_s: float | None = None

    def frame_times(self, due: float) -> list[float]:
        """When the frames of an ask that is due then are taken, in seconds from the start."""
        if self.lead_s is None:
            return []
        return [due - self.lead_s - back * self.period_s / NUM_FRAMES for back in reversed(range(NUM_FRAMES))]

    def episodes(self, robot: int) -> Iterator[list[float]]:
        """When the robot in place `robot` asks, episode by episode, in seconds from the start."""
        rng = np.random.default_rng([self.seed, robot])
        due, end = rng.uniform(0, self.period_s), 0.0
        while due < self.seconds:
            end = self.seconds
            if self.episode_s is not None:
                end = min(end, due + self.episode_s * rng.uniform(0.75, 1.25))
            asks = []
            while due < end:
                asks.append(due + self.period_s * self.jitter * rng.uniform(-1, 1))
                due += self.period_s
            yield [max(0.0, at) for at in asks]
            due += rng.uniform(0, self.period_s)


@dataclass(frozen=True)
class Answer:
    """One ask. `due`: seconds from the start. `latency_s`: from then to the reply; None where it failed."""

    robot: int
    due: float
    latency_s: float | None
    error: str = ""


def drive(
    connect: Connect, num_robots: int, pace: Pace, on_progress: Callable[[float], None] = lambda _: None
) -> list[Answer]:
    """Have the robots ask from now on; all answers in the order of their asks. A robot whose reply failed goes on."""
    answers: list[Answer] = []
    start = time.perf_counter()

    def live(robot: int) -> None:
        for asks in pace.episodes(robot):
            time.sleep(max(0.0, start + asks[0] - time.perf_counter()))
            with connect(robot) as ask:
                for number, due in enumerate(asks):
                    answers.append(_answer(ask, robot, number, due, start, pace))

    threads = [threading.Thread(target=live, args=(robot,), daemon=True) for robot in range(num_robots)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        elapsed = time.perf_counter() - start
        on_progress(min(elapsed, pace.seconds))
        if elapsed > pace.seconds + _PATIENCE_S:
            break
        time.sleep(0.2)
    asked = {(answer.robot, answer.due) for answer in list(answers)}
    never = [
        Answer(robot, due, None, "no reply")
        for robot in range(num_robots)
        for asks in pace.episodes(robot)
        for due in asks
        if (robot, due) not in asked
    ]
    return sorted([*answers, *never], key=lambda answer: answer.due)


def _answer(ask: Ask, robot: int, number: int, due: float, start: float, pace: Pace) -> Answer:
    try:
        if isinstance(ask, Observes):
            for frame, at in enumerate(pace.frame_times(due)):
                time.sleep(max(0.0, start + at - time.perf_counter()))
                ask.observe(number, frame)
        time.sleep(max(0.0, start + due - time.perf_counter()))
        ask(number, start + due + pace.period_s)
    except Exception as error:
        return Answer(robot, due, None, f"{type(error).__name__}: {error}")
    return Answer(robot, due, time.perf_counter() - start - due)


def summarise(answers: Sequence[Answer], pace: Pace) -> Figures:
    """Latencies in milliseconds and the share of late ones, in all and by ten seconds; a failed reply is late."""
    slices = []
    for begin in np.arange(0.0, pace.seconds, _SLICE_S):
        within = [answer for answer in answers if begin <= answer.due < begin + _SLICE_S]
        if within:
            slices.append({"from_s": float(begin), **_figures(within, pace)})
    errors = sorted({answer.error for answer in answers if answer.error})
    return {"period_s": pace.period_s, **_figures(answers, pace), "by_ten_seconds": slices, "errors": errors[:5]}


def _figures(answers: Sequence[Answer], pace: Pace) -> Figures:
    latencies = [answer.latency_s for answer in answers if answer.latency_s is not None]
    late = sum(answer.latency_s is None or answer.latency_s > pace.period_s for answer in answers)
    figures: Figures = {"replies": len(answers), "failed": len(answers) - len(latencies)}
    for name, q in (("p50_ms", 50), ("p99_ms", 99), ("worst_ms", 100)):
        figures[name] = round(1e3 * float(np.percentile(latencies, q)), 1) if latencies else None
    return {**figures, "share_late": round(late / max(1, len(answers)), 4)}


def largest_in_time(measure: Callable[[int], float], low: int, high: int) -> int:
    """The largest number of robots from `low` to `high` whose share of late replies, as `measure` tells it, is allowed;
    0 where even `low` is too many. Takes for granted that more robots are never faster."""
    if measure(low) > ALLOWED_LATE:
        return 0
    while low < high:
        middle = (low + high + 1) // 2
        if measure(middle) > ALLOWED_LATE:
            high = middle - 1
        else:
            low = middle
    return low
