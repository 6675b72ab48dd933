"""The table of ticks: live on a terminal, plain lines anywhere else."""

from __future__ import annotations

import io
import re

import pytest

from worldkv.show.live_table import LiveTable
from worldkv.show.records import TickRecord


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def _record(tick: int, reason: str | None = None) -> TickRecord:
    timings = {"queue": 0.1, "encode": 20.0, "commit": 10.0, "denoise": 70.0, "total": 100.0 + tick}
    return TickRecord(tick, "robot-with-a-long-name", timings, 3, 5, 27, reason)


def test_without_a_terminal_it_prints_one_plain_line_per_tick() -> None:
    out = io.StringIO()
    with LiveTable(9, file=out) as table:
        table.add(_record(0, "first tick"))
        table.note("wrist camera is black")
        table.add(_record(1))
    lines = out.getvalue().splitlines()
    assert lines[0].split() == [
        *("tick", "session", "queue", "encode", "commit", "denoise", "total", "ms", "frames", "blocks"),
        *("window", "restart"),
    ]
    assert re.sub(" +", " ", lines[1]) == " 0 robot-with 0.1 20.0 10.0 70.0 100.0 3/9 5/32 first tick"
    assert lines[2] == "wrist camera is black"
    assert lines[3].split()[-1] == "5/32"
    assert lines[4] == "2 ticks, median 100.5 ms, slowest 101.0 ms"
    assert "\x1b" not in out.getvalue()


def test_on_a_terminal_it_is_a_table_with_the_newest_ticks_and_a_summary() -> None:
    pytest.importorskip("rich")
    out = Terminal()
    with LiveTable(9, title="demo", file=out) as table:
        for tick in range(30):
            table.add(_record(tick, "window full" if tick == 29 else None))
        table.note("[bold] is not markup here")
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", out.getvalue())
    assert "[bold] is not markup here" in text
    last = text[text.rindex("demo") :]
    assert "30 ticks, median 114.5 ms, slowest 129.0 ms" in last
    assert re.search(r"^ *29 .*■■■······ 3 +5/32 +window full", last, flags=re.M)
    assert not re.search(r"^ *5 ", last, flags=re.M), "only the newest rows stay"
    assert "robot-with" not in last, "a single session needs no name"


def test_several_sessions_are_named() -> None:
    pytest.importorskip("rich")
    out = Terminal()
    with LiveTable(9, file=out) as table:
        for session in ("left arm", "right arm"):
            table.add(TickRecord(0, session, {"total": 1.0}, 1, 1, 1))
    assert "right arm" in out.getvalue()


def test_an_error_inside_leaves_the_terminal_usable() -> None:
    pytest.importorskip("rich")
    out = Terminal()
    with pytest.raises(ZeroDivisionError), LiveTable(9, file=out):
        _ = 1 // 0
    assert out.getvalue().count("\x1b[?25l") == out.getvalue().count("\x1b[?25h"), "the cursor stays hidden"
