"""How the views of several cameras share the model's one image. numpy only: displays use it too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np

from worldkv.robots.embodiment import Layout

# where each camera stands in the model's image, in their order
PLACES: Mapping[Layout, tuple[str, ...]] = MappingProxyType(
    {
        "single": ("the whole image",),
        "wrist_over_exteriors": ("bottom left", "bottom right", "top, twice as wide"),
        "grid": ("top left", "bottom left", "top right", "bottom right"),
    }
)


def tile_views(views: Sequence[np.ndarray], layout: Layout) -> np.ndarray:
    """Views uint8 [T, h, w, 3] in camera order -> the model's image sequence, uint8 [T, H, W, 3].

    single: the one view. wrist_over_exteriors: view 2 over the whole top, each pixel twice along the width,
    views 0 and 1 below. grid: 0 top left, 1 bottom left, 2 top right, 3 (black if absent) bottom right.
    """
    if layout == "single":
        return views[0]
    if layout == "wrist_over_exteriors":
        left, right, wrist = views
        top = np.repeat(wrist, 2, axis=2)
        return np.concatenate([top, np.concatenate([left, right], axis=2)], axis=1)
    black = np.zeros_like(views[0])
    top_left, bottom_left, top_right, bottom_right = (*views, *[black] * (4 - len(views)))
    columns = [
        np.concatenate([top_left, bottom_left], axis=1),
        np.concatenate([top_right, bottom_right], axis=1),
    ]
    return np.concatenate(columns, axis=2)
