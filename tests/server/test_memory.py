"""What requests leave behind: nothing that only a search for cycles would free, and no heap that stays."""

from __future__ import annotations

import gc
import logging
import subprocess
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("diffusers")
pytest.importorskip("fastapi")

from engines import droid_observation, make_engine, make_inputs, rest
from server_fakes import FakePolicy, ask, eventually, raw_client, serving

from worldkv.server import memory
from worldkv.wire import pack


@contextmanager
def no_search() -> Iterator[None]:
    """Only what nobody refers to is freed, as between two searches."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class Camera:
    """Stands for a large array."""


def test_an_errors_frames_are_forgotten_though_its_causes_stand_in_a_ring() -> None:
    def fails() -> None:
        camera = Camera()
        seen.append(weakref.ref(camera))
        raise ValueError

    seen: list[weakref.ref[Camera]] = []
    first: BaseException = ValueError()
    try:
        fails()
    except ValueError as error:
        first = error
    second = KeyError()
    first.__cause__, second.__cause__ = second, first
    assert seen[0]() is not None
    memory.forget_frames(first)
    assert seen[0]() is None


def test_what_was_parked_is_freed_when_its_session_is_closed() -> None:
    """A copy's future held the closure that held the copy: 13 GiB of host memory for a 14B, until a search came by."""
    engine = make_engine("i2v", max_sessions=2)
    try:
        session = engine.open_session()
        engine.submit(session, make_inputs(engine, 0, 1)).result()
        with no_search():
            engine.park(session)
            parked = engine.inspect(lambda core: weakref.ref(core.sessions[session].parked))
            assert parked() is not None
            engine.close(session, "done").result()
            rest(engine)
            eventually(lambda: parked() is None)
    finally:
        engine.shutdown()


def test_a_failed_request_and_its_connection_are_freed_at_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)  # a record that is kept for the report would keep its error
    from worldkv.server import robots

    seen: list[weakref.ref[Any]] = []
    start = robots.Connection.__init__

    def noted(self: robots.Connection, *arguments: Any) -> None:
        start(self, *arguments)
        seen.append(weakref.ref(self))

    monkeypatch.setattr(robots.Connection, "__init__", noted)
    observation = droid_observation(np.random.default_rng(0), 1, "fail")
    with serving(FakePolicy()) as server, no_search():
        with raw_client(server.port) as ws:
            assert "error" in str(ask(ws, pack({**observation, "endpoint": "infer", "session_id": "arm"})))
        with raw_client(server.port) as ws:
            assert "bad_request" in str(ask(ws, b"\x91"))
        eventually(lambda: len(seen) == 2 and all(one() is None for one in seen))


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from /proc")
def test_freed_buffers_go_back_to_the_system() -> None:
    """In a process of its own, since it settles the whole one: rings of large arrays, made by many threads."""
    code = """
import gc, os, threading, time
from worldkv.server import memory
memory.use_few_heaps()
import numpy as np
def mib(): return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGESIZE") / 2**20
def work():
    for _ in range(20):
        ring = [np.ones(size) for size in (1000, 20_000, 200_000)]
        ring.append(ring)
with memory.given_back(every_s=0.1):
    before = mib()
    threads = [threading.Thread(target=work) for _ in range(16)]
    [thread.start() for thread in threads]; [thread.join() for thread in threads]
    until = time.monotonic() + 20
    while mib() > before + 10:
        assert time.monotonic() < until, f"{before:.0f} -> {mib():.0f} MiB"
        time.sleep(0.05)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
