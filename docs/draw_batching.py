"""Draws docs/img/batching.svg and docs/img/forks.svg, for architecture.md. Run it again when either changes.

python docs/draw_batching.py
"""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle

IMAGES = Path(__file__).parent / "img"
COLOURS = {"encode": "#79aede", "commit": "#2f9e75", "denoise": "#2563a8"}
SESSIONS = ("#2563a8", "#d9762b", "#2f9e75")
INK, MUTED = "#1b2530", "#66727f"

# Of three sessions: (forward, what it wants). Forwards run one after the other; whoever wants one shares it.
TICKS = {
    "robot A\n(7 frames)": [(0, "encode"), (1, "commit"), *((n, "denoise") for n in range(2, 10))],
    "robot B\n(3 frames)": [(2, "encode"), (3, "commit"), *((n, "denoise") for n in range(4, 12))],
    "robot C\n(first tick)": [(5, "encode"), (6, "commit"), *((n, "denoise") for n in range(7, 15))],
}


def main() -> None:
    draw_batching(IMAGES / "batching.svg")
    draw_forks(IMAGES / "forks.svg")


def draw_batching(path: Path) -> None:
    figure, axes = canvas(10, 3.3)
    last = max(forward for wishes in TICKS.values() for forward, _ in wishes)
    for forward in range(last + 1):
        rows = [(kind, y) for y, wishes in enumerate(TICKS.values()) for at, kind in wishes if at == forward]
        shared = [y for kind, y in rows if kind != "encode"]
        if len(shared) > 1:
            top, bottom = -min(shared) + 0.42, -max(shared) - 0.42
            axes.add_patch(Rectangle((forward + 0.03, bottom), 0.94, top - bottom, fc="#eef1f5", ec="#c3cad2", lw=1))
        axes.text(forward + 0.5, -2.75, f"{2 * len(shared)}" if shared else "", ha="center", fontsize=8, color=MUTED)
    for y, (name, wishes) in enumerate(TICKS.items()):
        axes.text(-0.2, -y, name, ha="right", va="center", fontsize=9, color=INK)
        for forward, kind in wishes:
            axes.add_patch(Rectangle((forward + 0.12, -y - 0.3), 0.76, 0.6, fc=COLOURS[kind], ec="none"))
    axes.text(-0.2, -2.75, "rows of the forward", ha="right", va="center", fontsize=8, color=MUTED)
    for index, (kind, colour) in enumerate(COLOURS.items()):
        axes.add_patch(Rectangle((3.5 * index, 0.72), 0.3, 0.24, fc=colour, ec="none"))
        words = {
            "encode": "encode what was observed",
            "commit": "commit it: one clean pass",
            "denoise": "denoise: a draft",
        }
        axes.text(3.5 * index + 0.4, 0.84, words[kind], va="center", fontsize=8, color=INK)
    axes.text(11.2, 0.84, "grey: one forward, shared", va="center", fontsize=8, color=MUTED)
    axes.set(xlim=(-2.6, last + 1.2), ylim=(-3.0, 1.15))
    figure.savefig(path)


def draw_forks(path: Path) -> None:
    figure, axes = canvas(10, 2.9)
    tables = {"session": list(range(6)), "fork 1": [0, 1, 2, 3, 6], "fork 2": [0, 1, 2, 3, 7, 8]}
    for index in range(10):
        used = [name for name, table in tables.items() if index in table]
        colour = "#8c98a4" if len(used) > 1 else SESSIONS[list(tables).index(used[0])] if used else "#eef1f5"
        axes.add_patch(Rectangle((index, 0), 0.9, 0.7, fc=colour, ec="#c3cad2"))
        axes.text(
            index + 0.45, 0.35, str(index), ha="center", va="center", fontsize=8, color="white" if used else MUTED
        )
    axes.text(-0.2, 0.35, "blocks of the pool", ha="right", va="center", fontsize=9, color=INK)
    for row, (name, table) in enumerate(tables.items()):
        y = 2.9 - 0.75 * row
        axes.text(-0.2, y + 0.2, name, ha="right", va="center", fontsize=9, color=SESSIONS[row])
        for place, block in enumerate(table):
            axes.add_patch(Rectangle((place * 0.62, y), 0.56, 0.4, fc="white", ec=SESSIONS[row], lw=1.3))
            axes.text(place * 0.62 + 0.28, y + 0.2, str(block), ha="center", va="center", fontsize=8, color=INK)
    for start, end, colour in (((2.76, 2.35), (6.45, 0.75), SESSIONS[1]), ((3.4, 1.6), (8.3, 0.75), SESSIONS[2])):
        axes.add_patch(FancyArrowPatch(start, end, arrowstyle="->", mutation_scale=10, color=colour, lw=1.1))
    axes.text(6.2, 2.9, "grey: held by all three, stored once\nwhat a fork writes goes to blocks of its own,\n"
              "a block that was half full is copied first", fontsize=8, color=MUTED, va="center")  # fmt: skip
    axes.set(xlim=(-2.2, 10.3), ylim=(-0.2, 3.6))
    figure.savefig(path)


def canvas(width: float, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
    axes = figure.subplots()
    axes.set_axis_off()
    return figure, axes


if __name__ == "__main__":
    main()
