"""Ticks of a real engine over a model of true size: time on the device of the DiT and the encoders, and of replies."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from worldkv.bench.timing import Stopwatch
from worldkv.engine.engine import Engine
from worldkv.models.dreamzero.config import DreamZeroConfig
from worldkv.models.dreamzero.inputs import TickInputs

TICKS_PER_WINDOW = 4  # histories of 1, 3, 5 and 7 frames


def make_inputs(engine: Engine, seed: int, num_frames: int, **more: Any) -> TickInputs:
    """A tick's inputs at the model's own size; noise images."""
    config: DreamZeroConfig = engine.model.config
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


def tiled_size(config: DreamZeroConfig) -> tuple[int, int]:
    """Height and width, in pixels, of an image that makes the model's tokens."""
    if config.target_video_height and config.target_video_width:
        return 2 * config.target_video_height, 2 * config.target_video_width
    stride = config.dit.pixel_stride * config.dit.patch_size[1]
    rows = next(n for n in range(int(config.dit.frame_tokens**0.5), 0, -1) if config.dit.frame_tokens % n == 0)
    rows = 22 if config.dit.frame_tokens == 880 else rows
    return rows * stride, config.dit.frame_tokens // rows * stride


@contextmanager
def watched(engine: Engine) -> Iterator[dict[str, list[Stopwatch]]]:
    """Stopwatches of all forwards ("forward") and encoders (by name) while the `with` lasts."""
    watches: dict[str, list[Stopwatch]] = defaultdict(list)
    model = engine.model
    dit, encode = model._dit, model.encode
    run = dit.forward

    def timed(name: str, function: Any, *arguments: Any) -> Any:
        watch = Stopwatch(dit.device)
        watch.mark()
        result = function(*arguments)
        watch.mark()
        watches[name].append(watch)
        return result

    dit.forward = lambda *arguments: timed("forward", run, *arguments)
    model.encode = lambda name, payloads: timed(name, encode, name, payloads)
    try:
        yield watches
    finally:
        dit.forward, model.encode = run, encode


def measure_window(engine: Engine) -> dict[str, Any]:
    """One session over a whole window, after one that warms up: milliseconds of DiT a chunk, of encoders, of a tick."""
    chunks: list[float] = []
    encoders: dict[str, list[float]] = defaultdict(list)
    totals = []
    for warm in (False, False, True):
        session = engine.open_session()
        for tick in range(TICKS_PER_WINDOW):
            with watched(engine) as watches:
                started = time.perf_counter()
                result = engine.submit(session, make_inputs(engine, tick, 1 if tick == 0 else 4)).result()
                np.asarray(result.actions)
                totals.append(1e3 * (time.perf_counter() - started))
            if warm:
                chunks.append(1e3 * sum(watch.seconds() for watch in watches.pop("forward")))
                for name, spans in watches.items():
                    encoders[name] += [1e3 * watch.seconds() for watch in spans]
        engine.close(session, "measured")
    return {
        "dit_ms_by_history": [round(ms, 2) for ms in chunks],
        "dit_ms_mean": statistics.mean(chunks),
        "encoder_ms": {name: round(statistics.median(times), 2) for name, times in encoders.items()},
        "tick_ms": [round(ms, 1) for ms in totals[-TICKS_PER_WINDOW:]],
        "achieved_tflops": flops_of_window(engine.model.config) / sum(chunks) / 1e9,
    }


def measure_sessions(engine: Engine, counts: Sequence[int]) -> Iterator[dict[str, Any]]:
    """So many sessions, at different fills, ticking at once through a window: ticks a second, and what replies take.

    A tick holds everything from the frames to the actions; `dit_s_per_round` is the DiT's part of one tick of all.
    """
    inputs = [[make_inputs(engine, 100 * n + t, 1 if t == 0 else 4) for t in range(2)] for n in range(max(counts))]
    for count in counts:
        sessions = [engine.open_session() for _ in range(count)]
        latencies: list[float] = []
        seconds = dit = 0.0
        for tick in range(3 * TICKS_PER_WINDOW):
            finished = []
            with watched(engine) as watches:
                started = time.perf_counter()
                futures = [
                    engine.submit(session, inputs[n][min((tick - n) % TICKS_PER_WINDOW, 1)])
                    for n, session in enumerate(sessions)
                    if tick >= n % TICKS_PER_WINDOW  # begun one after the other, so that windows are at all fills
                ]
                for future in futures:
                    np.asarray(future.result().actions)
                    finished.append(time.perf_counter() - started)
            if tick >= 2 * TICKS_PER_WINDOW:
                latencies += finished
                seconds += max(finished)
                dit += sum(watch.seconds() for watch in watches["forward"])
        for session in sessions:
            engine.close(session, "measured")
        yield {
            "sessions": count,
            "ticks_per_s": count * TICKS_PER_WINDOW / seconds,
            "p50_ms": 1e3 * float(np.percentile(latencies, 50)),
            "p99_ms": 1e3 * float(np.percentile(latencies, 99)),
            "dit_s_per_round": dit / TICKS_PER_WINDOW,
        }


def traced_tick(engine: Engine) -> dict[str, Any]:
    """Every traced quantity of a session's second tick, from the same noise each time."""
    traced: dict[str, Any] = {}
    session = engine.open_session()
    engine.submit(session, make_inputs(engine, 0, 1)).result()
    trace = lambda name, tensor: traced.__setitem__(name, tensor.float().clone())  # noqa: E731
    engine.submit(session, make_inputs(engine, 1, 4, trace=trace)).result()
    engine.close(session, "traced")
    return traced


def relative_errors(ours: Mapping[str, Any], expected: Mapping[str, Any]) -> dict[str, float]:
    """||ours - expected|| / ||expected|| of the first and the last velocities, the cache, latents and actions."""
    names = [name for name in expected if name.startswith(("step0.", "step15.", "cache.", "video_latents", "actions"))]
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
