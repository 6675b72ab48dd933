"""Thousands of ticks of one session: nothing grows once the window is full."""

from __future__ import annotations

import tracemalloc

import pytest

torch = pytest.importorskip("torch")

from engines import inside, rest  # noqa: E402
from toy_model import ToyInputs, ToyModel, make_toy_engine  # noqa: E402

NUM_TICKS = 2500


def test_thousands_of_ticks_past_frame_1024_grow_nothing() -> None:
    engine = make_toy_engine(ToyModel("slide", window=5, sink=1), max_sessions=1)
    session = engine.open_session()
    seen: list[tuple[int, int, int]] = []
    tracemalloc.start()
    for number in range(NUM_TICKS):
        engine.submit(session, ToyInputs(float(number))).result()
        if number >= 100 and number % 350 == 0:
            rest(engine)
            blocks = [len(branch.table.blocks) for branch in inside(engine, session).kv.branches.values()]
            seen.append((sum(blocks), engine.core.cache.pool.num_used, tracemalloc.get_traced_memory()[0]))
    tracemalloc.stop()
    assert inside(engine, session).kv.branches["left"].num_chunks == NUM_TICKS
    assert len({table for table, _, _ in seen}) == 1, "block tables grew"
    assert len({used for _, used, _ in seen}) == 1, "blocks in use grew"
    memory = [held for _, _, held in seen]
    assert max(memory) - memory[0] < 64 * 1024, f"host memory grew: {memory}"
    engine.shutdown()


def test_the_work_of_a_tick_does_not_depend_on_its_number() -> None:
    engine = make_toy_engine(ToyModel("slide", window=5, sink=1), max_sessions=1)
    session = engine.open_session()
    allocated: list[int] = []
    allocate = engine.core.cache.pool.allocate

    def counted(count: int) -> list[int] | None:
        allocated[-1] += count
        return allocate(count)

    engine.core.cache.pool.allocate = counted  # type: ignore[method-assign]
    for number in range(1200):
        allocated.append(0)
        engine.submit(session, ToyInputs(float(number))).result()
    period = 5 * 4  # the ring's length times the block size: after it the layout recurs
    assert allocated[100 : 100 + period] == allocated[1000 : 1000 + period]
    engine.shutdown()
