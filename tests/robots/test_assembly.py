"""How large a cache becomes, and how a checkpoint and a robot are brought together."""

from __future__ import annotations

import warnings
from importlib import resources
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")

from engines import make_engine  # noqa: E402

from worldkv import load as assembly  # noqa: E402
from worldkv.engine.engine import EngineConfig  # noqa: E402
from worldkv.engine.room import Room  # noqa: E402
from worldkv.errors import CheckpointError  # noqa: E402
from worldkv.load import load_policy  # noqa: E402
from worldkv.models.dreamzero.config import dreamzero_14b  # noqa: E402
from worldkv.models.dreamzero.model import kv_spec  # noqa: E402
from worldkv.models.dreamzero.random import write_random_checkpoint  # noqa: E402


def test_without_a_number_of_sessions_the_cache_takes_what_is_free_beside_room_to_work_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec, total = kv_spec(dreamzero_14b()), 141 * 2**30
    config = EngineConfig(max_sessions=None)

    def blocks(free_gib: int) -> int:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (free_gib * 2**30, total))
        return assembly._num_blocks(Room.of(spec, config.block_size, 2), config, torch.device("cuda"))

    assert blocks(96) * spec.bytes_per_block(128, 2) == pytest.approx(96 * 2**30 - 0.08 * total, abs=2e8)
    with pytest.raises(ValueError, match=r"one session needs .* are free .*; not one fits"):
        blocks(20)


def test_without_a_gpu_and_without_a_number_there_is_room_for_at_most_four_sessions() -> None:
    engine = make_engine("ti2v", max_sessions=None)
    assert 1 <= engine.capacity().num_more_sessions <= 4
    engine.shutdown()


def test_float8_needs_a_gpu() -> None:
    with pytest.raises(ValueError, match="precision: expected 'model' without a GPU"):
        make_engine("ti2v", precision="fp8")


def test_an_embodiment_file_stands_in_for_conf_yaml_bit_for_bit(tmp_path: Path) -> None:
    checkpoint = write_random_checkpoint(tmp_path / "droid", view_height=16, view_width=24)
    text = (resources.files("worldkv.robots") / "embodiments" / "oxe_droid.yaml").read_text()
    own = tmp_path / "own.yaml"
    own.write_text(text.replace("view_size: [176, 320]", "view_size: [16, 24]"))
    actions = []
    for embodiment in (None, own):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # the byte-level tokenizer
            policy = load_policy(checkpoint, EngineConfig(max_sessions=1), embodiment=embodiment)
        raw = policy._preparation.synthetic_observation(1)
        actions.append(policy.open_session().infer(raw).result().actions)
        policy.close()
        policy.engine.shutdown()
        (checkpoint / "experiment_cfg" / "conf.yaml").unlink(missing_ok=True)
    assert np.array_equal(*actions)
    with pytest.raises(CheckpointError, match=r"conf\.yaml is missing.*--embodiment"):
        load_policy(checkpoint)
    with pytest.raises(CheckpointError, match="view_size makes an image of 352 x 640 pixels, 880 tokens"):
        load_policy(checkpoint, embodiment="oxe_droid")
    own.write_text(own.read_text().replace("frames_per_tick: 4", "frames_per_tick: 5"))
    with pytest.raises(CheckpointError, match=r"frames_per_tick: expected one of \[4, 8\]"):
        load_policy(checkpoint, embodiment=own)
