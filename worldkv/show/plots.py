"""Pictures of an episode, as png: robot actions, cache occupancy, latency by stage (the `plots` extra).

Uses matplotlib's objects only, so nothing global is touched and any thread may draw.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from worldkv.show.records import STAGES, TickRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DROID_ACTIONS = (*(f"joint_{joint}" for joint in range(1, 8)), "gripper")
_INK, _MUTED, _GRID, _BAND = "#1f2933", "#66727f", "#e6e9ed", "#f3f5f8"
_BLUE, _SKY, _GREEN, _ORANGE, _RED = "#2563a8", "#79aede", "#2f9e75", "#e8833a", "#c8402f"
_SESSION_COLOURS = (_BLUE, _ORANGE, _GREEN, "#8b5fbf", _RED, "#4a9aa5")
_STAGE_COLOURS = dict(zip(STAGES, ("#dfe3e8", "#8c98a4", "#c3cad2", _SKY, _GREEN, _BLUE, _ORANGE), strict=True))
_DPI = 150
_MAX_LABELLED = 30  # ticks; more labels would overlap


def plot_actions(
    path: str | Path,
    chunks: Sequence[np.ndarray],
    *,
    rate_hz: float,
    title: str = "Executed actions",
    names: Sequence[str] = DROID_ACTIONS,
) -> None:
    """One panel per number of an action, over the time in which the chunks were executed.

    `chunks`: what was executed of each tick's answer, [N_i, len(names)]. `rate_hz`: control steps per second.
    Raises ValueError for other shapes.
    """
    if not chunks or any(chunk.ndim != 2 or chunk.shape[1] != len(names) or len(chunk) == 0 for chunk in chunks):
        shapes = [list(chunk.shape) for chunk in chunks]
        raise ValueError(f"chunks: expected arrays [N, {len(names)}], got shapes {shapes}")
    borders = np.cumsum([0, *(len(chunk) for chunk in chunks)]) / rate_hz
    rows = -(-len(names) // 2)
    about = f"{_count(chunks, 'chunk')} at {rate_hz:g} Hz, a shade and a dot each"
    figure = _figure(11, 0.6 + 1.9 * rows, title, about)
    panels = figure.subplots(rows, 2, sharex=True, squeeze=False).T.ravel()
    for column, (name, axes) in enumerate(zip(names, panels, strict=False)):
        gripper = "gripper" in name
        colour = _ORANGE if gripper else _BLUE
        _style(axes, name.replace("_", " "), "0 open, 1 closed" if gripper else "rad" if "joint" in name else "")
        for start, end in zip(borders[0::2], borders[1::2], strict=False):
            axes.axvspan(start, end, color=_BAND, linewidth=0, zorder=0)
        for index, chunk in enumerate(chunks):
            time = borders[index] + np.arange(len(chunk)) / rate_hz
            axes.plot(time, chunk[:, column], color=colour, linewidth=1.4, solid_capstyle="round")
            axes.plot(time[:1], chunk[:1, column], "o", color=colour, markersize=2.8)
        axes.set_xlim(0, borders[-1])
        values = np.concatenate([chunk[:, column] for chunk in chunks])
        _leave_room(axes, np.append(values, (0, 1)) if gripper else values)
    for axes in (panels[rows - 1], panels[len(names) - 1]):
        axes.set_xlabel("seconds", color=_MUTED, fontsize=9)
        axes.tick_params(labelbottom=True)
    for axes in panels[len(names) :]:
        axes.set_visible(False)
    figure.savefig(path)


def plot_cache(
    path: str | Path,
    records: Sequence[TickRecord],
    *,
    window_frames: int,
    title: str = "Cache occupancy",
) -> None:
    """Frames cached by session and blocks used of the pool, after each tick; why windows restarted.

    `window_frames`: frames of a full window, those being denoised included.
    """
    _require(records)
    reasons = Counter(record.restart_reason for record in records if record.restart_reason is not None)
    why = ", ".join(f"{reason} ({count})" for reason, count in reasons.items()) or "none"
    figure = _figure(11, 5.6, title, f"{_count(records, 'tick')}; window restarts: {why}")
    frames, blocks = figure.subplots(2, 1, sharex=True, height_ratios=(1.25, 1))
    _draw_frames(frames, records, window_frames)
    _draw_blocks(blocks, records)
    _tick_axis(blocks, records)
    figure.savefig(path)


def _draw_frames(axes: Axes, records: Sequence[TickRecord], window_frames: int) -> None:
    _style(axes, "frames cached", "frames")
    sessions = list(dict.fromkeys(record.session for record in records))
    for index, session in enumerate(sessions):
        mine = [i for i, record in enumerate(records) if record.session == session]
        heights = [records[i].frames_cached for i in mine]
        colour = _SESSION_COLOURS[index % len(_SESSION_COLOURS)]
        axes.bar(mine, heights, width=0.74, color=colour, label=f"session {session}", linewidth=0)
    if len(sessions) > 1:
        axes.legend(loc="upper right", ncols=len(sessions), frameon=False, fontsize=8, labelcolor=_INK)
    axes.axhline(window_frames, color=_MUTED, linewidth=1, linestyle=(0, (4, 3)))
    note = f" window: {window_frames} frames, those being denoised included"
    axes.text(-0.5, window_frames, note, color=_MUTED, fontsize=8, va="bottom")
    axes.set_ylim(0, window_frames * 1.22)
    restarts = [(i, record) for i, record in enumerate(records) if record.restart_reason is not None]
    axes.vlines([i - 0.5 for i, _ in restarts], 0, window_frames, color=_RED, lw=1, linestyle=(0, (2, 2)))
    for i, record in restarts if len(records) <= _MAX_LABELLED else ():
        height, text = record.frames_cached, f" {record.restart_reason}"
        axes.text(i, height, text, rotation=90, ha="center", va="bottom", fontsize=8, color=_RED)


def _draw_blocks(axes: Axes, records: Sequence[TickRecord]) -> None:
    _style(axes, "blocks used", "blocks")
    used = [record.blocks_used for record in records]
    edges = np.arange(len(records) + 1) - 0.5
    axes.stairs(used, edges, fill=True, color=_SKY, alpha=0.55)
    axes.stairs(used, edges, baseline=None, color=_BLUE, linewidth=1.6)
    pool = records[-1].blocks_used + records[-1].blocks_free
    axes.axhline(pool, color=_RED, linewidth=1.2)
    axes.text(-0.5, pool, f" pool: {pool} blocks", color=_RED, fontsize=8, va="bottom")
    axes.set_ylim(0, pool * 1.2)


def plot_latency(path: str | Path, records: Sequence[TickRecord], *, title: str = "Latency by stage") -> None:
    """A bar per tick, stacked by stage, with the measured total above it."""
    _require(records)
    totals = np.array([record.total_ms for record in records])
    summary = f"median {_number(float(np.median(totals)))} ms, slowest {_number(float(totals.max()))} ms"
    figure = _figure(11, 4.4, title, f"{_count(records, 'tick')}, {summary}")
    axes = figure.subplots()
    _style(axes, "", "milliseconds")
    stages = {stage: [record.timings.get(stage, 0.0) for record in records] for stage in STAGES}
    bottom = np.zeros(len(records))
    for stage, heights in stages.items():
        axes.bar(range(len(records)), heights, 0.74, bottom, color=_STAGE_COLOURS[stage], label=stage, lw=0)
        bottom += heights
    other = np.maximum(totals - bottom, 0)
    axes.bar(range(len(records)), other, 0.74, bottom, color=_GRID, label="other", lw=0)
    top = max(float((bottom + other).max()), 1e-3)
    for i, height in enumerate(bottom + other) if len(records) <= _MAX_LABELLED else ():
        axes.text(i, height + 0.01 * top, _number(totals[i]), ha="center", fontsize=8, color=_INK)
    axes.set_ylim(0, top * 1.12)
    _tick_axis(axes, records)
    legend = axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=len(STAGES) + 1, frameon=False)
    for text in legend.get_texts():
        text.set(color=_INK, fontsize=9)
    figure.savefig(path)


def _figure(width: float, height: float, title: str, subtitle: str) -> Figure:
    """An empty figure with a headline; sizes in inches."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
    except ImportError:
        raise ImportError("plots need matplotlib: pip install 'worldkv[plots]'") from None
    body = (0.01, 0.01, 0.98, 0.99 - 0.62 / height)  # left, bottom, width, height; the headline stands above
    layout = ConstrainedLayoutEngine(rect=body, hspace=0.03, wspace=0.03)
    figure = Figure(figsize=(width, height), dpi=_DPI, layout=layout, facecolor="white")
    FigureCanvasAgg(figure)
    figure.text(0.018, 1 - 0.10 / height, title, fontsize=14, fontweight="bold", color=_INK, va="top")
    figure.text(0.018, 1 - 0.40 / height, subtitle, fontsize=9.5, color=_MUTED, va="top")
    return figure


