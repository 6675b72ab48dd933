"""`worldkv verify`: the paged engine against recorded outputs of the reference implementation, quantity by quantity."""

from __future__ import annotations

import argparse
import json
import math
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from worldkv.cli.common import FAILED, OK, Step, choose_device, progress, spinner
from worldkv.engine.engine import Engine, EngineConfig
from worldkv.engine.session import Session
from worldkv.errors import CheckpointError
from worldkv.load import checkpoint_embodiment, load_engine
from worldkv.models.dreamzero.checkpoint import Checkpoint
from worldkv.models.dreamzero.inputs import Prompt, TickInputs
from worldkv.models.dreamzero.model import BRANCHES, CONDITIONAL, UNCONDITIONAL
from worldkv.models.dreamzero.steps import FIXED_STEPS, Steps
from worldkv.models.wan.names import LATENT_MEAN, LATENT_STD
from worldkv.models.wan.sizes import read_sizes
from worldkv.models.wan.tokenizer import ByteTokenizer
from worldkv.robots.tiling import tile_views
from worldkv.robots.transforms import absolute_actions, normalise_state, prepare_view

_CALLS_FIELDS = ("window_policy", "cfg_scale", "solver_steps", "evaluated_steps", "calls")
_INPUTS = ("frames", "state", "noise_video", "noise_action")  # recorded to be fed, not to be compared
_POLICY_TOLERANCE = 1e-6  # of state and actions; pixels must be equal


def run(arguments: argparse.Namespace) -> int:
    if not arguments.tolerance > 0:
        raise ValueError(f"--tolerance: expected more than 0, got {arguments.tolerance}")
    if arguments.interleave < 0:
        raise ValueError(f"--interleave: expected a number of sessions, got {arguments.interleave}")
    golden, calls = _read_recording(arguments.folder)
    with spinner("starting up"):
        checkpoint = Checkpoint.open(arguments.folder)
    worst = 0.0
    for block_size in arguments.block_size:
        engine = _load(checkpoint, arguments, block_size, golden, calls)
        try:
            with progress(f"running the recorded calls in blocks of {block_size}") as step:
                ours = _run_calls(engine, golden, calls, arguments.interleave, step)
        finally:
            engine.shutdown()
        print(
            f"blocks of {block_size}, attention by {engine.cache.backend.name}, {arguments.interleave} other sessions"
        )
        worst = max(worst, _report(_expected(golden, calls), ours))
    policy_ok = _verify_policy(arguments.folder, checkpoint)
    print(f"max_relative_error {worst:.3e}")
    return OK if worst <= arguments.tolerance and policy_ok else FAILED


def _load(
    checkpoint: Checkpoint,
    arguments: argparse.Namespace,
    block_size: int,
    golden: dict[str, torch.Tensor],
    calls: dict[str, Any],
) -> Engine:
    dit = checkpoint.config.dit
    with progress("loading weights", is_bytes=True) as step:
        return load_engine(
            checkpoint,
            EngineConfig(block_size=block_size, attention=arguments.attention, max_sessions=1 + arguments.interleave),
            device=choose_device(arguments.device),
            steps=_steps(calls),
            window_policy=calls["window_policy"],
            tokenizer=ByteTokenizer(dit.text_len, read_sizes(checkpoint).text.vocab_size),  # token ids were recorded
            negative_prompt=_prompt(golden, UNCONDITIONAL),
            progress=step,
        )


def _steps(calls: dict[str, Any]) -> Steps:
    """The step skipping that evaluates what the recording did."""
    evaluated = frozenset(calls["evaluated_steps"])
    if evaluated == frozenset(range(calls["solver_steps"])):
        return "all"
    for number, mask in FIXED_STEPS.items():
        if mask == evaluated:
            return number
    raise CheckpointError(f"calls.json: evaluated_steps {sorted(evaluated)} is none of the known step masks")


