"""The ways that paced robots take to a model: an engine in this process, or any server that speaks their dialects."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeGuard

import numpy as np

from worldkv.bench.paced import NUM_FRAMES, Ask, Connect, Figures, Pace, drive, summarise
from worldkv.bench.steady import made_so_far
from worldkv.bench.ticks import make_inputs
from worldkv.bench.watching import Bench
from worldkv.client import PolicyClient
from worldkv.engine.engine import SessionHandle
from worldkv.models.world_action import TickInputs

_PROMPT = "pick up the cup"
_VARIANTS = 4  # of a robot's images: making noise anew for every ask would take the time of what is measured


def to_engine(bench: Bench) -> Connect:
    """Each robot a session of the engine's; ticks carry their deadline."""
    first = [make_inputs(bench.model, seed, first=True) for seed in range(_VARIANTS)]
    later = [make_inputs(bench.model, seed) for seed in range(_VARIANTS)]

    @contextmanager
    def connect(robot: int) -> Iterator[Ask]:
        session = bench.engine.open_session()
        try:
            yield _EngineRobot(
                bench, session, lambda number: (later if number else first)[(robot + number) % _VARIANTS]
            )
        finally:
            bench.engine.close(session, "measured")

    return connect


@dataclass(frozen=True)
class _EngineRobot:
    bench: Bench
    session: SessionHandle
    inputs: Callable[[int], TickInputs]

    def __call__(self, number: int, due: float) -> None:
        np.asarray(self.bench.engine.submit(self.session, self.inputs(number), due).result().result.actions)

    def observe(self, number: int, frame: int) -> None:
        """An engine takes a tick's frames together, when the last one is there."""
        if frame == NUM_FRAMES - 1:
            self.bench.engine.work_ahead(self.session, self.inputs(number))


def measure_engine(bench: Bench, num_robots: int, pace: Pace) -> Figures:
    """Robots on a fresh engine in this process, from the moment that it calls itself ready. Shuts it down."""
    try:
        began = time.perf_counter()
        bench.engine.warm_up()
        warm_up_s, before = time.perf_counter() - began, made_so_far(bench)
        answers = drive(to_engine(bench), num_robots, pace)
        made = {what: count - before[what] for what, count in made_so_far(bench).items()}
    finally:
        bench.engine.shutdown()
    return {
        "robots": num_robots,
        "warm_up_s": round(warm_up_s, 1),
        "made_after_ready": made,
        **summarise(answers, pace),
    }


def to_server(url: str, dialect: str, api_key: str | None = None, proxy: str | None = "auto") -> Connect:
    """Each robot a socket of its own, to `url`; images are of the size that the greeting asks for."""

    @contextmanager
    def connect(robot: int) -> Iterator[Ask]:
        with PolicyClient(url, dialect=dialect, api_key=api_key, proxy=proxy) as client:
            yield _ServerRobot(
                client, [droid_observation(client.metadata, dialect, [robot, v], _PROMPT) for v in range(_VARIANTS)]
            )

    return connect


@dataclass
class _ServerRobot:
    client: PolicyClient
    observations: list[dict[str, object]]
    num_ahead: int = 0  # frames that were sent ahead of the next ask

    def __call__(self, number: int, due: float) -> None:
        whole = self.observations[number % _VARIANTS] if number else _newest(self.observations[0])
        ahead, self.num_ahead = self.num_ahead, 0
        self.client.infer({name: value for name, value in whole.items() if not (ahead and _is_image(value))})

    def observe(self, number: int, frame: int) -> None:
        if number or frame == NUM_FRAMES - 1:
            whole = self.observations[number % _VARIANTS]
            taken = {name: value[frame] if _is_image(value) else value for name, value in whole.items()}
            self.num_ahead = self.client.observe(taken)


def measure_server(
    url: str, dialect: str, num_robots: int, pace: Pace, api_key: str | None = None, proxy: str | None = "auto"
) -> Figures:
    """Robots on a server that is ready."""
    answers = drive(to_server(url, dialect, api_key, proxy), num_robots, pace)
    return {"robots": num_robots, **summarise(answers, pace)}


def droid_observation(metadata: Mapping[str, object], dialect: str, seed: list[int], prompt: str) -> dict[str, object]:
    """Noise for DROID's cameras, four frames each, and a state; `metadata`: the server's greeting."""
    rng = np.random.default_rng(seed)
    size = metadata.get("image_resolution")
    height, width = size if isinstance(size, list) else (180, 320)
    cameras = ["exterior_image_1_left"]
    if dialect == "roboarena":
        cameras = [f"exterior_image_{n}_left" for n in range(2 if metadata.get("n_external_cameras") != 1 else 1)]
    if metadata.get("needs_wrist_camera", True):
        cameras.append("wrist_image_left")
    images = {f"observation/{name}": rng.integers(0, 256, (4, height, width, 3), dtype=np.uint8) for name in cameras}
    return {
        **images,
        "observation/joint_position": rng.uniform(-0.5, 0.5, 7),
        "observation/gripper_position": rng.uniform(0, 1, 1),
        "prompt": prompt,
    }


def _newest(observation: Mapping[str, object]) -> dict[str, object]:
    """A first observation: of each camera the newest frame."""
    return {name: value[-1] if _is_image(value) else value for name, value in observation.items()}


def _is_image(value: object) -> TypeGuard[np.ndarray]:
    return isinstance(value, np.ndarray) and value.ndim >= 3
