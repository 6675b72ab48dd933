"""Whatever is wrong with a checkpoint's files is a CheckpointError, and `worldkv inspect` never calls it whole.

A valid tiny folder is damaged in one file at a time. WORLDKV_FUZZ=20 looks twenty times as long.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import os
import resource
import shutil
import struct
import tempfile
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("diffusers")
pytest.importorskip("transformers")

import torch
from engines import random_checkpoint
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from test_tokenizer import write_word_tokenizer

from worldkv.cli.main import main
from worldkv.errors import CheckpointError
from worldkv.models.checkpoints.files import read_headers, read_yaml
from worldkv.models.checkpoints.header import read_header
from worldkv.models.dreamzero.checkpoint import Checkpoint, load, tokenizer_of
from worldkv.robots.of_checkpoint import checkpoint_embodiment

LONGER = int(os.environ.get("WORLDKV_FUZZ", "1"))
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_MORE_MEMORY = 2**30


def fuzz(examples: int) -> Callable[[Any], Any]:
    return settings(
        max_examples=examples * LONGER,
        deadline=timedelta(seconds=30),  # nothing hangs
        derandomize=LONGER == 1,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


@pytest.fixture(scope="module", autouse=True)
def _bounded_memory() -> Iterator[None]:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    assert grown < MAX_MORE_MEMORY, f"a damaged file took {grown / 2**20:.0f} MiB"


def make(folder: Path, kind: str) -> Path:
    """A valid folder: `single`, `sharded`, `lora` (with its base inside) or `converted`."""
    if kind == "converted":
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            assert main(["convert", str(random_checkpoint("ti2v")), "--output", str(folder)]) == 0
    else:
        shutil.copytree(random_checkpoint("i2v"), folder)
    write_word_tokenizer(folder)
    if kind == "sharded":
        tensors = load_file(folder / SINGLE)
        (folder / SINGLE).unlink()
        names = sorted(tensors)
        parts = {f"model-0000{i + 1}-of-00003.safetensors": names[i::3] for i in range(3)}
        for file, part in parts.items():
            save_file({name: tensors[name] for name in part}, folder / file)
        weight_map = {name: file for file, part in parts.items() for name in part}
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    if kind == "lora":
        _make_lora(folder)
    return folder


def _make_lora(folder: Path) -> None:
    dit = "action_head.model."
    wrapped: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(folder / SINGLE).items():
        inner = name.replace(dit, f"{dit}base_model.model.", 1)
        if not name.endswith("ffn.0.weight"):
            wrapped[inner] = tensor
            continue
        layer = inner.removesuffix(".weight")
        wrapped[f"{layer}.base_layer.weight"] = tensor
        wrapped[f"{layer}.lora_A.default.weight"] = torch.ones(2, tensor.shape[1], dtype=tensor.dtype)
        wrapped[f"{layer}.lora_B.default.weight"] = torch.ones(tensor.shape[0], 2, dtype=tensor.dtype)
    save_file(wrapped, folder / SINGLE)
    config = json.loads((folder / "config.json").read_text())
    config["action_head_cfg"]["config"]["lora_alpha"] = 4
    (folder / "config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A valid folder of a kind, made once; not to be written to."""
    made: dict[str, Path] = {}

    def of(kind: str) -> Path:
        if kind not in made:
            made[kind] = make(tmp_path_factory.mktemp("whole") / kind, kind)
        return made[kind]

    return of


@contextlib.contextmanager
def copy_of(folder: Path) -> Iterator[Path]:
    """A copy whose files may be replaced (their weights are links)."""
    with tempfile.TemporaryDirectory() as place:
        yield Path(shutil.copytree(folder, Path(place) / "copy", copy_function=os.link))


def replace(path: Path, data: bytes) -> None:
    path.unlink()
    path.write_bytes(data)


def look(folder: Path) -> tuple[int, str]:
    """`worldkv inspect`: its exit code and all it printed."""
    told = io.StringIO()
    with contextlib.redirect_stdout(told), contextlib.redirect_stderr(told):
        return main(["inspect", str(folder)]), told.getvalue()


