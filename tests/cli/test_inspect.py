"""`worldkv inspect` says what a folder holds and lists everything that is wrong with it, without reading weights."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("diffusers")
pytest.importorskip("transformers")

import torch
from engines import random_checkpoint
from safetensors.torch import load_file, save_file

from worldkv.cli.main import main
from worldkv.models.dreamzero.checkpoint import Checkpoint
from worldkv.models.dreamzero.random import write_random_checkpoint


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(random_checkpoint("ti2v"), tmp_path / "copy"))


def test_a_whole_checkpoint_is_described_and_its_weights_are_not_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def read(self: Checkpoint, name: str) -> torch.Tensor:
        raise AssertionError(f"{name} was read")

    monkeypatch.setattr(Checkpoint, "tensor", read)
    folder = random_checkpoint("ti2v")
    assert main(["inspect", str(folder), "--block-size", "16"]) == 0
    text = capsys.readouterr().out
    assert "random weights" in text
    assert "oxe_droid" in text
    assert "wrist_image_left 320 x 180" in text
    assert "prompts are cut into bytes" in text
    assert "nothing is missing" in text
    # 3 tokens x 2 layers x (K and V) x 64 numbers x 2 bytes
    assert "in bfloat16   1.5 KiB a frame and branch, 3 KiB a frame, 8 KiB a block" in text
    weights = load_file(folder / "model.safetensors")
    assert f"weights    {len(weights)} tensors in 1 file" in text
    total = re.search(r"all +(\d+) tensors +([\d.]+) M", text)
    assert total is not None
    assert float(total[2]) == pytest.approx(sum(t.numel() for t in weights.values()) / 1e6, abs=1e-3)


def test_a_session_costs_what_the_engine_charges(capsys: pytest.CaptureFixture[str]) -> None:
    from engines import make_engine

    engine = make_engine("ti2v", block_size=64)
    engine.shutdown()
    assert main(["inspect", str(random_checkpoint("ti2v")), "--block-size", "64"]) == 0
    assert f"a session          {engine.capacity().blocks_per_session} blocks at most" in capsys.readouterr().out


def test_a_golden_folder_is_complete(golden_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(golden_folder)]) == 0
    assert "compare with `worldkv verify`" in capsys.readouterr().out


def test_a_damaged_folder_lists_all_that_is_wrong_and_still_says_what_it_can(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_random_checkpoint(tmp_path / "sharded", kind="ti2v", view_height=16, view_width=48, sharded=True)
    first, second, _ = sorted(folder.glob("model-*.safetensors"))
    first.write_bytes(first.read_bytes()[:-100])
    second.unlink()
    (folder / "experiment_cfg" / "conf.yaml").unlink()
    assert main(["inspect", str(folder)]) == 1
    text = capsys.readouterr().out
    wrong = text.partition("what is wrong")[2]
    assert f"{first.name} is truncated" in wrong
    assert f"{second.name} is absent" in wrong
    assert "conf.yaml is missing" in wrong
    assert "K/V cache" in text, "what config.json says is known nevertheless"


def test_missing_and_unexpected_tensors_are_named(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = load_file(copy / "model.safetensors")
    del weights["action_head.model.blocks.1.ffn.0.weight"]
    weights["action_head.model.blocks.1.surprise"] = torch.zeros(3)
    save_file(weights, copy / "model.safetensors")
    assert main(["inspect", str(copy)]) == 1
    wrong = capsys.readouterr().out.partition("what is wrong")[2]
    assert "missing: action_head.model.blocks.1.ffn.0.weight" in wrong
    assert "unexpected: action_head.model.blocks.1.surprise" in wrong


def test_a_config_that_contradicts_the_tensors_is_told(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = json.loads((copy / "config.json").read_text())
    config["action_head_cfg"]["config"]["diffusion_model_cfg"]["num_layers"] = 3
    (copy / "config.json").write_text(json.dumps(config))
    assert main(["inspect", str(copy)]) == 1
    assert "config.json says num_layers 3, the tensors have 2 blocks" in capsys.readouterr().out


def test_another_kind_of_folder_is_recognised_and_an_absent_one_is_a_mistake(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model_index.json").write_text("{}")
    assert main(["inspect", str(tmp_path)]) == 1
    assert "looks like a diffusers model" in capsys.readouterr().out
    assert main(["inspect", str(tmp_path / "gone")]) == 2
    assert main(["inspect", str(random_checkpoint("ti2v")), "--block-size", "100"]) == 2
    assert "power of two" in capsys.readouterr().err
