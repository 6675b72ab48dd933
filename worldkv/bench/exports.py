"""A session that leaves in bytes and comes back, with its pages and computed anew, beside one moved to the host."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch

from worldkv.bench.paced import Figures
from worldkv.engine.engine import Engine, SessionHandle
from worldkv.models.base import InputsT, ResultT, StateT

_ROUNDS = 3  # that are counted, after one
T = TypeVar("T")


def measure_exports(engine: Engine[InputsT, StateT, ResultT], session: SessionHandle) -> Figures:
    """Bytes, and seconds of each way: `leave_s` until all bytes are there, `back_s` until a tick could go on from them,
    medians. The engine has room for one session more; nobody else uses it."""
    figures: Figures = {"chunks": engine.describe(session).num_chunks}
    for kind in ("pages", "compact"):
        figures[kind] = _measure_kind(engine, session, compact=kind == "compact")
    parks, returns = [], []
    for _ in range(1 + _ROUNDS):
        parks.append(_seconds(engine, lambda: engine.park(session))[0])
        returns.append(_seconds(engine, lambda: engine.resume(session))[0])
    figures["parking"] = {"leave_s": _median(parks), "back_s": _median(returns)}
    return figures


def _measure_kind(engine: Engine[InputsT, StateT, ResultT], session: SessionHandle, *, compact: bool) -> Figures:
    leaves, returns = [], []
    for _ in range(1 + _ROUNDS):
        left_s, data = _seconds(engine, lambda: engine.export(session, compact=compact).to_bytes())
        leaves.append(left_s)
        back_s, came = _seconds(engine, partial(_come_back, engine, data))
        returns.append(back_s)
        inexact = engine.describe(came).inexact
        engine.close(came, "measured").result()
    return {"bytes": len(data), "leave_s": _median(leaves), "back_s": _median(returns), "inexact": inexact}


def _come_back(engine: Engine[InputsT, StateT, ResultT], data: bytes) -> SessionHandle:
    came = engine.import_session(data)
    engine.resume(came)
    return came


def _seconds(engine: Engine[InputsT, StateT, ResultT], work: Callable[[], T]) -> tuple[float, T]:
    """Until it is done, on the device too."""
    began = time.perf_counter()
    done = work()
    device = torch.device(engine.cache_card.device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began, done


def _median(seconds: list[float]) -> float:
    """Of the counted rounds."""
    return round(statistics.median(seconds[1:]), 4)
