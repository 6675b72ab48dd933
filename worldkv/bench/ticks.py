"""Ticks of a real engine over a model of true size: time on the device of the DiT and the encoders, and of replies."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from worldkv.bench.watching import Bench
from worldkv.models.dreamzero.config import DreamZeroConfig
from worldkv.models.dreamzero.inputs import tiled_size
from worldkv.models.world_action import TickInputs

TICKS_PER_WINDOW = 4  # histories of 1, 3, 5 and 7 frames


def make_inputs(bench: Bench, seed: int, num_frames: int, **more: Any) -> TickInputs:
    """A tick's inputs at the model's own size; noise images."""
    config = bench.model.config
    rng = np.random.default_rng(seed)
    height, width = tiled_size(config)
    tokens = np.zeros((1, config.dit.text_len), dtype=np.int64)
    tokens[0, :6] = np.arange(5, 11)
    return TickInputs(
        rng.integers(0, 256, (num_frames, height, width, 3), dtype=np.uint8),
        rng.uniform(-1, 1, (config.dit.num_states, config.dit.max_state_dim)),
        tokens,
        (tokens > 0).astype(np.int64),
        **more,
    )


def measure_window(bench: Bench) -> dict[str, Any]:
    """One session over a whole window, after one that warms up: milliseconds of DiT a chunk, of encoders, of a tick."""
    chunks: list[float] = []
    encoders: dict[str, list[float]] = defaultdict(list)
    totals = []
    for warm in (False, False, True):
        session = bench.engine.open_session()
        for tick in range(TICKS_PER_WINDOW):
            with bench.watched() as watches:
                started = time.perf_counter()
                result = bench.engine.submit(session, make_inputs(bench, tick, 1 if tick == 0 else 4)).result().result
                np.asarray(result.actions)
                totals.append(1e3 * (time.perf_counter() - started))
            if warm:
                chunks.append(1e3 * sum(watch.seconds() for watch in watches.pop("forward")))
                for name, spans in watches.items():
                    encoders[name] += [1e3 * watch.seconds() for watch in spans]
        bench.engine.close(session, "measured")
    return {
        "dit_ms_by_history": [round(ms, 2) for ms in chunks],
        "dit_ms_mean": statistics.mean(chunks),
        "encoder_ms": {name: round(statistics.median(times), 2) for name, times in encoders.items()},
        "tick_ms": [round(ms, 1) for ms in totals[-TICKS_PER_WINDOW:]],
        "achieved_tflops": flops_of_window(bench.model.config) / sum(chunks) / 1e9,
    }


def measure_sessions(bench: Bench, counts: Sequence[int]) -> Iterator[dict[str, Any]]:
    """So many sessions, at different fills, ticking at once through a window: ticks a second, and what replies take.

    A tick holds everything from the frames to the actions; `dit_s_per_round` is the DiT's part of one tick of all.
    """
    inputs = [[make_inputs(bench, 100 * n + t, 1 if t == 0 else 4) for t in range(2)] for n in range(max(counts))]
    for count in counts:
        sessions = [bench.engine.open_session() for _ in range(count)]
        latencies: list[float] = []
        seconds = dit = 0.0
        for tick in range(3 * TICKS_PER_WINDOW):
            finished = []
            with bench.watched() as watches:
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
    """What a session's second tick computes, from the same noise each time: velocities, cache, latents, actions."""
    session = bench.engine.open_session()
    bench.engine.submit(session, make_inputs(bench, 0, 1)).result()
    bench.seen.tensors = {}
    result = bench.engine.submit(session, make_inputs(bench, 1, 4)).result().result
    seen, bench.seen.tensors = bench.seen.tensors, None
    bench.engine.close(session, "seen")
    actions = torch.from_numpy(result.actions)
    return {**seen, "video_latents": result.video_latents.float(), "actions": actions}


def relative_errors(ours: Mapping[str, Any], expected: Mapping[str, Any]) -> dict[str, float]:
    """||ours - expected|| / ||expected|| of the first and the last velocities, the cache, latents and actions."""
    names = [name for name in expected if name.startswith(("step0.", "step7.", "cache.", "video_latents", "actions"))]
    return {name: float((ours[name] - expected[name]).norm() / expected[name].norm()) for name in names}


def flops_of_window(config: DreamZeroConfig) -> float:
    """Floating-point operations of all DiT forwards of one window's ticks, two branches, 8 evaluated steps."""
    total, frames = 0.0, 0
    for tick in range(TICKS_PER_WINDOW):
        committed = 1 if tick == 0 else config.frames_per_chunk
        frames += committed
        total += 2 * _flops_of_row(config, committed, frames, clean=True)
        total += 8 * 2 * _flops_of_row(config, config.frames_per_chunk, frames + config.frames_per_chunk, clean=False)
    return total


def _flops_of_row(config: DreamZeroConfig, num_frames: int, visible_frames: int, *, clean: bool) -> float:
    dit = config.dit
    extra = 0 if clean else dit.num_actions_per_chunk + dit.num_states
    queries, keys = num_frames * dit.frame_tokens + extra, visible_frames * dit.frame_tokens + extra
    products = 2 * queries * (6 * dit.dim**2 + 2 * dit.dim * dit.ffn_dim)
    attention = 4 * queries * (keys + dit.text_len + dit.image_tokens) * dit.dim
    return float(dit.num_layers * (products + attention))
