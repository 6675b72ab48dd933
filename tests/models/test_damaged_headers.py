"""Headers of safetensors files, YAML and names that no checkpoint has: a CheckpointError each."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("diffusers")
pytest.importorskip("transformers")

import torch
from damaged import (
    HOW,
    SINGLE,
    VALUES,
    changed,
    check,
    copy_of,
    fuzz,
    header_of,
    look,
    paths,
    replace,
    with_header,
)
from damaged import _bounded_memory as _bounded_memory  # a fixture of each test here
from damaged import whole as whole
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from worldkv.errors import CheckpointError
from worldkv.models.checkpoints.files import read_headers, read_yaml
from worldkv.models.checkpoints.header import read_header
from worldkv.models.dreamzero.checkpoint import Checkpoint

BAD_FIELDS: list[tuple[str, Any]] = [
    *[("data_offsets", offsets) for offsets in (["0", "8"], [-8, 0], [0, -1], [0, 10**400], [8, 0], [0], [0, 1, 2])],
    *[("data_offsets", offsets) for offsets in ("08", None, {}, [True, 8], [0.0, 8.0], [0, 2**63], [[0], [8]])],
    *[("dtype", dtype) for dtype in (["F32"], None, "F33", "f32", 32, {}, "", "\n", "F64", "BOOL")],
    *[
        ("shape", shape)
        for shape in ([-1], [10**400], ["64"], [True], 64, None, {}, [1.0], [[64]], [1] * 1000, [2**62, 4])
    ],
    *[("shape", shape) for shape in ([0], [], [2**63, 0], [2**40, 0])],
]


@pytest.mark.parametrize(("field", "value"), BAD_FIELDS, ids=[f"{f}={str(v)[:24]!r}" for f, v in BAD_FIELDS])
def test_a_tensor_s_entry_that_cannot_be_is_an_error_of_one_line(
    whole: Callable[[str], Path], field: str, value: Any
) -> None:
    with copy_of(whole("single")) as folder:
        header = header_of(folder / SINGLE)
        header["action_head.model.patch_embedding.weight"][field] = value
        with_header(folder / SINGLE, json.dumps(header).encode())
        with pytest.raises(CheckpointError, match=SINGLE) as caught:
            read_header(folder / SINGLE)
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 1000
        assert not check(folder)


HEADERS = {
    "not JSON": b"{'a': 1}",
    "not text": b"\xff\xfe{}",
    "a list": b"[]",
    "deep": b'{"a":' * 50_000,
    "deep lists": b"[" * 200_000,
    "a digit flood": b'{"a": {"dtype": "F32", "shape": [' + b"9" * 5000 + b'], "data_offsets": [0, 4]}}',
    "not a number": b'{"a": {"dtype": "F32", "shape": [NaN], "data_offsets": [0, 4]}}',
    "an entry that is none": b'{"a": 5}',
    "utf-16": '{"a": 5}'.encode("utf-16"),
    "a byte order mark": b"\xef\xbb\xbf{}",
    "nothing": b"",
    "metadata that is none": b'{"__metadata__": 5}',
    "a name with an escape": b'{"\\u001b[2J": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}',
    "half a character": b'{"\\ud800": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}',
}


@pytest.mark.parametrize("header", HEADERS.values(), ids=list(HEADERS))
def test_a_header_that_is_none_is_an_error_of_one_line(whole: Callable[[str], Path], header: bytes) -> None:
    with copy_of(whole("single")) as folder:
        with_header(folder / SINGLE, header)
        with pytest.raises(CheckpointError, match=SINGLE) as caught:
            read_header(folder / SINGLE)
        assert str(caught.value).isprintable()
        assert not check(folder)


@pytest.mark.parametrize("length", [0, 1, 8, 2**31, 2**63, 2**64 - 1])
def test_a_header_of_another_length_is_told(whole: Callable[[str], Path], length: int) -> None:
    with copy_of(whole("single")) as folder:
        with_header(folder / SINGLE, json.dumps(header_of(folder / SINGLE)).encode(), length)
        assert not check(folder)


def test_a_tensor_that_is_there_twice_overlaps_or_leaves_a_gap_is_told(whole: Callable[[str], Path]) -> None:
    with copy_of(whole("single")) as folder:
        plain = json.dumps(header_of(folder / SINGLE))
        name = "action_head.model.head.head.bias"
        entry = json.dumps(header_of(folder / SINGLE)[name])
        with_header(folder / SINGLE, (plain[:-1] + f', "{name}": {entry}}}').encode())
        with pytest.raises(CheckpointError, match="is there twice"):
            read_header(folder / SINGLE)
        assert not check(folder)
        with_header(folder / SINGLE, (plain[:-1] + f', "{name}.twin": {entry}}}').encode())
        with pytest.raises(CheckpointError, match="overlaps"):
            read_header(folder / SINGLE)
        parsed = json.loads(plain)
        del parsed[name]
        with_header(folder / SINGLE, json.dumps(parsed).encode())
        with pytest.raises(CheckpointError, match=r"leaves a gap|longer"):
            read_header(folder / SINGLE)


@fuzz(12)
@given(data=st.data())
def test_a_header_with_another_value_loads_or_is_told(whole: Callable[[str], Path], data: st.DataObject) -> None:
    header = header_of(whole("single") / SINGLE)
    path = data.draw(st.sampled_from(paths(header)[1:]))
    odd = changed(header, path, data.draw(HOW), data.draw(VALUES))
    with copy_of(whole("single")) as folder:
        with_header(folder / SINGLE, json.dumps(odd).encode())
        check(folder)


@fuzz(12)
@given(data=st.data())
def test_weights_that_are_cut_or_something_else_are_told(whole: Callable[[str], Path], data: st.DataObject) -> None:
    kind, file = data.draw(st.sampled_from([("single", SINGLE), ("sharded", "model-00002-of-00003.safetensors")]))
    with copy_of(whole(kind)) as folder:
        old = (folder / file).read_bytes()
        size = data.draw(st.sampled_from([0, 1, 7, 8, 9, 100, len(old) // 2, len(old) - 1]))
        replace(folder / file, data.draw(st.sampled_from([old[:size], b"\0" * size, old + b"\0", b"version 1"])))
        assert not check(folder)


@pytest.mark.parametrize("file", ["config.json", SINGLE, "experiment_cfg/conf.yaml", "tokenizer.json"])
def test_a_folder_in_place_of_a_file_is_told(whole: Callable[[str], Path], file: str) -> None:
    with copy_of(whole("single")) as folder:
        (folder / file).unlink()
        (folder / file).mkdir()
        check(folder)


# YAML

BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 12)
)
YAMLS = {
    "anchors that unfold into 10^12 values": BOMB,
    "an anchor that holds itself": "a: &a [*a]\n",
    "merged with itself": "a: &a\n  <<: *a\n",
    "a tag that runs code": "a: !!python/object/apply:os.system ['true']\n",
    "an unknown tag": "a: !thing 5\n",
    "an empty number": "a: !!int ''\n",
    "a truth that is none": "a: !!bool maybe\n",
    "a date that is none": "a: !!timestamp soon\n",
    "month 13": "a: 2024-13-45\n",
    "a tab": "a:\n\t- 5\n",
    "bytes": "\x00\x01\x02",
    "deep": "[" * 600,
    "deep mappings": "{a: " * 600,
    "a key that is a list": "? [1, 2]\n: 5\n",
    "two documents": "a: 5\n---\nb: 6\n",
    "a number of 5000 digits": "a: 0x" + "f" * 5000 + "\n",
    "sixty to the power of many": "a: " + ":".join(["59"] * 2000) + "\n",
    "a list": "- 5\n",
    "nothing": "",
}


@pytest.mark.parametrize("text", YAMLS.values(), ids=list(YAMLS))
@pytest.mark.parametrize(("kind", "file"), [("single", "experiment_cfg/conf.yaml"), ("converted", "worldkv.yaml")])
def test_yaml_that_is_no_description_is_told(whole: Callable[[str], Path], text: str, kind: str, file: str) -> None:
    with copy_of(whole(kind)) as folder:
        replace(folder / file, text.encode())
        assert not check(folder)


def test_anchors_that_mean_little_are_read(tmp_path: Path) -> None:
    (tmp_path / "few.yaml").write_text("a: &a [1, 2]\nb: *a\nc: *a\n")
    assert read_yaml(tmp_path / "few.yaml")["c"] == [1, 2]


def test_a_layer_number_that_no_model_has_builds_nothing(whole: Callable[[str], Path]) -> None:
    """One odd name made a module of a hundred million layers."""
    with copy_of(whole("single")) as folder:
        header = header_of(folder / SINGLE)
        for part in ("action_head.text_encoder.blocks", "action_head.image_encoder.model.visual.transformer"):
            name = next(name for name in header if name.startswith(f"{part}.0."))
            header[name.replace(f"{part}.0.", f"{part}.99999999.")] = header.pop(name)
        with_header(folder / SINGLE, json.dumps(header).encode())
        assert not check(folder)


# names from inside a wrapper


def wrap(folder: Path, rename: Callable[[str], str]) -> None:
    tensors = load_file(folder / SINGLE)
    (folder / SINGLE).unlink()
    save_file({rename(name): tensor for name, tensor in tensors.items()}, folder / SINGLE)


DIT = "action_head.model."
WRAPPED: dict[str, Callable[[str], str]] = {
    "compiled": lambda name: f"_orig_mod.{name}",
    "distributed": lambda name: f"module.{name}",
    "both": lambda name: f"module._orig_mod.{name}",
    "a compiled part": lambda name: name.replace(DIT, f"{DIT}_orig_mod.", 1),
    "compiled blocks": lambda name: name.replace(f"{DIT}blocks.1.", f"{DIT}blocks.1._orig_mod."),
    "checkpointed blocks": lambda name: name.replace(f"{DIT}blocks.0.", f"{DIT}blocks.0._checkpoint_wrapped_module."),
}


@pytest.mark.parametrize("rename", WRAPPED.values(), ids=list(WRAPPED))
def test_a_wrapper_s_word_before_all_names_is_dropped_and_told(
    whole: Callable[[str], Path], rename: Callable[[str], str]
) -> None:
    plain = Checkpoint.open(whole("single"))
    with copy_of(whole("single")) as folder:
        wrap(folder, rename)
        code, told = look(folder)
        assert code == 0, told
        assert "saved from inside a wrapper" in told
        found = Checkpoint.open(folder)
        assert found.shapes == plain.shapes
        name = f"{DIT}blocks.1.ffn.0.weight"
        assert torch.equal(found.tensor(name), plain.tensor(name))
        assert check(folder)


def test_a_lora_run_from_inside_a_wrapper_is_merged(whole: Callable[[str], Path]) -> None:
    plain = Checkpoint.open(whole("lora"))
    with copy_of(whole("lora")) as folder:
        wrap(folder, lambda name: f"_orig_mod.{name}")
        found, name = Checkpoint.open(folder), f"{DIT}blocks.0.ffn.0.weight"
        assert name in found.adapters
        assert torch.equal(found.tensor(name), plain.tensor(name))


@pytest.mark.parametrize("word", ["_orig_mod", "module"])
def test_names_of_which_some_have_a_wrapper_s_word_are_refused(whole: Callable[[str], Path], word: str) -> None:
    with copy_of(whole("single")) as folder:
        wrap(folder, lambda name: f"{word}.{name}" if ".blocks.0." in name else name)
        problems: list[str] = []
        read_headers(folder, problems)
        assert len(problems) == 1
        assert f"have the wrapper's word '{word}.'" in problems[0]
        assert "two models seem to be mixed" in problems[0]
        code, told = look(folder)
        assert code == 1
        assert "two models seem to be mixed" in told
        assert not check(folder)


def test_more_wrappers_than_a_model_has_parts_end(whole: Callable[[str], Path]) -> None:
    with copy_of(whole("single")) as folder:
        (folder / SINGLE).unlink()
        save_file({f"a{i}._orig_mod.w": torch.zeros(1) for i in range(700)}, folder / SINGLE)
        assert not check(folder)
