"""Which steps run: the reference's fixed masks, and the dynamic rule on velocities with a known turn."""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from worldkv.models.dreamzero.steps import FIXED_STEPS, StepChooser  # noqa: E402


@pytest.mark.parametrize("steps", [5, 6, 7, 8])
def test_a_fixed_mask_runs_as_many_steps_as_its_name_says(steps: int) -> None:
    chooser = StepChooser(steps)
    ran = [index for index in range(16) if chooser.runs(index)]
    assert len(ran) == steps
    assert ran == sorted(FIXED_STEPS[steps])
    assert ran[0] == 0, "the first step has no velocity to reuse"


def test_all_runs_every_step() -> None:
    chooser = StepChooser("all")
    assert all(chooser.runs(index) for index in range(16))


def run_dynamic(cosine: float) -> list[int]:
    """Steps that run when each computed velocity turns by the same angle."""
    chooser, angle, ran = StepChooser("dynamic"), 0.0, []
    for index in range(16):
        question = chooser.question()
        if chooser.runs(index, None if question is None else float(question)):
            ran.append(index)
            chooser.record(torch.tensor([math.cos(angle), math.sin(angle)]))
            angle += math.acos(cosine)
    return ran


def test_dynamic_runs_all_while_the_velocity_turns_much() -> None:
    assert run_dynamic(0.9) == list(range(16))


def test_dynamic_skips_four_then_must_run_one_where_it_hardly_turns() -> None:
    assert run_dynamic(0.99) == [0, 1, 6, 11]


def test_dynamic_skips_two_then_must_run_one_between_the_thresholds() -> None:
    assert run_dynamic(0.94) == [0, 1, 4, 7, 10, 13]


def by_the_reference_s_rule(velocity_of: Callable[[int], np.ndarray]) -> list[int]:
    """The rule as the reference states it, slot by slot; `velocity_of`: what the network gives where it runs."""
    slots: list[str] = []
    computed: list[np.ndarray] = []
    while len(slots) < 16:
        forced = len(computed) < 2 or (len(slots) > 0 and slots[-1] == "skipped")
        similarity = -1.0
        if not forced:
            a, b = computed[-2].ravel(), computed[-1].ravel()
            similarity = float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))
        burst = 4 if similarity > 0.95 else 2 if similarity > 0.93 else 0
        if burst:
            slots += ["skipped"] * burst
        else:
            computed.append(velocity_of(len(slots)))
            slots.append("computed")
    return [index for index, what in enumerate(slots[:16]) if what == "computed"]


def test_dynamic_is_the_reference_s_rule_on_the_golden_checkpoints(golden_folder: Path) -> None:
    pytest.importorskip("diffusers")
    from worldkv.engine.engine import EngineConfig
    from worldkv.load import load_engine
    from worldkv.models.base import Forward

    seen: list[dict[int, np.ndarray]] = []

    def observe(kv: Any, request: Any, result: Any) -> None:
        if isinstance(request, Forward) and request.stage == "commit":
            seen.append({})
        elif isinstance(request, Forward):
            conditional, negative = (output.video_velocity.double().numpy() for output in result)
            index = engine.model.action_schedule.timesteps.index(request.rows[0].inputs.action_timestep)
            seen[-1][index] = negative + engine.model.config.cfg_scale * (conditional - negative)

    config = EngineConfig(max_sessions=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        engine = load_engine(golden_folder, config, steps="dynamic", observer=observe)
    session = engine.open_session()
    for tick in range(4):
        engine.submit(session, engine.model.fake_inputs(first=tick == 0)).result()
    engine.shutdown()
    assert len(seen) == 4
    for velocities in seen:
        assert sorted(velocities) == by_the_reference_s_rule(velocities.__getitem__)
        assert 4 <= len(velocities) < 16, "something was skipped"


def test_who_waits_for_the_similarity_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("diffusers")
    from engines import make_engine, make_inputs

    from worldkv.models.dreamzero import model

    engine = make_engine("ti2v", block_size=16, steps="dynamic", max_sessions=2)
    go_on, asked = threading.Event(), threading.Event()

    class Slow(model.HostCopy):
        def numpy(self) -> np.ndarray:
            if threading.current_thread().name.startswith("worldkv-host") and not asked.is_set():
                asked.set()
                assert go_on.wait(20)
            return super().numpy()

    monkeypatch.setattr(model, "HostCopy", Slow)
    first, second = engine.open_session(), engine.open_session()
    held = engine.submit(first, make_inputs(engine, 0, 1))
    assert asked.wait(20)
    engine.submit(second, make_inputs(engine, 1, 1)).result(20)
    assert not held.done()
    go_on.set()
    held.result(20)
    engine.shutdown()


def test_steps_are_compared_with_all_sixteen() -> None:
    pytest.importorskip("diffusers")
    from engines import make_engine

    from worldkv.bench.steps import CHOICES, compare_steps

    engine = make_engine("ti2v", block_size=16)
    rows = list(compare_steps(engine))
    engine.shutdown()
    assert [row["steps"] for row in rows] == [str(choice) for choice in CHOICES]
    assert [row["forwards"] for row in rows[:5]] == [17, 9, 8, 7, 6], "the clean pass, and what the name says"
    assert rows[0]["actions"] == rows[0]["latents"] == 0
    assert all(row["latents"] > 0 for row in rows[1:5])


def test_an_unknown_choice_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="dynamic"):
        StepChooser(9)