def _read_recording(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    for name in ("golden.safetensors", "calls.json"):
        if not (folder / name).is_file():
            raise CheckpointError(
                f"{folder} has no {name}: verify needs a checkpoint folder with outputs recorded from the reference; "
                f"to look at any other checkpoint use `worldkv inspect`"
            )
    try:
        golden, calls = load_file(folder / "golden.safetensors"), json.loads((folder / "calls.json").read_text())
    except (SafetensorError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{folder}: the recording cannot be read: {error}") from error
    missing = [name for name in _CALLS_FIELDS if name not in calls]
    missing += [name for name in _recorded_names(calls) if name not in golden] if not missing else []
    if missing:
        raise CheckpointError(f"{folder}: the recording lacks {', '.join(missing)}")
    return golden, calls


def _recorded_names(calls: dict[str, Any]) -> list[str]:
    """What has to be recorded for the calls to be run."""
    prompts = [f"prompt.{branch}.{part}" for branch in BRANCHES for part in ("token_ids", "attention_mask")]
    return prompts + [f"call{call['call']}.{name}" for call in calls["calls"] for name in _INPUTS]


def _expected(golden: dict[str, torch.Tensor], calls: dict[str, Any]) -> dict[str, torch.Tensor]:
    """What was recorded and has to be computed, what calls.json says as numbers included."""
    inputs = (*_INPUTS, "token_ids", "attention_mask")
    expected = {name: tensor for name, tensor in golden.items() if name.split(".")[-1] not in inputs}
    expected["solver.guidance_and_steps"] = torch.tensor([calls["cfg_scale"], calls["solver_steps"]])
    for call in calls["calls"]:
        facts = (call["reset"], call["denoise_start_frame"], call["history_tokens"])
        expected[f"call{call['call']}.reset_start_history"] = torch.tensor(facts, dtype=torch.float32)
    return expected


def _run_calls(
    engine: Engine, golden: dict[str, torch.Tensor], calls: dict[str, Any], num_others: int, step: Step
) -> dict[str, torch.Tensor]:
    """Everything our side computed, under the names of `_expected`."""
    model = engine.model
    config, ours = model.config, {}
    ours["solver.sigmas"] = torch.tensor(model.action_schedule.sigmas)
    ours["solver.timesteps"] = torch.tensor(model.action_schedule.timesteps)
    ours["solver.guidance_and_steps"] = torch.tensor([config.cfg_scale, config.num_inference_steps])
    ours["latent_mean"] = torch.tensor(LATENT_MEAN[config.dit.out_dim])
    ours["latent_std"] = torch.tensor(LATENT_STD[config.dit.out_dim])
    session = engine.open_session()
    others = [engine.open_session() for _ in range(num_others)]
    for done, call in enumerate(calls["calls"], start=1):
        number = call["call"]

        def trace(quantity: str, tensor: torch.Tensor, number: int = number) -> None:
            name = quantity if quantity.startswith("prompt.") else f"call{number}.{quantity}"
            ours[name] = tensor.detach().float().cpu()

        beside = [_disturb(engine, other, golden, number, i) for i, other in enumerate(others)]
        result = engine.submit(session, _recorded_inputs(golden, number, trace)).result()
        history = session.kv.branches[CONDITIONAL].num_tokens
        for future in beside:
            future.result()
        for i, other in enumerate(others):  # one more of each, between this call and the next
            _disturb(engine, other, golden, number, i).result()
        facts = (result.restart_reason is not None, result.start_frame, history)
        ours[f"call{number}.reset_start_history"] = torch.tensor(facts, dtype=torch.float32)
        if f"call{number}.decoded_video" in golden:
            ours[f"call{number}.decoded_video"] = model.decode(result.video_latents[None]).float().cpu()
        step(done, len(calls["calls"]))
    return ours


def _recorded_inputs(golden: dict[str, torch.Tensor], number: int, trace: Any) -> TickInputs:
    return TickInputs(
        golden[f"call{number}.frames"].numpy(),
        golden[f"call{number}.state"][0].numpy(),
        *_prompt(golden, CONDITIONAL),
        noise_video=golden[f"call{number}.noise_video"],
        noise_action=golden[f"call{number}.noise_action"],
        trace=trace,
    )


def _disturb(engine: Engine, other: Session, golden: dict[str, torch.Tensor], number: int, index: int) -> Future[Any]:
    """A tick of another session, with other frames, state, prompt and noise, beside the recorded ones."""
    rng = np.random.default_rng([number, index])
    ids, mask = _prompt(golden, CONDITIONAL)
    inputs = TickInputs(
        rng.integers(0, 256, golden[f"call{number}.frames"].shape, dtype=np.uint8),
        rng.uniform(-1, 1, golden[f"call{number}.state"].shape[1:]),
        np.where(mask > 0, (ids + index + 1) % 256, ids),
        mask,
        noise_seed=index,
    )
    return engine.submit(other, inputs)


def _prompt(golden: dict[str, torch.Tensor], branch: str) -> Prompt:
    return golden[f"prompt.{branch}.token_ids"].numpy(), golden[f"prompt.{branch}.attention_mask"].numpy()


def _report(expected: dict[str, torch.Tensor], ours: dict[str, torch.Tensor]) -> float:
    """Print a line per recorded quantity; the largest relative error, infinite where a quantity is missing."""
    worst = 0.0
    for name in sorted(expected):
        wanted, got = expected[name].float(), ours.get(name)
        if got is None or got.shape != wanted.shape:
            error, note = math.inf, "not computed" if got is None else f"{list(got.shape)}, not {list(wanted.shape)}"
        else:
            error, note = relative_error(got, wanted), ""
        print(f"{name:<52} {error:.3e} {note}".rstrip())
        worst = max(worst, error)
    return worst


def relative_error(ours: torch.Tensor, expected: torch.Tensor) -> float:
    """||ours - expected|| / ||expected||; infinite where ours is not finite."""
    error = float((ours.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30))
    return error if math.isfinite(error) else math.inf


def _verify_policy(folder: Path, checkpoint: Checkpoint) -> bool:
    """The transforms around the model: every pixel equal, numbers to 1e-6. True where nothing was recorded."""
    path = folder / "policy.safetensors"
    if not path.is_file():
        return True
    recorded = {name: tensor.numpy() for name, tensor in load_file(path).items()}
    embodiment = checkpoint_embodiment(checkpoint)
    views = [prepare_view(recorded[f"camera.{camera.name}"], embodiment) for camera in embodiment.cameras]
    tiled = tile_views(views, embodiment.layout)
    state = {quantity.key: recorded[f"state.{quantity.key}"] for quantity in embodiment.state}
    num_wrong = int((tiled != recorded["tiled_frames"]).sum())
    errors = {
        "policy.normalised_state": (normalise_state(state, embodiment), recorded["normalised_state"]),
        "policy.absolute_actions": (
            absolute_actions(recorded["normalised_actions"], state, embodiment),
            recorded["absolute_actions"],
        ),
    }
    print(f"{'policy.tiled_frames':<52} {num_wrong} pixels differ")
    ok = num_wrong == 0
    for name, (ours, expected) in errors.items():
        error = relative_error(torch.from_numpy(np.asarray(ours)), torch.from_numpy(expected))
        print(f"{name:<52} {error:.3e}")
        ok = ok and error <= _POLICY_TOLERANCE
    return ok
