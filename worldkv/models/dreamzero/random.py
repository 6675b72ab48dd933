"""Writes a complete tiny DreamZero checkpoint folder with random weights, from a seed.

For demos and tests: everything runs, is finite and depends on its inputs, and nothing was learned. The folder's
config.json, its tensors' file and its statistics all say so. Layout and names are those of a released checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from worldkv.models.checkpoints.files import CONFIG_FILE, INDEX_FILE, SINGLE_FILE
from worldkv.models.checkpoints.writing import save_tensors, write_text
from worldkv.models.dreamzero.checkpoint import needed_shapes
from worldkv.models.dreamzero.config import DreamZeroConfig
from worldkv.models.dreamzero.folder import CONF_FILE, IMAGE_PREFIX, METADATA_FILE, RANDOM_WEIGHTS_KEY
from worldkv.models.wan.random import NOTICE as NOTICE
from worldkv.models.wan.random import random_tensors
from worldkv.models.wan.sizes import EncoderSizes, ImageSizes, TextSizes, VAESizes

_CAMERAS = ("exterior_image_1_left", "exterior_image_2_left", "wrist_image_left")
_NUM_SHARDS = 3


@dataclass(frozen=True)
class RandomSizes:
    """The sizes that may be chosen. Views are the cameras' images after resizing; the model sees them tiled 2 x 2."""

    view_height: int
    view_width: int
    dim: int = 64
    ffn_dim: int = 128
    freq_dim: int = 32
    num_heads: int = 2
    num_layers: int = 2
    text_len: int = 16
    text_dim: int = 48
    text_ffn_dim: int = 96
    text_num_heads: int = 4
    text_num_layers: int = 2
    vocab_size: int = 320
    image_dim: int = 64
    image_num_heads: int = 4
    image_num_layers: int = 3
    vae_dim: int = 16
    action_dim: int = 8
    max_state_dim: int = 16
    hidden_size: int = 32
    action_horizon: int = 6
    frames_per_chunk: int = 2
    max_chunk_size: int = 4


_DEFAULTS = {"i2v": RandomSizes(32, 48), "ti2v": RandomSizes(64, 80)}


def write_random_checkpoint(
    folder: str | Path, *, kind: str = "i2v", seed: int = 0, sharded: bool = False, **sizes: int
) -> Path:
    """Writes the folder (and its parents) and returns it; the same arguments give the same bytes.

    `kind`: "i2v" (as DreamZero-14B: Wan 2.1 VAE) or "ti2v" (as the 5B: Wan 2.2 VAE). `sharded`: three files and an
    index in place of one file. `sizes`: any field of RandomSizes. Raises ValueError for unknown or impossible sizes,
    and for a folder that holds anything but an earlier random checkpoint, which is replaced.
    """
    folder = Path(folder)
    if kind not in _DEFAULTS:
        raise ValueError(f"kind must be one of {', '.join(_DEFAULTS)}, got {kind!r}")
    known = {field.name for field in fields(RandomSizes)}
    if unknown := sorted(sizes.keys() - known):
        raise ValueError(f"unknown sizes {', '.join(unknown)}; known are {', '.join(sorted(known))}")
    chosen = replace(_DEFAULTS[kind], **sizes)
    stride = 8 if kind == "i2v" else 16  # a view's pixels per token: the VAE's stride, times 2 of patches, over 2 tiles
    if chosen.view_height % stride or chosen.view_width % stride or chosen.action_dim < 8 or chosen.max_state_dim < 8:
        raise ValueError(
            f"view_height and view_width must be multiples of {stride} for {kind}, action_dim and max_state_dim "
            f"at least 8; got {chosen.view_height} x {chosen.view_width}, {chosen.action_dim}, "
            f"{chosen.max_state_dim}"
        )
    _clear(folder)
    config = _config_json(kind, chosen, seed)
    parsed = DreamZeroConfig.from_json(config)
    parsed = replace(parsed, dit=replace(parsed.dit, image_dim=chosen.image_dim))
    sizes_of_encoders = _encoder_sizes(kind, chosen)
    shapes = needed_shapes(parsed, sizes_of_encoders)
    shapes |= _stored_for_nobody(shapes, sizes_of_encoders)

    (folder / "experiment_cfg").mkdir(parents=True, exist_ok=True)
    write_text(json.dumps(_conf(chosen), indent=1) + "\n", folder / CONF_FILE)  # JSON is YAML
    write_text(json.dumps(_metadata(), indent=1) + "\n", folder / METADATA_FILE)
    _write_tensors(folder, random_tensors(shapes, seed), sharded)
    write_text(json.dumps(config, indent=1) + "\n", folder / CONFIG_FILE)
    return folder


def _clear(folder: Path) -> None:
    """Removes an earlier random checkpoint's tensors; refuses any other content."""
    if not folder.exists() or not any(folder.iterdir()):
        return
    try:
        ours = RANDOM_WEIGHTS_KEY in json.loads((folder / CONFIG_FILE).read_text())
    except (OSError, ValueError):
        ours = False
    if not ours:
        raise ValueError(f"{folder} is not empty and not a random checkpoint; choose another folder")
    for path in (*folder.glob("model*.safetensors"), folder / INDEX_FILE):
        path.unlink(missing_ok=True)


