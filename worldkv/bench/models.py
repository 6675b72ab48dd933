"""The models that can be measured by name: DreamZero at its true sizes, and a tiny one for machines without a GPU."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from worldkv.engine.engine import Engine, EngineConfig
from worldkv.load import accelerate, load_engine, start_engine
from worldkv.models.dreamzero.config import DreamZeroConfig, dreamzero_5b, dreamzero_14b
from worldkv.models.dreamzero.random import write_random_checkpoint
from worldkv.models.dreamzero.true_size import random_model
from worldkv.models.wan.fused import Precision

TRUE_SIZES: dict[str, Callable[[], DreamZeroConfig]] = {"dreamzero-14b": dreamzero_14b, "dreamzero-5b": dreamzero_5b}
MODELS = (*TRUE_SIZES, "tiny")


def build_engine(
    model: str,
    config: EngineConfig,
    device: torch.device,
    dtype: torch.dtype,
    *,
    precision: Precision = "model",
    progress: Callable[[str], None] = lambda _: None,
) -> Engine:
    """An engine over random weights: they run at full cost, and have learned nothing."""
    if model in TRUE_SIZES:
        made = random_model(TRUE_SIZES[model](), device=device, dtype=dtype, progress=progress)
        accelerate(made._dit, precision)
        return start_engine(made, config, device, dtype)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # about the tokenizer that a random checkpoint lacks
        checkpoint = write_random_checkpoint(Path(folder) / "random", view_height=16, view_width=24)
        return load_engine(checkpoint, config, device=device, dtype=dtype, precision=precision)


def sessions_that_fit(model: str, wanted: Sequence[int]) -> list[int]:
    """Of the session counts asked for, those that a GPU of 141 GB has room for beside the model."""
    most = {"dreamzero-14b": 4, "dreamzero-5b": 64, "tiny": 16}[model]
    return [count for count in wanted if count <= most]
