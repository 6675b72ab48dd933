"""Which family a checkpoint folder belongs to."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from worldkv.errors import CheckpointError
from worldkv.models import registry


def test_a_golden_folder_is_known_as_dreamzeros(golden_folder: Path) -> None:
    assert registry.family_of(golden_folder) == "dreamzero"


def test_a_converted_folder_and_one_without_its_tensors_are_known_too(tmp_path: Path) -> None:
    (tmp_path / "worldkv.yaml").write_text("format: 1\n")
    assert registry.family_of(tmp_path) == "dreamzero"
    (tmp_path / "worldkv.yaml").rename(tmp_path / "other.yaml")
    (tmp_path / "config.json").write_text(json.dumps({"action_head_cfg": {}}))
    assert registry.family_of(str(tmp_path)) == "dreamzero", "what it lacks is that family's to say"


def test_a_folder_of_no_family_is_told_what_each_looks_for(tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text("{}")
    with pytest.raises(CheckpointError) as caught:
        registry.family_of(tmp_path)
    for words in ("dreamzero: config.json with action_head_cfg, or worldkv.yaml", "diffusers model"):
        assert words in str(caught.value)
    with pytest.raises(CheckpointError, match="does not exist"):
        registry.family_of(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json is not readable JSON"):
        registry.family_of(tmp_path)


def test_an_unknown_family_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"expected one of \[.*'dreamzero'.*\], got 'llama'"):
        registry.checkpoint_module("llama")


@pytest.mark.parametrize("family", registry.FAMILIES)
def test_every_family_offers_what_the_registry_asks_of_it(family: str) -> None:
    module = registry.checkpoint_module(family)
    assert isinstance(module.LOOKS_FOR, str)
    assert all(isinstance(pattern, str) for pattern in module.FILES)
    assert callable(module.is_mine)
    assert callable(module.from_elsewhere)
    assert callable(module.load)


def test_a_family_is_imported_only_when_it_is_asked_for() -> None:
    code = "import sys, worldkv.models.registry; print([m for m in sys.modules if 'models.dreamzero' in m])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