def _style(axes: Axes, name: str, unit: str) -> None:
    axes.set_title(name, loc="left", fontsize=10, color=_INK, pad=4)
    axes.set_ylabel(unit, fontsize=9, color=_MUTED)
    axes.grid(axis="y", color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_MUTED, labelsize=8.5, length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(_MUTED)


def _leave_room(axes: Axes, values: np.ndarray, least: float = 0.1) -> None:
    """Limits with a margin, at least `least` apart, so that a joint at rest is a line and not noise."""
    low, high = float(values.min()), float(values.max())
    middle, half = (low + high) / 2, max(high - low, least) / 2 * 1.12
    axes.set_ylim(middle - half, middle + half)


def _tick_axis(axes: Axes, records: Sequence[TickRecord]) -> None:
    """Tick numbers below, about twenty of them at most."""
    step = max(1, -(-len(records) // 20))
    axes.set_xlim(-0.6, max(len(records), 8) - 0.4)
    axes.set_xticks(range(0, len(records), step), [str(record.tick) for record in records[::step]])
    axes.set_xlabel("tick", fontsize=9, color=_MUTED)


def _count(things: Sequence[object], noun: str) -> str:
    return f"{len(things)} {noun}" + ("" if len(things) == 1 else "s")


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}"


def _require(records: Sequence[TickRecord]) -> None:
    if not records:
        raise ValueError("records: expected at least one tick, got none")
