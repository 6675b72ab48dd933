"""Causal Wan video against the reference's recordings, and what must hold for a block whatever happens around it."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")

from causal import Recording, Watcher, relative_error  # noqa: E402
from conftest import SHARED  # noqa: E402

TOLERANCE = 1e-4


@pytest.fixture(scope="module", params=["tiny_causal_chunk", "tiny_causal_recache"])
def recording(request: pytest.FixtureRequest) -> Recording:
    folder: Path = SHARED / "golden" / request.param
    if not folder.is_dir():
        pytest.skip(f"golden/{request.param} is not beside this checkout")
    return Recording(folder)


# the recordings


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
    golden, steps = recording.golden, recording.calls["blocks"][0]["steps"]
    for number in range(len(recording.calls["blocks"])):  # what the engine does not name itself
        for step in range(steps):
            name = f"block{number}.step{step}"
            x0 = engine.model.schedule.clean(step, watcher.ours[f"{name}.input"], watcher.ours[f"{name}.velocity"])
            watcher.ours[f"{name}.x0"] = x0
    schedule = engine.model.schedule
    watcher.ours["schedule.timesteps"] = torch.tensor(schedule.timesteps)
    watcher.ours["schedule.sigmas"] = torch.tensor(schedule.sigmas)
    given = ("token_ids", "attention_mask", "noise", "epsilon", "latent_mean", "latent_std")
    expected = {name: tensor for name, tensor in golden.items() if not name.endswith(given)}
    assert expected.keys() <= watcher.ours.keys(), "a recorded quantity is not compared"
    worst: dict[str, float] = {}
    for name, tensor in expected.items():
        error = relative_error(watcher.ours[name], tensor)
        assert error < TOLERANCE, f"{name}: relative error {error:.2e}"
        kind = name.split(".", 1)[-1].rstrip("0123456789")
        worst[kind] = max(worst.get(kind, 0.0), error)
    print({kind: f"{error:.1e}" for kind, error in worst.items()})
    engine.shutdown()
    engine.core.cache.pool.check()
    assert engine.core.cache.pool.num_used == 0
