"""Many sessions in shared forwards against the same sessions one after the other, in one run.

    python -m worldkv.bench.sessions [--sessions 1 2 4 8 16] [--ticks 5] [--checkpoint DIR]

Prints a table, and one line of JSON last. Ratios are of throughputs measured in this run; absolute times say little
about another machine. The default checkpoint is tiny and random: what is measured is the engine, not a model.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
import warnings
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from worldkv.bench.ticks import TICKS_PER_WINDOW, make_inputs
from worldkv.engine.engine import Engine, EngineConfig, TickReply
from worldkv.load import load_engine
from worldkv.models.dreamzero.model import State
from worldkv.models.dreamzero.random import write_random_checkpoint
from worldkv.models.world_action import TickInputs, TickResult

RolloutEngine = Engine[TickInputs, State, TickResult]


def main(argv: Sequence[str] | None = None) -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--sessions", type=int, nargs="+", default=[1, 2, 4, 8, 16], help="how many at once")
    # whole windows, so that every session restarts as often in both ways of running
    options.add_argument("--ticks", type=int, default=TICKS_PER_WINDOW, help="ticks of each session (4)")
    options.add_argument("--checkpoint", type=Path, help="DreamZero checkpoint folder (default: tiny, random weights)")
    options.add_argument("--threads", type=int, default=os.cpu_count(), help="torch's threads (all)")
    arguments = options.parse_args(argv)
    torch.set_num_threads(arguments.threads)
    most = max(arguments.sessions)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # about the tokenizer that a random checkpoint lacks
        checkpoint = arguments.checkpoint or write_random_checkpoint(Path(folder) / "random", view_height=16)
        config = EngineConfig(max_sessions=most, max_rows=2 * most)
        engine = load_engine(checkpoint, config)
        inputs = [make_inputs(engine.model, seed) for seed in range(most)]
    measure(engine, inputs[:2], 2, together=True)  # warm up
    rows = []
    names = ("sessions", "one by one", "batched", "ratio", "p50 ms", "p99 ms", "rows/forward")
    print("{:>8} {:>11} {:>9} {:>6} {:>8} {:>8} {:>13}".format(*names))
    for count in arguments.sessions:
        alone = measure(engine, inputs[:count], arguments.ticks, together=False)
        batched = measure(engine, inputs[:count], arguments.ticks, together=True)
        row = {
            "sessions": count,
            "one_by_one_ticks_per_s": round(alone["ticks_per_s"], 2),
            "batched_ticks_per_s": round(batched["ticks_per_s"], 2),
            "ratio": round(batched["ticks_per_s"] / alone["ticks_per_s"], 2),
            **{f"batched_{name}": round(batched[name], 2) for name in batched if name != "ticks_per_s"},
        }
        rows.append(row)
        print(
            f"{count:>8} {row['one_by_one_ticks_per_s']:>9}/s {row['batched_ticks_per_s']:>7}/s {row['ratio']:>6} "
            f"{row['batched_p50_ms']:>8} {row['batched_p99_ms']:>8} {row['batched_rows_per_forward']:>13}",
            flush=True,
        )
    engine.shutdown()
    about = {"python": platform.python_version(), "torch": torch.__version__, "threads": arguments.threads}
    print(json.dumps({"benchmark": "sessions", "device": "cpu", **about, "machine": platform.machine(), "rows": rows}))


def measure(engine: RolloutEngine, inputs: list[TickInputs], num_ticks: int, *, together: bool) -> dict[str, float]:
    """Throughput and latency of `num_ticks` ticks of each session, all in flight at once or one after the other."""
    sessions = [engine.open_session() for _ in inputs]
    latencies: list[float] = []
    for session, first in zip(sessions, inputs, strict=True):
        engine.submit(session, replace(first, frames=first_frames(first))).result()
    before = engine.stats().rows_per_forward
    started = time.perf_counter()
    for _ in range(num_ticks):
        pending: list[Future[TickReply[TickResult]]] = []
        for session, tick in zip(sessions, inputs, strict=True):
            pending.append(engine.submit(session, tick))
            if not together:
                pending[-1].result()
        latencies += [future.result().info.timings["total"] for future in pending]
    seconds = time.perf_counter() - started
    forwards = {rows: n - before.get(rows, 0) for rows, n in engine.stats().rows_per_forward.items()}
    num_forwards = sum(forwards.values())
    for session in sessions:
        engine.close(session, "measured")
    engine.warm_up()
    return {
        "ticks_per_s": len(latencies) / seconds,
        "p50_ms": statistics.median(latencies),
        "p99_ms": float(np.percentile(latencies, 99)),
        "forwards_per_tick": num_forwards / len(latencies),
        "rows_per_forward": sum(rows * n for rows, n in forwards.items()) / num_forwards,
    }


def first_frames(inputs: TickInputs) -> np.ndarray:
    assert inputs.frames is not None
    return inputs.frames[:1]


if __name__ == "__main__":
    main()
