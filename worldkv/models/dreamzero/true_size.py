"""DreamZero at its released models' true sizes, and nothing learned: on a device, for measuring, or as a folder.

The folder has every name, shape and byte count of the released one.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import nn

from worldkv.kv.window import WindowPolicy
from worldkv.models.checkpoints.files import CONFIG_FILE, INDEX_FILE, SINGLE_FILE
from worldkv.models.dreamzero.checkpoint import meta_dit
from worldkv.models.dreamzero.config import DreamZeroConfig
from worldkv.models.dreamzero.layout import TRUE_SIZES as TRUE_SIZES
from worldkv.models.dreamzero.layout import needed_shapes
from worldkv.models.dreamzero.model import DreamZero
from worldkv.models.dreamzero.random import write_random_checkpoint
from worldkv.models.dreamzero.steps import Steps
from worldkv.models.wan.encoders import ImageEncoder, TextEncoder, WanEncoders, WanVAE, place_position_ids
from worldkv.models.wan.libraries import build_image_encoder, build_text_encoder, build_vae
from worldkv.models.wan.random import fill

_VIEWS = {"i2v": (176, 320), "ti2v": (160, 320)}
_SHARD_BYTES = 5_000_000_000
_NAMES = {  # of DiTConfig's fields in config.json
    "frame_tokens": "frame_seqlen",
    "num_actions_per_chunk": "num_action_per_block",
    "num_states": "num_state_per_block",
}


# on a device


def random_model(
    config: DreamZeroConfig,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    steps: Steps = 8,
    window_policy: WindowPolicy = "reset",
    progress: Callable[[str], None] = lambda _: None,
) -> DreamZero:
    """Made on the device; no file is written: the 14B with its text encoder would be 45 GB.

    `progress` is told each part as it is begun. Raises CheckpointError without diffusers and transformers.
    """
    torch.manual_seed(0)
    sizes = TRUE_SIZES[config.dit.model_type]
    assert sizes.image is not None

    def made(name: str, module: nn.Module) -> nn.Module:
        progress(name)
        place_position_ids(module, device)
        return fill(module, device, dtype)

    dit = meta_dit(config.dit)
    fill(dit, device, dtype)
    encoders = WanEncoders(
        WanVAE(made("VAE", build_vae(sizes.vae)[0]), sizes.vae),
        TextEncoder(made("text encoder", build_text_encoder(sizes.text)[0]), sizes.text.vocab_size),
        ImageEncoder(made("image encoder", build_image_encoder(sizes.image)[0])),
    )
    tokens = np.zeros((1, config.dit.text_len), dtype=np.int64)
    tokens[0, :8] = np.arange(10, 18)
    return DreamZero(
        config, dit, encoders, (tokens, (tokens > 0).astype(np.int64)), steps=steps, window_policy=window_policy
    )


# as a folder


def write_true_structure(
    folder: Path, config: DreamZeroConfig, *, content: bool = False, without: str | None = None
) -> Path:
    """Writes a checkpoint folder and returns it. Raises KeyError where `without` is not one of its tensors' names.

    Without `content` the tensors' bytes are holes in one sparse file, which costs no disk: for checking names and
    shapes. With it they are random numbers in shards of 5 GB: for measuring how fast a folder is loaded.
    """
    height, width = _VIEWS[config.dit.model_type]
    write_random_checkpoint(folder, kind=config.dit.model_type, view_height=height, view_width=width)
    _write_config(folder / CONFIG_FILE, config)
    shapes = true_shapes(config)
    if without is not None:
        del shapes[without]
    if not content:
        _write_file(folder / SINGLE_FILE, shapes, None)
        return folder
    (folder / SINGLE_FILE).unlink()
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    for name, shape in shapes.items():
        if _num_bytes(shards[-1]) > _SHARD_BYTES:
            shards.append({})
        shards[-1][name] = shape
    noise = (torch.randn(2**26, generator=torch.Generator().manual_seed(0)) * 0.02).to(torch.bfloat16)
    weight_map: dict[str, str] = {}
    for index, shard in enumerate(shards, start=1):
        file = f"model-{index:05d}-of-{len(shards):05d}.safetensors"
        _write_file(folder / file, shard, noise.view(torch.uint8).numpy().data)
        weight_map |= dict.fromkeys(shard, file)
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def true_shapes(config: DreamZeroConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of the checkpoint. The image tower's last layer is stored, and never run."""
    shapes = needed_shapes(config, TRUE_SIZES[config.dit.model_type])
    return shapes | {
        name.replace("transformer.30.", "transformer.31."): shape
        for name, shape in shapes.items()
        if "transformer.30." in name
    }


def _write_config(path: Path, config: DreamZeroConfig) -> None:
    written = json.loads(path.read_text())
    head = written["action_head_cfg"]["config"]
    for name, value in asdict(config.dit).items():
        key = _NAMES.get(name, name)
        for part in (head["diffusion_model_cfg"], head):
            if key in part:
                part[key] = value
    head["action_horizon"] = config.action_horizon
    head["text_encoder_cfg"], head["image_encoder_cfg"] = {"num_heads": 64}, {"num_heads": 16}
    if config.target_video_height is not None:
        head |= {"target_video_height": config.target_video_height, "target_video_width": config.target_video_width}
    path.write_text(json.dumps(written))


def _num_bytes(shapes: dict[str, tuple[int, ...]]) -> int:
    return sum(2 * torch.Size(shape).numel() for shape in shapes.values())


def _write_file(path: Path, shapes: dict[str, tuple[int, ...]], noise: memoryview | None) -> None:
    """bfloat16 tensors one after the other, in safetensors' layout; holes without `noise`."""
    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + _num_bytes({name: shape})
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    packed = json.dumps(header).encode()
    packed += b" " * (-len(packed) % 8)
    with open(path, "wb") as file:
        file.write(len(packed).to_bytes(8, "little") + packed)
        if noise is None:
            file.truncate(8 + len(packed) + end)
        else:
            _write_noise(file, end, noise)


def _write_noise(file: BinaryIO, num_bytes: int, noise: memoryview) -> None:
    while num_bytes:
        num_bytes -= file.write(noise[: min(num_bytes, len(noise))])
