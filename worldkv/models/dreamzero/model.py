"""DreamZero as a world model: its window rules, its tick, its guidance.

A tick restarts the window or encodes the observation; one clean forward commits it; then the next frames and actions
are denoised together, the guidance pair as two rows of each forward. The cache holds observations, never predictions.
Holds weights and constants only; an episode's state is a `State` value that the engine keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from worldkv.device import HostCopy, upload
from worldkv.errors import BadRequest
from worldkv.kv.cache import KVCache
from worldkv.kv.state import KVState
from worldkv.kv.window import WindowPolicy
from worldkv.models.base import (
    BatchLimits,
    Encode,
    Forward,
    ModelCard,
    OnHost,
    Outcome,
    Program,
    Request,
    Row,
)
from worldkv.models.dreamzero.beginning import Beginning, digest, first_image
from worldkv.models.dreamzero.config import DreamZeroConfig
from worldkv.models.dreamzero.dit import DreamZeroDiT, DreamZeroRow, RowOutput
from worldkv.models.dreamzero.encoding import Encoding
from worldkv.models.dreamzero.inputs import check_inputs, fill_chunk, tiled_size
from worldkv.models.dreamzero.network import DreamZeroNetwork, guide
from worldkv.models.dreamzero.ready import encoder_steps
from worldkv.models.dreamzero.spec import BRANCHES as BRANCHES
from worldkv.models.dreamzero.spec import CONDITIONAL as CONDITIONAL
from worldkv.models.dreamzero.spec import UNCONDITIONAL as UNCONDITIONAL
from worldkv.models.dreamzero.spec import kv_spec as kv_spec
from worldkv.models.dreamzero.state import Begun, Past, load_compact, load_state, save_state
from worldkv.models.dreamzero.state import State as State
from worldkv.models.dreamzero.steps import StepChooser, Steps, check_steps
from worldkv.models.fingerprint import fingerprint
from worldkv.models.saving import Saved
from worldkv.models.solvers.unipc import SolverState, UniPCSchedule
from worldkv.models.wan.config import VAE_TEMPORAL_STRIDE
from worldkv.models.wan.encoders import WanEncoders
from worldkv.models.wan.network import Network, activated
from worldkv.models.wan.shard import ALONE, Mesh
from worldkv.models.wan.tokenizer import Tokens
from worldkv.models.world_action import TickInputs, TickResult
from worldkv.words import count


class DreamZero:
    """See the module. `negative_prompt` is the tokenised negative prompt of all sessions. `network`: the DiT as it
    runs, where several ranks of `mesh` run it together."""

    def __init__(
        self,
        config: DreamZeroConfig,
        dit: DreamZeroDiT,
        encoders: WanEncoders,
        negative_prompt: Tokens,
        *,
        window_policy: WindowPolicy = "reset",
        steps: Steps = 8,
        network: Network | None = None,
        mesh: Mesh = ALONE,
    ) -> None:
        check_steps(steps)
        self.config = config
        self.encoders = encoders
        self.negative_prompt = negative_prompt
        self.steps: Steps = steps
        self.dit = dit
        self.encoding = Encoding(config, encoders, dit.device, dit.dtype)
        assert encoders.image is not None, "DreamZero reads an image"
        self._image = encoders.image
        others = (encoders.vae.module, encoders.text.module, self._image.module)
        self._weights = dit.fingerprint + fingerprint(*others)
        self.action_schedule = UniPCSchedule(config.num_inference_steps, config.sigma_shift)
        final = config.video_inference_final_noise if config.decouple_inference_noise else 0.0
        self.video_schedule = UniPCSchedule(config.num_inference_steps, config.sigma_shift, final)
        self.spec = kv_spec(config, window_policy, mesh)
        self.whole_spec = kv_spec(config, window_policy)  # of all ranks together
        self.network = network or DreamZeroNetwork(config, dit, self.spec)
        self._beginning = Beginning(config, self.spec, dit, self.network, self.encoding, negative_prompt)

    @property
    def card(self) -> ModelCard:
        dit = self.config.dit
        return ModelCard(
            family="dreamzero",
            sizes=f"{dit.model_type}, {dit.num_layers} layers, width {dit.dim}",
            num_weight_bytes=self.num_weight_bytes,
            window_chunks=self.config.window_frames,
            facts={
                "steps": self.steps,
                "solver_steps": self.config.num_inference_steps,
                "cfg_scale": self.config.cfg_scale,
                "frame_tokens": dit.frame_tokens,
            },
            weights=self._weights,
        )

    @cached_property
    def num_weight_bytes(self) -> int:
        """Of the DiT and the encoders; what modules share is counted once."""
        modules = (self.dit, self.encoders.vae.module, self.encoders.text.module, self._image.module)
        storages = {
            t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for m in modules for t in m.parameters()
        }
        return sum(storages.values())

    # what the engine runs

    def new_state(self, old: State | None = None) -> State:
        return State()

    def save_state(self, state: State) -> Saved:
        """See SavesState."""
        return save_state(state, self.config)

    def load_state(self, saved: Saved) -> State:
        return load_state(saved, self.config).to(self.dit.device)

    def compact(self, state: State) -> State:
        """See RebuildsHistory."""
        return replace(state, first_frame_condition=None)

    def load_compact(self, saved: Saved) -> State:
        return load_compact(saved, self.config, self.spec.window).to(self.dit.device)

    def why_inexact(self, state: State) -> str | None:
        if state.past is None or state.past.first_frame == 0:
            return None
        return f"{count(state.past.first_frame, 'frame')} of its history have left the window, and were read by others"

    def rebuild(self, kv: KVState, state: State) -> Program[None, State]:
        """The window's clean passes, once more."""
        past = state.past
        if past is None:
            return Outcome(None, state)
        state = replace(state, num_skipped=past.first_frame)
        yield from self._beginning.set_text(kv, past)
        pixels = yield from self._beginning.set_image(kv, past)
        if self.config.dit.concat_first_frame_latent:
            condition, _ = yield from self._beginning.first_frame(pixels)
            state = replace(state, first_frame_condition=condition)
        for observed in past.observed:
            yield self._clean_pass(kv, state, observed.to(self.dit.device, self.dit.dtype))
        return Outcome(None, state)

    def fake_inputs(self, first: bool) -> TickInputs:
        """Grey images of a size that makes the model's tokens, a prompt of few words."""
        height, width = tiled_size(self.config)
        dit = self.config.dit
        tokens = np.zeros((1, dit.text_len), dtype=np.int64)
        tokens[0, :6] = np.arange(5, 11)
        frames = np.full((1 if first else VAE_TEMPORAL_STRIDE, height, width, 3), 127, dtype=np.uint8)
        state = np.zeros((dit.num_states, dit.max_state_dim))
        return TickInputs(frames, state, tokens, (tokens > 0).astype(np.int64))

    def forward(self, cache: KVCache, rows: Sequence[Row[DreamZeroRow]]) -> Sequence[object]:
        """Velocities of the rows, their K/V written to the cache. Blocks are taken here, when the rows really run."""
        return self.network.forward(cache, activated(rows, self.spec.conditioning))

    def encode(self, encoder: str, payloads: Sequence[Any]) -> list[torch.Tensor]:
        return self.encoding.encode(encoder, payloads)

    def ready_steps(self, cache: KVCache, limits: BatchLimits) -> Sequence[Callable[[], object]]:
        """See MakesReady."""
        return [*encoder_steps(self, cache, limits), *self.network.ready_steps(cache, limits)]

    def imagined_video(self, result: TickResult) -> Encode:
        """The request whose output `frames` turns into the tick's imagined video. The newest observed latent goes
        first, since the video continues it."""
        latents = torch.cat([result.observed_latents[:, -1:], result.video_latents], dim=1)
        return Encode("decode", (latents[None],))

    @staticmethod
    def frames(video: torch.Tensor, num_latent_frames: int) -> np.ndarray:
        """The last frames of a decoded video [1, 3, T, H, W] in [-1, 1]: uint8 [4 F, H, W, 3]. Waits for the device."""
        newest = video[0, :, -VAE_TEMPORAL_STRIDE * num_latent_frames :].float()
        pixels = ((newest + 1) * 127.5).clamp(0, 255).to(torch.uint8).permute(1, 2, 3, 0)
        frames: np.ndarray = pixels.cpu().numpy()
        return frames

    # the tick

    def program(self, kv: KVState, state: State, inputs: TickInputs) -> Program[TickResult, State]:
        """One tick, or the rest of one that has begun."""
        check_inputs(self.config, inputs, state.prediction is not None)
        if state.begun is None:
            state = yield from self._observe(kv, state, inputs)
        begun = state.begun
        assert begun is not None
        assert state.past is not None
        start_frame, observed, latents = self._next_frame(kv, state), begun.observed, HostCopy(begun.observed)
        video, actions = yield from self._denoise(kv, state, inputs, observed.shape[-2:])
        copy = HostCopy(actions.float())
        numbers, latents_CFhw = yield OnHost(lambda: (copy.numpy(), latents.kept()), "denoise")
        past = state.past.with_observed(latents_CFhw, self.spec.window.max_chunks)
        result = TickResult(numbers, video, observed, begun.restart_reason, start_frame)
        return Outcome(result, replace(state, prediction=video, begun=None, past=past))

    def ahead(self, kv: KVState, state: State, inputs: TickInputs) -> Program[None, State]:
        """What of a tick needs neither its robot's state nor noise: its observation is encoded and committed."""
        check_inputs(self.config, inputs, state.prediction is not None)
        return Outcome(None, (yield from self._observe(kv, state, inputs)))

    def goes_on(self, state: State, inputs: TickInputs) -> bool:
        """See WorksAhead: with these frames, and this prompt."""
        begun, frames = state.begun, inputs.frames
        if begun is None or begun.frames is None or frames is None:
            return False
        same = frames is begun.frames or np.array_equal(frames, begun.frames)
        return same and digest(inputs.token_ids, inputs.attention_mask) == begun.prompt_key

    def _observe(self, kv: KVState, state: State, inputs: TickInputs) -> Generator[Request, Any, State]:
        """Make the observation history. The state says how the tick has begun."""
        prompt_key = digest(inputs.token_ids, inputs.attention_mask)
        reason = self._restart_reason(state, kv, prompt_key, inputs)
        if reason is not None:
            kv.reset(keep=("text",) if prompt_key == state.prompt_key else ())
            past = self._new_past(inputs, state)
            yield from self._beginning.set_text(kv, past)
            pixels = yield from self._beginning.set_image(kv, past)
            condition, observed = yield from self._beginning.first_frame(pixels)
            state = State(prompt_key, condition, state.prediction, past=past)
        elif inputs.frames is None:
            observed = self._imagined(inputs, state)
        else:
            pixels = self.encoding.pixels(fill_chunk(inputs.frames, self.config.frames_per_chunk))
            latents = yield Encode("video", (pixels,))
            observed = latents[0, :, -self.config.frames_per_chunk :]
        yield self._clean_pass(kv, state, observed)
        return replace(state, begun=Begun(inputs.frames, prompt_key, observed, reason))

    def _restart_reason(self, state: State, kv: KVState, prompt_key: str, inputs: TickInputs) -> str | None:
        """The reference's four rules, in its order."""
        num_frames = kv.num_chunks
        if state.prompt_key is None or num_frames == 0:
            return "first tick"
        if prompt_key != state.prompt_key:
            return "prompt changed"
        if inputs.frames is not None and inputs.frames.shape[0] == 1:
            return "single frame"
        # what is observed takes the place of the chunk that was denoised, and the next one must fit as well
        if self.spec.window.policy == "reset" and not self.spec.window.has_room(
            num_frames, 2 * self.config.frames_per_chunk
        ):
            return "window full"
        return None

    def _new_past(self, inputs: TickInputs, state: State) -> Past:
        """Of the window that begins with this tick."""
        text = (inputs.token_ids.copy(), inputs.attention_mask.copy())
        if inputs.frames is None:
            return Past(*text, None, self._imagined(inputs, state).cpu())
        return Past(*text, first_image(inputs.frames).copy(), None)

    def _next_frame(self, kv: KVState, state: State) -> int:
        """Its number in the window."""
        return kv.num_chunks + state.num_skipped

    def _imagined(self, inputs: TickInputs, state: State) -> torch.Tensor:
        latents = inputs.latents if inputs.latents is not None else state.prediction
        assert latents is not None, "checked before the tick began"
        return latents.to(self.dit.device, self.dit.dtype)

    def _clean_pass(self, kv: KVState, state: State, observed: torch.Tensor) -> Forward:
        """Both branches read the observed frames at timestep 0; they become history."""
        first_frame, num_frames = self._next_frame(kv, state), observed.shape[1]
        condition = self._condition(state, first_frame, num_frames)
        inputs = DreamZeroRow(observed, condition, first_frame, timestep=0, wants_velocity=False)
        seq_len = num_frames * self.config.dit.frame_tokens
        rows = tuple(
            Row(kv.prepare(branch, seq_len, commit=True), kv.conditioning(branch), 0, inputs)
            for branch in self.spec.branches
        )
        return Forward(rows, "commit")

    def _denoise(
        self, kv: KVState, state: State, inputs: TickInputs, latent_size: Sequence[int]
    ) -> Generator[Request, Any, tuple[torch.Tensor, torch.Tensor]]:
        """The next chunk's latents [C, F, h, w] and actions [horizon, action_dim], from noise."""
        config = self.config
        video, actions = self._noise(inputs, latent_size)
        robot_state = upload(inputs.state, self.dit.device, torch.float32)
        first_frame = self._next_frame(kv, state)
        condition = self._condition(state, first_frame, config.frames_per_chunk)
        seq_len = config.frames_per_chunk * config.dit.frame_tokens
        contexts = {branch: kv.prepare(branch, seq_len, commit=False) for branch in self.spec.branches}
        num_draft_tokens = actions.shape[0] + robot_state.shape[0]
        chooser = StepChooser(self.steps)
        video_solver, action_solver = SolverState(), SolverState()
        video_velocity, action_velocity = torch.zeros_like(video), torch.zeros_like(actions)
        for index in range(config.num_inference_steps):
            question = chooser.question()
            similarity = None
            if question is not None:  # a host thread waits for it, and the others' batches go on
                similarity = float((yield OnHost(HostCopy(question).numpy, "denoise")))
            if chooser.runs(index, similarity):
                row = DreamZeroRow(
                    video,
                    condition,
                    first_frame,
                    timestep=self.video_schedule.timesteps[index],
                    wants_velocity=True,
                    actions=actions,
                    state=robot_state,
                    action_timestep=self.action_schedule.timesteps[index],
                )
                rows = tuple(
                    Row(contexts[branch], kv.conditioning(branch), num_draft_tokens, row)
                    for branch in self.spec.branches
                )
                outputs: list[RowOutput] = yield Forward(rows, "denoise")
                video_velocity, action_velocity = self._guide(outputs)
                chooser.record(video_velocity)
            video, video_solver = self.video_schedule.step(index, video_velocity, video, video_solver)
            actions, action_solver = self.action_schedule.step(index, action_velocity, actions, action_solver)
        kv.abandon()  # the drafts' blocks go back
        return video, actions

    def _guide(self, outputs: list[RowOutput]) -> tuple[torch.Tensor, torch.Tensor]:
        """Classifier-free guidance on the video; the actions are the conditional branch's alone."""
        video, actions = outputs[0].video_velocity, outputs[0].action_velocity
        assert video is not None
        assert actions is not None
        if len(outputs) == 1:  # guidance is off, or the network has done it
            return video, actions
        negative = outputs[1].video_velocity
        assert negative is not None
        return guide(video, negative, self.config.cfg_scale), actions

    def _condition(self, state: State, first_frame: int, num_frames: int) -> torch.Tensor | None:
        """The first-frame condition at these frames; past its end, its last frames, as the reference does."""
        if state.first_frame_condition is None or not self.config.dit.concat_first_frame_latent:
            return None
        start = min(first_frame, self.config.latent_frames - num_frames)
        return state.first_frame_condition[:, start : start + num_frames]

    def _noise(self, inputs: TickInputs, latent_size: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        config, dit = self.config, self.dit
        shapes = (
            (config.dit.out_dim, config.frames_per_chunk, *latent_size),
            (config.action_horizon, config.action_dim),
        )
        noise = []
        for given, shape in zip((inputs.noise_video, inputs.noise_action), shapes, strict=True):
            if given is None:
                generator = torch.Generator(dit.device).manual_seed(
                    config.seed if inputs.noise_seed is None else inputs.noise_seed
                )
                given = torch.randn((1, *shape), generator=generator, device=dit.device, dtype=dit.dtype)
            elif tuple(given.shape) != (1, *shape):
                raise BadRequest(f"noise: expected shape {(1, *shape)}, got {tuple(given.shape)}")
            noise.append(given[0].to(dit.device, dit.dtype))
        return noise[0], noise[1]
