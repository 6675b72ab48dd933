"""Pictures of an episode, as png: robot actions, cache occupancy, latency by stage (the `plots` extra).

Uses matplotlib's objects only, so nothing global is touched and any thread may draw.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from worldkv.show.records import STAGES, TickRecord
from worldkv.words import count

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DROID_ACTIONS = (*(f"joint_{joint}" for joint in range(1, 8)), "gripper")
_INK, _MUTED, _GRID, _BAND = "#1f2933", "#66727f", "#e6e9ed", "#f3f5f8"
_BLUE, _SKY, _GREEN, _ORANGE, _RED = "#2563a8", "#79aede", "#2f9e75", "#e8833a", "#c8402f"
_SESSION_COLOURS = (_BLUE, _ORANGE, _GREEN, "#8b5fbf", _RED, "#4a9aa5")
_STAGE_COLOURS = dict(zip(STAGES, ("#b39ad0", "#8c98a4", "#c3cad2", _SKY, _GREEN, _BLUE, _ORANGE), strict=True))
_MEANINGS = {
    "read": "message to request",
    "queue": "waiting for other ticks",
    "preprocess": "pixels are prepared",
    "encode": "pixels to latent frames",
    "commit": "what was seen, into the cache",
    "denoise": "next frames and actions",
    "postprocess": "actions to joints",
}
_DPI = 150
_LINE = 165  # letters below a headline
_MAX_LABELLED = 30  # ticks; more labels would overlap


def plot_actions(
    path: str | Path,
    chunks: Sequence[np.ndarray],
    *,
    rate_hz: float,
    followed: Sequence[np.ndarray] = (),
    note: str = "",
    names: Sequence[str] = DROID_ACTIONS,
) -> None:
    """One panel per number of an action, over the time in which the chunks were executed.

    `chunks`: what was executed of each tick's answer, [N_i, len(names)]; `followed`: where the robot was after each of
    them. `rate_hz`: control steps per second. `note`: a sentence for people. Raises ValueError for other shapes.
    """
    if not chunks or any(chunk.ndim != 2 or chunk.shape[1] != len(names) or len(chunk) == 0 for chunk in chunks):
        shapes = [list(chunk.shape) for chunk in chunks]
        raise ValueError(f"chunks: expected arrays [N, {len(names)}], got shapes {shapes}")
    borders = np.cumsum([0, *(len(chunk) for chunk in chunks)]) / rate_hz
    rows = -(-len(names) // 2)
    seconds = _number(len(chunks[0]) / rate_hz)
    about = [
        f"{count(len(chunks), 'chunk')}, at {rate_hz:g} actions a second. A chunk is what one answer holds: the "
        f"actions of the next {seconds} s. Chunks are white and shaded strips in turn.",
        *([note] if note else []),
    ]
    figure = figure_of(11, 1.3 + 1.8 * rows, "What the robot was told to do, number by number", about)
    panels = figure.subplots(rows, 2, sharex=True, squeeze=False).T.ravel()
    for column, (name, axes) in enumerate(zip(names, panels, strict=False)):
        style(axes, *_named(name, [chunk[:, column] for chunk in chunks]))
        for start, end in zip(borders[0::2], borders[1::2], strict=False):
            axes.axvspan(start, end, color=_BAND, linewidth=0, zorder=0)
        _draw_answered(axes, [chunk[:, column] for chunk in chunks], borders, rate_hz, gripper="gripper" in name)
        _draw_followed(axes, [chunk[:, column] for chunk in followed], borders, rate_hz)
        axes.set_xlim(0, borders[-1])
    for axes in (panels[rows - 1], panels[len(names) - 1]):
        axes.set_xlabel("seconds of the robot's time", color=_MUTED, fontsize=9)
        axes.tick_params(labelbottom=True)
    for axes in panels[len(names) :]:
        axes.set_visible(False)
    handles, labels = panels[0].get_legend_handles_labels()
    _legend(figure, handles, labels, len(labels))
    figure.savefig(path)


def _named(name: str, chunks: Sequence[np.ndarray]) -> tuple[str, str]:
    """A panel's title and unit; of a gripper also how much it was told that it cannot do."""
    title = name.replace("_", " ")
    if "gripper" not in name:
        return title, "radians" if "joint" in name else ""
    values = np.concatenate(chunks)
    outside = float(np.mean((values < 0) | (values > 1)))
    if outside:
        title += f": {max(outside, 0.01):.0%} outside of 0 to 1, where it stops"
    return title, "0 open, 1 closed"


