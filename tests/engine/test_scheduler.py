"""Which requests share a batch, and in which order. No torch here."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

from worldkv.engine.scheduler import PATIENCE_S, Scheduler
from worldkv.engine.session import Tick
from worldkv.models.base import Encode, Forward


def forward(num_rows: int = 2, num_tokens: int = 10) -> Forward:
    row: Any = SimpleNamespace(context=SimpleNamespace(num_tokens=num_tokens))
    return Forward((row,) * num_rows, "denoise")


def job(request: Any, waiting_since: float, deadline: float | None = None, submitted: float = 0.0) -> Tick:
    session: Any = SimpleNamespace()
    made = Tick(session, Future(), deadline=deadline, submitted=submitted)
    made.request, made.waiting_since = request, waiting_since
    return made


def test_forwards_of_different_ticks_share_a_batch_up_to_the_limits() -> None:
    jobs = [job(forward(), i) for i in range(5)]
    assert Scheduler(6, 1000).next_batch(jobs) == jobs[:3], "max_rows"
    assert Scheduler(100, 45).next_batch(jobs) == jobs[:2], "max_tokens"
    assert Scheduler(1, 1).next_batch(jobs) == jobs[:1], "a tick's own rows always fit"


def test_the_longest_waiting_leads_and_only_its_kind_joins() -> None:
    text, video = Encode("text", None), Encode("video", None)
    jobs = [job(forward(), 3), job(video, 1), job(text, 2), job(video, 5)]
    assert Scheduler(8, 1000).next_batch(jobs) == [jobs[1], jobs[3]]


def test_an_earlier_deadline_goes_first_but_nobody_starves_behind_deadlines() -> None:
    patient, urgent = job(forward(), 0.0), job(forward(), 1.0, deadline=1.5)
    assert Scheduler(2, 1000).next_batch([patient, urgent]) == [urgent]
    urgent.waiting_since = urgent.deadline = 2 * PATIENCE_S
    assert Scheduler(2, 1000).next_batch([patient, urgent]) == [patient]


def test_ticks_that_come_after_their_deadline_do_not_go_first_for_ever() -> None:
    patient = job(forward(), 0.0)
    for number in range(100):
        now = 0.1 * number
        late = job(forward(), now, deadline=now - 100, submitted=now)
        if Scheduler(2, 1000).next_batch([patient, late]) == [patient]:
            break
    assert PATIENCE_S <= now < PATIENCE_S + 0.15


def test_nothing_waiting_is_an_empty_batch() -> None:
    assert Scheduler(2, 10).next_batch([job(None, 0.0)]) == []
