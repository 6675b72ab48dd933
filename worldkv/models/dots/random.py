"""A dots folder with random weights: it runs, and has learned nothing."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import torch

from worldkv.models.checkpoints.files import CONFIG_FILE
from worldkv.models.checkpoints.writing import save_tensors, write_text
from worldkv.models.dots.checkpoint import WEIGHTS_FILE
from worldkv.models.dots.config import MODEL_TYPE, DotsConfig
from worldkv.models.dots.model import Dots


def write_random_dots(folder: Path | str, config: DotsConfig | None = None, seed: int = 0) -> Path:
    """Returns the folder."""
    folder, config = Path(folder), config or DotsConfig()
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(seed)
    write_text(json.dumps({"model_type": MODEL_TYPE, **asdict(config)}, indent=1), folder / CONFIG_FILE)
    save_tensors(dict(Dots(config).state_dict()), folder / WEIGHTS_FILE)
    return folder
