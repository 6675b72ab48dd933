"""After warm-up nothing is compiled, captured or planned anew and no operation makes the host wait: counted here.

Two waits are meant: for the batch before the newest one (`Pacer`), and for a reply's actions. Both are for events; the
operations that torch's synchronisation watch reports are all others.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch

from worldkv.bench.ticks import TICKS_PER_WINDOW, make_inputs
from worldkv.bench.watching import Bench
from worldkv.models.graphs import GraphedCall
from worldkv.models.wan.dit import WanDiT


def measure_steadiness(bench: Bench, num_sessions: int, num_ticks: int = 100) -> dict[str, Any]:
    """`num_ticks` ticks of sessions at different fills, after three times as many that warm up; see the module."""
    sessions = [bench.engine.open_session() for _ in range(num_sessions)]
    ages = [0] * num_sessions

    def tick(count: int) -> None:
        for turn in range(-(-count // num_sessions)):
            futures = []
            for n, session in enumerate(sessions):
                if turn < n % TICKS_PER_WINDOW and ages[n] == 0:
                    continue  # begins later, so that fills differ
                inputs = make_inputs(bench.model, 1000 * n + ages[n], first=ages[n] % TICKS_PER_WINDOW == 0)
                futures.append(bench.engine.submit(session, inputs))
                ages[n] += 1
            for future in futures:
                future.result()

    tick(3 * num_ticks)
    before, done = made_so_far(bench), sum(ages)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            tick(num_ticks)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    made = {what: count - before[what] for what, count in made_so_far(bench).items()}
    waits = Counter(f"{w.filename}:{w.lineno}" for w in caught if "synchronizing" in str(w.message))
    for session in sessions:
        bench.engine.close(session, "measured")
    return {
        "sessions": num_sessions,
        "ticks": sum(ages) - done,
        "made_after_warm_up": made,
        "host_waits": sum(waits.values()),
        "where": dict(waits.most_common(5)),
    }


def made_so_far(bench: Bench) -> dict[str, int]:
    """See `made_by`."""
    return made_by(bench.executor.device, bench.model.dit, bench.model.encoding.graphed.values())


def made_by(device: torch.device, dit: WanDiT, encoders: Iterable[GraphedCall]) -> dict[str, int]:
    """How many kernels were compiled, graphs captured and attention plans built so far; none but on a GPU."""
    if device.type != "cuda":
        return {}
    from worldkv.attention import cudnn
    from worldkv.models.wan import kernels_triton, vae_triton

    return {
        "kernels": kernels_triton.num_compiled() + vae_triton.num_compiled(),
        "graphs": getattr(dit.run_blocks, "num_captured", 0),
        "encoder_graphs": sum(each.num_captured for each in encoders),
        "attention_plans": cudnn.num_graphs(),
    }


def profile_forwards(bench: Bench, most: int = 14) -> list[dict[str, Any]]:
    """Milliseconds on the device by kernel, of one tick with a full window: the largest first, then the rest."""
    session = bench.engine.open_session()
    for tick in range(TICKS_PER_WINDOW - 1):
        bench.tick(session, make_inputs(bench.model, tick, first=tick == 0))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        bench.tick(session, make_inputs(bench.model, 9))
        torch.cuda.synchronize()
    bench.engine.close(session, "profiled")
    averages = sorted(profile.key_averages(), key=lambda event: -event.self_device_time_total)
    rows = [{"kernel": e.key[:90], "calls": e.count, "ms": round(e.self_device_time_total / 1e3, 3)} for e in averages]
    rest = round(sum(row["ms"] for row in rows[most:]), 3)
    return [*rows[:most], {"kernel": "all others", "calls": sum(r["calls"] for r in rows[most:]), "ms": rest}]
