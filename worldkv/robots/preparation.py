"""From an observation and what its session remembers to a tick's inputs; from its result to robot actions.

Keeps nothing of a session itself: `Memory` goes in, the next `Memory` comes out, and the session decides
whether the tick succeeded. Does not know threads or the engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from worldkv.errors import BadRequest, WorldKVError
from worldkv.models.wan.tokenizer import Tokenizer
from worldkv.models.world_action import TickInputs
from worldkv.robots.embodiment import Embodiment
from worldkv.robots.observation import (
    Frames,
    Observation,
    has_frames,
    read_frames,
    read_observation,
    unread_warning,
)
from worldkv.robots.pending import (
    Begin,
    Kept,
    Pending,
    Views,
    completed,
    extended,
    joined_views,
    require_as_told,
)
from worldkv.robots.tiling import tile_views
from worldkv.robots.transforms import (
    absolute_actions,
    format_prompt,
    normalise_state,
    prepare_view,
)
from worldkv.robots.warnings import contract_warnings

_MAX_TOLD_UNREAD = 64  # fields of one session: of a client that makes up new names nothing more is said


@dataclass(frozen=True)
class Prompt:
    """An instruction and its tokens, int64 [1, text_len] each."""

    text: str
    token_ids: np.ndarray
    attention_mask: np.ndarray


@dataclass(frozen=True)
class Imagined:
    """In place of an observation: what the last tick predicted is taken for observed. `noise_seed`: None is the
    model's own."""

    noise_seed: int | None = None


@dataclass(frozen=True)
class Memory:
    """What a session remembers between ticks. Replaced whole when a tick has succeeded, never changed.

    `views`: per camera the newest frames, uint8 [1..frames_per_tick, h, w, 3]; none before the first tick.
    `warned`: subjects of the warnings already given. `told_unread`: fields of which was said that nothing reads them.
    """

    views: tuple[np.ndarray, ...] = ()
    prompt: Prompt | None = None
    warned: frozenset[str] = frozenset()
    told_unread: frozenset[str] = frozenset()
    state: Mapping[str, np.ndarray] | None = None  # the newest, raw
    pending: Pending | None = None  # frames of the next tick that have come already


@dataclass(frozen=True)
class Prepared:
    """An observation, ready for the engine. `memory`: the session's, should the tick succeed."""

    inputs: TickInputs
    state: Mapping[str, np.ndarray]
    warnings: tuple[str, ...]
    memory: Memory
    observation: Observation | None = None  # None: imagined


# What a tick is given; a map is by the embodiment's fields. Frames are only kept for the next one, which may Begin.
Seen = Observation | Imagined | Frames | Begin | Mapping[str, Any]


