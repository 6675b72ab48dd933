"""DreamZero as a world model: its window rules, its tick, its guidance. Weights and constants only; an episode's
state is a `Rollout` value that the engine keeps.

A tick: restart the window or encode what was observed; one clean forward commits it; then the next frames and actions
are denoised together, the guidance pair as two rows of each forward. The cache holds observations, never predictions.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from worldkv.device import HostCopy, Pacer, upload
from worldkv.errors import BadRequest
from worldkv.kv.cache import KVCache
from worldkv.kv.spec import KVSpec
from worldkv.kv.state import KVState
from worldkv.kv.window import Window, WindowPolicy
from worldkv.models.base import EncodeRequest, ForwardRequest, ForwardRow, Request, RowOutput, batches_of_alike
from worldkv.models.dreamzero.config import VAE_TEMPORAL_STRIDE, DreamZeroConfig
from worldkv.models.dreamzero.inputs import Prompt, TickInputs, TickResult, Trace, check_inputs, fill_chunk
from worldkv.models.dreamzero.steps import StepChooser, Steps, check_steps
from worldkv.models.solvers.unipc import SolverState, UniPCSchedule
from worldkv.models.wan.dit import ForwardPlans, WanDiT, num_draft_tokens
from worldkv.models.wan.encoders import WanEncoders
from worldkv.models.wan.graphs import GraphedCall

CONDITIONAL, UNCONDITIONAL = BRANCHES = ("conditional", "unconditional")
_MAX_EMBEDDINGS = 64  # prompts whose text is not encoded again; 4 MB each at the true sizes
_MOST_NUMBERS, _MOST_LATENTS = 1 << 24, 1 << 18  # of an encoder's, a decoder's input at once: they need room to work in
_MASK_CHANNELS = 4  # mark the first frame on the channels of the first-frame condition


@dataclass(frozen=True)
class Rollout:
    """The non-K/V state of an episode. Values are replaced, never written to: keeping one is a snapshot."""

    prompt_key: str | None = None  # digest of the last prompt's tokens
    first_frame_condition: torch.Tensor | None = None  # [4 + C, latent frames, h, w], of the window's first frame
    prediction: torch.Tensor | None = None  # [C, F, h, w], what the last tick imagined


def kv_spec(config: DreamZeroConfig, window_policy: WindowPolicy = "reset") -> KVSpec:
    """What a model of these sizes keeps per session; needs no weights. Without guidance one branch runs."""
    guided = config.cfg_scale != 1
    return KVSpec(
        num_layers=config.dit.num_layers,
        num_heads=config.dit.num_heads,
        head_dim=config.dit.head_dim,
        window=Window(config.dit.frame_tokens, config.window_frames, policy=window_policy),
        branches=BRANCHES if guided else (CONDITIONAL,),
        max_chunks_per_forward=config.frames_per_chunk,
        max_draft_tokens=config.dit.num_actions_per_chunk + config.dit.num_states,
        conditioning={"text": config.dit.text_len, "image": config.dit.image_tokens},
        entries_per_session={"text": 1, "image": 1},
        entries_shared={"text": 1} if guided else {},  # the negative prompt
    )


class DreamZero:
    """See the module. `negative_prompt` is the tokenised negative prompt of all sessions."""

    def __init__(
        self,
        config: DreamZeroConfig,
        dit: WanDiT,
        encoders: WanEncoders,
        negative_prompt: Prompt,
        *,
        window_policy: WindowPolicy = "reset",
        steps: Steps = 8,
    ) -> None:
        check_steps(steps)
        self.config = config
        self.encoders = encoders
        self.negative_prompt = negative_prompt
        self.steps: Steps = steps
        self._dit = dit
        self._pacer = Pacer(dit.device)
        self._embeddings: dict[str, torch.Tensor] = {}  # of the prompts encoded last, by digest
        self._encode: dict[str, Callable[..., torch.Tensor]] = {
            "text": encoders.text.encode,
            "image": GraphedCall(encoders.image.encode),
            "video": GraphedCall(encoders.vae.encode),
            "decode": encoders.vae.decode,
        }
        self.action_schedule = UniPCSchedule(config.num_inference_steps, config.sigma_shift)
        final = config.video_inference_final_noise if config.decouple_inference_noise else 0.0
        self.video_schedule = UniPCSchedule(config.num_inference_steps, config.sigma_shift, final)
        self.spec = kv_spec(config, window_policy)

    @property
    def num_weight_bytes(self) -> int:
        """Of the DiT and the encoders; what modules share is counted once."""
        modules = (self._dit, self.encoders.vae.module, self.encoders.text.module, self.encoders.image.module)
        storages = {
            t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for m in modules for t in m.parameters()
        }
        return sum(storages.values())

    # what the engine runs

    def new_rollout(self) -> Rollout:
        return Rollout()

    @torch.no_grad()
    def forward(self, cache: KVCache, rows: Sequence[ForwardRow]) -> list[RowOutput]:
        """Velocities of the rows, their K/V written to the cache. Blocks are taken here, when the rows really run."""
        plan, storage = cache.backend.plan, cache.storage
        history = [row.context.activate(num_draft_tokens(row)) for row in rows]
        plans = ForwardPlans(
            plan(storage, history),
            plan(storage, [row.conditioning["text"].row(h.num_queries) for row, h in zip(rows, history, strict=True)]),
            plan(storage, [row.conditioning["image"].row(h.num_queries) for row, h in zip(rows, history, strict=True)]),
        )
        outputs: list[RowOutput] = self._dit(rows, plans)
        self._pacer.batch_queued()
        return outputs

    @torch.no_grad()
    def encode(self, encoder: str, payloads: Sequence[Any]) -> list[torch.Tensor]:
        """Run one encoder; payloads of equal shapes are batched, large ones less. Outputs carry a batch axis of 1.

        A payload is a tuple of tensors with a batch axis of 1: "text" (token ids, attention mask; on the host), "image"
        pixels [1, 3, H, W], "video" pixels [1, 3, T, H, W], "decode" latents [1, C, F, h, w].
        """
        outputs: list[Any] = [None] * len(payloads)
        for indices in batches_of_alike(payloads, _MOST_LATENTS if encoder == "decode" else _MOST_NUMBERS):
            batch = [torch.cat(parts) for parts in zip(*(payloads[index] for index in indices), strict=True)]
            for index, output in zip(indices, torch.split(self._encode[encoder](*batch), 1), strict=True):
                outputs[index] = output
        self._pacer.batch_queued()
        return outputs

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """[B, C, F, h, w] latents to video [B, 3, T, H, W] in [-1, 1]."""
        return self.encoders.vae.decode(latents)

    def decode_video(self, latents: torch.Tensor) -> np.ndarray:
        """[C, F, h, w] latents to uint8 frames [T, H, W, 3]."""
        video = self.decode(latents[None])[0].float()
        frames: np.ndarray = ((video + 1) * 127.5).clamp(0, 255).to(torch.uint8).permute(1, 2, 3, 0).cpu().numpy()
        return frames

    def imagined_video(self, result: TickResult) -> np.ndarray:
        """What a tick imagined, uint8 frames [4 F, H, W, 3]; decoded after the newest observed latent, whose
        continuation they are."""
        latents = torch.cat([result.observed_latents[:, -1:], result.video_latents], dim=1)
        num_frames = VAE_TEMPORAL_STRIDE * result.video_latents.shape[1]
        return self.decode_video(latents)[-num_frames:]

    # the tick

    def tick(
        self, cache: KVCache, kv: KVState, rollout: Rollout, inputs: TickInputs
    ) -> Generator[Request, Any, tuple[TickResult, Rollout]]:
        """One tick's program: yields what must run, returns (result, the rollout after it)."""
        check_inputs(self.config, inputs, rollout.prediction is not None)
        trace = inputs.trace or _ignore
        prompt_key = _digest(inputs.token_ids, inputs.attention_mask)
        reason = self._restart_reason(rollout, kv, prompt_key, inputs)
        if reason is not None:
            kv.reset(keep=("text",) if prompt_key == rollout.prompt_key else ())
            yield from self._condition_on_text(cache, kv, inputs, trace)
            pixels, image_key = yield from self._first_image(inputs, rollout)
            condition, observed = yield from self._start_window(cache, kv, inputs, pixels, image_key, trace)
            rollout = replace(rollout, prompt_key=prompt_key, first_frame_condition=condition)
        elif inputs.frames is None:
            observed = self._imagined(inputs, rollout)
        else:
            pixels = self._pixels(fill_chunk(inputs.frames, self.config.frames_per_chunk))
            latents = yield EncodeRequest("video", (pixels,))
            trace("observed_latents", latents)
            observed = latents[0, :, -self.config.frames_per_chunk :]
        yield self._clean_pass(kv, rollout, observed)
        if inputs.trace is not None:
            _trace_history(trace, cache, kv)
        start_frame = kv.branches[CONDITIONAL].num_chunks
        video, actions = yield from self._denoise(kv, rollout, inputs, trace, observed.shape[-2:])
        trace("video_latents", video[None])
        trace("actions", actions[None])
        result = TickResult(
            action_copy=HostCopy(actions.float()),
            video_latents=video,
            observed_latents=observed,
            restart_reason=reason,
            start_frame=start_frame,
            frames_cached=start_frame,
        )
        return result, replace(rollout, prediction=video)

    def _restart_reason(self, rollout: Rollout, kv: KVState, prompt_key: str, inputs: TickInputs) -> str | None:
        """The reference's four rules, in its order."""
        num_frames = kv.branches[CONDITIONAL].num_chunks
        if rollout.prompt_key is None or num_frames == 0:
            return "first tick"
        if prompt_key != rollout.prompt_key:
            return "prompt changed"
        if inputs.frames is not None and inputs.frames.shape[0] == 1:
            return "single frame"
        # what is observed takes the place of the chunk that was denoised, and the next one must fit as well
        if self.spec.window.policy == "reset" and not self.spec.window.has_room(
            num_frames, 2 * self.config.frames_per_chunk
        ):
            return "window full"
        return None

    def _condition_on_text(
        self, cache: KVCache, kv: KVState, inputs: TickInputs, trace: Trace
    ) -> Generator[Request, Any, None]:
        """Attach the text half to each branch; encode and project only what is stored nowhere."""
        prompts = {CONDITIONAL: (inputs.token_ids, inputs.attention_mask), UNCONDITIONAL: self.negative_prompt}
        for branch in self.spec.branches:
            prompt = prompts[branch]
            key = f"text:{_digest(*prompt)}"
            state = kv.branches[branch].conditioning.get("text")
            if state is not None and state.key == key:
                continue
            entry = cache.conditioning.acquire(key) if inputs.trace is None else None
            if entry is None:  # else it is never held over a yield: a failing tick would leak it
                embedding = self._embeddings.get(key)
                if embedding is None:
                    embedding = yield EncodeRequest("text", tuple(torch.from_numpy(part) for part in prompt))
                    self._embeddings[key] = embedding
                    if len(self._embeddings) > _MAX_EMBEDDINGS:
                        self._embeddings.pop(next(iter(self._embeddings)))
                trace(f"prompt.{branch}.embedding", embedding)
                entry = cache.conditioning.publish(
                    key, self.spec.conditioning["text"], self._dit.project_text(embedding[0])
                )
            kv.set_conditioning(branch, "text", entry)

    def _first_image(self, inputs: TickInputs, rollout: Rollout) -> Generator[Request, Any, tuple[torch.Tensor, str]]:
        """The frame a window starts with: pixels [1, 3, 1, H, W] and the key of its conditioning."""
        if inputs.frames is None:
            latents = self._imagined(inputs, rollout)
            video = yield EncodeRequest("decode", (latents[None],))
            return video[:, :, -1:].to(self._dit.dtype), f"imagined:{_digest(latents.float().cpu().numpy())}"
        # a request of 4 or 9 frames ends now, so its last frame is the newest; otherwise the reference takes the first
        image = inputs.frames[-1:] if inputs.frames.shape[0] in (4, 9) else inputs.frames[:1]
        return self._pixels(image), f"image:{_digest(image)}"

    def _imagined(self, inputs: TickInputs, rollout: Rollout) -> torch.Tensor:
        latents = inputs.latents if inputs.latents is not None else rollout.prediction
        assert latents is not None, "checked before the tick began"
        return latents.to(self._dit.device, self._dit.dtype)

    def _start_window(
        self, cache: KVCache, kv: KVState, inputs: TickInputs, pixels: torch.Tensor, key: str, trace: Trace
    ) -> Generator[Request, Any, tuple[torch.Tensor | None, torch.Tensor]]:
        """Attach the image half, and encode the window's first frame: (first-frame condition, its latents)."""
        if key not in cache.conditioning or inputs.trace is not None:
            feature = yield EncodeRequest("image", (pixels[:, :, 0],))
            trace("clip_feature", feature)
            num_tokens = self.spec.conditioning["image"]
            entry = cache.conditioning.publish(key, num_tokens, self._dit.project_image(feature[0]))
        else:
            stored = cache.conditioning.acquire(key)
            assert stored is not None
            entry = stored
        for branch in self.spec.branches:
            kv.set_conditioning(branch, "image", cache.conditioning.share(entry))
        cache.conditioning.release(entry)
        if not self.config.dit.concat_first_frame_latent and inputs.trace is None:
            latents = yield EncodeRequest("video", (pixels,))
            return None, latents[0]
        padding = pixels.new_zeros(1, 3, self.config.num_frames - 1, *pixels.shape[-2:])
        latents = yield EncodeRequest("video", (torch.cat([pixels, padding], dim=2),))
        mask = latents.new_zeros(1, _MASK_CHANNELS, *latents.shape[2:])
        mask[:, :, 0] = 1
        condition = torch.cat([mask, latents], dim=1)
        trace("first_frame_condition", condition)
        return condition[0], latents[0, :, :1]  # causal: the first latent frame is the first frame's own

    def _clean_pass(self, kv: KVState, rollout: Rollout, observed: torch.Tensor) -> ForwardRequest:
        """Both branches read the observed frames at timestep 0; they become history."""
        first_frame = kv.branches[CONDITIONAL].num_chunks
        num_frames = observed.shape[1]
        condition = self._condition(rollout, first_frame, num_frames)
        seq_len = num_frames * self.config.dit.frame_tokens
        rows = tuple(
            ForwardRow(
                kv.prepare(branch, seq_len, commit=True), kv.conditioning(branch), observed, condition, first_frame, 0
            )
            for branch in self.spec.branches
        )
        return ForwardRequest(rows, "commit")

    def _denoise(
        self, kv: KVState, rollout: Rollout, inputs: TickInputs, trace: Trace, latent_size: Sequence[int]
    ) -> Generator[Request, Any, tuple[torch.Tensor, torch.Tensor]]:
        """The next chunk's latents [C, F, h, w] and actions [horizon, action_dim], from noise."""
        config = self.config
        video, actions = self._noise(inputs, latent_size)
        state = upload(inputs.state, self._dit.device, torch.float32)
        first_frame = kv.branches[CONDITIONAL].num_chunks
        condition = self._condition(rollout, first_frame, config.frames_per_chunk)
        seq_len = config.frames_per_chunk * config.dit.frame_tokens
        contexts = {branch: kv.prepare(branch, seq_len, commit=False) for branch in self.spec.branches}
        chooser = StepChooser(self.steps)
        video_solver, action_solver = SolverState(), SolverState()
        video_velocity, action_velocity = torch.zeros_like(video), torch.zeros_like(actions)
        for index in range(config.num_inference_steps):
            if chooser.runs(index):
                rows = tuple(
                    ForwardRow(
                        contexts[branch],
                        kv.conditioning(branch),
                        video,
                        condition,
                        first_frame,
                        self.video_schedule.timesteps[index],
                        actions,
                        state,
                        self.action_schedule.timesteps[index],
                    )
                    for branch in self.spec.branches
                )
                outputs: list[RowOutput] = yield ForwardRequest(rows, "denoise")
                video_velocity, action_velocity = self._guide(index, outputs, trace)
                chooser.record(video_velocity)
            video, video_solver = self.video_schedule.step(index, video_velocity, video, video_solver)
            actions, action_solver = self.action_schedule.step(index, action_velocity, actions, action_solver)
        kv.abandon()  # the drafts' blocks go back
        return video, actions

    def _guide(self, index: int, outputs: list[RowOutput], trace: Trace) -> tuple[torch.Tensor, torch.Tensor]:
        """Classifier-free guidance on the video; the actions are the conditional branch's alone."""
        video, actions = outputs[0].video_velocity, outputs[0].action_velocity
        assert video is not None
        assert actions is not None
        trace(f"step{index}.video_velocity.{CONDITIONAL}", video[None])
        trace(f"step{index}.action_velocity.{CONDITIONAL}", actions[None])
        if len(outputs) == 1:  # guidance is off
            return video, actions
        negative = outputs[1].video_velocity
        assert negative is not None
        trace(f"step{index}.video_velocity.{UNCONDITIONAL}", negative[None])
        return negative + self.config.cfg_scale * (video - negative), actions

    def _condition(self, rollout: Rollout, first_frame: int, num_frames: int) -> torch.Tensor | None:
        """The first-frame condition at these frames; past its end, its last frames, as the reference does."""
        if rollout.first_frame_condition is None or not self.config.dit.concat_first_frame_latent:
            return None
        start = min(first_frame, self.config.latent_frames - num_frames)
        return rollout.first_frame_condition[:, start : start + num_frames]

    def _noise(self, inputs: TickInputs, latent_size: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        config, dit = self.config, self._dit
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

    def _pixels(self, frames: np.ndarray) -> torch.Tensor:
        """uint8 [T, H, W, 3] to [1, 3, T, H, W] in [-1, 1], rounded as the reference does, resized for the 5B."""
        video = upload(frames, self._dit.device)
        pixels = ((video.permute(3, 0, 1, 2).float() / 255).to(self._dit.dtype) - 0.5) / 0.5
        height, width = self.config.target_video_height, self.config.target_video_width
        if height is not None and width is not None and pixels.shape[-2:] != (height, width):
            resized = F.interpolate(pixels.transpose(0, 1), (height, width), mode="bilinear", align_corners=False)
            pixels = resized.transpose(0, 1)
        return pixels[None]


def _digest(*arrays: np.ndarray) -> str:
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(f"{array.shape}{array.dtype.str}".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def _trace_history(trace: Trace, cache: KVCache, kv: KVState) -> None:
    layer = cache.spec.num_layers - 1
    for branch in kv.branches:
        trace(f"cache.{branch}.layer{layer}", torch.stack(kv.layer_kv(branch, layer))[:, None])


def _ignore(quantity: str, tensor: torch.Tensor) -> None:
    return None
