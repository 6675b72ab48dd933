"""What a session feels while another one is moved to the host and back, over and over."""

from __future__ import annotations

import threading
import time

import numpy as np

from worldkv.bench.paced import Figures
from worldkv.bench.ticks import TICKS_PER_WINDOW, fill_window, make_inputs
from worldkv.bench.watching import Bench
from worldkv.engine.engine import SessionHandle


def measure_parking(bench: Bench, windows: int = 2) -> Figures:
    """Ticks of one session through whole windows, in milliseconds: alone, then beside a full one that is parked and
    comes back all the time. The engine has room for these two, so that host memory is pinned ahead as in a full pool.
    """
    active, moved = bench.engine.open_session(), fill_window(bench)
    first_ms = _ticks(bench, active, 1)  # host memory is pinned meanwhile
    alone_ms = _ticks(bench, active, windows)
    parks: list[float] = []
    returns: list[float] = []
    stop = threading.Event()

    def move() -> None:
        while not stop.is_set():
            for method, seconds in ((bench.engine.park, parks), (bench.engine.resume, returns)):
                began = time.perf_counter()
                method(moved)
                seconds.append(time.perf_counter() - began)

    mover = threading.Thread(target=move, daemon=True)
    mover.start()
    beside_ms = _ticks(bench, active, windows)
    stop.set()
    mover.join()
    bench.engine.park(moved)
    num_bytes = bench.engine.describe(moved).bytes_parked
    for session in (active, moved):
        bench.engine.close(session, "measured")
    return {
        "parked_gib": round(num_bytes / 2**30, 2),
        "moves": len(parks) + len(returns),
        "first_park_s": round(parks[0], 3),
        "park_s": round(float(np.median(parks)), 3),
        "return_s": round(float(np.median(returns)), 3),
        "pinning_ms": first_ms,
        "alone_ms": alone_ms,
        "beside_ms": beside_ms,
        "worst_ratio": round(max(b / a for a, b in zip(alone_ms, beside_ms, strict=True)), 3),
    }


def _ticks(bench: Bench, session: SessionHandle, windows: int) -> list[float]:
    """The longest of `windows` ticks at each fill of the window."""
    longest = [0.0] * TICKS_PER_WINDOW
    for _ in range(windows):
        for tick in range(TICKS_PER_WINDOW):
            began = time.perf_counter()
            bench.tick(session, make_inputs(bench.model, tick, first=tick == 0))
            longest[tick] = max(longest[tick], 1e3 * (time.perf_counter() - began))
    return [round(ms, 1) for ms in longest]
