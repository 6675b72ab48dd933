"""The models that can be measured by name: DreamZero at its true sizes, and a tiny one for machines without a GPU."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import torch

from worldkv.bench.released import RELEASED, TINY
from worldkv.bench.watching import Bench, Seen, TimedExecutor
from worldkv.device import forget_ended_engines
from worldkv.engine.core import Model
from worldkv.engine.engine import EngineConfig
from worldkv.kv.cache import KVCache
from worldkv.load import start_engine
from worldkv.models.dreamzero.checkpoint import load
from worldkv.models.dreamzero.random import write_random_checkpoint
from worldkv.models.dreamzero.steps import Steps
from worldkv.models.dreamzero.true_size import random_model
from worldkv.models.wan.fused import Precision
from worldkv.models.wan.graphs import accelerate


def build_engine(
    model: str,
    config: EngineConfig,
    device: torch.device,
    dtype: torch.dtype,
    *,
    precision: Precision = "model",
    steps: Steps = 8,
    progress: Callable[[str], None] = lambda _: None,
) -> Bench:
    """An engine over random weights: they run at full cost, and have learned nothing."""
    forget_ended_engines(device)
    if model in RELEASED:
        made = random_model(RELEASED[model](), device=device, dtype=dtype, steps=steps, progress=progress)
        accelerate(made.dit, precision)
        made.encoders.vae.accelerate()
    else:
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # about the tokenizer that a random checkpoint lacks
            checkpoint = write_random_checkpoint(Path(folder) / "random", view_height=16, view_width=24)
            made = load(checkpoint, device=device, dtype=dtype, precision=precision, steps=steps)
    seen, executors = Seen(), []

    def timed(cache: KVCache) -> TimedExecutor:
        executors.append(TimedExecutor(cast("Model", made), cache, alone=config.batch_invariant))
        return executors[-1]

    engine = start_engine(made, config, device, dtype, observer=seen, make_executor=timed)
    return Bench(engine, made, executors[-1], seen)


def sessions_that_fit(model: str, wanted: Sequence[int]) -> list[int]:
    """Of the session counts asked for, those that a GPU of 141 GB has room for beside the model."""
    most = {"dreamzero-14b": 4, "dreamzero-5b": 64, TINY: 16}[model]
    return [count for count in wanted if count <= most]
