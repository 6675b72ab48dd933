"""A picture of a world from words: a frame of each block over the words it was made with, and what each took."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from worldkv.show.plots import figure_of, style

_COLOURS = ("#2563a8", "#e8833a", "#2f9e75", "#8b5fbf")


def plot_world(
    path: Path,
    pictures: Sequence[np.ndarray],
    prompts: Sequence[str],
    made_ms: Sequence[float],
    period_ms: float,
    note: str,
) -> None:
    """One of each by block. `pictures`: uint8 [H, W, 3]. `period_ms`: how long a block lasts a viewer."""
    words = list(dict.fromkeys(prompts))
    about = [note, "Above: the middle frame of each block. Below: what the engine took for it, from request to pixels."]
    figure = figure_of(1.2 * max(8, len(pictures)), 4.6, "A world from words, block after block", about)
    grid = figure.add_gridspec(2, len(pictures), height_ratios=(1, 1.6))
    for number, (picture, prompt) in enumerate(zip(pictures, prompts, strict=True)):
        axes = figure.add_subplot(grid[0, number])
        axes.imshow(picture)
        axes.set_xticks([])
        axes.set_yticks([])
        for spine in axes.spines.values():
            spine.set_color(_COLOURS[words.index(prompt) % len(_COLOURS)])
            spine.set_linewidth(2)
        if number == 0 or prompts[number - 1] != prompt:
            axes.set_title("\n".join(textwrap.wrap(prompt, 16)), loc="left", fontsize=8)
    axes = figure.add_subplot(grid[1, :])
    style(axes, "time to make a block", "milliseconds")
    colours = [_COLOURS[words.index(prompt) % len(_COLOURS)] for prompt in prompts]
    axes.bar(range(len(made_ms)), made_ms, color=colours, width=0.7)
    axes.axhline(period_ms, color="#66727f", linewidth=1, linestyle="--")
    across = axes.get_yaxis_transform()
    axes.text(1.004, period_ms, "as long as\na block lasts", transform=across, ha="left", va="center", fontsize=8)
    axes.set_xticks(range(len(made_ms)))
    axes.set_xlabel("block", fontsize=9)
    figure.savefig(path)
