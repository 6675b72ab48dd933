"""What fewer solver steps cost and change: ticks by `--steps`, and their drift from all 16, in one run.

    python -m worldkv.bench.steps --checkpoint ../shared/golden/tiny_i2v
    python -m worldkv.bench.steps --model dreamzero-14b

Each choice runs the same frames through one window, from the same noise. Prints one line of JSON last.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch

from worldkv.bench.models import build_engine
from worldkv.bench.released import RELEASED
from worldkv.bench.ticks import TICKS_PER_WINDOW, make_inputs
from worldkv.engine.engine import Engine, EngineConfig
from worldkv.load import load_engine
from worldkv.models.dreamzero.model import DreamZero, State
from worldkv.models.dreamzero.steps import FIXED_STEPS, Steps
from worldkv.models.world_action import TickInputs, TickResult

DreamZeroEngine: TypeAlias = Engine[TickInputs, State, TickResult]
CHOICES: tuple[Steps, ...] = ("all", *sorted(FIXED_STEPS, reverse=True), "dynamic")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--checkpoint", type=Path, help="a checkpoint's folder")
    which.add_argument("--model", choices=RELEASED, help="a released model's true sizes, with random weights")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--precision", choices=("model", "fp8"), default="model", help="of the DiT's products (model)")
    parser.add_argument("--windows", type=int, default=1, help="windows of frames that each choice runs (1)")
    arguments = parser.parse_args()
    device, config = torch.device(arguments.device), EngineConfig(max_sessions=1)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    if arguments.model is not None:
        engine: DreamZeroEngine = build_engine(
            arguments.model, config, device, dtype, precision=arguments.precision
        ).engine
    else:
        engine = load_engine(arguments.checkpoint, config, device=device, dtype=dtype, precision=arguments.precision)
    engine.warm_up()
    rows = []
    for row in compare_steps(engine, arguments.windows):
        rows.append(row)
        print(
            f"  {row['steps']:>7}: {row['forwards']:.1f} forwards a tick, {row['tick_ms']:.1f} ms; "
            f"from all 16: latents {row['latents']:.1e}, actions {row['actions']:.1e}",
            flush=True,
        )
    engine.shutdown()
    print(
        json.dumps(
            {
                "benchmark": "steps",
                "precision": arguments.precision,
                "model": str(arguments.model or arguments.checkpoint),
                "rows": rows,
            }
        )
    )


def compare_steps(engine: DreamZeroEngine, windows: int = 1) -> Iterator[dict[str, float | str]]:
    """For each choice: forwards and milliseconds of a tick (means, the clean pass included), and ||difference|| / ||all
    16|| of the latents and actions of all ticks. History is of observed frames, so no tick's drift enters the next."""
    model = engine.model
    assert isinstance(model, DreamZero)
    chosen, expected = model.steps, None
    try:
        for steps in CHOICES:
            model.steps = steps
            before = sum(engine.stats().rows_per_forward.values())
            began = time.perf_counter()
            latents, actions = _ticks(engine, model, windows * TICKS_PER_WINDOW)
            seconds = time.perf_counter() - began
            num_forwards = sum(engine.stats().rows_per_forward.values()) - before
            expected = expected or (latents, actions)
            yield {
                "steps": str(steps),
                "forwards": num_forwards / (windows * TICKS_PER_WINDOW),
                "tick_ms": 1e3 * seconds / (windows * TICKS_PER_WINDOW),
                "latents": _drift(latents, expected[0]),
                "actions": _drift(actions, expected[1]),
            }
    finally:
        model.steps = chosen


def _ticks(engine: DreamZeroEngine, model: DreamZero, count: int) -> tuple[np.ndarray, np.ndarray]:
    session = engine.open_session()
    results = [
        engine.submit(session, make_inputs(model, tick, first=tick == 0)).result().result for tick in range(count)
    ]
    engine.close(session, "measured").result()
    latents = np.stack([result.video_latents.float().cpu().numpy() for result in results])
    return latents, np.stack([result.actions for result in results])


def _drift(ours: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(ours - expected) / np.linalg.norm(expected))


if __name__ == "__main__":
    main()
