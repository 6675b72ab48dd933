"""Ticks of a real engine over a model of true size: time on the device of the DiT and the encoders, and of replies."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from worldkv.bench.watching import Bench
from worldkv.engine.engine import SessionHandle
from worldkv.models.base import WorldModel
from worldkv.models.dreamzero.config import DreamZeroConfig
from worldkv.models.dreamzero.model import State
from worldkv.models.world_action import TickInputs, TickResult

TICKS_PER_WINDOW = 4  # histories of 1, 3, 5 and 7 frames


def make_inputs(model: WorldModel[TickInputs, State, TickResult], seed: int, *, first: bool = False) -> TickInputs:
    """A tick's inputs at the model's own sizes, of noise."""
    rng, fake = np.random.default_rng(seed), model.fake_inputs(first)
    assert fake.frames is not None
    return replace(
        fake,
        frames=rng.integers(0, 256, fake.frames.shape, dtype=np.uint8),
        state=rng.uniform(-1, 1, fake.state.shape),
    )


def fill_window(bench: Bench) -> SessionHandle:
    """A session with as much history as ticks read."""
    session = bench.engine.open_session()
    for tick in range(TICKS_PER_WINDOW):
        bench.tick(session, make_inputs(bench.model, tick, first=tick == 0))
    return session


def measure_window(bench: Bench) -> dict[str, Any]:
    """One session over a whole window, after one that warms up: milliseconds of DiT a chunk, of encoders, of a tick."""
    chunks: list[float] = []
    num_drafts: list[int] = []
    encoders: dict[str, list[float]] = defaultdict(list)
    totals = []
    for warm in (False, False, True):
        session = bench.engine.open_session()
        for tick in range(TICKS_PER_WINDOW):
            with bench.executor.watched() as watches:
                started = time.perf_counter()
                result = bench.tick(session, make_inputs(bench.model, tick, first=tick == 0))
                np.asarray(result.actions)
                totals.append(1e3 * (time.perf_counter() - started))
            if warm:
                forwards = watches.pop("forward")
                chunks.append(1e3 * sum(watch.seconds() for watch in forwards))
                num_drafts.append(len(forwards) - 1)  # one commits
                for name, spans in watches.items():
                    encoders[name] += [1e3 * watch.seconds() for watch in spans]
        bench.engine.close(session, "measured")
    return {
        "dit_ms_by_history": [round(ms, 2) for ms in chunks],
        "dit_ms_mean": statistics.mean(chunks),
        "encoder_ms": {name: round(statistics.median(times), 2) for name, times in encoders.items()},
        "tick_ms": [round(ms, 1) for ms in totals[-TICKS_PER_WINDOW:]],
        "achieved_tflops": flops_of_window(bench.model.config, num_drafts) / sum(chunks) / 1e9,
    }


def measure_begun(bench: Bench, windows: int = 3) -> dict[str, float]:
    """Milliseconds of a reply, and of one whose frames came ahead: medians of two sessions that take turns, so that
    whatever else the machine does is the same for both."""
    sessions = [bench.engine.open_session() for _ in range(2)]
    replies: list[list[float]] = [[], []]
    for tick in range(windows * TICKS_PER_WINDOW):
        inputs = make_inputs(bench.model, tick, first=tick == 0)
        bench.engine.work_ahead(sessions[1], inputs).result()
        for session, times in zip(sessions, replies, strict=True):
            started = time.perf_counter()
            np.asarray(bench.tick(session, inputs).actions)
            times.append(1e3 * (time.perf_counter() - started))
    for session in sessions:
        bench.engine.close(session, "measured")
    whole, begun = (statistics.median(times[TICKS_PER_WINDOW:]) for times in replies)  # less the first window
    return {"reply_ms": round(whole, 2), "begun_reply_ms": round(begun, 2), "ratio": round(begun / whole, 3)}


def measure_sessions(bench: Bench, counts: Sequence[int]) -> Iterator[dict[str, Any]]:
    """So many sessions, at different fills, ticking at once through a window: ticks a second, and what replies take.

    A tick holds everything from the frames to the actions; `dit_s_per_round` is the DiT's part of one tick of all.
    """
    inputs = [[make_inputs(bench.model, 100 * n + t, first=t == 0) for t in range(2)] for n in range(max(counts))]
    for count in counts:
        sessions = [bench.engine.open_session() for _ in range(count)]
        latencies: list[float] = []
        seconds = dit = 0.0
        for tick in range(3 * TICKS_PER_WINDOW):
            finished = []
            with bench.executor.watched() as watches:
                started = time.perf_counter()
                futures = [
                    bench.engine.submit(session, inputs[n][min((tick - n) % TICKS_PER_WINDOW, 1)])
                    for n, session in enumerate(sessions)
                    if tick >= n % TICKS_PER_WINDOW  # begun one after the other, so that windows are at all fills
                ]
                for future in futures:
                    future.result()
                    finished.append(time.perf_counter() - started)
            if tick >= 2 * TICKS_PER_WINDOW:
                latencies += finished
                seconds += max(finished)
                dit += sum(watch.seconds() for watch in watches["forward"])
        for session in sessions:
            bench.engine.close(session, "measured")
        yield {
            "sessions": count,
            "ticks_per_s": count * TICKS_PER_WINDOW / seconds,
            "p50_ms": 1e3 * float(np.percentile(latencies, 50)),
            "p99_ms": 1e3 * float(np.percentile(latencies, 99)),
            "dit_s_per_round": dit / TICKS_PER_WINDOW,
        }


def seen_tick(bench: Bench) -> dict[str, Any]:
    """The tensors of a session's second tick, from the same noise each time: velocities, cache, latents, actions."""
    session = bench.engine.open_session()
    bench.tick(session, make_inputs(bench.model, 0, first=True))
    bench.seen.tensors = {}
    result = bench.tick(session, make_inputs(bench.model, 1))
    seen, bench.seen.tensors = bench.seen.tensors, None
    bench.engine.close(session, "seen")
    actions = torch.from_numpy(result.actions)
    return {**seen, "video_latents": result.video_latents.float(), "actions": actions}


