"""A complete tiny causal Wan folder with random weights: it runs, and has learned nothing."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from worldkv.models.causal_wan.config import SETTINGS_FILE, CausalSettings, CausalWanConfig
from worldkv.models.causal_wan.folder import RANDOM_WEIGHTS_KEY, needed_shapes
from worldkv.models.checkpoints.files import CONFIG_FILE, SINGLE_FILE
from worldkv.models.checkpoints.writing import save_tensors, write_text
from worldkv.models.wan.config import WanConfig
from worldkv.models.wan.random import NOTICE, random_tensors
from worldkv.models.wan.sizes import EncoderSizes, TextSizes, VAESizes

_DIT = WanConfig(
    model_type="t2v",
    dim=64,
    ffn_dim=128,
    num_heads=2,
    num_layers=2,
    in_dim=16,
    out_dim=16,
    freq_dim=32,
    text_dim=48,
    text_len=16,
)
_ENCODERS = EncoderSizes(
    VAESizes(16, 4, 4, residual=False),
    TextSizes(320, 48, 48, 96, num_layers=2, num_heads=4, num_buckets=32),
)
TINY = CausalSettings(frames_per_block=3, steps=(1000, 750, 500, 250), window_frames=9, sink_frames=3)


def write_random_causal_wan(folder: Path | str, settings: CausalSettings = TINY, seed: int = 0) -> Path:
    """Returns the folder; the same arguments give the same bytes."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    shapes = needed_shapes(CausalWanConfig(_DIT, settings), _ENCODERS)
    save_tensors(random_tensors(shapes, seed), folder / SINGLE_FILE, {"notice": NOTICE})
    write_text(json.dumps(asdict(settings), indent=1) + "\n", folder / SETTINGS_FILE)
    about = {RANDOM_WEIGHTS_KEY: {"notice": NOTICE, "seed": seed}, "_class_name": "WanModel"}
    write_text(json.dumps(about | asdict(_DIT), indent=1) + "\n", folder / CONFIG_FILE)
    return folder
