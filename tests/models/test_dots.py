"""The toy family: found by its folder, loaded, and run on the same engine, cache and books as all others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from worldkv.engine.engine import EngineConfig  # noqa: E402
from worldkv.errors import BadRequest, CheckpointError  # noqa: E402
from worldkv.load import load_engine  # noqa: E402
from worldkv.models.dots.random import write_random_dots  # noqa: E402
from worldkv.models.registry import family_of  # noqa: E402


def test_a_folder_becomes_an_engine_whose_sessions_share_forwards_fork_and_park(tmp_path: Path) -> None:
    folder = write_random_dots(tmp_path / "dots")
    assert family_of(folder) == "dots"
    engine = load_engine(folder, EngineConfig(block_size=4, max_sessions=3, batch_invariant=True))
    assert engine.card.family == "dots"
    engine.warm_up()
    first, second = engine.open_session(), engine.open_session()
    for number in range(10):  # past its window
        frame = torch.full((4, 32), float(number))
        futures = [engine.submit(session, frame) for session in (first, second)]
        one, two = (future.result().result for future in futures)
        assert torch.equal(one, two)
        engine.park(second)
    fork = engine.fork(first)
    assert torch.equal(engine.submit(fork, None).result().result, engine.submit(second, None).result().result)
    engine.shutdown()
    engine.core.cache.pool.check()
    assert engine.core.cache.pool.num_used == 0


def test_wrong_inputs_and_folders_name_what_was_expected(tmp_path: Path) -> None:
    folder = write_random_dots(tmp_path / "dots")
    engine = load_engine(folder, EngineConfig(block_size=4, max_sessions=1))
    session = engine.open_session()
    with pytest.raises(BadRequest, match="send the first one"):
        engine.submit(session, None).result()
    with pytest.raises(BadRequest, match=r"expected shape \[4, 32\], got \[2\]"):
        engine.submit(session, torch.zeros(2)).result()
    engine.shutdown()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dim": 31}))
    with pytest.raises(CheckpointError, match="dim: expected a multiple of num_heads, got 31"):
        load_engine(folder)
    (folder / "config.json").write_text(json.dumps(config | {"dim": 64}))
    with pytest.raises(CheckpointError, match="size mismatch"):
        load_engine(folder)
