"""Draws docs/img/cache.svg: one pool, a session in the middle of a forward, and a fork of it.

Everything in the picture is asked from the cache itself (window, block tables, pool), so it cannot show a layout that
the code does not have. Run it from the project's root: python docs/draw_cache.py [OUTPUT]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle

from worldkv.kv.block_pool import BlockPool
from worldkv.kv.block_table import BlockTable
from worldkv.kv.window import Window

WINDOW = Window(chunk_size=20, window=4, sink=1)
BLOCK_SIZE = 16
NUM_BLOCKS = 22
DRAFT_TOKENS = 7  # actions and state
HISTORY = 7  # chunks committed before the fork

INK, MUTED, PAPER = "#1f2933", "#7b8794", "#ffffff"
SINK, RING, TAIL = "#f2c078", "#cfe3f3", "#e6d3f0"
SHARED, STAGED, ONLY_A, ONLY_B, TEXT, FREE = "#cfe3f3", "#b7e0c3", "#93b7d6", "#f5b7a8", "#e9e3d3", "#ffffff"

LEFT = 0.0
SLOT = 1.0  # width of one slot in data units


def commit(table: BlockTable, chunk: int) -> None:
    place = WINDOW.place(chunk, 1)
    staged = table.stage(place.writes, WINDOW.num_slots(chunk), place.num_visible)
    assert staged is not None
    table.commit(staged, WINDOW.num_slots(chunk + 1))


def box(axes: Axes, x: float, y: float, width: float, height: float, color: str, **style: object) -> None:
    axes.add_patch(Rectangle((x, y), width, height, facecolor=color, edgecolor=INK, linewidth=0.8, **style))


def label(axes: Axes, x: float, y: float, text: str, size: float = 8.5, **style: object) -> None:
    style = {"ha": "center", "va": "center", "color": INK} | style
    axes.text(x, y, text, fontsize=size, **style)


def bracket(axes: Axes, start: float, stop: float, y: float, text: str) -> None:
    axes.plot([start + 0.4, start + 0.4, stop - 0.4, stop - 0.4], [y, y + 1, y + 1, y], color=INK, linewidth=0.8)
    label(axes, (start + stop) / 2, y + 2.6, text)


def draw_slots(axes: Axes, y: float, num_chunks: int, color_of: dict[int, str], draft: int | None, tail: int) -> int:
    """The logical slots of a branch that has seen `num_chunks`, perhaps while it denoises `draft`; their number."""
    size = WINDOW.chunk_size
    chunks = {WINDOW.entry(chunk): chunk for chunk in range(num_chunks)}
    if draft is not None:
        chunks[WINDOW.entry(draft)] = draft
    for entry, chunk in sorted(chunks.items()):
        color = SINK if entry < WINDOW.sink else color_of.get(chunk, RING)
        box(axes, LEFT + entry * size, y, size, 4, color)
        name = f"chunk {chunk}" + (" (draft)" if chunk == draft else "")
        label(axes, LEFT + (entry + 0.5) * size, y + 2, name)
    num_slots = len(chunks) * size
    if tail:
        box(axes, LEFT + num_slots, y, tail, 4, TAIL)
    return num_slots + tail


def draw_table(axes: Axes, y: float, name: str, blocks: Sequence[int], colors: dict[int, str]) -> None:
    label(axes, LEFT - 2, y + 1.7, name, ha="right")
    for index, block in enumerate(blocks):
        box(axes, LEFT + index * BLOCK_SIZE, y, BLOCK_SIZE, 3.4, colors[block])
        label(axes, LEFT + (index + 0.5) * BLOCK_SIZE, y + 1.7, f"{block}", 9, weight="bold")


def draw_pool(axes: Axes, y: float, pool: BlockPool, colors: dict[int, str]) -> None:
    label(axes, LEFT - 2, y + 3.0, "the pool", ha="right", weight="bold")
    label(axes, LEFT - 2, y + 0.6, "block id, references", 7.5, ha="right", color=MUTED)
    width = 112 / NUM_BLOCKS
    for block in range(NUM_BLOCKS):
        count = pool.num_references(block)
        x = LEFT + block * width
        box(axes, x + 0.3, y, width - 0.6, 4.4, colors.get(block, FREE), linestyle="-" if count else ":")
        label(axes, x + width / 2, y + 2.9, f"{block}", 9, weight="bold", color=INK if count else MUTED)
        references = f"\N{MULTIPLICATION SIGN}{count}" if count else "free"
        label(axes, x + width / 2, y + 1.1, references, 7, color=INK if count else MUTED)


def draw_legend(axes: Axes, y: float) -> None:
    entries = (
        (SHARED, "history of A and B: the fork copied no byte"),
        (ONLY_A, "history of A alone: B has replaced it"),
        (STAGED, "taken for A's forward, given back if it fails"),
        (ONLY_B, "B's own: copied on its first write, unless overwritten whole"),
        (TEXT, "conditioning, text and image: stored once, read by both"),
    )
    for index, (color, text) in enumerate(entries):
        x, row = LEFT - 22 + (index % 2) * 64, y - (index // 2) * 3.2
        box(axes, x, row, 3, 2, color)
        label(axes, x + 4.2, row + 1, text, 8.5, ha="left")


def draw(path: Path) -> None:
    pool = BlockPool(NUM_BLOCKS)
    text, image = pool.allocate(3), pool.allocate(2)
    assert text is not None
    assert image is not None
    history = BlockTable(pool, BLOCK_SIZE)
    for chunk in range(HISTORY):
        commit(history, chunk)
    fork = history.fork()
    pool.share([*text, *image])  # B reads the conditioning that A reads
    commit(fork, HISTORY)
    place = WINDOW.place(HISTORY, 1, DRAFT_TOKENS)
    staged = history.stage(place.writes, WINDOW.num_slots(HISTORY), place.num_visible)
    assert staged is not None
    pool.check()

    colors = dict.fromkeys([*text, *image], TEXT)
    colors |= dict.fromkeys(history.blocks, ONLY_A) | dict.fromkeys(fork.blocks, ONLY_B)
    colors |= dict.fromkeys(set(history.blocks) & set(fork.blocks), SHARED) | dict.fromkeys(staged.fresh, STAGED)

    figure = Figure(figsize=(11.2, 7.0), facecolor=PAPER)
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0.01, 0.01, 0.98, 0.98))
    axes.set_xlim(-25, 115)
    axes.set_ylim(-5, 68)
    axes.axis("off")

    size = WINDOW.chunk_size
    label(axes, LEFT - 22, 65, "Session A denoises chunk 7", 12, ha="left", weight="bold")
    bracket(axes, LEFT, LEFT + size, 57.6, "sink")
    bracket(axes, LEFT + size, LEFT + WINDOW.max_chunks * size, 57.6, "ring: the newest chunk takes the oldest's place")
    bracket(axes, LEFT + 100, LEFT + 100 + DRAFT_TOKENS, 57.6, "draft tail")
    label(axes, LEFT - 2, 55, "logical slots", ha="right")
    visible = draw_slots(axes, 53, HISTORY, {HISTORY: STAGED}, HISTORY, DRAFT_TOKENS)
    label(axes, LEFT + 100 + DRAFT_TOKENS / 2, 55, "actions\nstate", 6)
    axes.annotate("", (LEFT + visible, 51.4), (LEFT, 51.4), arrowprops={"arrowstyle": "<->", "color": MUTED, "lw": 0.9})
    label(axes, LEFT + visible / 2, 49.8, f"the forward sees slots [0, {visible}): a prefix, no mask", color=MUTED)
    draw_table(axes, 44.4, "the forward's table", staged.blocks, colors)
    draw_table(axes, 39.6, "A's committed table", history.blocks, colors)
    label(
        axes,
        LEFT,
        37.6,
        f"blocks of {BLOCK_SIZE} slots, chunks of {size}: a chunk may begin and end inside a block. "
        "Until the commit, A's history is untouched.",
        7.8,
        ha="left",
        color=MUTED,
    )

    label(
        axes,
        LEFT - 22,
        32.4,
        "Session B, a fork of A, has committed a chunk 7 of its own",
        12,
        ha="left",
        weight="bold",
    )
    label(axes, LEFT - 2, 27, "logical slots", ha="right")
    draw_slots(axes, 25, HISTORY + 1, {HISTORY: ONLY_B}, None, 0)
    draw_table(axes, 20, "B's committed table", fork.blocks, colors)

    axes.add_patch(
        FancyBboxPatch(
            (-22, 8.2), 135.5, 7.6, boxstyle="round,pad=0.6", facecolor="#f7f8fa", edgecolor="none", zorder=0
        )
    )
    draw_pool(axes, 9.8, pool, colors)
    draw_legend(axes, 2.6)

    mpl.rcParams["svg.hashsalt"] = "worldkv"  # the same picture is the same file
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, metadata={"Date": None} if path.suffix == ".svg" else None)


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "img" / "cache.svg")
