"""What begins in a turn of the event loop: those that go last have theirs one by one, and nobody is forgotten."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import time
from collections.abc import Iterator

import pytest
from attackers import opened
from server_fakes import FakePolicy, ask, eventually, infer_message, raw_client, serving, told

from worldkv.server.turns import FairSelector, Turns

ONE = 0.0  # seconds that a turn may take: nothing is as short, so there is one in each


@contextlib.contextmanager
def pairs(num: int) -> Iterator[list[tuple[socket.socket, socket.socket]]]:
    """Connected sockets: on the first of each something has come."""
    with contextlib.ExitStack() as stack:
        made = [socket.socketpair() for _ in range(num)]
        for ours, theirs in made:
            stack.enter_context(ours)
            stack.enter_context(theirs).send(b"x")
        yield made


def test_those_that_go_last_are_told_of_in_the_order_of_coming() -> None:
    last: set[int] = set()
    with pairs(4) as made, contextlib.closing(FairSelector(last, set(), ONE)) as selector:
        for ours, _ in made:
            last.add(ours.fileno())
            selector.register(ours, 1)
        order = [key.fd for _ in range(8) for key, _ in selector.select(None)]
        assert sorted(order[:4]) == sorted(last), "one was told of twice, and another not at all"
        assert order[:4] == order[4:]


def test_as_many_are_told_of_as_are_served_in_time() -> None:
    last: set[int] = set()
    with pairs(6) as made, contextlib.closing(FairSelector(last, set(), turn_s=0.05)) as selector:
        for ours, _ in made:
            last.add(ours.fileno())
            selector.register(ours, 1)
        quick = [len(selector.select(None)) for _ in range(4)]
        assert quick == [1, 2, 4, 6]
        selector.select(None)
        shorter = len(selector.select(None))
        for _ in range(3):
            made_at_once = len(selector.select(None))
            time.sleep(0.06)
        assert made_at_once < shorter


def test_others_are_told_of_at_once_and_alone_while_the_loop_has_something_to_do() -> None:
    last: set[int] = set()
    with pairs(3) as made, contextlib.closing(FairSelector(last, set(), ONE)) as selector:
        for ours, _ in made:
            selector.register(ours, 1)
        first, *strangers = (ours.fileno() for ours, _ in made)
        last.update(strangers)
        assert [[key.fd for key, _ in selector.select(0)] for _ in range(4)] == [[first]] * 4
        selector.unregister(made[0][0])
        assert selector.select(0) == []
        assert len(selector.select(None)) == 1, "nobody else wants the loop"


def test_whoever_goes_last_has_a_turn_though_the_loop_is_never_idle() -> None:
    last: set[int] = set()
    with pairs(2) as made, contextlib.closing(FairSelector(last, set(), ONE)) as selector:
        for ours, _ in made:
            last.add(ours.fileno())
            selector.register(ours, 1)
        assert {key.fd for _ in range(100) for key, _ in selector.select(0)} == last


def test_newcomers_wait_for_one_of_those_that_go_last_and_not_for_all_of_them() -> None:
    last: set[int] = set()
    doors: set[int] = set()
    with pairs(4) as made, contextlib.closing(FairSelector(last, doors, ONE)) as selector:
        for ours, _ in made:
            last.add(ours.fileno())
            selector.register(ours, 1)
        door = made[0][0].fileno()
        last.discard(door)
        doors.add(door)
        assert selector.select(0) == [], "newcomers come before what the loop has to do"
        told = [[key.fd for key, _ in selector.select(None)] for _ in range(3)]
        assert all(each[0] == door and len(each) == 2 for each in told)
        assert {each[1] for each in told} == last


def test_a_loop_of_one_that_goes_last_and_one_that_does_not_loses_nothing() -> None:
    last: set[int] = set()

    async def run() -> list[bytes]:
        loop = asyncio.get_running_loop()
        with pairs(2) as made:
            last.add(made[0][0].fileno())
            for ours, _ in made:
                ours.setblocking(False)
            return list(await asyncio.gather(*(loop.sock_recv(ours, 1) for ours, _ in made)))

    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(FairSelector(last, set()))) as runner:
        assert runner.run(asyncio.wait_for(run(), 5)) == [b"x", b"x"]


def test_a_socket_goes_first_once_a_tick_of_it_was_answered() -> None:
    with serving(FakePolicy()) as server:
        gate = server._gate
        with raw_client(server.port) as robot, opened(server.port):
            ask(robot, {"endpoint": "reset"})
            eventually(lambda: len(gate.last) == 2)  # both are strangers
            assert told(ask(robot, infer_message()))[0] == 1
            assert len(gate.last) == 1


@pytest.mark.parametrize("pause", [1, 3])
def test_one_begins_every_few_turns_of_the_loop_in_the_order_of_coming(pause: int) -> None:
    async def run() -> list[tuple[int, int]]:
        turns, begun, turn = Turns(pause), [], 0

        async def ask(number: int) -> None:
            await turns.begin()
            begun.append((turn, number))

        asked = [asyncio.create_task(ask(number)) for number in range(20)]
        for turn in range(60 * pause):
            if turn == 3:
                asked[10].cancel()
            await asyncio.sleep(0)
        last = asyncio.create_task(ask(20))
        await asyncio.wait_for(last, 5)
        return begun

    begun = asyncio.run(run())
    assert [number for _, number in begun] == [*range(10), *range(11, 21)]
    at = [turn for turn, _ in begun[:-1]]
    first, *gaps = (later - before for before, later in itertools.pairwise(at))
    assert set(gaps) == {pause}
    assert first == pause + 1, "whoever waits is called a turn before it begins"
