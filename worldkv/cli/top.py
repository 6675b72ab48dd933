"""`worldkv top`: a server's sessions and blocks in a terminal, twice a second. Imports no torch."""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from worldkv.cli.common import add_server_address
from worldkv.cli.errors import OK
from worldkv.show.terminal import has_rich, size_text
from worldkv.words import count
from worldkv_client.console import console_feed, hear

if TYPE_CHECKING:
    from websockets.sync.client import ClientConnection

_BAR, _NAME = 40, 24  # columns
_SPARKS = "▁▂▃▄▅▆▇█"


MORE = "What the console's first view shows; Ctrl-C ends it. Without a terminal, or with --once, one picture."
EXAMPLE = "worldkv top --url ws://gpu-box:8000"


def add_options(parser: argparse.ArgumentParser) -> None:
    add_server_address(parser)
    parser.add_argument("--once", action="store_true", help="print once and end")


def run(arguments: argparse.Namespace) -> int:
    with (
        console_feed(arguments.url, arguments.api_key, proxy=arguments.proxy) as (socket, hello),
        suppress(KeyboardInterrupt),
    ):
        if arguments.once or not sys.stdout.isatty() or not has_rich():
            print("\n".join(lines(hello, hear(socket, "overview"))))
        else:
            _show(socket, hello)
    return OK


def _show(socket: ClientConnection, hello: dict[str, Any]) -> None:
    from rich.live import Live
    from rich.text import Text

    with Live(screen=True, auto_refresh=False) as screen:
        while True:
            shown = fitting(lines(hello, hear(socket, "overview")), screen.console.width, screen.console.height)
            screen.update(Text("\n".join(shown)), refresh=True)


def fitting(shown: list[str], width: int, height: int) -> list[str]:
    """What a terminal of that size can show: long lines folded, so that nothing of an id is lost, and a word on what
    is left out below."""
    folded = [line[at : at + width] for line in shown for at in range(0, max(len(line), 1), width)]
    if len(folded) <= height:
        return folded
    return [*folded[: height - 1], f"... {count(len(folded) - height + 1, 'more line')}: worldkv top --once"[:width]]


def lines(hello: dict[str, Any], told: dict[str, Any]) -> list[str]:
    """What is shown, for people."""
    memory = told["memory"]
    used, total = memory["used"], memory["total"]
    filled = round(_BAR * used / max(total, 1))
    note = "  RANDOM WEIGHTS" if hello["random_weights"] else ""
    shown = [
        f"worldkv {hello['version']}  {hello['name']}  {hello['model']}  {hello['device']} {hello['attention']}{note}",
        f"{time.strftime('%H:%M:%S', time.localtime(told['now']))}  {count(len(told['sessions']), 'session')}, "
        f"{told['num_parked']} parked, {told['num_other_sessions']} of other keys, {told['more_sessions']} more fit; "
        f"{count(told['in_flight'], 'tick')} in flight; {told['refused']} refused",
        f"blocks [{'#' * filled}{'.' * (_BAR - filled)}] {used} of {total}, {memory['charged']} promised, "
        f"{size_text(used * memory['bytes_per_block'])}",
        "",
        f"{'session':<{_NAME}} {'state':<7} {'frames':>7} {'blocks':>7} {'ticks':>7} {'last':>9} {'spare':>8}  latency",
    ]
    for session in told["sessions"]:
        shown += _session_lines(session, hello["window_frames"])
    return shown


def _session_lines(session: dict[str, Any], window: int) -> list[str]:
    """One line; an id that is too long for its column stands whole on a line of its own before it."""
    latency = session["latency_ms"]
    last = f"{latency[-1]:.0f} ms" if latency else ""
    spare = "" if session["margin_s"] is None else f"{session['margin_s']:.2f} s"
    state = "busy" if session["busy"] else session["state"]
    frames = f"{session['frames_seen']}/{window}"
    name = session["id"]
    before, name = ([name], "") if len(name) > _NAME else ([], name)
    line = (
        f"{name:<{_NAME}} {state:<7} {frames:>7} {session['blocks']:>7} {session['ticks']:>7} {last:>9} "
        f"{spare:>8}  {sparks(latency)}"
    )
    return [*before, line]


def sparks(values: list[float]) -> str:
    """A line of bars, the tallest the largest value."""
    top = max(values, default=0.0) or 1.0
    return "".join(_SPARKS[min(len(_SPARKS) - 1, int(len(_SPARKS) * value / top))] for value in values)
