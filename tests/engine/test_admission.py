"""At the edge of a tiny pool: whoever was let in never runs out of blocks, and what is refused is told the sum."""

from __future__ import annotations

import random
from concurrent.futures import Future
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from engines import rest  # noqa: E402
from toy_model import Injected, ToyInputs, ToyModel, make_toy_engine  # noqa: E402

from worldkv.engine.engine import Engine  # noqa: E402
from worldkv.errors import AdmissionRefused, OutOfBlocks, SessionBusy, SessionEnded, SessionNotFound  # noqa: E402

STEPS = 400
EXPLAINED = (AdmissionRefused, SessionBusy, SessionEnded, SessionNotFound, Injected)


class Adversary:
    """Does one thing after the other, at random, without waiting for what it began."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self.engine, self.dice = engine, random.Random(seed)
        self.sessions: list[Any] = []
        self.snapshots: list[Any] = []
        self.ticks: list[Future[Any]] = []
        self.refusals: list[str] = []

    def step(self) -> None:
        acts = {self.open: 3, self.tick: 14, self.settle: 4, self.fork: 2, self.snapshot: 2, self.restore: 2}
        acts |= {self.release: 3, self.reset: 1, self.park: 2, self.close: 2}
        (act,) = self.dice.choices(list(acts), list(acts.values()))
        try:
            act()
        except AdmissionRefused as error:
            self.refusals.append(str(error))
        except (SessionBusy, SessionNotFound):
            pass
        assert self.engine.capacity().num_charged <= self.engine.core.cache.pool.num_blocks

    def open(self) -> None:
        self.sessions.append(self.engine.open_session())

    def tick(self) -> None:
        if self.sessions:
            fail_at = self.dice.choice([None] * 8 + ["encode", "commit", "draft"])
            inputs = ToyInputs(self.dice.random(), self.dice.randrange(5), fail_at)
            self.ticks.append(self.engine.submit(self.dice.choice(self.sessions), inputs))

    def settle(self) -> None:
        """Let what was begun come to its end, so that not all is cancelled."""
        for tick in self.ticks[-3:]:
            tick.exception(10)

    def fork(self) -> None:
        if source := (self.sessions + self.snapshots):
            self.sessions.append(self.engine.fork(self.dice.choice(source)))

    def snapshot(self) -> None:
        if self.sessions:
            self.snapshots.append(self.engine.snapshot(self.dice.choice(self.sessions)))

    def restore(self) -> None:
        if self.sessions and self.snapshots:
            self.engine.restore(self.dice.choice(self.sessions), self.dice.choice(self.snapshots))

    def release(self) -> None:
        if self.snapshots:
            self.engine.release(self._take(self.snapshots))

    def reset(self) -> None:
        if self.sessions:
            self.engine.reset(self.dice.choice(self.sessions))

    def park(self) -> None:
        if self.sessions:
            self.engine.park(self.dice.choice(self.sessions))

    def close(self) -> None:
        if self.sessions:
            self.engine.close(self._take(self.sessions), "test")

    def _take(self, things: list[Any]) -> Any:
        return things.pop(self.dice.randrange(len(things)))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("park_when_full", [True, False])
@pytest.mark.parametrize("policy", ["reset", "slide"])
def test_no_tick_that_was_admitted_fails_for_lack_of_memory(policy: Any, park_when_full: bool, seed: int) -> None:
    model = ToyModel(policy, sink=seed % 2)
    block_size = (2, 4, 8)[seed]
    num_blocks = 3 * model.spec.blocks_per_session(block_size) + seed  # three sessions, and next to no more
    engine = make_toy_engine(model, block_size=block_size, num_blocks=num_blocks, park_when_full=park_when_full)
    adversary = Adversary(engine, seed)
    for _ in range(STEPS):
        adversary.step()
    errors = [error for tick in adversary.ticks if (error := tick.exception(10)) is not None]
    assert not [error for error in errors if isinstance(error, OutOfBlocks)], "admitted, and then no memory"
    assert not [error for error in errors if not isinstance(error, EXPLAINED)], errors
    assert len(adversary.ticks) - len(errors) > 20, "it has to get something done"
    assert adversary.refusals, "it has to reach the edge"
    for text in adversary.refusals:
        assert "it needs" in text
        assert "are not promised to others; close a session, release a snapshot" in text
    for snapshot in adversary.snapshots:
        engine.release(snapshot)
    for session in adversary.sessions:
        engine.close(session, "done")
    rest(engine)
    assert engine.capacity().num_charged == engine.capacity().blocks_shared
    assert engine.core.cache.pool.num_used == 0
    engine.core.cache.pool.check()
    engine.shutdown()