class Preparation:
    """The part of a policy that computes. Thread-safe."""

    def __init__(self, embodiment: Embodiment, tokenizer: Tokenizer) -> None:
        self.embodiment = embodiment
        self._tokenizer = tokenizer

    def read(self, raw: Mapping[str, Any]) -> Observation:
        """`raw`: by the embodiment's field names. Raises BadRequest."""
        return read_observation(raw, self.embodiment)

    def prepare(self, seen: Seen, memory: Memory) -> Prepared:
        """A tick's inputs, and what is remembered after it. Raises BadRequest."""
        if isinstance(seen, Imagined):
            return self.imagine(memory, seen.noise_seed)
        assert not isinstance(seen, Frames | Begin), "no request"
        observation, pending = seen if isinstance(seen, Observation) else self.read(seen), memory.pending
        require_as_told(observation, pending)
        new, tiled = self._views(observation), None
        if pending is not None:
            tiled = None if observation.num_frames else pending.tiled
            new = joined_views(pending.views, new)
            observation = completed(observation, pending, self.embodiment)
        views = self._newest(memory.views, new)
        found = {**observation.warnings, **contract_warnings(observation, memory.views, views, self.embodiment)}
        news, memory = self._news(found, observation.unread, memory)
        prompt = self._prompt(observation.prompt, memory)
        inputs = TickInputs(
            frames=self._tick_frames(views, memory) if tiled is None else tiled,
            state=normalise_state(observation.state, self.embodiment),
            token_ids=prompt.token_ids,
            attention_mask=prompt.attention_mask,
        )
        return Prepared(
            inputs=inputs,
            state=observation.state,
            warnings=news,
            memory=replace(memory, views=views, prompt=prompt, state=observation.state, pending=None),
            observation=observation,
        )

    def read_frames(self, raw: Mapping[str, Any]) -> Frames:
        """What is sent ahead of a request. Raises BadRequest."""
        return read_frames(raw, self.embodiment)

    def keep(self, new: Frames, memory: Memory) -> tuple[Kept, Memory]:
        """Keep frames for the next request. Raises BadRequest where that takes no more."""
        before = memory.pending
        prompt = memory.prompt if before is None else before.prompt
        if new.prompt is not None:
            prompt = self._prompt(new.prompt, memory)
        pending = extended(before, new, self._views(new), prompt, self.embodiment)
        news, memory = self._news(new.warnings, new.unread, memory)
        needed = self.embodiment.frames_per_tick if memory.views else 1
        kept = Kept(pending.num_frames, news, prompt is not None and pending.num_frames >= needed)
        return kept, replace(memory, pending=pending)

    def begin(self, memory: Memory) -> tuple[TickInputs, Memory]:
        """The inputs of the tick that what is pending is for, but for the robot's state."""
        pending = memory.pending
        assert pending is not None, "nothing is pending"
        assert pending.prompt is not None, "and with which prompt?"
        frames = self._tick_frames(self._newest(memory.views, pending.views), memory)
        ids, mask = pending.prompt.token_ids, pending.prompt.attention_mask
        inputs = TickInputs(frames, np.zeros((1, self.embodiment.max_state_dim)), ids, mask)
        return inputs, replace(memory, pending=replace(pending, tiled=frames))

    def takes_pending(self, seen: Seen, memory: Memory) -> bool:
        """Whether a tick with `seen` has just the frames that are pending, and their prompt."""
        if memory.pending is None or memory.pending.prompt is None:
            return False
        if isinstance(seen, Observation):
            return not seen.num_frames and seen.prompt == memory.pending.prompt.text
        if isinstance(seen, Mapping):
            return not has_frames(seen, self.embodiment) and seen.get("prompt") == memory.pending.prompt.text
        return False

    def imagine(self, memory: Memory, noise_seed: int | None) -> Prepared:
        """A tick that takes what the last one predicted for observed. Raises BadRequest where nothing was observed."""
        if memory.prompt is None or memory.state is None:
            raise BadRequest("imagine: nothing was observed yet; send the first frames")
        inputs = TickInputs(
            frames=None,
            state=normalise_state(memory.state, self.embodiment),
            token_ids=memory.prompt.token_ids,
            attention_mask=memory.prompt.attention_mask,
            noise_seed=noise_seed,
        )
        return Prepared(inputs=inputs, state=memory.state, warnings=(), memory=memory)

    def robot_actions(self, actions: np.ndarray, state: Mapping[str, np.ndarray]) -> np.ndarray:
        """Normalised [horizon, >= action_dim] to absolute float32 [horizon, action_dim], finite.

        Raises WorldKVError instead of returning a number that a robot must not be given.
        """
        with np.errstate(over="ignore"):
            absolute = absolute_actions(actions, state, self.embodiment).astype(np.float32)
        if not np.isfinite(absolute).all():
            raise WorldKVError("the model returned actions that are not finite; none is sent to the robot")
        return absolute

    def synthetic_observation(self, num_frames: int) -> dict[str, Any]:
        """Grey cameras and a state from the middle of the training data, for warming up."""
        observation: dict[str, Any] = {"prompt": "warm up"}
        for camera in self.embodiment.cameras:
            shape = (num_frames, camera.height, camera.width, 3)
            observation[camera.field] = np.full(shape, 127, np.uint8)
        for quantity in self.embodiment.state:
            zeros = np.zeros(quantity.dim)
            low, high = quantity.allowed or quantity.training_range or (zeros, zeros)
            observation[quantity.field] = zeros + (low + high) / 2
        return observation

    def _views(self, seen: Observation | Frames) -> Views:
        """Its frames as the model is to see them; a missing camera is black."""
        shape = (seen.num_frames, self.embodiment.view_height, self.embodiment.view_width, 3)
        stacks = [seen.frames[camera.name] for camera in self.embodiment.cameras]
        return tuple(
            np.zeros(shape, np.uint8) if frames is None else prepare_view(frames, self.embodiment) for frames in stacks
        )

    def _newest(self, views: Views, new: Views) -> Views:
        """`views` and the new frames, the newest `frames_per_tick` of each."""
        return tuple(view[-self.embodiment.frames_per_tick :] for view in (joined_views(views, new) if views else new))

    def _tick_frames(self, views: Views, memory: Memory) -> np.ndarray:
        """The tiled sequence of one tick: uint8 [1, H, W, 3] at first, then [frames_per_tick, H, W, 3]."""
        if not memory.views:
            return tile_views([view[-1:] for view in views], self.embodiment.layout)
        missing = self.embodiment.frames_per_tick - len(views[0])
        padded = [np.concatenate([np.repeat(view[:1], missing, axis=0), view]) for view in views]
        return tile_views(padded, self.embodiment.layout)

    def _news(self, found: Mapping[str, str], unread: Sequence[str], memory: Memory) -> tuple[tuple[str, ...], Memory]:
        """What of these warnings and unread fields was not said yet, and the memory of a session that was told."""
        told, unread = memory.told_unread, [each for each in unread if each not in memory.told_unread]
        news = [text for subject, text in found.items() if subject not in memory.warned]
        if unread and len(told) < _MAX_TOLD_UNREAD:
            news.append(unread_warning(unread, self.embodiment))
            told = told.union(unread[: _MAX_TOLD_UNREAD - len(told)])
        return tuple(news), replace(memory, warned=memory.warned | found.keys(), told_unread=told)

    def _prompt(self, text: str, memory: Memory) -> Prompt:
        """The prompt's tokens; a known one is not encoded again."""
        known = [memory.prompt, None if memory.pending is None else memory.pending.prompt]
        same = (prompt for prompt in known if prompt is not None and prompt.text == text)
        return next(same, None) or self._encode(text)

    def _encode(self, text: str) -> Prompt:
        ids, mask = self._tokenizer.encode(format_prompt(text, self.embodiment.prompt_template))
        token_ids, attention_mask = np.asarray(ids, np.int64), np.asarray(mask, np.int64)
        assert token_ids.shape == attention_mask.shape == (1, self.embodiment.text_len), token_ids.shape
        return Prompt(text, token_ids, attention_mask)
