"""Checkpoints of the released models' true structure: every name and shape, in files without content."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")

from worldkv.errors import CheckpointError  # noqa: E402
from worldkv.models.checkpoint import Checkpoint, dit_tensor_shapes  # noqa: E402
from worldkv.models.checkpoint_folder import DIT_PREFIX  # noqa: E402
from worldkv.models.dreamzero_config import DreamZeroConfig, dreamzero_5b, dreamzero_14b  # noqa: E402
from worldkv.models.encoder_sizes import read_sizes  # noqa: E402
from worldkv.models.random_checkpoint import write_random_checkpoint  # noqa: E402
from worldkv.models.random_model import TRUE_SIZES  # noqa: E402
from worldkv.models.wan_encoders import check_all_tensors  # noqa: E402

MODELS = {"14B": (dreamzero_14b, 1317, 45e9), "5B": (dreamzero_5b, 997, 25e9)}


def write_structure(folder: Path, config: DreamZeroConfig, without: str | None = None) -> Path:
    """A folder that says what the released one says, its tensors' bytes being holes in a sparse file."""
    dit = config.dit
    views = (
        {"view_height": 176, "view_width": 320} if dit.model_type == "i2v" else {"view_height": 160, "view_width": 320}
    )
    write_random_checkpoint(folder, kind=dit.model_type, **views)
    path = folder / "config.json"
    written = json.loads(path.read_text())
    head = written["action_head_cfg"]["config"]
    fields = asdict(dit)
    names = {"frame_tokens": "frame_seqlen", "num_actions_per_chunk": "num_action_per_block"}
    names |= {"num_states": "num_state_per_block"}
    for name, value in fields.items():
        key = names.get(name, name)
        for part in (head["diffusion_model_cfg"], head):
            if key in part:
                part[key] = value
    head["action_horizon"] = config.action_horizon
    head["text_encoder_cfg"], head["image_encoder_cfg"] = {"num_heads": 64}, {"num_heads": 16}
    if config.target_video_height is not None:
        head |= {"target_video_height": config.target_video_height, "target_video_width": config.target_video_width}
    path.write_text(json.dumps(written))

    shapes = {DIT_PREFIX + name: shape for name, shape in dit_tensor_shapes(dit).items()}
    shapes |= TRUE_SIZES[dit.model_type].tensor_shapes()
    last = {n.replace("transformer.30.", "transformer.31."): s for n, s in shapes.items() if "transformer.30." in n}
    shapes |= last  # the image tower's last layer is stored, and never run
    if without is not None:
        del shapes[without]
    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * torch.Size(shape).numel()
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    packed = json.dumps(header).encode()
    packed += b" " * (-len(packed) % 8)
    with open(folder / "model.safetensors", "wb") as file:
        file.write(len(packed).to_bytes(8, "little") + packed)
        file.truncate(8 + len(packed) + end)
    return folder


@pytest.mark.parametrize(("make", "num_tensors", "num_bytes"), MODELS.values(), ids=MODELS)
def test_nothing_is_missing_or_unexpected(make: Any, num_tensors: int, num_bytes: float, tmp_path: Path) -> None:
    config = make()
    folder = write_structure(tmp_path / "whole", config)
    checkpoint = Checkpoint.open(folder)
    assert checkpoint.config.dit == config.dit
    assert sum(name.startswith(DIT_PREFIX) for name in checkpoint.shapes) == num_tensors
    assert (folder / "model.safetensors").stat().st_size == pytest.approx(num_bytes, rel=0.12)
    assert read_sizes(checkpoint) == TRUE_SIZES[config.dit.model_type]
    check_all_tensors(checkpoint)


def test_one_tensor_of_1317_that_is_missing_is_named(tmp_path: Path) -> None:
    missing = f"{DIT_PREFIX}blocks.23.cross_attn.k_img.bias"
    checkpoint = Checkpoint.open(write_structure(tmp_path / "broken", dreamzero_14b(), without=missing))
    with pytest.raises(CheckpointError, match=re.escape(f"missing: {missing}")):
        check_all_tensors(checkpoint)
