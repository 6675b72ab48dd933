"""The solver against diffusers' own UniPC, and against flows whose answer is known."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from worldkv.models.solvers.unipc import SolverState, UniPCSchedule  # noqa: E402


def integrate(schedule: UniPCSchedule, sample: torch.Tensor, velocity) -> torch.Tensor:
    state = SolverState()
    for index in range(len(schedule)):
        sample, state = schedule.step(index, velocity(sample, schedule.sigmas[index]), sample, state)
    return sample


def test_sigmas_and_timesteps_are_the_recorded_ones(golden_folder: Path) -> None:
    from safetensors.torch import load_file

    golden = load_file(golden_folder / "golden.safetensors")
    schedule = UniPCSchedule(16, 5.0)
    torch.testing.assert_close(torch.tensor(schedule.sigmas), golden["solver.sigmas"], rtol=1e-6, atol=1e-7)
    assert list(schedule.timesteps) == golden["solver.timesteps"].tolist()


@pytest.mark.parametrize("num_steps", [1, 2, 3, 5, 16])
def test_every_step_equals_diffusers_unipc(num_steps: int) -> None:
    diffusers = pytest.importorskip("diffusers")
    schedule = UniPCSchedule(num_steps, 5.0)
    theirs = diffusers.UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=1.0, final_sigmas_type="zero"
    )
    theirs.set_timesteps(num_steps)
    theirs.sigmas = torch.tensor(schedule.sigmas, dtype=torch.float64)
    theirs.timesteps = torch.tensor(schedule.timesteps)
    torch.manual_seed(0)
    ours = other = torch.randn(4, 5, dtype=torch.float64)
    weight = torch.randn(5, 5, dtype=torch.float64)
    state = SolverState()
    for index in range(num_steps):
        ours, state = schedule.step(index, torch.tanh(ours @ weight), ours, state)
        other = theirs.step(torch.tanh(other @ weight), theirs.timesteps[index], other).prev_sample
        torch.testing.assert_close(ours, other, rtol=1e-6, atol=1e-6, msg=f"step {index}")


@pytest.mark.parametrize("final_sigma", [0.0, 0.8])
def test_a_constant_flow_is_integrated_exactly(final_sigma: float) -> None:
    schedule = UniPCSchedule(16, 5.0, final_sigma)
    sample, velocity = torch.randn(7, dtype=torch.float64), torch.randn(7, dtype=torch.float64)
    end = integrate(schedule, sample, lambda x, sigma: velocity)
    distance = schedule.sigmas[0] - schedule.sigmas[-1]
    torch.testing.assert_close(end, sample - distance * velocity)


def test_decoupled_video_noise_ends_at_its_final_level_with_its_own_timesteps() -> None:
    schedule, plain = UniPCSchedule(16, 5.0, 0.8), UniPCSchedule(16, 5.0)
    assert math.isclose(schedule.sigmas[0], plain.sigmas[0])
    assert math.isclose(schedule.sigmas[-1], 0.8)
    assert schedule.timesteps[0] == plain.timesteps[0] == 999
    assert schedule.timesteps[-1] == int(schedule.sigmas[-2] * 1000) > 800


def test_a_step_leaves_its_arguments_alone() -> None:
    schedule = UniPCSchedule(4, 5.0)
    sample = torch.randn(3)
    kept = sample.clone()
    first, state = schedule.step(0, torch.ones(3), sample, SolverState())
    once, _ = schedule.step(1, torch.ones(3), first, state)
    again, _ = schedule.step(1, torch.ones(3), first, state)
    assert torch.equal(sample, kept)
    assert torch.equal(once, again), "a repeated step must not see the first one"


def test_an_impossible_number_of_steps_is_refused() -> None:
    with pytest.raises(ValueError, match="num_steps"):
        UniPCSchedule(0, 5.0)
