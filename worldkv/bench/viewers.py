"""Viewers of causal video: who has a world's next block in time, and how soon a world begins and other words show.

A block is late where it comes later than the last one's pictures last. The loop is open, see `worldkv.bench.paced`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np

from worldkv.bench.paced import Ask, Connect, Figures, Pace, drive, summarise
from worldkv.bench.steady import made_by
from worldkv.bench.videos import VideoBench
from worldkv.engine.engine import SessionHandle
from worldkv.models.causal_wan.inputs import BlockRequest, PromptSwitch

PICTURES_PER_S = 16
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
        session, request = bench.engine.open_session(), replace(_words(bench, viewer), seed=viewer)

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
    number = 100
    begun, switched = [], {}
    for _ in range(_SWITCHES):
        number += 1
        session = bench.engine.open_session()
        begun.append(_block_ms(bench, session, _words(bench, number)))
        bench.engine.close(session, "measured").result()
    modes: tuple[PromptSwitch, ...] = ("recache", "keep") if bench.model.recaches else ("keep",)
    for mode in modes:
        session = bench.engine.open_session()
        for _ in range(bench.blocks_to_fill + 1):
            bench.engine.submit(session, _words(bench, number)).result()
        times = []
        for _ in range(_SWITCHES):
            number += 1
            times.append(_block_ms(bench, session, replace(_words(bench, number), switch=mode)))
            bench.engine.submit(session, _words(bench, number)).result()
        switched[f"{mode}_ms"] = round(statistics.median(times), 1)
        bench.engine.close(session, "measured").result()
    return {"begin_ms": round(statistics.median(begun), 1), **switched}


def _block_ms(bench: VideoBench, session: SessionHandle, request: BlockRequest) -> float:
    started = time.perf_counter()
    block = bench.engine.submit(session, request).result().result
    np.asarray(block.latents[0, 0, 0, 0].cpu() if block.video is None else block.video[0, -1, 0, 0].float().cpu())
    return 1e3 * (time.perf_counter() - started)


def _words(bench: VideoBench, number: int) -> BlockRequest:
    """A prompt of six words, another for each number."""
    request = bench.model.fake_inputs(first=True)
    tokens = request.token_ids.copy()
    tokens[0, :6] = 5 + (np.arange(6) + 7 * number) % 50
    return replace(request, token_ids=tokens)
