"""Causal Wan video as a world model: a tick is a block.

A few drafts denoise the block's frames over the window, then a clean pass over the finished ones commits them: the
cache holds the model's own outputs. What leaves the window leaves at that commit: a block that fails has lost nothing.
Holds weights and constants only; a session's state is a `State` value that the engine keeps.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from functools import cached_property, partial

import numpy as np
import torch

from worldkv.device import HostCopy
from worldkv.errors import BadRequest
from worldkv.kv.cache import KVCache
from worldkv.kv.state import KVState
from worldkv.models.base import (
    BatchLimits,
    Encode,
    Forward,
    ModelCard,
    OnHost,
    Outcome,
    Program,
    Row,
    batches_of_alike,
)
from worldkv.models.causal_wan.config import BRANCH, CausalWanConfig, kv_spec
from worldkv.models.causal_wan.inputs import (
    Block,
    BlockRequest,
    State,
    check_request,
    mixture,
    num_given_frames,
    pixels_of,
    prompt_key,
)
from worldkv.models.causal_wan.network import CausalWanNetwork
from worldkv.models.causal_wan.past import Past, kept_blocks, name_of
from worldkv.models.causal_wan.ready import encoder_steps
from worldkv.models.causal_wan.room import COPIES, state_bytes
from worldkv.models.causal_wan.saved import load_state, save_state
from worldkv.models.causal_wan.schedule import Schedule
from worldkv.models.causal_wan.texts import Texts
from worldkv.models.fingerprint import fingerprint
from worldkv.models.saving import Saved
from worldkv.models.wan.dit import WanDiT, WanRow
from worldkv.models.wan.encoders import VAEStream, WanEncoders
from worldkv.models.wan.network import Network, activated
from worldkv.models.wan.shard import ALONE, Mesh

_MAX_TEXT_ELEMENTS = 1 << 14  # token ids of one batch


class CausalWan:
    """See the module. `network`: the DiT as it runs, where several ranks of `mesh` run it together."""

    def __init__(
        self,
        config: CausalWanConfig,
        dit: WanDiT,
        encoders: WanEncoders,
        *,
        recache: bool = True,
        decodes: bool = True,
        network: Network | None = None,
        mesh: Mesh = ALONE,
    ) -> None:
        self.config, self.dit, self.encoders = config, dit, encoders
        self.recaches, self.decodes = recache, decodes
        self._weights = dit.fingerprint + fingerprint(encoders.vae.module, encoders.text.module)
        blocks = config.blocks
        self.schedule = Schedule.of(blocks.steps, blocks)
        self.first_schedule = Schedule.of(blocks.first_block_steps or blocks.steps, blocks)
        self.spec = kv_spec(config, recache, mesh)
        self.whole_spec = kv_spec(config, recache)  # of all ranks together
        self._block_tokens = blocks.frames_per_block * config.frame_tokens
        self.network = network or CausalWanNetwork(config, dit, self.spec)
        self.texts = Texts(self.spec, self.network)

    @property
    def card(self) -> ModelCard:
        dit, blocks = self.config.dit, self.config.blocks
        return ModelCard(
            family="causal_wan",
            sizes=f"{dit.model_type}, {dit.num_layers} layers, width {dit.dim}",
            num_weight_bytes=self.num_weight_bytes,
            window_chunks=blocks.held_frames,
            facts={
                "frames_per_block": blocks.frames_per_block,
                "steps": list(blocks.steps),
                "sink_frames": blocks.sink_frames,
                "rope": blocks.rope,
                "frame_tokens": self.config.frame_tokens,
                "pixels": [self.config.height, self.config.width],
                "decoder": self.encoders.decoder.label,
            },
            weights=self._weights,
        )

    @cached_property
    def num_weight_bytes(self) -> int:
        """Of the DiT and the encoders; what modules share is counted once."""
        modules = (self.dit, self.encoders.vae.module, self.encoders.text.module)
        storages = {
            t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for m in modules for t in m.parameters()
        }
        return sum(storages.values()) + (0 if self.encoders.tiny is None else self.encoders.tiny.num_weight_bytes)

    # what the engine runs

    def new_state(self, old: State | None = None) -> State:
        return State()

    @cached_property
    def max_state_bytes(self) -> int:
        """With the copy that a tick may roll back to."""
        decoder, itemsize = self.encoders.decoder.state_size(*self.config.latent_size), self.dit.dtype.itemsize
        return COPIES * state_bytes(self.config, decoder, itemsize, recaches=self.recaches, decodes=self.decodes)

    def state_bytes(self, state: State) -> int:
        return state.num_bytes

    def move_state(self, state: State, device: torch.device | str) -> State:
        return state.to(device)

    def save_state(self, state: State) -> Saved:
        """See SavesState."""
        return save_state(state, self.config, self.recaches, self.decodes)

    def load_state(self, saved: Saved) -> State:
        state = load_state(saved, self.config, self.recaches, self.decodes, self.dit.dtype)
        if state.decoder is not None:
            self.encoders.decoder.check_decode_state(state.decoder, self.config.latent_size)
        return state

    def compact(self, state: State) -> State:
        """See RebuildsHistory."""
        return replace(state, recent=None, decoder=None)

    def load_compact(self, saved: Saved) -> State:
        return load_state(saved, self.config, self.recaches, self.decodes, self.dit.dtype, is_compact=True)

    def why_inexact(self, state: State) -> str | None:
        return None if state.past is None else state.past.inexact

    def rebuild(self, kv: KVState, state: State) -> Program[None, State]:
        """The passes that made its history, once more; then its video is decoded anew."""
        state, past = state.to(self.dit.device), state.past
        if past is None:
            return Outcome(None, state)
        blocks = [block.to(self.dit.device, self.dit.dtype) for block in past.blocks]
        newest = blocks
        if past.inexact is None:
            yield from self._replay(kv, past, blocks)
        else:
            yield from self.texts.set_own(kv, state)
            num_sink = kept_blocks(self.config)[0] if past.num_forgotten else 0
            for block in blocks[:num_sink]:
                yield self._clean_pass(kv, block)
            newest, state = blocks[num_sink:], replace(state, num_skipped=past.num_forgotten)
            for block in newest:
                yield self._clean_pass(kv, block, past.num_forgotten)
        for block in newest:
            state = self._remember(state, block)
        if self.decodes:
            num_at_first = past.num_given + 1 if not past.num_forgotten else 1
            stream = self.encoders.decoder.new_decode_state()
            for piece in (torch.cat(newest[:num_at_first], dim=1), *newest[num_at_first:]):
                _, stream = yield Encode("decode", (stream, piece[None]), "decode")
            state = replace(state, decoder=stream)
        return Outcome(None, state)

    def fake_inputs(self, first: bool) -> BlockRequest:
        """A prompt of few words."""
        tokens = np.zeros((1, self.config.dit.text_len), dtype=np.int64)
        tokens[0, :6] = np.arange(5, 11)
        return BlockRequest(tokens, (tokens > 0).astype(np.int64))

    def forward(self, cache: KVCache, rows: Sequence[Row[WanRow]]) -> Sequence[object]:
        """Velocities of the rows, their K/V written to the cache. Blocks are taken here, when the rows really run."""
        velocities = self.network.forward(cache, activated(rows, self.spec.conditioning))
        for row in rows:
            if row.context.branch.copy is not None:
                row.context.branch.copy.is_filled = True
        return velocities

    def ready_steps(self, cache: KVCache, limits: BatchLimits) -> Sequence[Callable[[], object]]:
        """See MakesReady."""
        return [*encoder_steps(self, cache), *self.network.ready_steps(cache, limits)]

    @torch.no_grad()
    def encode(self, encoder: str, payloads: Sequence[object]) -> list[object]:
        """ "text": (token ids, attention mask), each [1, text_len], to an embedding [1, text_len, text_dim]. "video":
        (video [1, 3, T, H, W] in [-1, 1],) to latents [1, C, F, h, w]. "decode": (stream, latents [1, C, F, h, w]) to
        (video [1, 3, T, H, W], the stream after it); the given one is not changed."""
        if encoder == "decode":
            return [self._decode(payload) for payload in payloads]
        if encoder == "video":
            return [self.encoders.vae.encode(payload[0]) for payload in payloads if isinstance(payload, tuple)]
        if encoder != "text":
            raise ValueError(f"encoder: expected 'text', 'video' or 'decode', got {encoder!r}")
        outputs: dict[int, object] = {}
        prompts = [payload for payload in payloads if isinstance(payload, tuple)]
        for indices in batches_of_alike(prompts, _MAX_TEXT_ELEMENTS):
            ids, mask = (torch.cat(parts) for parts in zip(*(prompts[index] for index in indices), strict=True))
            for index, output in zip(indices, torch.split(self.encoders.text.encode(ids, mask), 1), strict=True):
                outputs[index] = output
        return [outputs[index] for index in range(len(payloads))]

    def _decode(self, payload: object) -> tuple[torch.Tensor, VAEStream]:
        assert isinstance(payload, tuple)
        before, latents = payload
        stream = before.copy()
        return self.encoders.decoder.decode_stream(stream, latents), stream

    # the tick

    def program(self, kv: KVState, state: State, inputs: BlockRequest) -> Program[Block, State]:
        """One block."""
        state = state if inputs.seed is None else replace(state, seed=inputs.seed)
        schedule = self.schedule if state.num_blocks else self.first_schedule
        check_request(self.config, inputs, kv.num_chunks, len(schedule))
        old = state.blend
        self._expect_room(kv, inputs)
        state, num_recached = yield from self._under_prompt(kv, state, inputs)
        fresh = []
        given = yield from self._given(inputs)
        if given is not None:
            for block in torch.split(given, self.config.blocks.frames_per_block, dim=1):
                yield self._clean_pass(kv, block, state.num_skipped)
            fresh.append(given)
        first_frame = kv.num_chunks + state.num_skipped
        latents = yield from self._denoise(kv, state, inputs, schedule)
        yield self._clean_pass(kv, latents, state.num_skipped)
        fresh.append(latents)
        state = self._remember(state, torch.cat(fresh, dim=1))
        copies = [HostCopy(torch.cat(fresh, dim=1))]
        if state.blend is not None and (old is None or state.blend.old is not old.old):
            copies.append(HostCopy(state.blend.old))
        video = None
        if self.decodes:
            stream = state.decoder or self.encoders.decoder.new_decode_state()
            decoded = yield Encode("decode", (stream, torch.cat(fresh, dim=1)[None]), "decode")
            video, state = decoded[0][0], replace(state, decoder=decoded[1])
        kept = yield OnHost(lambda: [copy.kept() for copy in copies], "postprocess")
        state = replace(state, past=self._past_after(state, kept, anew=num_recached > 0))
        return Outcome(
            Block(latents, video, first_frame, num_recached), replace(state, num_blocks=state.num_blocks + 1)
        )

    def _past_after(self, state: State, kept: list[torch.Tensor], *, anew: bool) -> Past:
        """With a tick's blocks, and what its blend mixes from; both on the host."""
        past, passage = state.past or Past(), state.passage
        if anew:
            past = past.recached(passage.prompt)
        if len(kept) > 1 and state.blend is not None:
            past = past.mixing(kept[1], state.blend.old_name)
        blocks = torch.split(kept[0], self.config.blocks.frames_per_block, dim=1)
        if state.past is None:
            past = replace(past, num_given=len(blocks) - 1)
        return past.after(blocks, replace(passage, num_blocks=len(blocks)), self.config)

    def _replay(
        self, kv: KVState, past: Past, blocks: Sequence[torch.Tensor]
    ) -> Generator[Encode | Forward, torch.Tensor, None]:
        """Each passage under its text, as it came."""
        coming = iter(blocks)
        for passage in past.passages:
            key = prompt_key(passage.prompt)
            if passage.share is None:
                yield from self.texts.set(kv, f"text:{key}", key, passage.prompt)
            else:
                assert past.mixed_from is not None
                old = past.mixed_from.to(self.dit.device)
                name, mix = name_of(past.mixed_from, key, passage.share), partial(mixture, old, share=passage.share)
                yield from self.texts.set(kv, name, key, passage.prompt, mix)
            own = [next(coming) for _ in range(passage.num_blocks)]
            for block in own:
                yield self._clean_pass(kv, block)
            if passage.recached:
                yield self._recache(kv, torch.cat(own, dim=1), 0)

    def _given(self, inputs: BlockRequest) -> Generator[OnHost | Encode, torch.Tensor, torch.Tensor | None]:
        """[C, frames, h, w] that the session starts from."""
        given = inputs.given
        if inputs.clip is not None:
            resize = partial(pixels_of, inputs.clip, self.config.height, self.config.width)
            pixels = yield OnHost(resize, "resize")
            given = yield Encode("video", (pixels,))
        return None if given is None else given[0].to(self.dit.device, self.dit.dtype)

    def _expect_room(self, kv: KVState, inputs: BlockRequest) -> None:
        coming = self.config.blocks.frames_per_block + num_given_frames(inputs)
        window = self.spec.window
        if window.policy == "reset" and not window.has_room(kv.num_chunks, coming):
            raise BadRequest(
                f"window full: {kv.num_chunks} frames are there, {coming} more exceed the {window.max_chunks} that "
                "this model was trained for; reset the session, or load the model with window_frames"
            )

    def _under_prompt(
        self, kv: KVState, state: State, inputs: BlockRequest
    ) -> Generator[Encode | Forward, torch.Tensor, tuple[State, int]]:
        """Attach the text of this block where it is another one than before, and compute history anew under it if that
        is wanted.

        Returns the state, and how many frames were computed anew.
        """
        before, prompt = state, (inputs.token_ids, inputs.attention_mask)
        key = prompt_key(prompt)
        switches = key != state.prompt_key and state.prompt_key is not None
        anew = switches and kv.num_chunks > 0 and inputs.switch == "recache"
        if anew and not self.recaches:
            raise BadRequest("switch: 'recache' was turned off when this model was loaded; 'keep' is possible")
        if key != state.prompt_key:
            blend = None
            if switches and inputs.switch == "blend":
                blend = yield from self.texts.blend_from(state, inputs.blend_blocks)
            state = replace(state, prompt_key=key, prompt=(prompt[0].copy(), prompt[1].copy()), blend=blend)
        if state.blend is not None:
            state = replace(state, blend=state.blend.next())
        if state.text_name == before.text_name:
            return state, 0
        yield from self.texts.set_own(kv, state)
        if anew:
            assert state.recent is not None, "a session that has frames remembers the newest"
            yield self._recache(kv, state.recent, state.num_skipped)
        return state, state.recent.shape[1] if anew and state.recent is not None else 0

    def _recache(self, kv: KVState, recent: torch.Tensor, num_skipped: int) -> Forward:
        """All frames that the window remembers, in one forward: they see one another, and an older sink."""
        num_frames = recent.shape[1]
        first_frame = 0 if self.spec.reads_copy else kv.num_chunks + num_skipped - num_frames
        row = WanRow(recent, None, first_frame, self.config.blocks.context_noise, wants_velocity=False)
        context = kv.prepare_rewrite(BRANCH, num_frames * self.config.frame_tokens)
        return Forward((Row(context, kv.conditioning(BRANCH), 0, row),), "recache")

    def _clean_pass(self, kv: KVState, latents: torch.Tensor, num_skipped: int = 0) -> Forward:
        """A finished block becomes history."""
        row = WanRow(
            latents, None, self._position(kv, num_skipped), self.config.blocks.context_noise, wants_velocity=False
        )
        context = kv.prepare(BRANCH, self._block_tokens, commit=True)
        return Forward((Row(context, kv.conditioning(BRANCH), 0, row),), "commit")

    def _denoise(
        self, kv: KVState, state: State, inputs: BlockRequest, schedule: Schedule
    ) -> Generator[Forward, list[torch.Tensor], torch.Tensor]:
        """The block's latents [C, F, h, w], from noise."""
        x, epsilons = self._noise(kv.num_chunks + state.num_skipped, state, inputs, len(schedule))
        context = kv.prepare(BRANCH, self._block_tokens, commit=False)
        for step, timestep in enumerate(schedule.timesteps):
            row = WanRow(x, None, self._position(kv, state.num_skipped), timestep, wants_velocity=True)
            (velocity,) = yield Forward((Row(context, kv.conditioning(BRANCH), 0, row),), "denoise")
            x = schedule.clean(step, x, velocity)
            if step + 1 < len(schedule):
                x = schedule.noised(step + 1, x, epsilons[step])
        return x  # the drafts' blocks go back when the clean pass takes its own

    def _position(self, kv: KVState, num_skipped: int) -> int:
        """Of the coming block's first frame: its number, or its place in the window."""
        blocks = self.config.blocks
        if blocks.rope == "absolute":
            return kv.num_chunks + num_skipped
        return min(kv.num_chunks, blocks.held_frames - blocks.frames_per_block)

    def _noise(
        self, first_frame: int, state: State, inputs: BlockRequest, num_steps: int
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The noise that a block starts from, and the fresh one of its later steps, each [C, F, h, w]. What is drawn
        depends on the seed and on the block's first frame only: a repeated, restored or forked block draws the same."""
        config, dit = self.config, self.dit
        shape = (num_steps, config.dit.out_dim, config.blocks.frames_per_block, *config.latent_size)
        given = (inputs.noise, *(inputs.epsilons or (None,) * (num_steps - 1)))
        drawn: Sequence[torch.Tensor] = ()
        if any(noise is None for noise in given):
            digest = hashlib.sha256(f"{state.seed} {first_frame}".encode()).digest()
            generator = torch.Generator(dit.device).manual_seed(int.from_bytes(digest[:8], "big") >> 1)
            drawn = torch.randn(shape, generator=generator, device=dit.device, dtype=dit.dtype).unbind(0)
        first, *later = [
            drawn[index] if noise is None else noise[0].to(dit.device, dit.dtype) for index, noise in enumerate(given)
        ]
        return first, later

    def _remember(self, state: State, fresh: torch.Tensor) -> State:
        """The newest clean frames, as many as the window holds."""
        if not self.recaches:
            return state
        recent = fresh if state.recent is None else torch.cat([state.recent, fresh], dim=1)
        return replace(state, recent=recent[:, -self.config.blocks.held_frames :].clone())
