"""A rank that dies, at whatever moment, leaves nobody waiting; a new group goes on from what was exported."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")

from engines import make_engine, make_inputs, pause  # noqa: E402

from worldkv.engine.engine import Engine  # noqa: E402
from worldkv.errors import EngineStopped  # noqa: E402
from worldkv.models.wan.shard import Mesh  # noqa: E402
from worldkv.ranks.channel import Channel  # noqa: E402
from worldkv.ranks.ranks import Ranks  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
TIMEOUT_S = 5.0
BOUND_S = 2 * TIMEOUT_S + 2.0  # after a death, as docs/ranks.md has it; two slow cores need a little more
LONG_S = 60.0  # for what goes before


@pytest.fixture(scope="module")
def exported() -> tuple[bytes, Any]:
    """A session that has run two ticks on one rank, and its third."""
    engine = make_engine(block_size=16)
    session = engine.open_session()
    for seed in (0, 1):
        engine.submit(session, make_inputs(engine, seed, 1 if seed == 0 else 4)).result(60)
    data = engine.export(session).to_bytes()
    third = engine.submit(session, make_inputs(engine, 2)).result(60).result
    engine.shutdown()
    return data, third


@pytest.fixture
def start() -> Iterator[Callable[..., Ranks]]:
    """Starts groups, and closes them in any case."""
    with ExitStack() as groups:
        yield lambda mesh, timeout_s=TIMEOUT_S: groups.enter_context(Ranks.start(mesh, timeout_s=timeout_s))


def kill_when_told(monkeypatch: pytest.MonkeyPatch, ranks: Ranks, victim: int, command: str, nth: int) -> list[float]:
    """SIGKILL for a rank that has just been told to do something, the nth time. Returns when that was, once it was."""
    when: list[float] = []
    sending, count = Channel.send, 0
    channels = {id(lane._channels[victim]) for lane in (ranks.leader.work, ranks.leader.copies)}
    process = ranks._others.processes[victim]

    def send(self: Channel, text: bytes, *rest: Any) -> None:
        nonlocal count
        sending(self, text, *rest)
        if id(self) in channels and json.loads(text)["command"] == command:
            count += 1
            if count == nth:
                when.append(time.monotonic())
                os.kill(process.pid, signal.SIGKILL)

    monkeypatch.setattr(Channel, "send", send)
    return when


def expect_end(engine: Engine, ranks: Ranks, victim: int, how: str) -> None:
    """The engine says why it is unready, and refuses work at once; no process is left."""
    until = time.monotonic() + BOUND_S
    while engine.health().ready and time.monotonic() < until:
        time.sleep(0.02)
    health = engine.health()
    assert not health.ready
    assert f"rank {victim}" in health.reason, health.reason
    assert how in health.reason, health.reason
    with pytest.raises(EngineStopped, match=f"rank {victim}"):
        engine.open_session()
    engine.shutdown()
    ranks.close()
    assert not any(process.is_alive() for process in ranks._others.processes.values())


def goes_on(engine: Engine, exported: tuple[bytes, Any]) -> Any:
    """The imported session, whose third tick is what it would have been."""
    data, third = exported
    session = engine.import_session(data)
    twin = engine.import_session(data)
    result = engine.submit(twin, make_inputs(engine, 2)).result(60).result
    assert abs(result.actions - third.actions).max() < 1e-5
    assert (result.video_latents - third.video_latents).abs().max() < 1e-4
    engine.close(twin, "done").result()
    return session


@pytest.mark.parametrize(
    ("mesh", "victim", "command", "nth"),
    [
        (Mesh(2, 1), 1, "project", 1),  # of a new prompt
        (Mesh(2, 1), 1, "copy_blocks", 1),  # on write, of a fork
        (Mesh(1, 2), 1, "forward", 1),  # the clean pass that commits
        (Mesh(2, 2), 2, "forward", 4),  # in the middle of denoising
        (Mesh(2, 2), 3, "forward", 4),
    ],
    ids=lambda value: str(value).replace(" ", ""),
)
def test_a_rank_killed_in_a_tick_fails_it_in_time_and_a_new_group_goes_on(
    mesh: Mesh, victim: int, command: str, nth: int, start: Any, exported: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = start(mesh)
    engine = make_engine(block_size=16, ranks=ranks)
    session = goes_on(engine, exported)  # after the death of the group of the test before
    fork = engine.fork(session)
    died = kill_when_told(monkeypatch, ranks, victim, command, nth)
    prompt, answered = 7 if command == "project" else 0, []
    pending = [engine.submit(each, make_inputs(engine, 2, prompt=prompt)) for each in (session, fork)]
    for future in pending:
        future.add_done_callback(lambda _: answered.append(time.monotonic()))
    for future in pending:
        with pytest.raises(EngineStopped, match=f"rank {victim} .*SIGKILL"):
            future.result(LONG_S)
    assert max(answered) - died[0] < BOUND_S
    expect_end(engine, ranks, victim, "SIGKILL")


@pytest.mark.parametrize("command", ["read", "write", "tokens", "keep"])
def test_a_rank_killed_in_a_copy_fails_it_in_time(
    command: str, start: Any, exported: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = start(Mesh(1, 2))
    engine = make_engine(block_size=16, ranks=ranks)
    session = engine.import_session(exported[0])
    if command == "write":
        engine.park(session)
    kill_when_told(monkeypatch, ranks, 1, command, 1)
    with pytest.raises(EngineStopped, match="rank 1"):
        {
            "read": lambda: engine.park(session),
            "write": lambda: engine.resume(session),
            "tokens": lambda: engine.export(session),
            "keep": lambda: engine.import_session(exported[0]),
        }[command]()
    expect_end(engine, ranks, 1, "SIGKILL")


def test_a_rank_that_dies_at_rest_is_noticed(start: Any) -> None:
    ranks = start(Mesh(1, 2))
    engine = make_engine(block_size=16, ranks=ranks)
    session = engine.open_session()
    assert engine.health().ready
    go_on = pause(engine)
    os.kill(ranks._others.processes[1].pid, signal.SIGKILL)
    ranks._others.processes[1].join(LONG_S)
    late = engine.submit(session, make_inputs(engine, 0, 1))  # a message of the turn that finds it
    go_on.set()
    with pytest.raises(EngineStopped, match="rank 1"):
        late.result(BOUND_S)
    expect_end(engine, ranks, 1, "at rest")


def test_a_rank_that_hangs_is_given_up_in_time(start: Any) -> None:
    ranks = start(Mesh(2, 1), 1.0)
    engine = make_engine(block_size=16, ranks=ranks)
    session = engine.open_session()
    pid = ranks._others.processes[1].pid
    os.kill(pid, signal.SIGSTOP)
    pending = engine.submit(session, make_inputs(engine, 0, 1))
    with pytest.raises(EngineStopped, match="rank 1 has not answered for 1 s, told to project"):
        pending.result(LONG_S)
    expect_end(engine, ranks, 1, "not answered")


def _lead(told: Any) -> None:
    ranks = Ranks.start(Mesh(1, 2))
    told.send(ranks._others.processes[1].pid)
    told.recv()  # for ever


def test_ranks_end_when_their_leader_is_killed() -> None:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    leader = context.Process(target=_lead, args=(there,))
    leader.start()
    assert here.poll(60)
    pid = here.recv()
    leader.kill()
    leader.join()
    until = time.monotonic() + BOUND_S
    while _lives(pid) and time.monotonic() < until:
        time.sleep(0.02)
    assert not _lives(pid), "a rank waits for a leader that is dead"


def _lives(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
