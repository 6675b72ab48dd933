"""A conversion that is refused or fails leaves what was there."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from engines import random_checkpoint
from test_convert import convert

from worldkv.models.dreamzero.checkpoint import Checkpoint


@pytest.fixture
def source(tmp_path):
    return Path(shutil.copytree(random_checkpoint("ti2v"), tmp_path / "source"))


def test_a_refused_conversion_leaves_the_folder_as_it_was(source, tmp_path):
    output = tmp_path / "clean"
    assert convert(source, output) == 0
    (output / "README.md").write_text("my notes")
    try:
        code = convert(source, output)
    except BaseException:
        code = 1
    assert code != 0
    assert (output / "worldkv.yaml").is_file(), "refused, and the good folder's description is gone"
    Checkpoint.open(output)


def test_converting_another_checkpoint_onto_a_good_folder_does_not_break_it(source, tmp_path):
    from safetensors.torch import load_file, save_file

    output = tmp_path / "clean"
    assert convert(source, output) == 0
    other = tmp_path / "other"
    shutil.copytree(source, other)
    for path in other.glob("*.safetensors"):
        tensors = load_file(path)
        save_file({n: t * 2 if "blocks.0.ffn.0.weight" in n else t for n, t in tensors.items()}, path)
    assert convert(other, output) != 0
    assert (output / "worldkv.yaml").is_file(), "the first conversion cannot be opened any more"


def test_shards_of_an_earlier_size_do_not_stay(source, tmp_path):
    output = tmp_path / "clean"
    assert convert(source, output) == 0
    from worldkv.cli.main import main

    assert main(["convert", str(source), "--output", str(output), "--shard-gb", "1"]) == 0
    assert len(list(output.glob("model-*.safetensors"))) == 1, len(list(output.glob("model-*.safetensors")))
