"""Progress in a terminal, and sizes as people read them. Without rich, or elsewhere: plain lines."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Callable, Iterator

Step = Callable[[int, int], None]  # done, in all


def has_rich() -> bool:
    return importlib.util.find_spec("rich") is not None


@contextlib.contextmanager
def progress(label: str, *, is_bytes: bool = False) -> Iterator[Step]:
    """A progress bar on standard error, driven by step(done, total); one plain line without rich or a terminal."""
    if not (sys.stderr.isatty() and has_rich()):
        print(f"{label} ...", file=sys.stderr, flush=True)
        yield lambda done, total: None
        return
    from rich import progress as rich_progress
    from rich.console import Console

    counts: rich_progress.ProgressColumn = (
        rich_progress.DownloadColumn() if is_bytes else rich_progress.MofNCompleteColumn()
    )
    columns = (
        rich_progress.SpinnerColumn(),
        rich_progress.TextColumn("{task.description}"),
        rich_progress.BarColumn(),
        counts,
        rich_progress.TimeElapsedColumn(),
    )
    with rich_progress.Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(label, total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total or None)


@contextlib.contextmanager
def spinner(label: str) -> Iterator[None]:
    """Something that moves on standard error while nobody can say how long it takes."""
    if not (sys.stderr.isatty() and has_rich()):
        print(f"{label} ...", file=sys.stderr, flush=True)
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(label):
        yield


def size_text(num_bytes: float) -> str:
    """A size for people."""
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.4g} {unit}" if unit != "B" else f"{num_bytes:.0f} B"
        num_bytes /= 1024
    return f"{num_bytes:.2f} GiB"
