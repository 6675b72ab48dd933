"""Causal Wan video against the reference's recordings, and against the window as a list of frames."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")

from causal import SHARED, Recording, Watcher, make_engine, make_request, relative_error, run  # noqa: E402
from engines import inside, make_inputs  # noqa: E402
from engines import make_engine as make_robots_engine  # noqa: E402
from list_window import ListVideo  # noqa: E402

from worldkv.engine.sharing import SharedDevice  # noqa: E402
from worldkv.models.causal_wan.config import BRANCH, Rope  # noqa: E402
from worldkv.models.causal_wan.random import TINY  # noqa: E402
from worldkv.models.causal_wan.schedule import Schedule  # noqa: E402

TOLERANCE = 1e-4


@pytest.fixture(scope="module", params=["tiny_causal_chunk", "tiny_causal_recache"])
def recording(request: pytest.FixtureRequest) -> Recording:
    folder: Path = SHARED / "golden" / request.param
    if not folder.is_dir():
        pytest.skip(f"golden/{request.param} is not beside this checkout")
    return Recording(folder)


# the recordings


def check(recording: Recording, watcher: Watcher, schedule: Schedule, *unwatched: str) -> None:
    """Every recorded quantity is what was watched, but for those with these endings."""
    golden, steps = recording.golden, recording.calls["blocks"][0]["steps"]
    for number in range(len(recording.calls["blocks"])):  # what the engine does not name itself
        for step in range(steps):
            name = f"block{number}.step{step}"
            x0 = schedule.clean(step, watcher.ours[f"{name}.input"], watcher.ours[f"{name}.velocity"])
            watcher.ours[f"{name}.x0"] = x0
    watcher.ours["schedule.timesteps"] = torch.tensor(schedule.timesteps)
    watcher.ours["schedule.sigmas"] = torch.tensor(schedule.sigmas)
    given = ("token_ids", "attention_mask", "noise", "epsilon", "latent_mean", "latent_std", *unwatched)
    expected = {name: tensor for name, tensor in golden.items() if not name.endswith(given)}
    assert expected.keys() <= watcher.ours.keys(), "a recorded quantity is not compared"
    worst: dict[str, float] = {}
    for name, tensor in expected.items():
        error = relative_error(watcher.ours[name], tensor)
        assert error < TOLERANCE, f"{name}: relative error {error:.2e}"
        kind = name.split(".", 1)[-1].rstrip("0123456789")
        worst[kind] = max(worst.get(kind, 0.0), error)
    print({kind: f"{error:.1e}" for kind, error in worst.items()})


@pytest.mark.parametrize("block_size", [16, 64, 128])
def test_every_recorded_quantity_is_reproduced(recording: Recording, block_size: int) -> None:
    watcher = Watcher()
    engine = recording.engine(block_size, observer=watcher.observe)
    session = engine.open_session()
    for number, said in enumerate(recording.calls["blocks"]):
        watcher.begin(number, said["prompt"])
        block = engine.submit(session, recording.request(number)).result().result
        watcher.end(block)
        assert block.first_frame == said["start_frame"]
        assert block.num_recached == said.get("recache_frames", 0)
        assert watcher.visible[number] == said["steps"] * [said["visible_history_tokens"]]
    check(recording, watcher, engine.model.schedule)
    engine.shutdown()
    engine.core.cache.pool.check()
    assert engine.core.cache.pool.num_used == 0


@pytest.mark.parametrize("block_size", [16, 64, 128])
def test_recordings_are_reproduced_among_robots_ticks_after_forks_parking_and_restores(
    recording: Recording, block_size: int
) -> None:
    device, watcher = SharedDevice(), Watcher()
    engine = recording.engine(block_size, observer=watcher.observe, shared=device)
    robots = make_robots_engine("ti2v", block_size=block_size, shared=device)
    robot, session = robots.open_session(), engine.open_session()
    stop = threading.Event()

    def tick() -> None:
        number = 0
        while not stop.is_set():
            robots.submit(robot, make_inputs(robots, number, 4 if number else 1)).result()
            number += 1

    driver = threading.Thread(target=tick, daemon=True)
    driver.start()
    for number, said in enumerate(recording.calls["blocks"]):
        mark = engine.snapshot(session)
        unwatched = engine.open_session()
        watcher.kv = inside(engine, unwatched).kv
        astray = recording.request(number, noise=None, epsilons=None, seed=number)
        engine.submit(session, astray).result()  # a future that is not to be
        engine.restore(session, mark)
        engine.release(mark)
        engine.close(unwatched, "it never began")
        following = engine.fork(session)
        engine.close(session, "its fork goes on")
        session = following
        engine.park(session)
        watcher.kv = inside(engine, session).kv
        watcher.begin(number, said["prompt"])
        block = engine.submit(session, recording.request(number)).result().result
        watcher.end(block)
        assert block.num_recached == said.get("recache_frames", 0)
    stop.set()
    driver.join()
    assert robots.describe(robot).num_chunks > 0
    check(recording, watcher, engine.model.schedule, "embedding")  # encoded in the futures that are not to be
    for each in (engine, robots):
        each.shutdown()


# against the window as a list of frames


@pytest.mark.parametrize(
    ("window", "sink", "per_block"), [(9, 3, 3), (12, 3, 3), (6, 0, 3), (4, 0, 1), (4, 1, 1), (7, 2, 2), (5, 1, 2)]
)
@pytest.mark.parametrize("block_size", [16])
@pytest.mark.parametrize("rope", ["absolute", "relative"])
def test_any_window_equals_the_list_of_frames_before_and_after_another_prompt(
    window: int, sink: int, per_block: int, block_size: int, rope: Rope
) -> None:
    settings = replace(TINY, frames_per_block=per_block, window_frames=window, sink_frames=sink, steps=(1000, 500))
    settings = replace(settings, rope=rope)
    engine = make_engine(settings, block_size, decodes=False)
    model, session = engine.model, engine.open_session()
    oracle, num_blocks = ListVideo(model.dit, window, sink, rope == "relative"), 2 * window // per_block + 2
    generator = torch.Generator().manual_seed(0)
    for number in range(num_blocks):
        switches = number in (1, num_blocks // 2, num_blocks - 1)  # before, at and after the roll
        prompt = sum(number >= at for at in (1, num_blocks // 2, num_blocks - 1))
        noise = torch.randn((2, 1, 16, per_block, 4, 6), generator=generator)
        block = run(engine, session, make_request(prompt, noise=noise[0], epsilons=(noise[1],)))
        request = make_request(prompt)
        oracle.prompt(model.encoders.text.encode(request.token_ids, request.attention_mask)[0])
        if switches:
            oracle.recache(0)
        assert block.num_recached == (min(window, number * per_block) if switches else 0)
        x = noise[0][0]
        for step, timestep in enumerate(model.schedule.timesteps):
            x = model.schedule.clean(step, x, oracle.forward(x, timestep))
            if step == 0:
                x = model.schedule.noised(1, x, noise[1][0])
        oracle.forward(x, 0, commit=True)
        assert relative_error(block.latents, x) < 1e-5, f"block {number}"
        for layer in range(2):
            ours = torch.stack(inside(engine, session).kv.layer_kv(BRANCH, layer))
            assert relative_error(ours, oracle.cache(layer)) < 1e-5, f"block {number}, layer {layer}"
    engine.shutdown()
