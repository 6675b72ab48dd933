"""Whatever is wrong with the descriptions of a causal Wan folder is a CheckpointError, and inspect agrees.

WORLDKV_FUZZ=20 looks twenty times as long.
"""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("diffusers")
pytest.importorskip("transformers")

from causal import random_folder
from causal_published import write_base
from damaged import HOW, VALUES, bytes_damage, changed, copy_of, fuzz, paths, replace
from damaged import _bounded_memory as _bounded_memory  # a fixture of each test here
from hypothesis import given
from hypothesis import strategies as st

from worldkv.cli.main import main
from worldkv.errors import CheckpointError
from worldkv.models.causal_wan.checkpoint import load
from worldkv.models.registry import family_of

SIZE = ("--height", "32", "--width", "48")


def check(folder: Path) -> None:
    """Loading works or raises CheckpointError, and inspect agrees."""
    told = io.StringIO()
    with contextlib.redirect_stdout(told), contextlib.redirect_stderr(told):
        code = main(["inspect", str(folder), *SIZE])
    text = told.getvalue()
    assert code in (0, 1, 2), text
    assert all(line.isprintable() for line in text.splitlines()), f"what a terminal would obey: {text!r}"
    try:
        family = family_of(folder)
    except CheckpointError:
        family = "none"
    if family != "causal_wan":
        assert code != 0, text
        return
    reason = ""
    try:
        load(folder, height=32, width=48)
    except CheckpointError as error:
        reason = str(error)
    assert (code == 0) == (not reason), f"inspect says {text!r}, loading {reason!r}"
    assert len(reason) < 50_000, "an error that nobody can read"


@pytest.mark.parametrize(("file", "examples"), [("config.json", 40), ("causal.json", 40)])
def test_a_description_with_another_value_loads_or_says_what_is_wrong(file: str, examples: int) -> None:
    said = json.loads((random_folder() / file).read_text())

    @fuzz(examples)
    @given(path=st.sampled_from(paths(said)), how=HOW, new=VALUES)
    def run(path: tuple[Any, ...], how: str, new: Any) -> None:
        with copy_of(random_folder()) as folder:
            replace(folder / file, json.dumps(changed(said, path, how, new)).encode())
            check(folder)

    run()


@pytest.mark.parametrize(("file", "examples"), [("config.json", 10), ("causal.json", 10)])
def test_a_description_of_other_bytes_loads_or_says_what_is_wrong(file: str, examples: int) -> None:
    data = (random_folder() / file).read_bytes()

    @fuzz(examples)
    @given(draw=st.data())
    def run(draw: st.DataObject) -> None:
        with copy_of(random_folder()) as folder:
            replace(folder / file, bytes_damage(data, draw))
            check(folder)

    run()


def test_a_config_of_diffusers_with_another_value_loads_or_says_what_is_wrong(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base")
    said: dict[str, Any] = {"_class_name": "WanTransformer3DModel", "num_attention_heads": 2, "attention_head_dim": 32}
    said |= {"in_channels": 16, "out_channels": 16, "text_dim": 48, "freq_dim": 32, "ffn_dim": 128, "num_layers": 2}
    said |= {"qk_norm": "rms_norm_across_heads", "image_dim": None, "patch_size": [1, 2, 2], "eps": 1e-6}

    @fuzz(25)
    @given(path=st.sampled_from(paths(said)), how=HOW, new=VALUES)
    def run(path: tuple[Any, ...], how: str, new: Any) -> None:
        with copy_of(random_folder()) as folder:
            replace(folder / "config.json", json.dumps(changed(said, path, how, new)).encode())
            with contextlib.suppress(CheckpointError):
                load(folder, base=[base], height=32, width=48)

    run()
