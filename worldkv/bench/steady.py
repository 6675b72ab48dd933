"""After warm-up nothing is compiled, captured or planned anew and no operation makes the host wait: counted here.

Two waits are meant: for the batch before the newest one (`Pacer`), and for a reply's actions. Both are for events; the
operations that torch's synchronisation watch reports are all others.
"""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any

import numpy as np
import torch

from worldkv.bench.ticks import TICKS_PER_WINDOW, make_inputs
from worldkv.engine.engine import Engine


def measure_steadiness(engine: Engine, num_sessions: int, num_ticks: int = 100) -> dict[str, Any]:
    """`num_ticks` ticks of sessions at different fills, after three times as many that warm up; see the module."""
    sessions = [engine.open_session() for _ in range(num_sessions)]
    ages = [0] * num_sessions

    def tick(count: int) -> None:
        for turn in range(-(-count // num_sessions)):
            futures = []
            for n, session in enumerate(sessions):
                if turn < n % TICKS_PER_WINDOW and ages[n] == 0:
                    continue  # begins later, so that fills differ
                num_frames = 1 if ages[n] % TICKS_PER_WINDOW == 0 else 4
                futures.append(engine.submit(session, make_inputs(engine, 1000 * n + ages[n], num_frames)))
                ages[n] += 1
            for future in futures:
                np.asarray(future.result().actions)

    tick(3 * num_ticks)
    before, done = _made(engine), sum(ages)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            tick(num_ticks)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    made = {what: count - before[what] for what, count in _made(engine).items()}
    waits = Counter(f"{w.filename}:{w.lineno}" for w in caught if "synchronizing" in str(w.message))
    for session in sessions:
        engine.close(session, "measured")
    return {
        "sessions": num_sessions,
        "ticks": sum(ages) - done,
        "made_after_warm_up": made,
        "host_waits": sum(waits.values()),
        "where": dict(waits.most_common(5)),
    }


def _made(engine: Engine) -> dict[str, int]:
    """How many kernels were compiled, graphs captured and attention plans built so far."""
    from worldkv.attention import cudnn
    from worldkv.models.wan import kernels_triton as triton_kernels

    names = ("_residual_norm", "_rms_norm", "_norm_rotate_write", "_quantise_rows")
    kernels = [getattr(triton_kernels, name) for name in names]
    compiled = sum(len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values())
    captured = getattr(engine.model._dit.run_blocks, "num_captured", 0)
    return {"kernels": compiled, "graphs": captured, "attention_plans": cudnn._graph.cache_info().currsize}


def profile_forwards(engine: Engine, most: int = 14) -> list[dict[str, Any]]:
    """Milliseconds on the device by kernel, of one tick with a full window: the largest first, then the rest."""
    session = engine.open_session()
    for tick in range(TICKS_PER_WINDOW - 1):
        np.asarray(engine.submit(session, make_inputs(engine, tick, 1 if tick == 0 else 4)).result().actions)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        np.asarray(engine.submit(session, make_inputs(engine, 9, 4)).result().actions)
        torch.cuda.synchronize()
    engine.close(session, "profiled")
    averages = sorted(profile.key_averages(), key=lambda event: -event.self_device_time_total)
    rows = [{"kernel": e.key[:90], "calls": e.count, "ms": round(e.self_device_time_total / 1e3, 3)} for e in averages]
    rest = round(sum(row["ms"] for row in rows[most:]), 3)
    return [*rows[:most], {"kernel": "all others", "calls": sum(r["calls"] for r in rows[most:]), "ms": rest}]
