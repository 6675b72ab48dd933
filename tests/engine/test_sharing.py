"""Engines that share a device: one batch at a time, who is due first goes first, and nobody waits for the dead."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")

import causal  # noqa: E402
from engines import make_engine, make_inputs  # noqa: E402
from toy_model import ToyInputs, ToyModel, make_toy_engine  # noqa: E402

from worldkv.engine.sharing import SharedDevice  # noqa: E402
from worldkv.errors import EngineStopped  # noqa: E402


def in_thread(function: Any) -> threading.Thread:
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    return thread


def test_never_two_at_once_and_nobody_waits_for_ever() -> None:
    device, inside, most = SharedDevice(), [0], [0]

    def work(engine: int) -> None:
        dice = random.Random(engine)
        for _ in range(200):
            with device.turn(engine, None if dice.random() < 0.2 else dice.random()) as _:
                pass
            with device.turn(engine, dice.random()):
                inside[0] += 1
                most[0] = max(most[0], inside[0])
                inside[0] -= 1
            if dice.random() < 0.3:
                device.leave(engine)
        device.leave(engine)

    threads = [in_thread(lambda number=number: work(number)) for number in range(4)]
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert most[0] == 1


def test_who_is_due_first_goes_first_and_keeps_its_place_between_two_batches() -> None:
    device, order = SharedDevice(), []
    waiting = threading.Event()

    def later() -> None:
        waiting.set()
        with device.turn("later", 2.0):
            order.append("later")

    with device.turn("urgent", 1.0):
        thread = in_thread(later)
        assert waiting.wait(10)
        order.append("urgent")
    time.sleep(0.05)  # the device is free, but the urgent tick goes on in a moment
    with device.turn("urgent", 1.0):
        order.append("urgent")
    assert order == ["urgent", "urgent"]
    device.leave("urgent")
    thread.join(10)
    assert order == ["urgent", "urgent", "later"]


def test_an_engine_s_batch_waits_for_another_s_and_messages_do_not() -> None:
    device = SharedDevice()
    robots, videos = (make_toy_engine(ToyModel("slide"), max_sessions=2, shared=device) for _ in range(2))
    robot, viewer = robots.open_session(), videos.open_session()
    hold = threading.Event()
    held = ToyInputs(1.0, hold=hold)
    first = robots.submit(robot, held)
    assert held.held.wait(10)
    second = videos.submit(viewer, ToyInputs(2.0))
    time.sleep(0.1)
    assert not second.done(), "two batches at once"
    assert videos.stats().num_sessions == 1
    hold.set()
    assert first.result(10).result.averages
    assert second.result(10).result.averages
    for engine in (robots, videos):
        engine.shutdown()


def test_the_tick_that_is_due_first_is_not_stretched_by_another_engine_s() -> None:
    device = SharedDevice()
    order: list[str] = []
    robots, videos = (make_toy_engine(ToyModel("slide"), max_sessions=2, shared=device) for _ in range(2))
    for engine, name in ((robots, "robot"), (videos, "video")):
        forward = engine.model.forward

        def counted(cache: Any, rows: Any, name: str = name, forward: Any = forward) -> Any:
            order.append(name)
            return forward(cache, rows)

        engine.model.forward = counted
    robot, viewer = robots.open_session(), videos.open_session()
    hold = threading.Event()
    held = ToyInputs(1.0, hold=hold)
    now = time.perf_counter()
    begun = videos.submit(viewer, held, now + 1.6)
    assert held.held.wait(10)
    urgent = robots.submit(robot, ToyInputs(2.0), now + 0.5)
    time.sleep(0.1)  # it waits for the device
    hold.set()
    for future in (begun, urgent):
        future.result(10)
    first = order.index("robot")
    assert order[first : first + 3] == ["robot"] * 3, f"another engine's batches came between: {order}"
    for engine in (robots, videos):
        engine.shutdown()


@pytest.mark.parametrize("how", ["shutdown", "fault"])
def test_an_engine_that_ends_is_waited_for_by_nobody(how: str, caplog: Any) -> None:
    device = SharedDevice()
    ends, goes_on = (make_toy_engine(ToyModel("slide"), max_sessions=2, shared=device) for _ in range(2))
    session = goes_on.open_session()
    gone = ends.open_session()
    ends.submit(gone, ToyInputs(1.0)).result(10)
    if how == "fault":
        ends.core.scheduler.next_batch = lambda ticks: 1 / 0
        with pytest.raises(EngineStopped):
            ends.submit(gone, ToyInputs(1.0)).result(10)
    else:
        ends.shutdown()
    assert goes_on.submit(session, ToyInputs(1.0)).result(10).result.averages
    goes_on.shutdown()
    if how == "fault":
        ends.shutdown()


def test_robots_and_videos_beside_each_other_compute_what_each_computes_alone() -> None:
    video_alone, robot_alone = causal.make_engine(), make_engine("ti2v", block_size=16)
    video_session, robot_session = video_alone.open_session(), robot_alone.open_session()
    blocks = [causal.run(video_alone, video_session, causal.make_request(number // 3)) for number in range(5)]
    ticks = [
        robot_alone.submit(robot_session, make_inputs(robot_alone, t, 4 if t else 1)).result().result for t in range(5)
    ]
    device = SharedDevice()
    videos, robots = causal.make_engine(shared=device), make_engine("ti2v", block_size=16, shared=device)
    viewer, robot = videos.open_session(), robots.open_session()
    for number in range(5):
        now = time.perf_counter()
        block = videos.submit(viewer, causal.make_request(number // 3), now + 0.75)
        tick = robots.submit(robot, make_inputs(robots, number, 4 if number else 1), now + 1.6)
        assert causal.same(block.result(60).result, blocks[number])
        assert torch.equal(tick.result(60).result.video_latents, ticks[number].video_latents)
    for engine in (video_alone, robot_alone, videos, robots):
        engine.shutdown()


def test_an_urgent_tick_is_not_held_up_by_what_its_own_engine_waits_for() -> None:
    """A tick without haste waits for the device; one that comes after it, and is due before the other engine's, goes
    between two of that engine's batches."""
    device, order = SharedDevice(), []
    robots, videos = (make_toy_engine(ToyModel("slide"), max_sessions=3, shared=device) for _ in range(2))
    for engine, name in ((robots, "robot"), (videos, "video")):
        forward = engine.model.forward

        def counted(cache: Any, rows: Any, name: str = name, forward: Any = forward) -> Any:
            order.extend((name, row.inputs.tick.number) for row in rows[:1])
            return forward(cache, rows)

        engine.model.forward = counted
    patient, robot, viewer = robots.open_session(), robots.open_session(), videos.open_session()
    held = ToyInputs(1.0, hold=threading.Event())
    begun = videos.submit(viewer, held, time.perf_counter() + 1.0)
    assert held.held.wait(10)
    late = robots.submit(patient, ToyInputs(2.0))
    time.sleep(0.1)  # it waits for the device
    urgent = robots.submit(robot, ToyInputs(3.0), time.perf_counter() + 0.2)
    time.sleep(0.1)
    assert held.hold is not None
    held.hold.set()
    for future in (begun, late, urgent):
        future.result(10)
    assert order.index(("robot", 3.0)) == 1, f"the urgent tick came after the other engine's: {order}"
    for engine in (robots, videos):
        engine.shutdown()


@pytest.mark.parametrize("asks", ["open", "shutdown"])
def test_who_waits_for_the_device_hears_its_messages(asks: str) -> None:
    device = SharedDevice()
    busy, waits = (make_toy_engine(ToyModel("slide"), max_sessions=2, shared=device) for _ in range(2))
    one, other = busy.open_session(), waits.open_session()
    held = ToyInputs(1.0, hold=threading.Event())
    begun = busy.submit(one, held)
    assert held.held.wait(10)
    waiting = waits.submit(other, ToyInputs(1.0))
    time.sleep(0.1)
    asked = in_thread(waits.open_session if asks == "open" else waits.shutdown)
    asked.join(5)
    answered = not asked.is_alive()
    assert held.hold is not None
    held.hold.set()
    assert begun.result(10).result.averages
    assert answered, f"{asks} waited for another engine's batch"
    if asks == "open":
        assert waiting.result(10).result.averages
    else:
        with pytest.raises(EngineStopped):
            waiting.result(10)
    for engine in (busy, waits):
        engine.shutdown()
