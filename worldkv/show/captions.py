"""A line of words above a frame, in as many columns as there are words (matplotlib draws it: the `plots` extra)."""

from __future__ import annotations

import functools
import io

import numpy as np

_HEIGHT, _DPI = 24, 100  # pixels; pixels per inch
_INK = "#1f2933"


def captioned(frame: np.ndarray, *words: str) -> np.ndarray:
    """uint8 [H, W, 3] below a strip that has the words side by side, each above its part of the frame."""
    return np.concatenate([_strip(frame.shape[1], words), frame])


@functools.lru_cache(maxsize=8)
def _strip(width: int, words: tuple[str, ...]) -> np.ndarray:
    """uint8 [_HEIGHT, width, 3]; words that are too long for their part are drawn smaller."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width / _DPI, _HEIGHT / _DPI), dpi=_DPI, facecolor="white")
    FigureCanvasAgg(figure)
    room = width / len(words) - 12
    for column, text in enumerate(words):
        size = 9.0
        drawn = figure.text(column / len(words) + 4 / width, 0.5, text, va="center", fontsize=size, color=_INK)
        while drawn.get_window_extent().width > room and size > 2:
            size *= 0.95
            drawn.set_fontsize(size)
    pixels = io.BytesIO()
    figure.savefig(pixels, format="rgba")
    return np.frombuffer(pixels.getvalue(), np.uint8).reshape(_HEIGHT, width, 4)[..., :3]
