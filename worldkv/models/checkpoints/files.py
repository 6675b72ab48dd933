"""The files of a checkpoint folder: found and read, before any tensor is.

Problems are collected as lines of text, so that one error can name them all. Nothing is ever unpickled.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from worldkv.errors import CheckpointError
from worldkv.models.checkpoints.header import read_header
from worldkv.models.checkpoints.source import Place, Stored
from worldkv.models.checkpoints.words import one_line, shown
from worldkv.models.checkpoints.wrappers import unwrapped

if TYPE_CHECKING:
    import yaml

CONFIG_FILE = "config.json"
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_MAX_LINES = 20
_MAX_JSON_BYTES, _MAX_YAML_BYTES = 64 * 2**20, 4 * 2**20  # YAML takes seconds a megabyte
_MAX_YAML_VALUES = 1_000_000
_SHARD_NAME = re.compile(r"[\w.\-+=@ ]{1,200}\.safetensors", re.ASCII)  # never a path


def raise_if_any(folder: Path, problems: list[str]) -> None:
    if not problems:
        return
    shown_ones = problems[:_MAX_LINES]
    if len(problems) > _MAX_LINES:
        shown_ones.append(f"and {len(problems) - _MAX_LINES} more")
    raise CheckpointError("\n  ".join([f"{folder} cannot be loaded:", *shown_ones]))


def read_text(path: Path, max_bytes: int) -> str:
    """A description as text. Raises CheckpointError where it cannot be read, or is far larger than any is."""
    try:
        size = path.stat().st_size
        if size > max_bytes:
            raise CheckpointError(f"{path} is no description of a model: {size} bytes, at most {max_bytes} are read")
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is not text in UTF-8: {error.reason} at byte {error.start}") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error


def read_json(path: Path) -> dict[str, Any]:
    """Raises CheckpointError for whatever is no JSON object. NaN and Infinity pass, as Python writes them."""
    try:
        value = json.loads(read_text(path, _MAX_JSON_BYTES))
    except ValueError as error:
        raise CheckpointError(f"{path} is not readable JSON: {one_line(error)}") from error
    except RecursionError as error:
        raise CheckpointError(f"{path} is not readable JSON: it is nested too deeply") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value


def read_yaml(path: Path) -> dict[str, Any]:
    """Raises CheckpointError for whatever is no mapping, and for anchors that unfold into more than fits a memory."""
    try:
        import yaml
    except ImportError as error:
        raise CheckpointError(f"reading {path.name} needs PyYAML: pip install 'worldkv[dreamzero]'") from error
    text = read_text(path, _MAX_YAML_BYTES)
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        _expect_finite(node)
        value = None if node is None else loader.construct_document(node)
    except RecursionError as error:
        raise CheckpointError(f"{path.name} is not readable YAML: it is nested too deeply") from error
    except Exception as error:  # a wrong tag makes whatever Python makes of int(""), an unknown bool, month 13
        raise CheckpointError(f"{path.name} is not readable YAML: {one_line(error) or type(error).__name__}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path.name} must hold a mapping, got {type(value).__name__}")
    return value


def _expect_finite(root: yaml.Node | None) -> None:
    """An alias stands for all that its anchor has: a few lines can mean billions of values, or themselves."""
    sizes: dict[int, int] = {}  # of nodes that were unfolded, by identity

    def size(node: yaml.Node) -> int:
        known = sizes.get(id(node))
        if known == 0:
            raise ValueError(f"an anchor holds itself, line {node.start_mark.line + 1}")
        if known is None:
            sizes[id(node)] = 0
            inner = node.value if isinstance(node.value, list) else []
            pairs = [part for entry in inner for part in (entry if isinstance(entry, tuple) else (entry,))]
            known = sizes[id(node)] = 1 + sum(map(size, pairs))
        if known > _MAX_YAML_VALUES:
            raise ValueError(f"its anchors unfold into more than {_MAX_YAML_VALUES} values")
        return known

    if root is not None:
        size(root)


@dataclass(frozen=True)
class Headers:
    """What a folder's tensors are, before one is read. `wrappers`: words that were dropped from their names."""

    tensors: Mapping[str, Stored]
    wrappers: tuple[str, ...] = ()

    @property
    def num_files(self) -> int:
        return len({stored.place.file for stored in self.tensors.values()})


def read_headers(folder: Path, problems: list[str]) -> Headers:
    """Every tensor of a folder, from the index and the shards' headers. Appends what is wrong."""
    weight_map = _read_index(folder / INDEX_FILE) if (folder / INDEX_FILE).is_file() else {}
    expected: dict[str, list[str]] = {}
    for name, file in weight_map.items():
        expected.setdefault(file, []).append(name)
    found: dict[str, Stored] = {}
    for file in sorted(expected) or [SINGLE_FILE]:
        path, names = folder / file, expected.get(file, [])
        if not path.is_file():
            problems.append(f"{file} is absent; {INDEX_FILE} puts {len(names)} tensors in it")
            continue
        try:
            header = read_header(path)
        except CheckpointError as error:
            problems.append(str(error))
            continue
        problems += [f"{file} lacks {name}, which {INDEX_FILE} puts in it" for name in names if name not in header]
        for name in header.keys() & set(names) if names else header:
            dtype, shape = header[name]
            found[name] = Stored(Place(path, name), shape, dtype)
    plain, wrappers = unwrapped(found, problems)
    return Headers({name: found[stored] for name, stored in plain.items()}, tuple(wrappers))


def _read_index(path: Path) -> dict[str, str]:
    """Tensor -> the shard beside the index that has it. Raises CheckpointError that names the entry at fault."""
    weight_map = read_json(path).get("weight_map", {})
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: weight_map must map tensor names to file names, got {shown(weight_map)}")
    for name, file in weight_map.items():
        if not isinstance(file, str) or not _SHARD_NAME.fullmatch(file) or not name.isprintable():
            raise CheckpointError(
                f"{path}: weight_map must map tensor names to names of .safetensors files beside it, got "
                f"{shown(name)}: {shown(file)}"
            )
    return weight_map


def what_it_looks_like(folder: Path, config: Mapping[str, Any]) -> str:
    """A sentence, with a space before it, about a folder that is not what was expected; empty where nothing is known.

    `config`: what its config.json holds.
    """
    names = {path.name for path in folder.iterdir()}
    if "model_index.json" in names or "_class_name" in config:
        return " It looks like a diffusers model; the layout of the released checkpoints is needed."
    inner = [
        path.parent for path in sorted(folder.glob("*/config.json")) + sorted(folder.glob("snapshots/*/config.json"))
    ]
    if inner:
        return f" A folder inside has a config.json: did you mean {inner[0]}?"
    if any(name.endswith((".bin", ".pt", ".pth")) for name in names):
        return " It holds pickled weights, which are never read; convert them to safetensors."
    if "model_type" in config:
        return f" It looks like a transformers model of type {shown(config['model_type'])}."
    return ""
