"""Whatever is wrong with a checkpoint's files is a CheckpointError, and `worldkv inspect` never calls it whole.

A valid tiny folder is damaged in one file at a time. WORLDKV_FUZZ=20 looks twenty times as long.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("diffusers")
pytest.importorskip("transformers")

from damaged import HOW, INDEX, VALUES, bytes_damage, changed, check, copy_of, fuzz, look, paths, replace
from damaged import _bounded_memory as _bounded_memory  # a fixture of each test here
from damaged import whole as whole
from hypothesis import given
from hypothesis import strategies as st

from worldkv.models.checkpoints.files import read_yaml


@pytest.mark.parametrize("kind", ["single", "sharded", "lora", "converted"])
def test_what_is_not_damaged_is_whole(whole: Callable[[str], Path], kind: str) -> None:
    with copy_of(whole(kind)) as folder:
        code, told = look(folder)
        assert code == 0, told
        assert check(folder)


@pytest.mark.parametrize(
    ("kind", "file", "examples"),
    [
        ("single", "config.json", 25),
        ("lora", "config.json", 6),
        ("single", "experiment_cfg/metadata.json", 8),
        ("single", "experiment_cfg/conf.yaml", 6),
        ("single", "tokenizer.json", 12),
        ("single", "tokenizer_config.json", 8),
    ],
)
def test_a_description_with_another_value_loads_or_says_what_is_wrong(
    whole: Callable[[str], Path], kind: str, file: str, examples: int
) -> None:
    said = json.loads((whole(kind) / file).read_text())

    @fuzz(examples)
    @given(path=st.sampled_from(paths(said)), how=HOW, new=VALUES)
    def run(path: tuple[Any, ...], how: str, new: Any) -> None:
        with copy_of(whole(kind)) as folder:
            replace(folder / file, json.dumps(changed(said, path, how, new)).encode())
            check(folder)

    run()


@pytest.mark.parametrize(
    ("kind", "file", "examples"),
    [
        ("single", "config.json", 10),
        ("sharded", INDEX, 6),
        ("single", "experiment_cfg/metadata.json", 6),
        ("single", "experiment_cfg/conf.yaml", 6),
        ("converted", "worldkv.yaml", 12),
        ("single", "tokenizer.json", 8),
        ("single", "tokenizer_config.json", 6),
    ],
)
def test_a_description_of_other_bytes_loads_or_says_what_is_wrong(
    whole: Callable[[str], Path], kind: str, file: str, examples: int
) -> None:
    data = (whole(kind) / file).read_bytes()

    @fuzz(examples)
    @given(draw=st.data())
    def run(draw: st.DataObject) -> None:
        with copy_of(whole(kind)) as folder:
            replace(folder / file, bytes_damage(data, draw))
            check(folder)

    run()


def test_a_converted_folder_s_values_load_or_are_told(whole: Callable[[str], Path]) -> None:
    said = read_yaml(whole("converted") / "worldkv.yaml")

    @fuzz(15)
    @given(path=st.sampled_from(paths(said)), how=HOW, new=VALUES)
    def run(path: tuple[Any, ...], how: str, new: Any) -> None:
        with copy_of(whole("converted")) as folder:
            replace(folder / "worldkv.yaml", json.dumps(changed(said, path, how, new)).encode())
            check(folder)

    run()


@fuzz(15)
@given(data=st.data())
def test_an_index_of_something_else_is_told(whole: Callable[[str], Path], data: st.DataObject) -> None:
    said = json.loads((whole("sharded") / INDEX).read_text())
    names = sorted(said["weight_map"])
    file = st.sampled_from(
        [
            "..",
            "../x.safetensors",
            "/etc/passwd",
            "",
            ".",
            "a\0.safetensors",
            "x" * 300 + ".safetensors",
            "absent.safetensors",
            *(
                "model-00001-of-00003.safetensors",
                "config.json",
                "model.bin",
                "\ud800.safetensors",
                "sub/m.safetensors",
            ),
        ]
    )
    whole_map = st.one_of(VALUES, st.just(dict.fromkeys(names, "model-00001-of-00003.safetensors")), st.just({}))
    entry = data.draw(st.sampled_from(["map", "file", "name"]))
    if entry == "map":
        said["weight_map"] = data.draw(whole_map)
    elif entry == "file":
        said["weight_map"][data.draw(st.sampled_from(names))] = data.draw(st.one_of(file, VALUES))
    else:
        new = data.draw(
            st.sampled_from(["", "\n", "\x1b[2J", "\ud800", "action_head.model.blocks.99999999.x", "ghost"])
        )
        said["weight_map"][new] = said["weight_map"].pop(data.draw(st.sampled_from(names)))
    with copy_of(whole("sharded")) as folder:
        replace(folder / INDEX, json.dumps(said).encode())
        assert not check(folder) or entry == "file"


# safetensors
