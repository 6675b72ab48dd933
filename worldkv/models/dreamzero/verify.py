"""A recording of the reference implementation, and an observer that sees the same quantities in a running engine.

A recording is `golden.safetensors` (tensors by name) and `calls.json` (what each call was) in a checkpoint folder. The
observer watches the program that serves; it changes nothing of it. Does not know the engine.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from worldkv.errors import CheckpointError
from worldkv.kv.state import KVState
from worldkv.models.base import Encode, Forward, Request
from worldkv.models.checkpoints.words import one_line
from worldkv.models.dreamzero.model import BRANCHES, CONDITIONAL, DreamZero
from worldkv.models.dreamzero.steps import FIXED_STEPS, Steps
from worldkv.models.wan.names import LATENT_MEAN, LATENT_STD
from worldkv.models.wan.tokenizer import Tokens
from worldkv.models.world_action import TickInputs, TickResult

Tensors = dict[str, torch.Tensor]

_CALLS_FIELDS = ("window_policy", "cfg_scale", "solver_steps", "evaluated_steps", "calls")
_INPUTS = ("frames", "state", "noise_video", "noise_action")  # recorded to be fed, not to be compared
_CONDITION = "first_frame_condition"
_FIRST_LATENT = ".first_latent"  # of the condition: without the mask's channels, its first frame


@dataclass(frozen=True)
class GoldenRecording:
    """`golden`: tensors by name. `calls`: what calls.json says."""

    golden: Tensors
    calls: Mapping[str, Any]

    @classmethod
    def open(cls, folder: Path) -> GoldenRecording:
        """Raises CheckpointError where the folder has none, or one that is damaged or not whole."""
        for name in ("golden.safetensors", "calls.json"):
            if not (folder / name).is_file():
                raise CheckpointError(
                    f"{folder} has no {name}: verify needs a checkpoint folder with outputs recorded from the "
                    f"reference; to look at any other checkpoint use `worldkv inspect`"
                )
        try:
            golden, calls = load_file(folder / "golden.safetensors"), json.loads((folder / "calls.json").read_text())
        except (OSError, SafetensorError, ValueError, RecursionError) as error:
            raise CheckpointError(f"{folder}: the recording cannot be read: {one_line(error)}") from error
        if not isinstance(calls, dict):
            raise CheckpointError(f"{folder}: calls.json must hold a JSON object, got {type(calls).__name__}")
        missing = [name for name in _CALLS_FIELDS if name not in calls]
        missing += [name for name in _needed_names(calls) if name not in golden] if not missing else []
        if missing:
            raise CheckpointError(f"{folder}: the recording lacks {', '.join(missing)}")
        return cls(golden, calls)

    @property
    def steps(self) -> Steps:
        """The step skipping that evaluates the recording's steps."""
        evaluated = frozenset(self.calls["evaluated_steps"])
        if evaluated == frozenset(range(self.calls["solver_steps"])):
            return "all"
        for number, mask in FIXED_STEPS.items():
            if mask == evaluated:
                return number
        raise CheckpointError(f"calls.json: evaluated_steps {sorted(evaluated)} is none of the known step masks")

    def prompt(self, branch: str) -> Tokens:
        names = (f"prompt.{branch}.{part}" for part in ("token_ids", "attention_mask"))
        ids, mask = (self.golden[name].numpy() for name in names)
        return ids, mask

    def inputs(self, number: int) -> TickInputs:
        """Of that call, its noise included."""
        golden = self.golden
        return TickInputs(
            golden[f"call{number}.frames"].numpy(),
            golden[f"call{number}.state"][0].numpy(),
            *self.prompt(CONDITIONAL),
            noise_video=golden[f"call{number}.noise_video"],
            noise_action=golden[f"call{number}.noise_action"],
        )

    def inputs_of_another(self, number: int, index: int) -> TickInputs:
        """For a session beside the recorded one: other frames, state, prompt and noise of the same shapes."""
        rng = np.random.default_rng([number, index])
        ids, mask = self.prompt(CONDITIONAL)
        return TickInputs(
            rng.integers(0, 256, self.golden[f"call{number}.frames"].shape, dtype=np.uint8),
            rng.uniform(-1, 1, self.golden[f"call{number}.state"].shape[1:]),
            np.where(mask > 0, (ids + index + 1) % 256, ids),
            mask,
            noise_seed=index,
        )

    def expected(self, model: DreamZero) -> Tensors:
        """The recorded tensors that have to be computed; the facts of calls.json are among them, as numbers.

        A model that takes no first-frame condition encodes one frame where the reference encoded a padded chunk of
        them: the first latent frame is compared, which is the first frame's own.
        """
        inputs = (*_INPUTS, "token_ids", "attention_mask")
        expected = {name: tensor for name, tensor in self.golden.items() if name.split(".")[-1] not in inputs}
        if not model.config.dit.concat_first_frame_latent:
            for name in [name for name in expected if name.endswith(_CONDITION)]:
                expected[name + _FIRST_LATENT] = expected.pop(name)[:, 4:, :1]
        expected["solver.guidance_and_steps"] = torch.tensor([self.calls["cfg_scale"], self.calls["solver_steps"]])
        for call in self.calls["calls"]:
            facts = (call["reset"], call["denoise_start_frame"], call["history_tokens"])
            expected[f"call{call['call']}.reset_start_history"] = torch.tensor(facts, dtype=torch.float32)
        return expected


