"""From a dots folder to a model."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from worldkv.errors import CheckpointError
from worldkv.models.checkpoints.files import CONFIG_FILE, read_json
from worldkv.models.checkpoints.header import read_header
from worldkv.models.dots.config import MODEL_TYPE, DotsConfig
from worldkv.models.dots.model import Dots

LOOKS_FOR = f'{CONFIG_FILE} with "model_type": "{MODEL_TYPE}"'
WEIGHTS_FILE = "model.safetensors"
FILES = (CONFIG_FILE, WEIGHTS_FILE)


def is_mine(folder: Path) -> bool:
    path = folder / CONFIG_FILE
    return path.is_file() and read_json(path).get("model_type") == MODEL_TYPE


def from_elsewhere(folder: Path) -> dict[str, tuple[str, tuple[str, ...]]]:
    return {}


def load(folder: Path | str, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> Dots:
    """Raises CheckpointError with what is missing, unexpected or of another shape."""
    folder = Path(folder)
    config = DotsConfig.read(folder)
    read_header(folder / WEIGHTS_FILE)  # raises, and says what is wrong with the file
    tensors = load_file(folder / WEIGHTS_FILE)
    with torch.device("meta"):
        model = Dots(config)
    try:
        model.load_state_dict({name: tensor.to(device, dtype) for name, tensor in tensors.items()}, assign=True)
    except RuntimeError as error:
        raise CheckpointError(f"{folder / WEIGHTS_FILE}: {error}") from error
    return model
