"""Viewers of causal video: who has a world's next block in time, and how soon a world begins and other words show.

A block is late where it comes later than the last one's pictures last. The loop is open, see `worldkv.bench.paced`.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager

from worldkv.bench.paced import Ask, Connect, Figures, Pace, drive, summarise
from worldkv.bench.steady import made_by
from worldkv.bench.videos import VideoBench
from worldkv.engine.engine import SessionHandle
from worldkv.models.causal_wan.inputs import PromptSwitch
from worldkv.videos.request import VideoRequest

_SWITCHES = 3  # of each mode, to words that were not yet seen


def measure_viewers(bench: VideoBench, num_viewers: int, pace: Pace) -> Figures:
    """Viewers on a fresh engine, from the moment that it calls itself ready. Shuts it down."""
    try:
        began = time.perf_counter()
        bench.engine.warm_up()
        warm_up_s, before = time.perf_counter() - began, _made(bench)
        answers = drive(_to_engine(bench), num_viewers, pace)
        made = {what: count - before[what] for what, count in _made(bench).items()}
    finally:
        bench.engine.shutdown()
    about = {"robots": num_viewers, "warm_up_s": round(warm_up_s, 1), "made_after_ready": made}
    return {**about, **summarise(answers, pace)}


def _made(bench: VideoBench) -> dict[str, int]:
    return made_by(bench.executor.device, bench.model.dit, ())


def _to_engine(bench: VideoBench) -> Connect:
    """Each viewer a session; blocks carry their deadline."""

    @contextmanager
    def connect(viewer: int) -> Iterator[Ask]:
        session, request = bench.engine.open_session(), VideoRequest(_words(viewer), seed=viewer)

        def ask(number: int, due: float) -> None:
            bench.engine.submit(session, request, due).result()

        try:
            yield ask
        finally:
            bench.engine.close(session, "measured")

    return connect


def measure_first_pictures(bench: VideoBench) -> Figures:
    """Milliseconds from an ask to the pictures: of a new session with new words, and after other words of one whose
    window is full. The engine is ready."""
    numbers = itertools.count(100)
    begun = []
    for _ in range(_SWITCHES):
        session = bench.engine.open_session()
        begun.append(_block_ms(bench, session, VideoRequest(_words(next(numbers)))))
        bench.engine.close(session, "measured").result()
    measured = {"begin_ms": round(statistics.median(begun), 1)}
    modes: tuple[PromptSwitch, ...] = ("recache", "keep") if bench.model.recaches else ("keep",)
    for mode in modes:
        session, words = bench.engine.open_session(), _words(next(numbers))
        for _ in range(bench.blocks_to_fill + 1):
            bench.engine.submit(session, VideoRequest(words)).result()
        times = []
        for _ in range(_SWITCHES):
            times.append(_block_ms(bench, session, VideoRequest(_words(next(numbers)), switch=mode)))
            bench.engine.submit(session, VideoRequest()).result()
        measured[f"{mode}_ms"] = round(statistics.median(times), 1)
        bench.engine.close(session, "measured").result()
    return dict(measured)


def _block_ms(bench: VideoBench, session: SessionHandle, request: VideoRequest) -> float:
    started = time.perf_counter()
    bench.engine.submit(session, request).result()
    return 1e3 * (time.perf_counter() - started)


def _words(number: int) -> str:
    """A prompt of a few words, another for each number."""
    return f"a street in town {chr(97 + number // 26 % 26)}{chr(97 + number % 26)} in the rain"
