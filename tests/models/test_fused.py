"""The fused blocks against the plain ones: the same outputs and the same cache, in whole ticks."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from dits import Stage, make_dit  # noqa: E402

from worldkv.models.wan import kernels  # noqa: E402
from worldkv.models.wan.fused import FusedBlocks  # noqa: E402

KINDS = ["ti2v", "i2v", "t2v"]


def episode(kind: str, precision: Any = None) -> list[Any]:
    """Outputs of four ticks of two sessions side by side, and what the cache holds of them."""
    dit = make_dit(kind)
    if precision is not None:
        dit.run_blocks = FusedBlocks(dit, precision)
    return Stage(dit).ticks()


def relative_error(ours: Any, expected: Any) -> float:
    return float((ours.float() - expected.float()).norm() / expected.float().norm())


@pytest.mark.parametrize("kind", KINDS)
def test_whole_ticks_come_out_the_same(kind: str) -> None:
    plain, fused = episode(kind), episode(kind, "model")
    assert max(relative_error(*pair) for pair in zip(fused, plain, strict=True)) < 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_float8_products_stay_near(kind: str) -> None:
    plain, fused = episode(kind), episode(kind, "fp8")
    errors = [relative_error(*pair) for pair in zip(fused, plain, strict=True)]
    assert 1e-4 < max(errors) < 0.2, errors


def test_fusing_stores_no_weight_twice() -> None:
    dit = make_dit("ti2v")
    dit.run_blocks = FusedBlocks(dit)
    own = dit.blocks[0].self_attn
    storages = {own.q.weight.untyped_storage().data_ptr(), own.v.weight.untyped_storage().data_ptr()}
    assert storages == {dit.run_blocks._layers[0].qkv.weight.untyped_storage().data_ptr()}


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
