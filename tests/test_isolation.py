"""Robots beside each other get what each would get alone: over sockets, in random order, whatever shares a forward."""

from __future__ import annotations

import random
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("diffusers")
pytest.importorskip("uvicorn")

from engines import droid_observation

from worldkv.client import PolicyClient
from worldkv.engine.engine import EngineConfig
from worldkv.load import load_policy
from worldkv.server.server import PolicyServer, ServerConfig

MOST_ROBOTS = 6
NUM_TICKS = 2


@contextmanager
def serving(folder: Path, batch_invariant: bool) -> Iterator[PolicyServer]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        policy = load_policy(
            folder, EngineConfig(block_size=16, max_sessions=MOST_ROBOTS + 1, batch_invariant=batch_invariant)
        )
    try:
        with PolicyServer(policy, ServerConfig(port=0)) as server:
            yield server
    finally:
        policy.close()
        policy.engine.shutdown()
        policy.engine.core.cache.pool.check()


def observation(robot: int, tick: int) -> dict[str, object]:
    return droid_observation(np.random.default_rng([robot, tick]), 1 if tick == 0 else 4, f"do task {robot % 2}")


def episode(port: int, robot: int, num_ticks: int, delay: random.Random | None = None) -> list[np.ndarray]:
    with PolicyClient(port=port, session_id=f"robot {robot} {delay is None}") as client:
        actions = []
        for tick in range(num_ticks):
            if delay is not None:
                time.sleep(delay.uniform(0, 0.05))
            actions.append(np.array(client.infer(observation(robot, tick))))
    return actions


@pytest.mark.parametrize(
    ("kind", "num_robots", "batch_invariant"), [("ti2v", 6, True), ("ti2v", 6, False), ("i2v", 3, True)]
)
def test_robots_at_once_get_what_each_gets_alone(
    kind: str, num_robots: int, batch_invariant: bool, request: pytest.FixtureRequest
) -> None:
    with serving(request.getfixturevalue(f"golden_{kind}"), batch_invariant) as server:
        together: dict[int, list[np.ndarray]] = {}
        threads = [
            threading.Thread(
                target=lambda robot=robot: together.__setitem__(
                    robot, episode(server.port, robot, NUM_TICKS, random.Random(robot))
                )
            )
            for robot in range(num_robots)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(together) == num_robots, "a robot got no answer"
        for robot in range(num_robots):
            for ours, alone in zip(together[robot], episode(server.port, robot, NUM_TICKS), strict=True):
                if batch_invariant:
                    assert np.array_equal(ours, alone), f"robot {robot} depends on its company"
                else:
                    assert np.linalg.norm(ours - alone) <= 1e-5 * np.linalg.norm(alone)
