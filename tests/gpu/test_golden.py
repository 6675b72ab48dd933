"""The golden checkpoints in float32 on the GPU, through the fused kernels, within 1e-3."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no GPU here", allow_module_level=True)
pytest.importorskip("diffusers")

from worldkv.cli.main import main  # noqa: E402


@pytest.mark.parametrize("kind", ["i2v", "ti2v"])
def test_every_recorded_quantity_within_a_thousandth(kind: str, request: pytest.FixtureRequest) -> None:
    folder: Path = request.getfixturevalue(f"golden_{kind}")
    assert main(["verify", str(folder), "--device", "cuda", "--tolerance", "1e-3", "--interleave", "2"]) == 0