def relative_errors(ours: Mapping[str, Any], expected: Mapping[str, Any]) -> dict[str, float]:
    """||ours - expected|| / ||expected|| of the first and the last velocities, the cache, latents and actions."""
    names = [name for name in expected if name.startswith(("step0.", "step7.", "cache.", "video_latents", "actions"))]
    return {name: float((ours[name] - expected[name]).norm() / expected[name].norm()) for name in names}


def flops_of_window(config: DreamZeroConfig, num_drafts: Sequence[int]) -> float:
    """Floating-point operations of all DiT forwards of one window's ticks, two branches. `num_drafts`: the evaluated
    steps of each tick."""
    total, frames = 0.0, 0
    for tick, drafts in enumerate(num_drafts):
        committed = 1 if tick == 0 else config.frames_per_chunk
        frames += committed
        total += 2 * _flops_of_row(config, committed, frames, clean=True)
        total += (
            drafts * 2 * _flops_of_row(config, config.frames_per_chunk, frames + config.frames_per_chunk, clean=False)
        )
    return total


def _flops_of_row(config: DreamZeroConfig, num_frames: int, visible_frames: int, *, clean: bool) -> float:
    dit = config.dit
    extra = 0 if clean else dit.num_actions_per_chunk + dit.num_states
    queries, keys = num_frames * dit.frame_tokens + extra, visible_frames * dit.frame_tokens + extra
    products = 2 * queries * (6 * dit.dim**2 + 2 * dit.dim * dit.ffn_dim)
    attention = 4 * queries * (keys + dit.text_len + dit.image_tokens) * dit.dim
    return float(dit.num_layers * (products + attention))
