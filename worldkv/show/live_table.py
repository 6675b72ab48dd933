"""A table of ticks that grows while they happen; plain lines where there is no terminal or no rich.

Knows terminals. Does not know where the records come from.
"""

from __future__ import annotations

import statistics
import sys
from collections import deque
from typing import TYPE_CHECKING, Any, Self, TextIO

from worldkv.show.records import TickRecord
from worldkv.show.terminal import has_rich
from worldkv.words import count

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_STAGES = ("queue", "encode", "commit", "denoise")
_MAX_ROWS, _LINES_AROUND = 40, 7  # the lines that title, header, caption and prompt take
_PLAIN = "{:>5}  {:<10} {:>8} {:>8} {:>8} {:>8} {:>8}  {:>7} {:>9}  {}"


class LiveTable:
    """Shows ticks as they are added; use as a context manager.

    `window_frames`: of a full window, 0 where nobody knows. `file`: where to write; a terminal gets the live table.
    """

    def __init__(self, window_frames: int, *, title: str = "ticks", file: TextIO | None = None) -> None:
        self._window_frames = window_frames
        self._title = title
        self._file = file if file is not None else sys.stdout
        self._rows: deque[TickRecord] = deque(maxlen=_MAX_ROWS)
        self._totals: list[float] = []
        self._sessions: set[str] = set()
        self._live: Any = None

    def __enter__(self) -> Self:
        if self._file.isatty() and has_rich():
            from rich.console import Console
            from rich.live import Live

            console = Console(file=self._file)
            self._live = Live(self._table(console), console=console, refresh_per_second=8)
            self._live.start()
        else:
            header = ("tick", "session", *_STAGES, "total ms", "frames", "blocks", "window restart")
            self._print(_PLAIN.format(*header))
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.update(self._table(self._live.console))
            self._live.stop()
        elif self._totals:
            self._print(self._summary())

    def add(self, record: TickRecord) -> None:
        """Show one more tick."""
        self._rows.append(record)
        self._totals.append(record.total_ms)
        self._sessions.add(record.session)
        if self._live is not None:
            self._live.update(self._table(self._live.console))
            return
        row = _cells(record, f"{record.frames_cached}/{self._window_frames or '?'}")
        self._print(_PLAIN.format(*row).rstrip())

    def note(self, text: str) -> None:
        """Print a line above the table, such as a warning."""
        if self._live is not None:
            self._live.console.print(text, markup=False, highlight=False)
        else:
            self._print(text)

    def _print(self, line: str) -> None:
        print(line, file=self._file, flush=True)

    def _summary(self) -> str:
        median, slowest = statistics.median(self._totals), max(self._totals)
        return f"{count(len(self._totals), 'tick')}, median {median:.1f} ms, slowest {slowest:.1f} ms"

    def _table(self, console: Console) -> Table:
        """The newest ticks that fit into the terminal; sessions are named once there are two."""
        from rich import box
        from rich.table import Table

        caption = self._summary() if self._totals else "waiting for the first tick"
        several = len(self._sessions) > 1
        padding = 1 if console.width >= 110 else 0
        table = Table(
            title=self._title,
            caption=caption,
            title_justify="left",
            box=box.SIMPLE_HEAD,
            padding=(0, padding),
        )
        for name in ("tick", "session") if several else ("tick",):
            table.add_column(name, style="dim", no_wrap=True)
        for name in _STAGES:
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("total ms", justify="right", style="bold", no_wrap=True)
        table.add_column("frames", no_wrap=True)
        table.add_column("blocks", justify="right", no_wrap=True)
        table.add_column("window restart", style="yellow")
        for record in list(self._rows)[-max(console.height - _LINES_AROUND, 1) :]:
            filled = min(record.frames_cached, self._window_frames or record.frames_cached)
            gauge = f"[green]{'■' * filled}[/][dim]{'·' * (self._window_frames - filled)}[/]"
            tick, session, *rest = _cells(record, f"{gauge} {record.frames_cached}")
            table.add_row(tick, *([session] if several else []), *rest)
        return table


def _cells(record: TickRecord, frames: str) -> list[str]:
    return [
        str(record.tick),
        record.session[:10],
        *(f"{record.timings.get(stage, 0.0):.1f}" for stage in _STAGES),
        f"{record.total_ms:.1f}",
        frames,
        f"{record.blocks_used}/{record.blocks_used + record.blocks_free}",
        record.restart_reason or "",
    ]
