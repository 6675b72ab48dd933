"""config.json -> dataclasses: defaults, presets, and errors that name the field."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from worldkv.errors import CheckpointError
from worldkv.models.dreamzero.config import DreamZeroConfig, dreamzero_5b, dreamzero_14b

CONFIG: dict[str, Any] = {
    "action_head_cfg": {
        "config": {
            "diffusion_model_cfg": {
                "model_type": "i2v",
                "dim": 64,
                "ffn_dim": 128,
                "num_heads": 2,
                "num_layers": 3,
                "in_dim": 36,
                "out_dim": 16,
                "frame_seqlen": 24,
            }
        }
    }
}


def with_values(**changes: Any) -> dict[str, Any]:
    """CONFIG with fields of the head ("head__x") or of the DiT ("x") replaced; None takes a field out."""
    config = copy.deepcopy(CONFIG)
    head = config["action_head_cfg"]["config"]
    for key, value in changes.items():
        part, name = (head, key[6:]) if key.startswith("head__") else (head["diffusion_model_cfg"], key)
        part[name] = value
    return config


def test_what_a_released_config_leaves_out_has_the_references_defaults() -> None:
    config = DreamZeroConfig.from_json(CONFIG)
    dit = config.dit
    assert (dit.freq_dim, dit.text_dim, dit.text_len, dit.image_dim, dit.image_tokens) == (256, 4096, 512, 1280, 257)
    assert (dit.action_dim, dit.max_state_dim, dit.hidden_size, dit.eps) == (32, 64, 1024, 1e-6)
    assert (dit.num_actions_per_chunk, dit.num_states, dit.patch_size) == (24, 1, (1, 2, 2))
    assert (config.frames_per_chunk, config.max_chunk_size, config.action_horizon) == (2, 4, 24)
    assert (config.text_num_heads, config.image_num_heads) == (64, 16)
    assert (config.cfg_scale, config.sigma_shift, config.num_inference_steps, config.seed) == (5.0, 5.0, 16, 1140)
    assert (config.target_video_height, config.target_video_width) == (None, None)
    assert dit.head_dim == 32
    assert dit.concat_first_frame_latent


def test_the_golden_configs_are_read_as_they_stand(golden_folder: Path) -> None:
    config = DreamZeroConfig.from_json(json.loads((golden_folder / "config.json").read_text()))
    assert config.dit.model_type == golden_folder.name.removeprefix("tiny_")
    assert (config.action_dim, config.max_state_dim, config.action_horizon) == (8, 16, 6)
    assert (config.window_frames, config.latent_frames, config.dit.text_len) == (9, 9, 16)
    assert (config.text_num_heads, config.image_num_heads) == (4, 4)


def test_a_window_is_the_first_frame_and_its_chunks() -> None:
    config = dreamzero_14b()
    assert config.window_frames == 9
    assert dataclasses.replace(config, max_chunk_size=5).window_frames == 11
    assert dataclasses.replace(config, max_chunk_size=-1).window_frames == 21
    assert config.latent_frames == 9


def test_the_presets_have_the_true_sizes() -> None:
    big, small = dreamzero_14b(), dreamzero_5b()
    assert (big.dit.dim, big.dit.num_layers, big.dit.head_dim, big.dit.frame_tokens) == (5120, 40, 128, 880)
    assert (small.dit.dim, small.dit.num_layers, small.dit.head_dim, small.dit.frame_tokens) == (3072, 30, 128, 50)
    assert (big.dit.pixel_stride, small.dit.pixel_stride) == (8, 16)
    assert big.dit.frame_tokens == (352 // 16) * (640 // 16)
    assert (small.target_video_height, small.target_video_width) == (160, 320)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"dim": None}, "diffusion_model_cfg.dim is missing"),
        ({"num_heads": None}, "diffusion_model_cfg.num_heads is missing"),
        ({"frame_seqlen": None}, "diffusion_model_cfg.frame_seqlen is missing"),
        ({"dim": "64"}, "diffusion_model_cfg.dim must be a positive integer, got '64'"),
        ({"num_layers": 0}, "diffusion_model_cfg.num_layers must be a positive integer, got 0"),
        ({"num_layers": True}, "num_layers must be a positive integer, got True"),
        ({"model_type": "t2v"}, "model_type must be one of 'i2v', 'ti2v', got 't2v'"),
        ({"model_type": 3}, "model_type must be a string, got 3"),
        ({"num_heads": 3}, "dim"),
        ({"in_dim": 16}, "in_dim must be 36"),
        ({"out_dim": 20}, "out_dim"),
        ({"patch_size": [1, 1, 1]}, "patch_size"),
        ({"qk_norm": False}, "qk_norm"),
        ({"freq_dim": 3}, "freq_dim must be even"),
        ({"eps": 0}, "eps must be a positive number"),
        ({"max_chunk_size": 0}, "max_chunk_size must be positive or -1"),
        ({"max_chunk_size": -2}, "max_chunk_size must be an integer of at least -1"),
        ({"concat_first_frame_latent": 1}, "concat_first_frame_latent must be true or false"),
        ({"head__action_horizon": 48}, "action_horizon (48) must equal"),
        ({"head__num_frames": 32}, "num_frames must be 1 more than a multiple of 4"),
        ({"head__target_video_height": 160}, "must be given together"),
        ({"head__num_frame_per_block": 1, "num_frame_per_block": 2}, "must be equal"),
        ({"head__text_encoder_cfg": []}, "text_encoder_cfg must be an object"),
        ({"head__diffusion_model_cfg": None}, "diffusion_model_cfg is missing"),
    ],
)
def test_a_bad_field_is_named(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        DreamZeroConfig.from_json(with_values(**changes))
    assert named in str(caught.value)
    assert "config.json: action_head_cfg.config." in str(caught.value)


def test_a_config_of_something_else_is_named_as_such() -> None:
    with pytest.raises(CheckpointError, match="action_head_cfg is missing"):
        DreamZeroConfig.from_json({"model_type": "llama"})


def test_what_head_and_dit_both_state_is_taken_from_either() -> None:
    config = DreamZeroConfig.from_json(with_values(head__num_frame_per_block=3, head__action_dim=14))
    assert (config.frames_per_chunk, config.action_dim, config.window_frames) == (3, 14, 13)