def _config_json(kind: str, sizes: RandomSizes, seed: int) -> dict[str, Any]:
    z_dim, stride = (16, 8) if kind == "i2v" else (48, 16)
    reference = "groot.vla.model.dreamzero"
    common = {"action_dim": sizes.action_dim, "max_state_dim": sizes.max_state_dim}
    dit = {
        "_target_": f"{reference}.modules.wan_video_dit_action_casual_chunk.CausalWanModel",
        "model_type": kind,
        "frame_seqlen": (sizes.view_height // stride) * (sizes.view_width // stride),
        "in_dim": 2 * z_dim + 4 if kind == "i2v" else z_dim,
        "out_dim": z_dim,
        "concat_first_frame_latent": kind == "i2v",
        "text_len": sizes.text_len,
        "dim": sizes.dim,
        "ffn_dim": sizes.ffn_dim,
        "freq_dim": sizes.freq_dim,
        "text_dim": sizes.text_dim,
        "num_heads": sizes.num_heads,
        "num_layers": sizes.num_layers,
        "max_chunk_size": sizes.max_chunk_size,
        "num_frame_per_block": sizes.frames_per_chunk,
        "hidden_size": sizes.hidden_size,
        "num_action_per_block": sizes.action_horizon,
        "num_state_per_block": 1,
        **common,
    }
    head = {
        "num_frames": 33,
        "num_frame_per_block": sizes.frames_per_chunk,
        "max_action_dim": sizes.action_dim,
        "action_horizon": sizes.action_horizon,
        "train_architecture": "full",
        "decouple_inference_noise": False,
        "video_inference_final_noise": 0.8,
        **common,
        "diffusion_model_cfg": dit,
        "text_encoder_cfg": {
            "_target_": f"{reference}.modules.wan_video_text_encoder.WanTextEncoder",
            "num_heads": sizes.text_num_heads,
        },
        "image_encoder_cfg": {
            "_target_": f"{reference}.modules.wan_video_image_encoder.WanImageEncoder",
            "num_heads": sizes.image_num_heads,
        },
        "vae_cfg": {"_target_": f"{reference}.modules.wan_video_vae.WanVideoVAE{'' if kind == 'i2v' else '38'}"},
    }
    return {
        RANDOM_WEIGHTS_KEY: {"notice": NOTICE, "seed": seed},
        "architectures": ["VLA"],
        "action_horizon": sizes.action_horizon,
        "action_dim": sizes.action_dim,
        "action_head_cfg": {
            "_target_": f"{reference}.action_head.wan_flow_matching_action_tf.WANPolicyHead",
            "config": head,
        },
    }


def _encoder_sizes(kind: str, sizes: RandomSizes) -> EncoderSizes:
    text = TextSizes(
        vocab_size=sizes.vocab_size,
        dim=sizes.text_dim,
        attention_dim=sizes.text_dim,
        ffn_dim=sizes.text_ffn_dim,
        num_layers=sizes.text_num_layers,
        num_heads=sizes.text_num_heads,
        num_buckets=32,
    )
    image = ImageSizes(sizes.image_dim, 4 * sizes.image_dim, sizes.image_num_layers, sizes.image_num_heads)
    return EncoderSizes(
        VAESizes(16 if kind == "i2v" else 48, sizes.vae_dim, sizes.vae_dim, residual=kind == "ti2v"), text, image
    )


def _stored_for_nobody(shapes: Mapping[str, tuple[int, ...]], sizes: EncoderSizes) -> dict[str, tuple[int, ...]]:
    """Tensors that a released checkpoint holds and nobody reads: the image tower's last layer, final norm and head."""
    image = sizes.image
    assert image is not None
    first, last = (f"{IMAGE_PREFIX}transformer.{index}." for index in (0, image.num_layers - 1))
    unread = {last + name.removeprefix(first): s for name, s in shapes.items() if name.startswith(first)}
    for name in ("post_norm.weight", "post_norm.bias"):
        unread[IMAGE_PREFIX + name] = (image.dim,)
    return unread | {f"{IMAGE_PREFIX}head": (image.dim, image.dim // 2)}


def _write_tensors(folder: Path, tensors: dict[str, torch.Tensor], sharded: bool) -> None:
    about = {"notice": NOTICE}  # one entry: safetensors does not keep the order of several, and bytes must repeat
    if not sharded:
        save_tensors(tensors, folder / SINGLE_FILE, about)
        return
    names = list(tensors)
    weight_map: dict[str, str] = {}
    for index in range(_NUM_SHARDS):
        part = names[index * len(names) // _NUM_SHARDS : (index + 1) * len(names) // _NUM_SHARDS]
        file = f"model-{index + 1:05d}-of-{_NUM_SHARDS:05d}.safetensors"
        save_tensors({name: tensors[name] for name in part}, folder / file, about)
        weight_map |= dict.fromkeys(part, file)
    total = sum(tensor.numel() * tensor.itemsize for tensor in tensors.values())
    index_file = {"metadata": {"total_size": total}, "weight_map": weight_map}
    write_text(json.dumps(index_file, indent=1) + "\n", folder / INDEX_FILE)


# Made-up statistics of a Franka arm on a table, the real robot's order of magnitude: 1 % and 99 % quantiles.
_QUANTILES = {
    "state": {
        "joint_position": (
            (-0.80, -0.85, -0.75, -2.70, -0.90, 1.15, -1.55),
            (0.80, 1.05, 0.75, -1.00, 0.90, 3.10, 1.85),
        ),
        "gripper_position": ((0.0,), (0.99,)),
    },
    "action": {  # joint actions are relative to the joint state
        "joint_position": (
            (-0.22, -0.26, -0.20, -0.30, -0.28, -0.24, -0.32),
            (0.22, 0.30, 0.20, 0.26, 0.28, 0.27, 0.32),
        ),
        "gripper_position": ((0.0,), (1.0,)),
    },
}


def _metadata() -> dict[str, Any]:
    statistics: dict[str, Any] = {}
    modalities: dict[str, Any] = {
        "video": {name: {"resolution": [320, 180], "channels": 3, "fps": 15.0} for name in _CAMERAS}
    }
    for modality, parts in _QUANTILES.items():
        statistics[modality], modalities[modality] = {}, {}
        for part, (low, high) in parts.items():
            spans = [b - a for a, b in zip(low, high, strict=True)]
            statistics[modality][part] = {
                "max": [round(b + 0.1 * span, 4) for b, span in zip(high, spans, strict=True)],
                "min": [round(a - 0.1 * span, 4) for a, span in zip(low, spans, strict=True)],
                "mean": [round((a + b) / 2, 4) for a, b in zip(low, high, strict=True)],
                "std": [round(span / 4, 4) for span in spans],
                "q01": list(low),
                "q99": list(high),
            }
            about = {"absolute": True, "rotation_type": None, "shape": [len(low)], "continuous": True}
            modalities[modality][part] = about
    return {"oxe_droid": {"statistics": statistics, "modalities": modalities, "embodiment_tag": "oxe_droid"}}


def _conf(sizes: RandomSizes) -> dict[str, Any]:
    videos = [f"video.{name}" for name in _CAMERAS]
    states = ["state.joint_position", "state.gripper_position"]
    actions = ["action.joint_position", "action.gripper_position"]
    language = [f"annotation.language.language_instruction{suffix}" for suffix in ("", "_2", "_3")]
    horizon = list(range(sizes.action_horizon))

    def modality(names: list[str], deltas: list[int], **more: object) -> dict[str, Any]:
        target = "groot.vla.data.dataset.ModalityConfig"
        return {"_target_": target, "delta_indices": deltas, **more, "modality_keys": names}

    def step(name: str, names: list[str] | None = None, **more: object) -> dict[str, Any]:
        apply_to = {} if names is None else {"apply_to": names}
        return {"_target_": f"groot.vla.data.transform.{name}", **apply_to, **more}

    size = {"height": sizes.view_height, "width": sizes.view_width}
    return {
        "eval_bf16": True,
        "save_lora_only": False,
        "relative_action": True,
        "relative_action_per_horizon": False,
        "relative_action_keys": ["joint_position"],
        "num_frames": 33,
        "action_horizon": sizes.action_horizon,
        "state_horizon": 1,
        "max_chunk_size": sizes.max_chunk_size,
        "image_resolution_width": sizes.view_width,
        "image_resolution_height": sizes.view_height,
        "modality_configs": {
            "oxe_droid": {
                "video": modality(videos, list(range(25)), eval_delta_indices=[0]),
                "state": modality(states, [0]),
                "action": modality(actions, horizon),
                "language": modality(language, [0]),
            }
        },
        "transforms": {
            "oxe_droid": step(
                "ComposedModalityTransform",
                transforms=[
                    step("VideoToTensor", videos),
                    step("VideoCrop", videos, scale=0.95, mode="random"),
                    step("VideoResize", videos, **size, interpolation="linear"),
                    step("VideoToNumpy", videos),
                    step("StateActionToTensor", states),
                    step("StateActionTransform", states, normalization_modes=dict.fromkeys(states, "q99")),
                    step("StateActionToTensor", actions),
                    step("StateActionTransform", actions, normalization_modes=dict.fromkeys(actions, "q99")),
                    step(
                        "ConcatTransform",
                        video_concat_order=videos,
                        state_concat_order=states,
                        action_concat_order=actions,
                    ),
                    _model_transform(sizes),
                ],
            )
        },
    }


def _model_transform(sizes: RandomSizes) -> dict[str, Any]:
    return {
        "_target_": "groot.vla.model.dreamzero.transform.dreamzero_cotrain.DreamTransform",
        "default_instruction": "Perform the default behavior.",
        "max_state_dim": sizes.max_state_dim,
        "max_action_dim": sizes.action_dim,
        "max_length": sizes.text_len,
        "state_horizon": 1,
        "action_horizon": sizes.action_horizon,
        "tokenizer_path": "google/umt5-xxl",
        "embodiment_tag_mapping": {"oxe_droid": 17, "agibot": 26, "yam": 32},
    }
