"""The files of a checkpoint folder: found and read, before any tensor is.

Problems are collected as lines of text, so that one error can name them all. Nothing is ever unpickled.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from worldkv.errors import CheckpointError
from worldkv.models.checkpoints.dtypes import StoredDtype
from worldkv.models.checkpoints.header import read_header

CONFIG_FILE = "config.json"
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_MAX_LINES = 20


def raise_if_any(folder: Path, problems: list[str]) -> None:
    if not problems:
        return
    shown = problems[:_MAX_LINES]
    if len(problems) > _MAX_LINES:
        shown.append(f"and {len(problems) - _MAX_LINES} more")
    raise CheckpointError("\n  ".join([f"{folder} cannot be loaded:", *shown]))


def read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is not readable JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value


def read_yaml(path: Path) -> dict[str, Any]:
    try:
        import yaml
    except ImportError as error:
        raise CheckpointError(f"reading {path.name} needs PyYAML: pip install 'worldkv[dreamzero]'") from error
    try:
        value = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise CheckpointError(f"{path.name} is not readable YAML: {' '.join(str(error).split())}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path.name} must hold a mapping, got {type(value).__name__}")
    return value


def read_headers(
    folder: Path, problems: list[str]
) -> tuple[dict[str, Path], dict[str, tuple[int, ...]], dict[str, StoredDtype]]:
    """(file, shape, dtype) of every tensor, from the index and the shards' headers. Appends what is wrong."""
    weight_map: dict[str, str] = {}
    if (folder / INDEX_FILE).is_file():
        weight_map = read_json(folder / INDEX_FILE).get("weight_map", {})
        if (
            not isinstance(weight_map, dict)
            or not weight_map
            or not all(isinstance(file, str) and Path(file).name == file for file in weight_map.values())
        ):
            raise CheckpointError(f"{folder / INDEX_FILE}: weight_map must map tensor names to file names beside it")
    files: dict[str, Path] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    dtypes: dict[str, StoredDtype] = {}
    for file in sorted(set(weight_map.values())) or [SINGLE_FILE]:
        expected = [name for name, shard in weight_map.items() if shard == file]
        if not (folder / file).is_file():
            problems.append(f"{file} is absent; {INDEX_FILE} puts {len(expected)} tensors in it")
            continue
        try:
            header = read_header(folder / file)
        except CheckpointError as error:
            problems.append(str(error))
            continue
        problems += [f"{file} lacks {name}, which {INDEX_FILE} puts in it" for name in expected if name not in header]
        for name in header.keys() & set(expected) if expected else header:
            dtypes[name], shapes[name] = header[name]
            files[name] = folder / file
    return files, shapes, dtypes


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
        return f" It looks like a transformers model of type {config['model_type']!r}."
    return ""
