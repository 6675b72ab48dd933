"""The picture of a `worldkv bench` run: DiT time by history, attention against dense, sessions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

_COLOURS = {"reference": "#8c98a4", "cudnn": "#2f9e75", "flash4": "#2563a8"}
_INK, _GREY, _BLUE, _ORANGE, _GREEN = "#1f2933", "#8c98a4", "#2563a8", "#e8833a", "#2f9e75"


def plot_bench(path: Path, results: dict[str, Any]) -> None:
    """One figure, a panel for each part that was measured; nothing if none was."""
    panels = [draw for name, draw in _PANELS.items() if results.get(name)]
    if not panels:
        return
    figure = Figure(figsize=(5.4 * len(panels), 4.2), layout="constrained")
    for axes, draw in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        draw(axes, results)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{results['model']}, random weights, {results['device']}", fontsize=11, color=_GREY)
    figure.savefig(path, dpi=150)


def _draw_ticks(axes: Axes, results: dict[str, Any]) -> None:
    if "decode_ms" in results["ticks"]:
        _draw_blocks(axes, results)
        return
    histories = [1, 3, 5, 7]
    series = (("baseline", "plain baseline", _GREY), ("ticks", "paged", _BLUE), ("fp8", "paged, float8", _GREEN))
    for name, label, colour in series:
        if name in results:
            axes.plot(histories, results[name]["dit_ms_by_history"], "o-", label=label, color=colour)
    _title(axes, "DiT time of a chunk, ms")
    axes.set(xlabel="frames of history", xticks=histories)
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)


def _draw_blocks(axes: Axes, results: dict[str, Any]) -> None:
    rows = [(label, results[name]) for name, label in (("baseline", "plain"), ("ticks", "paged")) if name in results]
    begins = [0.0] * len(rows)
    for part, label, colour in (("dit_ms", "DiT", _BLUE), ("decode_ms", "decoding", _ORANGE)):
        times = [measured[part] for _, measured in rows]
        axes.barh([name for name, _ in rows], times, left=begins, label=label, color=colour)
        begins = [begin + ms for begin, ms in zip(begins, times, strict=True)]
    _title(axes, f"time of a block of {results['ticks']['frames_per_block']} pictures, ms")
    axes.legend(frameon=False, ncols=2, loc="upper left", bbox_to_anchor=(0, -0.08))


def _draw_attention(axes: Axes, results: dict[str, Any]) -> None:
    rows = [row for row in results["attention"] if "ms" in row and row["backend"] != "dense"]
    labels = [f"{row['shape']}\n{row['backend']}" for row in rows]
    axes.barh(labels, [row["ratio"] for row in rows], color=[_COLOURS.get(row["backend"], _GREY) for row in rows])
    axes.axvline(1, color=_INK, linewidth=1)
    _title(axes, "attention time, dense = 1")
    axes.invert_yaxis()
    axes.tick_params(labelsize=7)


def _draw_sessions(axes: Axes, results: dict[str, Any]) -> None:
    rows = results["sessions"]
    counts = [row["sessions"] for row in rows]
    axes.plot(counts, [row["p50_ms"] for row in rows], "o-", color=_BLUE, label="p50")
    axes.plot(counts, [row["p99_ms"] for row in rows], "o--", color=_ORANGE, label="p99")
    _title(axes, "reply time of sessions at once, ms")
    axes.set_xlabel("sessions")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)


def _draw_paced(axes: Axes, results: dict[str, Any]) -> None:
    rows, deadline = results["paced"]["rows"], 1e3 * results["paced"]["period_s"]
    robots = [row["robots"] for row in rows]
    for name, label, colour, line in (
        ("p50_ms", "p50", _BLUE, "o-"),
        ("p99_ms", "p99", _ORANGE, "o--"),
        ("worst_ms", "worst", _GREY, "o:"),
    ):
        axes.plot(robots, [row[name] for row in rows], line, color=colour, label=label)
    axes.axhline(deadline, color=_INK, linewidth=1)
    axes.annotate("late", (1, deadline), xycoords=("axes fraction", "data"), ha="right", va="bottom", color=_INK)
    who = results["paced"].get("who", "robots")
    _title(axes, f"reply time of {who} at their own pace, ms")
    axes.set(xlabel=who, xticks=robots)
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)


def _title(axes: Axes, text: str) -> None:
    axes.set_title(text, loc="left", fontsize=11, color=_INK)


_PANELS = {"ticks": _draw_ticks, "attention": _draw_attention, "sessions": _draw_sessions, "paced": _draw_paced}