def _draw_answered(
    axes: Axes, chunks: Sequence[np.ndarray], borders: np.ndarray, rate_hz: float, *, gripper: bool
) -> None:
    for index, chunk in enumerate(chunks):
        time = borders[index] + np.arange(len(chunk)) / rate_hz
        label = None if index else "answered"
        axes.plot(time, chunk, color=_BLUE, linewidth=1.2, solid_capstyle="round", label=label)
        axes.plot(time[:1], chunk[:1], "o", color=_BLUE, markersize=3.2, label=label and "first action of a chunk")
    values = np.concatenate(chunks)
    _leave_room(axes, np.append(values, (0, 1)) if gripper else values)
    if gripper:
        for end in (0, 1):
            axes.axhline(end, color=_MUTED, linewidth=1, linestyle=(0, (4, 3)), zorder=1)


def _draw_followed(axes: Axes, chunks: Sequence[np.ndarray], borders: np.ndarray, rate_hz: float) -> None:
    for index, chunk in enumerate(chunks):
        time = borders[index] + np.arange(1, len(chunk) + 1) / rate_hz
        axes.plot(time, chunk, color=_INK, linewidth=1.6, label=None if index else "where the robot went")


def _legend(figure: Figure, handles: Sequence[Artist], labels: Sequence[str], columns: int) -> None:
    """Below the panels."""
    figure.legend(
        handles, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize=8.5, labelcolor=_INK
    )


def plot_cache(path: str | Path, records: Sequence[TickRecord], *, window_frames: int, note: str = "") -> None:
    """Frames cached by session and blocks used of the pool, after each tick; why windows restarted.

    `window_frames`: frames of a full window, those being denoised included; 0 where nobody knows.
    """
    _require(records)
    reasons = Counter(record.restart_reason for record in records if record.restart_reason is not None)
    why = ", ".join(f"{reason} ({times})" for reason, times in reasons.items()) or "none"
    about = [
        f"{count(len(records), 'tick')}; a tick is one request and its answer. What the cameras saw is kept as latent "
        "frames, in K/V blocks of one pool that all sessions share.",
        f"A window that is full begins anew with its newest frame. Windows that began: {why}.",
        *([note] if note else []),
    ]
    figure = figure_of(11, 6.0, "What is remembered: frames and blocks in the cache after each tick", about)
    frames, blocks = figure.subplots(2, 1, sharex=True, height_ratios=(1.25, 1))
    _draw_frames(frames, records, window_frames)
    _draw_blocks(blocks, records)
    _tick_axis(blocks, records)
    figure.savefig(path)


def _draw_frames(axes: Axes, records: Sequence[TickRecord], window_frames: int) -> None:
    style(axes, "history of the session, in latent frames", "frames")
    sessions = list(dict.fromkeys(record.session for record in records))
    for index, session in enumerate(sessions):
        mine = [i for i, record in enumerate(records) if record.session == session]
        heights = [records[i].frames_cached for i in mine]
        colour = _SESSION_COLOURS[index % len(_SESSION_COLOURS)]
        axes.bar(mine, heights, width=0.74, color=colour, label=f"session {session}", linewidth=0)
    axes.set_ylim(0, (window_frames or max(record.frames_cached for record in records)) * 1.3)
    if window_frames:
        axes.axhline(window_frames, color=_MUTED, linewidth=1, linestyle=(0, (4, 3)))
        note = f" a full window: {window_frames} frames, those included that a tick imagines"
        axes.text(-0.5, window_frames, note, color=_MUTED, fontsize=8, va="bottom")
    restarts = [(i, record) for i, record in enumerate(records) if record.restart_reason is not None]
    if restarts:
        top = axes.get_ylim()[1] / 1.3
        edges = [i - 0.5 for i, _ in restarts]
        axes.vlines(edges, 0, top, color=_RED, lw=1, linestyle=(0, (2, 2)), label="a window begins, and why")
    for i, record in restarts if len(records) <= _MAX_LABELLED else ():
        height, text = record.frames_cached, f" {record.restart_reason}"
        axes.text(i, height, text, rotation=90, ha="center", va="bottom", fontsize=8, color=_RED)
    axes.legend(loc="upper right", ncols=len(sessions) + 1, frameon=False, fontsize=8, labelcolor=_INK)


