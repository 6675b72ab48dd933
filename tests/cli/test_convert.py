"""Any form of a checkpoint to one clean folder: the same numbers, resumable, and nothing else accepted."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")

import yaml  # noqa: E402
from engines import random_checkpoint  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

from worldkv.cli.main import main  # noqa: E402
from worldkv.engine.engine import EngineConfig  # noqa: E402
from worldkv.load import checkpoint_embodiment, load_policy  # noqa: E402
from worldkv.models.dreamzero.checkpoint import Checkpoint  # noqa: E402
from worldkv.robots.embodiment_file import describe  # noqa: E402


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return Path(shutil.copytree(random_checkpoint("ti2v"), tmp_path / "source"))


def convert(source: Path, output: Path, *more: str) -> int:
    return main(["convert", str(source), "--output", str(output), "--shard-gb", "0.0002", *more])


def first_actions(folder: Path) -> np.ndarray:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the byte-level tokenizer
        policy = load_policy(folder, EngineConfig(max_sessions=1))
    try:
        raw = policy._preparation.synthetic_observation(1)
        return policy.open_session().infer(raw).result().actions
    finally:
        policy.close()
        policy.engine.shutdown()


def test_a_converted_recording_verifies(golden_folder: Path, tmp_path: Path) -> None:
    assert main(["convert", str(golden_folder), "--output", str(tmp_path / "clean")]) == 0
    assert main(["verify", str(tmp_path / "clean"), "--tolerance", "1e-4"]) == 0


def test_the_folder_is_sharded_readable_and_gives_the_same_actions(source: Path, tmp_path: Path) -> None:
    output = tmp_path / "clean"
    assert convert(source, output) == 0
    assert len(list(output.glob("model-*.safetensors"))) > 3
    assert not list(output.glob("*.partial"))
    said = yaml.safe_load((output / "worldkv.yaml").read_text())
    assert said["random_weights"] is True
    assert said["model"]["dit"]["num_layers"] == 2
    assert list(said["embodiments"]) == ["oxe_droid"]
    assert main(["inspect", str(output)]) == 0
    before, after = Checkpoint.open(source), Checkpoint.open(output)
    assert after.config == before.config
    assert describe(checkpoint_embodiment(after)) == describe(checkpoint_embodiment(before))
    assert np.array_equal(first_actions(source), first_actions(output))
    again = tmp_path / "again"
    assert convert(output, again) == 0  # its own form is one of the forms
    assert said["embodiments"] == yaml.safe_load((again / "worldkv.yaml").read_text())["embodiments"]


def test_whole_shards_are_kept_and_damaged_ones_written_again(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "clean"
    assert convert(source, output) == 0
    first, second, *others = sorted(output.glob("model-*.safetensors"))
    stamps = {path: path.stat().st_mtime_ns for path in others}
    first.unlink()
    second.write_bytes(second.read_bytes()[:-8])
    (output / "worldkv.yaml").unlink()  # as if it had been stopped
    (output / f"{first.stem}.partial").write_bytes(b"half")
    assert convert(source, output) == 0
    assert f"{len(others)} kept from before" in capsys.readouterr().out
    assert stamps == {path: path.stat().st_mtime_ns for path in others}
    assert np.array_equal(first_actions(source), first_actions(output))


def test_shards_of_another_checkpoint_are_found_out(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "clean"
    assert convert(source, output) == 0
    tensors = load_file(source / "model.safetensors")
    name = "action_head.model.blocks.0.ffn.0.weight"
    save_file(tensors | {name: tensors[name] + 1}, source / "model.safetensors")
    assert convert(source, output) == 2
    assert f"tensors are not what the source holds ({name}, ...)" in capsys.readouterr().err
    assert (output / "worldkv.yaml").exists(), "the first conversion is as it was"


def test_what_cannot_be_converted_is_told_before_any_work(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert convert(source, source) == 2
    assert "expected another folder" in capsys.readouterr().err
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").touch()
    assert convert(source, tmp_path / "full") == 2
    assert "holds something else (thesis.tex)" in capsys.readouterr().err
    (source / "experiment_cfg" / "conf.yaml").unlink()
    assert convert(source, tmp_path / "clean") == 2
    assert "give --embodiment NAME or FILE" in capsys.readouterr().err
    assert not (tmp_path / "clean").exists()


FAULTS = {
    "no model": (lambda said: said.pop("model"), "worldkv.yaml: model: expected a mapping"),
    "a size of a wrong kind": (
        lambda said: said["model"]["dit"].update(dim="wide"),
        r"worldkv.yaml: model.dit.dim: expected int, got 'wide'",
    ),
    "an unknown size": (lambda said: said["model"].update(horizon=3), "worldkv.yaml: model: horizon is not known"),
    "a missing size": (lambda said: said["model"]["dit"].pop("dim"), "worldkv.yaml: model.dit.dim is missing"),
    "no robot": (lambda said: said.update(embodiments={}), "worldkv.yaml: embodiments: expected robots by their tags"),
}


@pytest.mark.parametrize(("change", "words"), FAULTS.values(), ids=FAULTS)
def test_a_yaml_that_was_edited_wrongly_is_named(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: object, words: str
) -> None:
    assert convert(source, tmp_path / "clean") == 0
    path = tmp_path / "clean" / "worldkv.yaml"
    said = yaml.safe_load(path.read_text())
    change(said)  # type: ignore[operator]
    path.write_text(yaml.safe_dump(said))
    capsys.readouterr()
    assert main(["inspect", str(path.parent)]) == 1
    assert words in capsys.readouterr().out