def check(folder: Path) -> bool:
    """Everything that reads a folder works or raises CheckpointError, and inspect agrees. Returns which."""
    code, told = look(folder)
    assert code in (0, 1, 2), told
    assert all(line.isprintable() for line in told.splitlines()), f"what a terminal would obey: {told!r}"
    whole = "nothing is missing" in told
    assert whole == (code == 0), told
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            checkpoint = Checkpoint.open(folder)
            checkpoint_embodiment(checkpoint, None)
            load(checkpoint, tokenizer=tokenizer_of(checkpoint))
    except CheckpointError as error:
        reason = str(error)
    else:
        return True
    assert not whole, f"inspect calls it whole, and it cannot be loaded: {reason}"
    assert len(reason) < 50_000, "an error that nobody can read"
    return False


# values that a description may hold in place of what belongs there

NUMBERS = st.sampled_from([0, -1, 1, 2, 3, 7, 64, 2**20, 2**31, 2**63, 10**400, 0.0, -0.5, 1e300])
ODD = st.sampled_from(
    [float("nan"), float("inf"), float("-inf"), None, True, False, "", "64", "\n\x1b[31m", "\ud800", "é"]
)
NESTED = st.sampled_from([[], {}, [[]], {"a": {"b": []}}, [1, 2], [None], {"": 0}, "x" * 100_000, list(range(1000))])
VALUES = st.one_of(NUMBERS, ODD, NESTED)


def paths(value: Any, before: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Of everything inside a JSON value. Of a long list only the ends."""
    found = [before]
    if isinstance(value, dict):
        for key, inner in value.items():
            found += paths(inner, (*before, key))
    elif isinstance(value, list):
        for index in {0, len(value) - 1} if value else ():
            found += paths(value[index], (*before, index))
    return found


def changed(value: Any, path: tuple[Any, ...], how: str, new: Any) -> Any:
    if not path:
        return new
    value = copy.deepcopy(value)
    owner = value
    for key in path[:-1]:
        owner = owner[key]
    if how == "drop":
        del owner[path[-1]]
    elif how == "rename" and isinstance(owner, dict):
        owner[str(new)[:50]] = owner.pop(path[-1])
    else:
        owner[path[-1]] = new
    return value


HOW = st.sampled_from(["set", "set", "set", "drop", "rename"])


def bytes_damage(data: bytes, draw: st.DataObject) -> bytes:
    how = draw.draw(st.sampled_from(["cut", "flip", "put", "deep", "empty", "binary", "twice", "bom", "utf16"]))
    at = draw.draw(st.integers(0, max(0, min(len(data), 4000) - 1)))
    put = draw.draw(
        st.sampled_from(
            [b"\x00", b"\xff\xfe", b"{", b"]", b"\t", b"NaN", b"9" * 5000, b"&a [*a]", b"!!int ''", b"\\ud800"]
        )
    )
    return {
        "cut": data[:at],
        "flip": data[:at] + bytes([data[at] ^ 0x15] if data else b"") + data[at + 1 :],
        "put": data[:at] + put + data[at:],
        "deep": b"[" * 100_000,
        "empty": b"",
        "binary": os.urandom(0) + bytes(range(256)) * 4,
        "twice": data + data,
        "bom": b"\xef\xbb\xbf" + data,
        "utf16": data[:2000].decode("utf-8", "ignore").encode("utf-16"),
    }[how]


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


def with_header(path: Path, header: bytes, length: int | None = None) -> None:
    """The same tensors' bytes behind another header."""
    data = path.read_bytes()
    (old,) = struct.unpack("<Q", data[:8])
    replace(path, struct.pack("<Q", len(header) if length is None else length) + header + data[8 + old :])


def header_of(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    parsed: dict[str, Any] = json.loads(data[8 : 8 + length])
    return parsed


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
