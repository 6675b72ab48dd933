"""Which requests share a batch, and in which order. No torch here."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from worldkv.engine.config import EngineConfig
from worldkv.engine.scheduler import LEAST_URGENT_S, PATIENCE_S, Scheduler
from worldkv.engine.session import Tick
from worldkv.kv.spec import KVSpec, Step
from worldkv.kv.window import Window
from worldkv.models.base import BatchLimits, Encode, Forward


def forward(num_rows: int = 2) -> Forward:
    row: Any = SimpleNamespace()
    return Forward((row,) * num_rows, "denoise")


def job(request: Any, submitted: float, deadline: float | None = None, *, own_session: bool = True) -> Tick:
    session: Any = SimpleNamespace() if own_session else None
    made = Tick(session, Future(), deadline=deadline, submitted=submitted)
    made.request = request
    return made


def next_batch(jobs: list[Tick], max_rows: int = 100, max_encodes: int = 8) -> list[Tick]:
    return Scheduler(BatchLimits(max_rows, max_encodes)).next_batch(jobs)


def test_forwards_of_different_ticks_share_a_batch_up_to_the_limits() -> None:
    jobs = [job(forward(), i) for i in range(5)]
    assert next_batch(jobs, max_rows=6) == jobs[:3]
    assert next_batch(jobs, max_rows=1) == jobs[:1], "a tick's own rows always fit"


def test_a_smaller_forward_takes_the_room_that_a_larger_one_does_not_fit() -> None:
    jobs = [job(forward(2), 0), job(forward(2), 1), job(forward(1), 2)]
    assert next_batch(jobs, max_rows=3) == [jobs[0], jobs[2]]


@given(st.integers(1, 300), st.integers(1, 3000), st.integers(1, 4), st.integers(0, 60), st.booleans())
def test_a_model_s_largest_rows_stay_within_the_tokens_of_a_forward(
    max_rows: int, max_tokens: int, chunk_size: int, num_draft_tokens: int, guided: bool
) -> None:
    spec = KVSpec(
        1, 1, 4, Window(chunk_size, 9), ("a", "b")[: 1 + guided], ticks=((Step(2, num_draft_tokens=num_draft_tokens),),)
    )
    limits = EngineConfig(max_rows=max_rows, max_tokens=max_tokens).limits(spec)
    fits = limits.max_rows <= max_rows and limits.max_rows * (2 * chunk_size + num_draft_tokens) <= max_tokens
    assert fits or limits.max_rows == 1 + guided, "a tick's own rows always fit"


def test_encoders_run_in_small_batches() -> None:
    jobs = [job(Encode("video", None), i) for i in range(5)]
    assert next_batch(jobs, max_encodes=3) == jobs[:3]


def test_the_first_to_come_leads_and_only_its_kind_joins() -> None:
    text, video = Encode("text", None), Encode("video", None)
    jobs = [job(forward(), 3), job(video, 1), job(text, 2), job(video, 5)]
    assert next_batch(jobs) == [jobs[1], jobs[3]]


def test_an_earlier_deadline_goes_first_but_nobody_starves_behind_deadlines() -> None:
    patient, urgent = job(forward(), 0.0), job(forward(), 1.0, deadline=1.5)
    assert next_batch([patient, urgent], max_rows=2) == [urgent]
    urgent = job(forward(), 2 * PATIENCE_S, deadline=2 * PATIENCE_S)
    assert next_batch([patient, urgent], max_rows=2) == [patient]


def test_what_belongs_to_no_session_gives_way_to_all_that_does() -> None:
    video, tick = job(Encode("decode", None), 0.0, own_session=False), job(forward(), LEAST_URGENT_S - PATIENCE_S - 1)
    assert next_batch([video, tick]) == [tick]


def test_ticks_that_come_after_their_deadline_do_not_go_first_for_ever() -> None:
    patient = job(forward(), 0.0)
    for number in range(100):
        now = 0.1 * number
        late = job(forward(), now, deadline=now - 100)
        if next_batch([patient, late], max_rows=2) == [patient]:
            break
    assert PATIENCE_S <= now < PATIENCE_S + 0.15


def test_nothing_waiting_is_an_empty_batch() -> None:
    assert next_batch([job(None, 0.0)]) == []
