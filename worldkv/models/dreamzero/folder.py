"""The files of a checkpoint folder: found, read, and compared with one another, before any tensor is read.

Problems are collected as lines of text, so that one error can name them all. Nothing is ever unpickled.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from worldkv.errors import CheckpointError
from worldkv.models.checkpoints.header import read_header
from worldkv.models.dreamzero.config import DreamZeroConfig

DIT_PREFIX = "action_head.model."
CONFIG_FILE = "config.json"
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
CONF_FILE = "experiment_cfg/conf.yaml"
METADATA_FILE = "experiment_cfg/metadata.json"
WORLDKV_FILE = "worldkv.yaml"  # of a converted folder: the model and its robots, in place of the three above
RANDOM_WEIGHTS_KEY = "worldkv_random_weights"  # in config.json of folders that random_checkpoint wrote

_MAX_LINES = 20


@dataclass(frozen=True)
class Description:
    """What a folder says of itself beside its tensors."""

    config: DreamZeroConfig
    conf: Mapping[str, Any]
    metadata: Mapping[str, Any]
    embodiments: Mapping[str, Any]
    lora_alpha: object
    random_weights: bool


def describe(folder: Path, problems: list[str]) -> Description:
    """From worldkv.yaml, or from config.json and experiment_cfg. Appends what is wrong with the latter."""
    if (folder / WORLDKV_FILE).is_file():
        said = read_yaml(folder / WORLDKV_FILE)
        config = DreamZeroConfig.from_plain(said.get("model"), WORLDKV_FILE)
        embodiments = said.get("embodiments")
        if not isinstance(embodiments, dict) or not embodiments:
            raise CheckpointError(f"{WORLDKV_FILE}: embodiments: expected robots by their tags, got {embodiments!r}")
        return Description(config, {}, {}, embodiments, None, bool(said.get("random_weights")))
    raw = read_json(folder / CONFIG_FILE)
    return Description(
        DreamZeroConfig.from_json(raw),
        read_experiment_file(folder, CONF_FILE, problems),
        read_experiment_file(folder, METADATA_FILE, problems),
        {},
        raw["action_head_cfg"]["config"].get("lora_alpha"),
        raw.get(RANDOM_WEIGHTS_KEY) is not None,
    )


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


def read_experiment_file(folder: Path, name: str, problems: list[str]) -> dict[str, Any]:
    """Empty where the file is absent: some releases lack conf.yaml, and what needs it says so."""
    path = folder / name
    if not path.is_file():
        return {}
    try:
        return read_json(path) if path.suffix == ".json" else read_yaml(path)
    except CheckpointError as error:
        problems.append(str(error))
        return {}


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


def expect_checkpoint_folder(folder: Path) -> None:
    """Raises CheckpointError unless the folder has a DreamZero config.json and some safetensors."""
    if not folder.is_dir():
        found = "is a file" if folder.is_file() else "does not exist"
        raise CheckpointError(
            f"checkpoint folder {folder} {found}; expected a folder with {CONFIG_FILE} and {SINGLE_FILE}"
        )
    config = read_json(folder / CONFIG_FILE) if (folder / CONFIG_FILE).is_file() else {}
    has_weights = any((folder / name).is_file() for name in (SINGLE_FILE, INDEX_FILE))
    if ("action_head_cfg" in config or (folder / WORLDKV_FILE).is_file()) and has_weights:
        return
    missing = [] if config else [CONFIG_FILE]
    if config and "action_head_cfg" not in config:
        missing.append(f"a {CONFIG_FILE} with action_head_cfg")
    if not has_weights:
        missing.append(f"{SINGLE_FILE} or {INDEX_FILE}")
    raise CheckpointError(
        f"{folder} is not a DreamZero checkpoint folder: looked for {CONFIG_FILE} with action_head_cfg, "
        f"{SINGLE_FILE} or {INDEX_FILE}; missing {' and '.join(missing)}." + _what_it_looks_like(folder, config)
    )


def _what_it_looks_like(folder: Path, config: Mapping[str, Any]) -> str:
    names = {path.name for path in folder.iterdir()}
    if names & {"Wan2.1_VAE.pth", "Wan2.2_VAE.pth", "models_t5_umt5-xxl-enc-bf16.pth"}:
        return " It looks like a base Wan model (no action head); a DreamZero checkpoint is fine-tuned from one."
    if "model_index.json" in names or "_class_name" in config:
        return " It looks like a diffusers model; DreamZero's own layout is needed."
    inner = [
        path.parent for path in sorted(folder.glob("*/config.json")) + sorted(folder.glob("snapshots/*/config.json"))
    ]
    if inner:
        return f" A folder inside has a config.json: did you mean {inner[0]}?"
    if any(name.endswith((".bin", ".pt", ".pth")) for name in names):
        return " It holds pickled weights, which are never read; convert them to safetensors."
    if "action_head_cfg" not in config and "model_type" in config:
        return f" It looks like a transformers model of type {config['model_type']!r}."
    return ""


def read_headers(
    folder: Path, problems: list[str]
) -> tuple[dict[str, Path], dict[str, tuple[int, ...]], dict[str, torch.dtype]]:
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
    dtypes: dict[str, torch.dtype] = {}
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


# (field of diffusion_model_cfg, attribute of DiTConfig, tensor, dimension, divisor)
_PROBES = (
    ("dim", "dim", f"{DIT_PREFIX}patch_embedding.weight", 0, 1),
    ("in_dim", "in_dim", f"{DIT_PREFIX}patch_embedding.weight", 1, 1),
    ("out_dim", "out_dim", f"{DIT_PREFIX}head.head.weight", 0, 4),
    ("out_dim", "out_dim", "action_head.vae.model.conv2.weight", 0, 1),
    ("ffn_dim", "ffn_dim", f"{DIT_PREFIX}blocks.0.ffn.0.weight", 0, 1),
    ("freq_dim", "freq_dim", f"{DIT_PREFIX}time_embedding.0.weight", 1, 1),
    ("text_dim", "text_dim", f"{DIT_PREFIX}text_embedding.0.weight", 1, 1),
    ("text_dim", "text_dim", "action_head.text_encoder.token_embedding.weight", 1, 1),
    ("action_dim", "action_dim", f"{DIT_PREFIX}action_encoder.W1.W", 1, 1),
    ("max_state_dim", "max_state_dim", f"{DIT_PREFIX}state_encoder.layer1.W", 1, 1),
    ("hidden_size", "hidden_size", f"{DIT_PREFIX}state_encoder.layer1.W", 2, 1),
)


def contradictions(
    config: DreamZeroConfig, shapes: Mapping[str, tuple[int, ...]], conf: Mapping[str, Any]
) -> list[str]:
    """Where config.json, the tensors' shapes and conf.yaml cannot all be true."""
    problems = []
    for key, attribute, tensor, dimension, divisor in _PROBES:
        said, shape = getattr(config.dit, attribute), shapes.get(tensor)
        if shape is None:
            problems.append(f"missing: {tensor}")
        elif len(shape) <= dimension or shape[dimension] != said * divisor:
            problems.append(f"config.json says {key} {said}, but {tensor} is {list(shape)}")
    if f"{DIT_PREFIX}img_emb.proj.0.weight" not in shapes:
        problems.append(f"missing: {DIT_PREFIX}img_emb.proj.0.weight")
    block = re.compile(re.escape(DIT_PREFIX) + r"blocks\.(\d+)\.")
    num_layers = 1 + max((int(found[1]) for name in shapes if (found := block.match(name))), default=-1)
    if num_layers != config.dit.num_layers:
        problems.append(f"config.json says num_layers {config.dit.num_layers}, the tensors have {num_layers} blocks")
    return list(dict.fromkeys(problems)) + _image_contradictions(config, conf)


