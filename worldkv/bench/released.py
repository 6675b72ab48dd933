"""The released models by name, with their sizes. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from worldkv.models.causal_wan.config import PRESETS, CausalWanConfig, wan_1_3b
from worldkv.models.dreamzero.config import DreamZeroConfig, dreamzero_5b, dreamzero_14b
from worldkv.models.dreamzero.layout import TRUE_SIZES

RELEASED: dict[str, Callable[[], DreamZeroConfig]] = {"dreamzero-14b": dreamzero_14b, "dreamzero-5b": dreamzero_5b}
# the window of a deployment goes with the run: one that nothing leaves is planned as 21 frames
VIDEO_MODELS: dict[str, Callable[[], CausalWanConfig]] = {
    f"{name}-1.3b": partial(CausalWanConfig, wan_1_3b(), settings) for name, settings in PRESETS.items()
}
VIDEO_ENCODERS = replace(TRUE_SIZES["i2v"], image=None)  # Wan 2.1's VAE and UMT5-XXL
TINY = "tiny"  # for machines without a GPU
TINY_VIDEO = "tiny-video"  # likewise, of causal video
