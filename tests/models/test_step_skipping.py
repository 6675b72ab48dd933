"""Which steps run: the reference's fixed masks, and the dynamic rule on velocities with a known turn."""

from __future__ import annotations

import math

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
        if chooser.runs(index):
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


def test_an_unknown_choice_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="dynamic"):
        StepChooser(9)
