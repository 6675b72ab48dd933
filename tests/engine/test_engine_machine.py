"""All session operations in any order, faults included, against dictionaries of lists."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from engines import inside, rest  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from hypothesis.stateful import (  # noqa: E402
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)
from toy_model import (  # noqa: E402
    BRANCHES,
    CHUNK,
    LAYERS,
    Injected,
    ToyInputs,
    ToyModel,
    expected_average,
    make_toy_engine,
    sign,
)

from worldkv.errors import AdmissionRefused, SessionEnded  # noqa: E402

FAULTS = ("begin", "encode", "commit", "draft")


@dataclass
class Expected:
    """What a session must be: its committed numbers since the last restart, and its prompt."""

    numbers: tuple[float, ...] = ()
    prompt: int | None = None


class EngineMachine(RuleBasedStateMachine):
    sessions = Bundle("sessions")
    snapshots = Bundle("snapshots")

    @initialize(
        policy=st.sampled_from(["reset", "slide"]),
        sink=st.integers(0, 1),
        block_size=st.sampled_from([2, 4, 8]),
        park=st.booleans(),
    )
    def start(self, policy: Any, sink: int, block_size: int, park: bool) -> None:
        self.model = ToyModel(policy, sink=sink)
        room = 3 * self.model.spec.blocks_per_session(block_size) + 5  # some for snapshots
        self.engine = make_toy_engine(
            self.model, block_size=block_size, num_blocks=room, park_when_full=park, batch_invariant=True
        )
        self.expected: dict[Any, Expected] = {}
        self.frozen: dict[Any, Expected] = {}
        self.counter = 0.0

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            self.engine.shutdown()
            self.engine.core.cache.pool.check()
            assert self.engine.core.cache.pool.num_used == 0, "blocks outlived their engine"

    # what a tick must do

    def _next(self, session: Any, prompt: int) -> tuple[ToyInputs, Expected, tuple[float, ...]]:
        """Inputs of a tick, what the session is after it, and the averages it must return."""
        self.counter += 1.0
        before, window = self.expected[session], self.model.spec.window
        restart = before.prompt != prompt
        if window.policy == "reset":
            restart = restart or not window.has_room(len(before.numbers), 2)
        numbers = (self.counter,) if restart else (*before.numbers, self.counter)
        # the draft is chunk number len(numbers): it takes the place of what leaves the window for it
        visible = [numbers[i] for i in window.visible_chunks(len(numbers) + 1) if i < len(numbers)]
        averages = tuple(expected_average(visible, prompt, branch) for branch in BRANCHES)
        return ToyInputs(self.counter, prompt), Expected(numbers, prompt), averages

    def _refused(self, session: Any, future: Any) -> bool:
        """Whether the tick was turned away; only a session that had given its room up may be."""
        refused = isinstance(future.exception(10), AdmissionRefused)
        if refused:
            assert self.engine.describe(session).parked or not inside(self.engine, session).num_blocks_charged, (
                "refused although it is resident"
            )
        return refused

    def _check(self, session: Any, future: Any, after: Expected, averages: tuple[float, ...]) -> None:
        if not self._refused(session, future):
            assert future.result().result.averages == pytest.approx(averages, rel=1e-12), "wrong history was visible"
            self.expected[session] = after

    # rules

    @rule(target=sessions)
    def open(self) -> Any:
        try:
            session = self.engine.open_session()
        except AdmissionRefused:
            assert not self.engine.capacity().num_more_sessions, "refused although there is room"
            return multiple()
        self.expected[session] = Expected()
        return session

    @rule(session=sessions, prompt=st.integers(0, 1))
    def tick(self, session: Any, prompt: int) -> None:
        inputs, after, averages = self._next(session, prompt)
        self._check(session, self.engine.submit(session, inputs), after, averages)

    @rule(first=sessions, second=sessions, prompt=st.integers(0, 1))
    def two_ticks_at_once(self, first: Any, second: Any, prompt: int) -> None:
        if first is second:
            return
        pending = []
        for session in (first, second):
            inputs, after, averages = self._next(session, prompt)
            pending.append((session, self.engine.submit(session, inputs), after, averages))
        for entry in pending:
            self._check(*entry)

    @rule(victim=sessions, other=sessions, fail_at=st.sampled_from(FAULTS), prompt=st.integers(0, 2))
    def a_tick_fails_beside_another(self, victim: Any, other: Any, fail_at: str, prompt: int) -> None:
        doomed = self.engine.submit(victim, ToyInputs(-1.0, prompt, fail_at))
        if other is not victim:
            inputs, after, averages = self._next(other, 0)
            self._check(other, self.engine.submit(other, inputs), after, averages)
        if not self._refused(victim, doomed):
            error = doomed.exception()
            if error is None:  # "encode" does not run where the conditioning is stored
                assert fail_at == "encode"
                self._accept(victim, -1.0, prompt)
            else:
                assert isinstance(error, Injected), error

    def _accept(self, session: Any, number: float, prompt: int) -> None:
        before, window = self.expected[session], self.model.spec.window
        restart = before.prompt != prompt or (window.policy == "reset" and not window.has_room(len(before.numbers), 2))
        self.expected[session] = Expected((number,) if restart else (*before.numbers, number), prompt)

    @rule(session=sessions, prompt=st.integers(0, 1), fail_at=st.sampled_from([None, *FAULTS[1:]]))
    def a_tick_begins_ahead(self, session: Any, prompt: int, fail_at: str | None) -> None:
        """With the number that the next tick has, unless others come between; nothing is history by that."""
        future = self.engine.work_ahead(session, ToyInputs(self.counter + 1.0, prompt, fail_at))
        assert isinstance(future.exception(10), Injected | AdmissionRefused | None)

    @rule(session=sessions, prompt=st.integers(0, 1))
    def a_tick_begins_ahead_and_is_asked_for(self, session: Any, prompt: int) -> None:
        begun = self.engine.work_ahead(session, ToyInputs(self.counter + 1.0, prompt))
        inputs, after, averages = self._next(session, prompt)
        self._check(session, self.engine.submit(session, inputs), after, averages)
        if begun.exception(10) is None:
            assert inside(self.engine, session).ahead is None

    @rule(session=sessions, closes=st.booleans())
    def a_tick_is_cancelled(self, session: Any, closes: bool) -> None:
        hold = threading.Event()
        inputs = ToyInputs(-2.0, 0, hold=hold)
        future = self.engine.submit(session, inputs)
        while not inputs.held.wait(0.01):
            if future.done():
                assert self._refused(session, future)
                return
        self.engine.reset(session)
        hold.set()
        with pytest.raises(SessionEnded):
            future.result(10)
        self.expected[session] = Expected()

    @rule(session=sessions)
    def reset(self, session: Any) -> None:
        self.engine.reset(session)
        self.expected[session] = Expected()

    @rule(session=consumes(sessions))
    def close(self, session: Any) -> None:
        self.engine.close(session, "test")
        self.engine.close(session, "again")
        del self.expected[session]

    @rule(session=sessions)
    def park(self, session: Any) -> None:
        self.engine.park(session)

    @rule(target=snapshots, session=sessions)
    def snapshot(self, session: Any) -> Any:
        try:
            snapshot = self.engine.snapshot(session)
        except AdmissionRefused:
            return multiple()
        self.frozen[snapshot] = self.expected[session]
        return snapshot

    @rule(session=sessions, snapshot=snapshots)
    def restore(self, session: Any, snapshot: Any) -> None:
        try:
            self.engine.restore(session, snapshot)
        except AdmissionRefused:
            return
        self.expected[session] = self.frozen[snapshot]

    @rule(target=sessions, source=st.one_of(sessions, snapshots))
    def fork(self, source: Any) -> Any:
        try:
            fork = self.engine.fork(source)
        except AdmissionRefused:
            return multiple()
        self.expected[fork] = self.frozen[source] if source in self.frozen else self.expected[source]
        return fork

    @rule(snapshot=consumes(snapshots))
    def release(self, snapshot: Any) -> None:
        self.engine.release(snapshot)
        del self.frozen[snapshot]

    # what must always hold

    @invariant()
    def the_books_balance(self) -> None:
        if not hasattr(self, "engine"):
            return
        rest(self.engine)  # everything asked for has been done
        cache = self.engine.core.cache
        cache.pool.check()
        held = {int(block) for entry in cache.conditioning._entries.values() for block in entry.blocks}
        frozen = [self.engine.core.snapshots[snapshot].kv for snapshot in self.frozen]
        begun = [ahead.rollback for s in self.expected if (ahead := inside(self.engine, s).ahead) is not None]
        for kv in (*(inside(self.engine, s).kv for s in self.expected), *frozen, *begun):
            for branch in kv.branches.values():
                held |= set(branch.table.blocks)
        assert cache.pool.num_used == len(held), "used blocks are not those that somebody holds"
        assert len(held) <= self.engine.core.admission.num_charged, "more is held than was charged"

    @invariant()
    def committed_numbers_are_what_was_observed(self) -> None:
        if not hasattr(self, "engine"):
            return
        rest(self.engine)
        for session, expected in self.expected.items():
            if self.engine.describe(session).parked or inside(self.engine, session).ahead is not None:
                continue
            window = self.model.spec.window
            for name, branch in inside(self.engine, session).kv.branches.items():
                assert branch.num_chunks == len(expected.numbers)
                wanted = [expected.numbers[i] for i in window.visible_chunks(len(expected.numbers))]
                for layer in range(LAYERS):
                    k, v = inside(self.engine, session).kv.layer_kv(name, layer)
                    tokens = [number + sign(name) + layer for number in wanted for _ in range(CHUNK)]
                    assert k[:, 0, 0].tolist() == tokens
                    assert v[:, 0, 1].tolist() == tokens


def test_any_order_of_operations_keeps_every_history_and_the_books() -> None:
    run_state_machine_as_test(
        EngineMachine,
        settings=settings(
            max_examples=80,
            stateful_step_count=40,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
