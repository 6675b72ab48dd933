"""The fused blocks against the plain ones: the same outputs and the same cache, in whole ticks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")

from engines import make_engine, make_inputs  # noqa: E402

from worldkv.models import kernels  # noqa: E402
from worldkv.models.wan.fused import FusedBlocks  # noqa: E402


def episode(kind: str, precision: Any = None) -> tuple[list[Any], list[Any]]:
    """Results of four ticks of two sessions side by side, and what the cache holds of the first one."""
    engine = make_engine(kind, block_size=16)
    if precision is not None:
        FusedBlocks(engine.model._dit, precision).install()
    sessions = [engine.open_session() for _ in range(2)]
    results = []
    for tick in range(4):
        inputs = [make_inputs(engine, 10 * n + tick, 1 if tick == 0 else 4) for n in range(2)]
        futures = [engine.submit(*pair) for pair in zip(sessions, inputs, strict=True)]
        results += [future.result() for future in futures]
    kv = [
        part for layer in range(engine.cache.spec.num_layers) for part in sessions[0].kv.layer_kv("conditional", layer)
    ]
    engine.shutdown()
    return results, kv


def relative_error(ours: Any, expected: Any) -> float:
    return float((ours.float() - expected.float()).norm() / expected.float().norm())


@pytest.mark.parametrize("kind", ["ti2v", "i2v"])
def test_whole_ticks_come_out_the_same(kind: str) -> None:
    (plain, plain_kv), (fused, fused_kv) = episode(kind), episode(kind, "model")
    for ours, expected in zip(fused, plain, strict=True):
        assert relative_error(ours.video_latents, expected.video_latents) < 1e-5
        assert np.linalg.norm(ours.actions - expected.actions) < 1e-5 * np.linalg.norm(expected.actions)
    assert max(relative_error(*pair) for pair in zip(fused_kv, plain_kv, strict=True)) < 1e-5


@pytest.mark.parametrize("kind", ["ti2v", "i2v"])
def test_float8_products_stay_near(kind: str) -> None:
    (plain, plain_kv), (fused, fused_kv) = episode(kind), episode(kind, "fp8")
    errors = [
        relative_error(ours.video_latents, expected.video_latents) for ours, expected in zip(fused, plain, strict=True)
    ]
    assert 1e-4 < max(errors) < 0.2, errors
    assert max(relative_error(*pair) for pair in zip(fused_kv, plain_kv, strict=True)) < 0.2


def test_fusing_stores_no_weight_twice() -> None:
    engine = make_engine("ti2v")
    dit = engine.model._dit
    FusedBlocks(dit).install()
    own = dit.blocks[0].self_attn
    storages = {own.q.weight.untyped_storage().data_ptr(), own.v.weight.untyped_storage().data_ptr()}
    assert storages == {dit.run_blocks._layers[0].qkv.weight.untyped_storage().data_ptr()}
    engine.shutdown()


def test_rows_in_float8_keep_their_scale() -> None:
    rows = torch.randn(5, 64) * torch.tensor([1e-3, 1.0, 1e3, 0.0, 7.0])[:, None]
    quantised = kernels.quantise_rows(rows)
    back = quantised.values.float() * quantised.scales
    assert torch.isfinite(back).all()
    assert relative_error(back, rows) < 0.04
    assert (
        float((back[:, None] - rows[:, None]).abs().amax(-1).div(rows.abs().amax(-1, keepdim=True) + 1e-30).max())
        < 0.04
    )
