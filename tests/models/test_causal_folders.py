"""Folders of causal Wan video: presets, settings, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")

from causal import SIZE, random_folder  # noqa: E402

from worldkv.errors import CheckpointError  # noqa: E402
from worldkv.models.causal_wan.checkpoint import load  # noqa: E402
from worldkv.models.causal_wan.config import PRESETS  # noqa: E402
from worldkv.models.registry import family_of  # noqa: E402


def test_every_preset_loads() -> None:
    folder = random_folder()
    for name, settings in PRESETS.items():
        model = load(folder, preset=name, **SIZE)
        assert model.config.blocks == settings


def test_what_a_folder_does_not_say_is_asked_for_with_the_presets(tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(random_folder(), folder)
    assert family_of(folder) == "causal_wan"
    presets = ", ".join(PRESETS)
    (folder / "causal.json").unlink()
    assert family_of(folder) == "causal_wan", "what it lacks is this family's to say"
    with pytest.raises(CheckpointError, match=rf"causal\.json is absent.*choose a preset: {presets}"):
        load(folder, **SIZE)
    with pytest.raises(CheckpointError, match=rf"preset: expected one of {presets}, got 'wan'"):
        load(folder, preset="wan", **SIZE)
    for said, words in (
        ({"preset": "wan"}, f"preset: expected one of {presets}"),
        ({"frames_per_block": 3}, "steps is missing, and no preset is named"),
        ({"preset": "longlive", "window": 3}, "'window' is not known"),
        ({"preset": "longlive", "window_frames": 5}, r"window_frames: expected -1, or 6 \(the sink and a block\)"),
        ({"preset": "longlive", "steps": [250, 500]}, "steps: expected falling positions"),
        ({"preset": "longlive", "rope": "none"}, "rope: expected 'absolute' or 'relative'"),
        ({"preset": "self-forcing", "sink_frames": 3}, "sink_frames: expected 0 where window_frames is -1"),
    ):
        (folder / "causal.json").write_text(json.dumps(said))
        with pytest.raises(CheckpointError, match=words):
            load(folder, **SIZE)
    (folder / "causal.json").write_text(json.dumps({"preset": "longlive", "window_frames": 9}))
    assert load(folder, **SIZE).spec.window.window == 6
    with pytest.raises(CheckpointError, match="height: expected a multiple of 16 pixels, got 40"):
        load(folder, height=40, width=48)
    said = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(said | {"num_layers": 3}))
    with pytest.raises(CheckpointError, match=r"missing: model\.blocks\.2\."):
        load(folder, **SIZE)
