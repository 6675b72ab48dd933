"""Checkpoints of the released models' true structure: every name and shape, in files without content."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")

from worldkv.errors import CheckpointError  # noqa: E402
from worldkv.models.dreamzero.checkpoint import Checkpoint, check_all_tensors, read_sizes  # noqa: E402
from worldkv.models.dreamzero.config import dreamzero_5b, dreamzero_14b  # noqa: E402
from worldkv.models.dreamzero.folder import DIT_PREFIX  # noqa: E402
from worldkv.models.dreamzero.true_size import TRUE_SIZES, write_true_structure  # noqa: E402

MODELS = {"14B": (dreamzero_14b, 1317, 45e9), "5B": (dreamzero_5b, 997, 25e9)}


@pytest.mark.parametrize(("make", "num_tensors", "num_bytes"), MODELS.values(), ids=MODELS)
def test_nothing_is_missing_or_unexpected(make: Any, num_tensors: int, num_bytes: float, tmp_path: Path) -> None:
    config = make()
    folder = write_true_structure(tmp_path / "whole", config)
    checkpoint = Checkpoint.open(folder)
    assert checkpoint.config.dit == config.dit
    assert sum(name.startswith(DIT_PREFIX) for name in checkpoint.shapes) == num_tensors
    assert (folder / "model.safetensors").stat().st_size == pytest.approx(num_bytes, rel=0.12)
    assert read_sizes(checkpoint) == TRUE_SIZES[config.dit.model_type]
    check_all_tensors(checkpoint)


def test_one_tensor_of_1317_that_is_missing_is_named(tmp_path: Path) -> None:
    missing = f"{DIT_PREFIX}blocks.23.cross_attn.k_img.bias"
    checkpoint = Checkpoint.open(write_true_structure(tmp_path / "broken", dreamzero_14b(), without=missing))
    with pytest.raises(CheckpointError, match=re.escape(f"missing: {missing}")):
        check_all_tensors(checkpoint)
