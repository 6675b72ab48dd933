"""How large a cache becomes."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")

from engines import make_engine  # noqa: E402

from worldkv.engine.engine import EngineConfig  # noqa: E402
from worldkv.models.dreamzero import kv_spec  # noqa: E402
from worldkv.models.dreamzero_config import dreamzero_14b  # noqa: E402
from worldkv.policy import assembly  # noqa: E402


def test_without_a_number_of_sessions_the_cache_takes_what_is_free_beside_room_to_work_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec, total = kv_spec(dreamzero_14b()), 141 * 2**30
    config = EngineConfig(max_sessions=None)

    def blocks(free_gib: int) -> int:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (free_gib * 2**30, total))
        return assembly._num_blocks(spec, config, torch.device("cuda"), torch.bfloat16)

    assert blocks(96) * spec.bytes_per_block(128, 2) == pytest.approx(96 * 2**30 - 0.08 * total, abs=2e8)
    with pytest.raises(ValueError, match=r"not one session fits: it needs 158 blocks, 20.0 GiB are free"):
        blocks(20)


def test_without_a_gpu_the_number_of_sessions_has_to_be_said() -> None:
    with pytest.raises(ValueError, match="max_sessions: expected a number without a GPU"):
        make_engine("ti2v", max_sessions=None)


def test_float8_needs_a_gpu() -> None:
    with pytest.raises(ValueError, match="precision: expected 'model' without a GPU"):
        make_engine("ti2v", precision="fp8")