def _image_contradictions(config: DreamZeroConfig, conf: Mapping[str, Any]) -> list[str]:
    """Tokens per frame cannot be read off any tensor, but they follow from the size of the tiled image."""
    sizes: dict[str, tuple[int, int]] = {}  # where it is said -> height, width
    if config.target_video_height and config.target_video_width:
        sizes["config.json's target_video"] = (config.target_video_height, config.target_video_width)
    elif isinstance(conf.get("transforms"), dict):
        for tag, group in conf["transforms"].items():
            steps = group.get("transforms", []) if isinstance(group, dict) else []
            for step in steps:
                if str(step.get("_target_", "")).endswith(".VideoResize") and "height" in step and "width" in step:
                    tiles = 2 if len(step.get("apply_to", [])) != 1 else 1  # several views make a 2 x 2 tiling
                    sizes[f"conf.yaml's {tag}"] = (step["height"] * tiles, step["width"] * tiles)
    stride, (_, patch_height, patch_width) = config.dit.pixel_stride, config.dit.patch_size
    tokens = {
        f"{origin} image of {height} x {width} pixels": (height // stride // patch_height)
        * (width // stride // patch_width)
        for origin, (height, width) in sizes.items()
    }
    if not tokens or config.dit.frame_tokens in tokens.values():
        return []
    made = ", ".join(f"{count} tokens for {image}" for image, count in tokens.items())
    return [f"config.json says frame_seqlen {config.dit.frame_tokens}, but the image size makes {made}"]
