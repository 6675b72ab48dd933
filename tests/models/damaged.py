"""A valid tiny checkpoint, and what reads one: for tests that damage it."""

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
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from test_tokenizer import write_word_tokenizer

from worldkv.cli.main import main
from worldkv.errors import CheckpointError
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