def _draw_blocks(axes: Axes, records: Sequence[TickRecord]) -> None:
    style(axes, "blocks in use in the pool, of all sessions", "blocks")
    used = [record.blocks_used for record in records]
    edges = np.arange(len(records) + 1) - 0.5
    axes.stairs(used, edges, fill=True, color=_SKY, alpha=0.55)
    axes.stairs(used, edges, baseline=None, color=_BLUE, linewidth=1.6)
    pool = records[-1].blocks_used + records[-1].blocks_free
    axes.axhline(pool, color=_RED, linewidth=1.2)
    most = f"at most {max(used)} were in use at the end of a tick"
    axes.text(-0.5, pool, f" the pool has {pool} blocks; {most}", color=_RED, fontsize=8, va="bottom")
    axes.set_ylim(0, pool * 1.2)


def plot_latency(
    path: str | Path, records: Sequence[TickRecord], *, chunk_s: float | None = None, note: str = ""
) -> None:
    """A bar per tick, stacked by stage, with the measured total above it; `chunk_s`: how long an answer lasts."""
    _require(records)
    totals = np.array([record.total_ms for record in records])
    middle, most = _number(float(np.median(totals))), _number(float(totals.max()))
    lasts = f"an answer's actions last {_number(chunk_s)} s" if chunk_s is not None else ""
    in_sight = chunk_s is not None and 1000 * chunk_s < 1.5 * totals.max()
    waits = ": a bar above that line is a robot that waits" if in_sight else ": no robot waited"
    about = [
        f"{count(len(records), 'tick')}, half of them within {middle} ms, the slowest {most} ms"
        f"{f'; {lasts}{waits}' if lasts else ''}.",
        *([note] if note else []),
    ]
    figure = figure_of(11, 5.0, "How long each answer took, and what took the time", about)
    axes = figure.subplots()
    style(axes, "", "milliseconds")
    bottom = np.zeros(len(records))
    for stage in STAGES:
        heights = [record.timings.get(stage, 0.0) for record in records]
        axes.bar(
            range(len(records)),
            heights,
            0.74,
            bottom,
            color=_STAGE_COLOURS[stage],
            label=f"{stage}: {_MEANINGS[stage]}",
            lw=0,
        )
        bottom += heights
    other = np.maximum(totals - bottom, 0)
    axes.bar(range(len(records)), other, 0.74, bottom, color=_GRID, label="other: in no stage", lw=0)
    top = max(float((bottom + other).max()), 1e-3)
    if chunk_s is not None and in_sight:
        axes.axhline(1000 * chunk_s, color=_RED, linewidth=1.2, label=lasts)
        top = max(top, 1000 * chunk_s)
    _label_bars(axes, records, bottom + other, top)
    axes.set_ylim(0, top * 1.16)
    _tick_axis(axes, records)
    _legend(figure, *axes.get_legend_handles_labels(), columns=3)
    figure.savefig(path)


def _label_bars(axes: Axes, records: Sequence[TickRecord], heights: np.ndarray, top: float) -> None:
    """The total of each, and which of them began a window: there the frames that fill it are encoded as well."""
    for i, (record, height) in enumerate(zip(records, heights, strict=True)):
        if len(records) > _MAX_LABELLED:
            return
        axes.text(i, height + 0.01 * top, _number(record.total_ms), ha="center", fontsize=8, color=_INK)
        if record.restart_reason is not None:
            axes.text(i, height + 0.06 * top, "new window", ha="center", fontsize=8, color=_RED)


def figure_of(width: float, height: float, title: str, about: Sequence[str]) -> Figure:
    """An empty figure with a headline and sentences below it; sizes in inches."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
    except ImportError:
        raise ImportError("plots need matplotlib: pip install 'worldkv[plots]'") from None
    lines = [line for sentence in about for line in textwrap.wrap(sentence, _LINE)]
    above = 0.42 + 0.2 * len(lines)  # inches for the headline
    body = (0.01, 0.01, 0.98, 0.99 - above / height)  # left, bottom, width, height
    layout = ConstrainedLayoutEngine(rect=body, hspace=0.03, wspace=0.03)
    figure = Figure(figsize=(width, height), dpi=_DPI, layout=layout, facecolor="white")
    FigureCanvasAgg(figure)
    figure.text(0.018, 1 - 0.10 / height, title, fontsize=14, fontweight="bold", color=_INK, va="top")
    for row, line in enumerate(lines):
        figure.text(0.018, 1 - (0.40 + 0.2 * row) / height, line, fontsize=9, color=_MUTED, va="top")
    return figure


def style(axes: Axes, name: str, unit: str) -> None:
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
    axes.set_xlabel("tick: a request of the robot and its answer, in order", fontsize=9, color=_MUTED)


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}"


def _require(records: Sequence[TickRecord]) -> None:
    if not records:
        raise ValueError("records: expected at least one tick, got none")
