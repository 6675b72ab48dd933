"""`worldkv top`: a server's sessions and blocks in a terminal, twice a second. Imports no torch."""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

from websockets.exceptions import ConnectionClosed, InvalidHandshake
from websockets.sync.client import ClientConnection, connect

from worldkv.cli.common import FAILED, OK, has_rich, size_text
from worldkv.errors import ConnectionLost

_BAR = 40
_SPARKS = "▁▂▃▄▅▆▇█"


def run(arguments: argparse.Namespace) -> int:
    url = arguments.url if "://" in arguments.url else f"ws://{arguments.url}"
    try:
        with connect(f"{url.rstrip('/')}/v1/console", open_timeout=10) as socket:
            socket.send(json.dumps({"key": arguments.api_key}))
            hello = _hear(socket, "hello")
            if arguments.once or not sys.stdout.isatty() or not has_rich():
                print("\n".join(lines(hello, _hear(socket, "overview"))))
                return OK
            _show(socket, hello)
    except (OSError, InvalidHandshake, ConnectionClosed) as error:
        raise ConnectionLost(f"{url}: {error}; check the address, and that the server runs") from error
    except KeyboardInterrupt:
        return OK
    return FAILED


def _show(socket: ClientConnection, hello: dict[str, Any]) -> None:
    from rich.live import Live
    from rich.text import Text

    with Live(screen=True, auto_refresh=False) as screen:
        while True:
            screen.update(Text("\n".join(lines(hello, _hear(socket, "overview")))), refresh=True)


def _hear(socket: ClientConnection, kind: str) -> dict[str, Any]:
    while True:
        message = socket.recv(timeout=30)
        told: dict[str, Any] = json.loads(message) if isinstance(message, str) else {}
        if told.get("type") == "refused":
            raise ConnectionLost(f"{told['why']}; give --api-key")
        if told.get("type") == kind:
            return told


def lines(hello: dict[str, Any], told: dict[str, Any]) -> list[str]:
    """What is shown, for people."""
    memory, robot = told["memory"], hello["robot"]
    used, total = memory["used"], memory["total"]
    filled = round(_BAR * used / max(total, 1))
    note = "  RANDOM WEIGHTS" if hello["random_weights"] else ""
    shown = [
        f"worldkv {hello['version']}  {robot['tag']}  {hello['model']}  {hello['device']} {hello['attention']}{note}",
        f"{time.strftime('%H:%M:%S', time.localtime(told['now']))}  {len(told['sessions'])} sessions, "
        f"{told['num_parked']} parked, {told['num_other_sessions']} of other keys, {told['more_sessions']} more fit; "
        f"{told['in_flight']} ticks in flight; {told['refused']} refused",
        f"blocks [{'#' * filled}{'.' * (_BAR - filled)}] {used} of {total}, {memory['charged']} promised, "
        f"{size_text(used * memory['bytes_per_block'])}",
        "",
        f"{'session':<24} {'state':<7} {'frames':>7} {'blocks':>7} {'ticks':>7} {'last':>9} {'spare':>8}  latency",
    ]
    shown += [_session_line(session, hello["window_frames"]) for session in told["sessions"]]
    return shown


def _session_line(session: dict[str, Any], window: int) -> str:
    latency = session["latency_ms"]
    last = f"{latency[-1]:.0f} ms" if latency else ""
    spare = "" if session["margin_s"] is None else f"{session['margin_s']:.2f} s"
    state = "busy" if session["busy"] else session["state"]
    frames = f"{session['frames_seen']}/{window}"
    return (
        f"{session['id'][:24]:<24} {state:<7} {frames:>7} {session['blocks']:>7} {session['ticks']:>7} {last:>9} "
        f"{spare:>8}  {sparks(latency)}"
    )


def sparks(values: list[float]) -> str:
    """A line of bars, the tallest the largest value."""
    top = max(values, default=0.0) or 1.0
    return "".join(_SPARKS[min(len(_SPARKS) - 1, int(len(_SPARKS) * value / top))] for value in values)