def _needed_names(calls: Mapping[str, Any]) -> list[str]:
    """The tensors that must be recorded for the calls to be run."""
    prompts = [f"prompt.{branch}.{part}" for branch in BRANCHES for part in ("token_ids", "attention_mask")]
    return prompts + [f"call{call['call']}.{name}" for call in calls["calls"] for name in _INPUTS]


class GoldenObserver:
    """Collects in `ours`, under the names of `GoldenRecording.expected`, what one session's calls compute.

    `observe` is an engine's observer: (the session's K/V, a request, its result), on the engine's thread.
    """

    def __init__(self, recording: GoldenRecording) -> None:
        self.ours: Tensors = {}
        self._recording = recording
        self._model: DreamZero | None = None
        self._kv: KVState | None = None
        self._call = ""
        self._condition = torch.empty(0)  # the window's first-frame condition, and its name
        self._condition_name = ""
        self._history = 0

    def watch(self, model: DreamZero, kv: KVState) -> None:
        """Observe this session from now on; collect the model's own constants."""
        self._model, self._kv = model, kv
        config = model.config
        self.ours["solver.sigmas"] = torch.tensor(model.action_schedule.sigmas)
        self.ours["solver.timesteps"] = torch.tensor(model.action_schedule.timesteps)
        self.ours["solver.guidance_and_steps"] = torch.tensor([config.cfg_scale, config.num_inference_steps])
        self.ours["latent_mean"] = torch.tensor(LATENT_MEAN[config.dit.out_dim])
        self.ours["latent_std"] = torch.tensor(LATENT_STD[config.dit.out_dim])

    def begin_call(self, number: int) -> None:
        self._call = f"call{number}."

    def end_call(self, result: TickResult) -> None:
        self._keep("video_latents", result.video_latents[None])
        self._keep("actions", torch.from_numpy(result.actions)[None])
        facts = (result.restart_reason is not None, result.start_frame, self._history)
        self._keep("reset_start_history", torch.tensor(facts))

    def keep_decoded(self, video: torch.Tensor) -> None:
        self._keep("decoded_video", video)

    def observe(self, kv: KVState, request: Request, result: Any) -> None:
        if isinstance(result, Exception):
            return
        if isinstance(request, Encode) and request.encoder == "text":
            self._see_text(request.payload[0].numpy(), result)  # whoever needed it first
        elif kv is not self._kv:
            return
        elif isinstance(request, Encode):
            self._see_encoded(kv, request.encoder, result)
        elif isinstance(request, Forward):
            self._see_condition(request)
            if request.stage == "commit":
                self._see_history(kv)
            else:
                self._see_velocities(request, result)

    def _keep(self, name: str, tensor: torch.Tensor) -> None:
        self.ours[self._call + name] = tensor.detach().float().cpu()

    def _see_text(self, token_ids: np.ndarray, embedding: torch.Tensor) -> None:
        for branch in BRANCHES:
            if np.array_equal(token_ids, self._recording.prompt(branch)[0]):
                self.ours[f"prompt.{branch}.embedding"] = embedding.detach().float().cpu()

    def _see_encoded(self, kv: KVState, encoder: str, output: torch.Tensor) -> None:
        assert self._model is not None
        if encoder == "image":
            self._keep("clip_feature", output)
        elif encoder == "video" and kv.num_chunks:
            self._keep("observed_latents", output)
        elif encoder == "video" and self._model.config.dit.concat_first_frame_latent:
            mask = output.new_zeros(1, 4, *output.shape[2:])  # the rows bring it: see _see_condition
            self._condition = torch.cat([mask, output], dim=1)
            self._condition_name = f"{self._call}{_CONDITION}"
        elif encoder == "video":
            self._keep(_CONDITION + _FIRST_LATENT, output)

    def _see_condition(self, request: Forward) -> None:
        """Collect the parts of the first-frame condition that the rows bring, each at its frames."""
        for row in request.rows:
            given = row.inputs.condition
            if given is not None:
                start = min(row.inputs.first_frame, self._condition.shape[2] - given.shape[1])
                self._condition[0, :, start : start + given.shape[1]] = given
                self.ours[self._condition_name] = self._condition.float().cpu()

    def _see_history(self, kv: KVState) -> None:
        assert self._model is not None
        self._history = kv.branches[CONDITIONAL].num_tokens
        for branch in self._model.spec.branches:
            for layer in range(self._model.spec.num_layers):
                self._keep(f"cache.{branch}.layer{layer}", torch.stack(kv.layer_kv(branch, layer))[:, None])

    def _see_velocities(self, request: Forward, outputs: Any) -> None:
        assert self._model is not None
        for row, output in zip(request.rows, outputs, strict=True):
            branch = row.context.branch.name
            step = self._model.action_schedule.timesteps.index(row.inputs.action_timestep)
            self._keep(f"step{step}.video_velocity.{branch}", output.video_velocity[None])
            self._keep(f"step{step}.action_velocity.{branch}", output.action_velocity[None])


def relative_error(ours: torch.Tensor, expected: torch.Tensor) -> float:
    """||ours - expected|| / ||expected||; infinite where ours is not finite."""
    error = float((ours.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30))
    return error if math.isfinite(error) else math.inf
