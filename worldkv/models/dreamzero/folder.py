"""The files of a DreamZero checkpoint folder: what they say, compared with one another before any tensor is read.

Problems are collected as lines of text, so that one error can name them all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from worldkv.errors import CheckpointError
from worldkv.models.checkpoints.files import (
    CONFIG_FILE,
    INDEX_FILE,
    SINGLE_FILE,
    read_json,
    read_yaml,
    what_it_looks_like,
)
from worldkv.models.checkpoints.words import one_line, shown
from worldkv.models.dreamzero.config import DreamZeroConfig
from worldkv.models.wan.base_folder import looks_like_base
from worldkv.models.wan.names import Prefixes
from worldkv.models.wan.sizes import numbers_under

DIT_PREFIX = "action_head.model."
IMAGE_PREFIX = "action_head.image_encoder.model.visual."
PREFIXES = Prefixes(dit=DIT_PREFIX, vae="action_head.vae.model.", text="action_head.text_encoder.", image=IMAGE_PREFIX)
CONF_FILE = "experiment_cfg/conf.yaml"
METADATA_FILE = "experiment_cfg/metadata.json"
_MAX_PIXELS = 2**16
WORLDKV_FILE = "worldkv.yaml"  # of a converted folder: the model and its robots, in place of config.json and those
RANDOM_WEIGHTS_KEY = "worldkv_random_weights"  # in config.json of folders that random_checkpoint wrote
LOOKS_FOR = f"{CONFIG_FILE} with action_head_cfg, or {WORLDKV_FILE}"


def is_mine(folder: Path) -> bool:
    """Whether this is a DreamZero checkpoint folder, whole or not. Raises CheckpointError for a damaged config.json."""
    if (folder / WORLDKV_FILE).is_file():
        return True
    return (folder / CONFIG_FILE).is_file() and "action_head_cfg" in read_json(folder / CONFIG_FILE)


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
            raise CheckpointError(
                f"{WORLDKV_FILE}: embodiments: expected robots by their tags, got {shown(embodiments)}"
            )
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


def expect_checkpoint_folder(folder: Path) -> None:
    """Raises CheckpointError unless the folder has a DreamZero config.json and some safetensors."""
    if not folder.is_dir():
        found = "is a file" if folder.is_file() else "does not exist"
        raise CheckpointError(
            f"checkpoint folder {folder} {found}; expected a folder with {CONFIG_FILE} and {SINGLE_FILE}"
        )
    config = read_json(folder / CONFIG_FILE) if (folder / CONFIG_FILE).is_file() else {}
    has_weights = any((folder / name).is_file() for name in (SINGLE_FILE, INDEX_FILE))
    has_head = "action_head_cfg" in config
    if (has_head or (folder / WORLDKV_FILE).is_file()) and has_weights:
        return
    missing = [] if config else [CONFIG_FILE]
    if config and not has_head:
        missing.append(f"a {CONFIG_FILE} with action_head_cfg")
    if not has_weights:
        missing.append(f"{SINGLE_FILE} or {INDEX_FILE}")
    looks = what_it_looks_like(folder, {} if has_head else config)
    if looks_like_base(folder):
        looks = " It looks like a base Wan model (no action head); a DreamZero checkpoint is fine-tuned from one."
    raise CheckpointError(
        f"{folder} is not a DreamZero checkpoint folder: looked for {CONFIG_FILE} with action_head_cfg, "
        f"{SINGLE_FILE} or {INDEX_FILE}; missing {' and '.join(missing)}." + looks
    )


# (field of diffusion_model_cfg and of DiTConfig, tensor, dimension): what a wrong config.json is best told by
_PROBES = (
    ("dim", f"{DIT_PREFIX}patch_embedding.weight", 0),
    ("out_dim", f"{PREFIXES.vae}conv2.weight", 0),
    ("ffn_dim", f"{DIT_PREFIX}blocks.0.ffn.0.weight", 0),
    ("freq_dim", f"{DIT_PREFIX}time_embedding.0.weight", 1),
    ("text_dim", f"{DIT_PREFIX}text_embedding.0.weight", 1),
    ("text_dim", f"{PREFIXES.text}token_embedding.weight", 1),
    ("action_dim", f"{DIT_PREFIX}action_encoder.W1.W", 1),
    ("max_state_dim", f"{DIT_PREFIX}state_encoder.layer1.W", 1),
    ("hidden_size", f"{DIT_PREFIX}state_encoder.layer1.W", 2),
)


def contradictions(
    config: DreamZeroConfig, shapes: Mapping[str, tuple[int, ...]], conf: Mapping[str, Any]
) -> list[str]:
    """Where config.json, the tensors' shapes and conf.yaml cannot all be true."""
    problems = []
    for name, tensor, dimension in _PROBES:
        said, shape = getattr(config.dit, name), shapes.get(tensor)
        if shape is None:
            problems.append(f"missing: {tensor}")
        elif len(shape) <= dimension or shape[dimension] != said:
            problems.append(f"config.json says {name} {said}, but {tensor} is {list(shape)}")
    image = f"{DIT_PREFIX}img_emb.proj.0.weight"
    if image not in shapes:
        problems.append(f"missing: {image}")
    elif not shapes[image] or 0 in shapes[image]:
        problems.append(f"shape: {image} is {list(shapes[image])}")
    blocks = numbers_under(f"{DIT_PREFIX}blocks.", shapes)
    if blocks != set(range(config.dit.num_layers)):
        found = f"{len(blocks)} blocks" if len(blocks) != config.dit.num_layers else f"block {max(blocks)}"
        problems.append(f"config.json says num_layers {config.dit.num_layers}, the tensors have {found}")
    return list(dict.fromkeys(problems)) + _image_contradictions(config, conf)


def _image_contradictions(config: DreamZeroConfig, conf: Mapping[str, Any]) -> list[str]:
    """Tokens per frame cannot be read off any tensor, but they follow from the size of the tiled image."""
    sizes: dict[str, tuple[int, int]] = {}  # where it is said -> height, width
    if config.target_video_height and config.target_video_width:
        sizes["config.json's target_video"] = (config.target_video_height, config.target_video_width)
    else:
        sizes = _tiled_sizes(conf.get("transforms"))
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


def _tiled_sizes(transforms: object) -> dict[str, tuple[int, int]]:
    """Whose -> height and width of the tiled image, by conf.yaml's transforms. What is no resizing is passed over:
    reading a robot's transforms, and refusing them, is not done here."""
    sizes = {}
    for tag, group in transforms.items() if isinstance(transforms, dict) else ():
        steps = group.get("transforms") if isinstance(group, dict) else None
        for step in steps if isinstance(steps, list) else ():
            if not isinstance(step, dict) or not str(step.get("_target_", "")).endswith(".VideoResize"):
                continue
            height, width, views = (step.get(name) for name in ("height", "width", "apply_to"))
            if not (isinstance(height, int) and isinstance(width, int)):
                continue
            tiles = 1 if isinstance(views, list) and len(views) == 1 else 2  # several views: a 2 x 2 tiling
            if 0 < height <= _MAX_PIXELS and 0 < width <= _MAX_PIXELS:
                sizes[f"conf.yaml's {one_line(tag)}"] = (height * tiles, width * tiles)
    return sizes
