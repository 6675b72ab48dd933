"""The program of a viewer's block, around the model's own: words in, pictures out.

What a session remembers (the words in force) is part of its state, so whatever the engine does with a session
(snapshot, fork, restore, park, fail) it does with that as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from worldkv.device import HostCopy
from worldkv.errors import BadRequest
from worldkv.models.base import BatchLimits, MakesReady, ModelCard, OnHost, Outcome, Program, Row
from worldkv.models.causal_wan.inputs import Block, BlockRequest, State
from worldkv.models.causal_wan.model import CausalWan
from worldkv.models.saving import Saved, load
from worldkv.models.wan.tokenizer import Tokenizer, clean_prompt
from worldkv.videos.request import MAX_PROMPT_CHARACTERS, VideoRequest, frames_of

if TYPE_CHECKING:
    from worldkv.kv.cache import KVCache
    from worldkv.kv.spec import KVSpec
    from worldkv.kv.state import KVState

FRAMES_PER_SECOND = 16  # of all of Wan 2.1


@dataclass(frozen=True)
class VideoState:
    """The model's state and the words in force; immutable."""

    model: State
    prompt: str | None = None


@dataclass(frozen=True)
class _Words:
    """What an export has of a session beside its model's state."""

    prompt: str | None


@dataclass(frozen=True)
class VideoBlock:
    """`frames`: uint8 [T, H, W, 3]. `first_frame`: how many frames the video had before it. `prompt`: that it was made
    under; `is_new_prompt`: the first such block."""

    frames: np.ndarray
    first_frame: int
    number: int
    prompt: str
    is_new_prompt: bool
    model: Block


class VideoMaker:
    """A causal video model for the engine, whose ticks take words. `model` computes; this prepares and finishes."""

    def __init__(self, model: CausalWan, tokenizer: Tokenizer) -> None:
        self.model = model
        self._tokenizer = tokenizer

    @property
    def spec(self) -> KVSpec:
        return self.model.spec

    @property
    def whole_spec(self) -> KVSpec:
        """See RunsOnRanks."""
        return self.model.whole_spec

    @property
    def card(self) -> ModelCard:
        return self.model.card

    def new_state(self, old: VideoState | None = None) -> VideoState:
        """A session that was reset has no words: its next block has to bring some."""
        return VideoState(self.model.new_state())

    def program(self, kv: KVState, state: VideoState, inputs: VideoRequest) -> Program[VideoBlock, VideoState]:
        """One block. A failed one has changed nothing, the words included."""
        prompt = state.prompt if inputs.prompt is None else clean_prompt(inputs.prompt)
        if prompt is None:
            raise BadRequest("prompt: the first block of a session needs one")
        token_ids, mask = yield OnHost(partial(self._tokenizer.encode, prompt), "preprocess")
        request = BlockRequest(token_ids, mask, inputs.switch, inputs.blend_blocks, inputs.seed, clip=inputs.clip)
        outcome = yield from self.model.program(kv, state.model, request)
        block = outcome.result
        assert block.video is not None, "loaded with decodes=False"
        copy = HostCopy(_pixels(block.video))
        frames = yield OnHost(lambda: frames_of(copy.numpy()), "postprocess")
        result = VideoBlock(
            frames,
            4 * (block.first_frame + block.latents.shape[1]) - 3 - len(frames),
            outcome.state.num_blocks - 1,
            prompt,
            prompt != state.prompt,
            block,
        )
        return Outcome(result, VideoState(outcome.state, prompt))

    def forward(self, cache: KVCache, rows: Sequence[Row[Any]]) -> Sequence[object]:
        return self.model.forward(cache, rows)

    def encode(self, encoder: str, payloads: Sequence[Any]) -> Sequence[object]:
        return self.model.encode(encoder, payloads)

    def ready_steps(self, cache: KVCache, limits: BatchLimits) -> Sequence[Callable[[], object]]:
        return self.model.ready_steps(cache, limits) if isinstance(self.model, MakesReady) else ()

    @property
    def max_state_bytes(self) -> int:
        return self.model.max_state_bytes

    def state_bytes(self, state: VideoState) -> int:
        return self.model.state_bytes(state.model)

    def move_state(self, state: VideoState, device: torch.device | str) -> VideoState:
        return replace(state, model=self.model.move_state(state.model, device))

    def save_state(self, state: VideoState) -> Saved:
        """See SavesState."""
        saved = self.model.save_state(state.model)
        return Saved({"prompt": state.prompt, "model": saved.values}, saved.tensors)

    def load_state(self, saved: Saved) -> VideoState:
        return self._with_words(self.model.load_state(saved.part("model")), saved)

    def compact(self, state: VideoState) -> VideoState:
        """See RebuildsHistory."""
        return replace(state, model=self.model.compact(state.model))

    def load_compact(self, saved: Saved) -> VideoState:
        return self._with_words(self.model.load_compact(saved.part("model")), saved)

    def why_inexact(self, state: VideoState) -> str | None:
        return self.model.why_inexact(state.model)

    def rebuild(self, kv: KVState, state: VideoState) -> Program[None, VideoState]:
        outcome = yield from self.model.rebuild(kv, state.model)
        return Outcome(None, replace(state, model=outcome.state))

    def _with_words(self, model: State, saved: Saved) -> VideoState:
        words = load(saved.only("prompt"), _Words, {}, "video")
        if words.prompt is not None and len(words.prompt) > MAX_PROMPT_CHARACTERS:
            raise BadRequest(f"import: video.prompt: expected at most {MAX_PROMPT_CHARACTERS} characters")
        return VideoState(model, words.prompt)

    def fake_inputs(self, first: bool) -> VideoRequest:
        return VideoRequest("a world that nobody sees" if first else None)


def _pixels(video: torch.Tensor) -> torch.Tensor:
    """[3, T, H, W] in [-1, 1] to uint8 [T, 3, H, W], where it is."""
    return ((video.float() + 1) * 127.5).round().clamp(0, 255).to(torch.uint8).transpose(0, 1).contiguous()
