"""The program of a robot's tick, around the model's own: pixels, joints and prompt in, absolute actions out.

What a robot's session remembers is part of the session's state, so whatever the engine does with a session (snapshot,
fork, restore, park, fail) it does with that as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Generic

import numpy as np

from worldkv.errors import BadRequest
from worldkv.models.base import (
    BatchLimits,
    MakesReady,
    ModelCard,
    OnHost,
    Outcome,
    Program,
    RebuildsHistory,
    Row,
    RunsOnRanks,
    SavesState,
    StateT,
    WorksAhead,
)
from worldkv.models.saving import Saved
from worldkv.models.world_action import TickResult, WorldActionModel
from worldkv.robots.observation import Frames, Observation
from worldkv.robots.pending import Begin, Kept
from worldkv.robots.preparation import Memory, Preparation, Prepared, Seen
from worldkv.robots.saved import load_memory, save_memory

if TYPE_CHECKING:
    from worldkv.kv.cache import KVCache
    from worldkv.kv.spec import KVSpec
    from worldkv.kv.state import KVState


@dataclass(frozen=True)
class RobotState(Generic[StateT]):
    """The model's state and what is remembered of the robot; immutable."""

    model: StateT
    memory: Memory


@dataclass(frozen=True)
class RobotResult:
    """`actions`: float32 [horizon, action_dim], absolute. `warnings`: each told once per session. `observation`: as it
    was read; None for an imagined tick."""

    actions: np.ndarray
    model: TickResult
    warnings: tuple[str, ...]
    observation: Observation | None


class RobotPolicy(Generic[StateT]):
    """A world model for the engine, whose ticks take observations. `model` computes; this prepares and finishes."""

    def __init__(self, model: WorldActionModel[StateT], preparation: Preparation) -> None:
        self.model = model
        self._preparation = preparation

    @property
    def spec(self) -> KVSpec:
        return self.model.spec

    @property
    def whole_spec(self) -> KVSpec:
        """See RunsOnRanks."""
        return self.model.whole_spec if isinstance(self.model, RunsOnRanks) else self.spec

    @property
    def card(self) -> ModelCard:
        return self.model.card

    def new_state(self, old: RobotState[StateT] | None = None) -> RobotState[StateT]:
        """A session that was reset forgets its frames, not its prompt nor what it was warned of."""
        if old is None:
            return RobotState(self.model.new_state(), Memory())
        return RobotState(self.model.new_state(old.model), replace(old.memory, views=(), pending=None))

    def program(
        self, kv: KVState, state: RobotState[StateT], inputs: Seen
    ) -> Program[RobotResult | Kept, RobotState[StateT]]:
        """One tick; of frames only, what keeps them for the next one. A failed one has changed nothing, the remembered
        frames included."""
        if isinstance(inputs, Frames):
            kept, memory = yield OnHost(partial(self._preparation.keep, inputs, state.memory), "preprocess")
            can_begin = kept.is_whole and isinstance(self.model, WorksAhead)
            return Outcome(replace(kept, is_whole=can_begin), replace(state, memory=memory))
        prepared: Prepared = yield OnHost(partial(self._preparation.prepare, inputs, state.memory), "preprocess")
        outcome = yield from self.model.program(kv, state.model, prepared.inputs)
        finish = partial(self._preparation.robot_actions, outcome.result.actions, prepared.state)
        actions = yield OnHost(finish, "postprocess")
        result = RobotResult(actions, outcome.result, prepared.warnings, prepared.observation)
        return Outcome(result, RobotState(outcome.state, prepared.memory))

    def ahead(self, kv: KVState, state: RobotState[StateT], inputs: Seen) -> Program[None, RobotState[StateT]]:
        """The beginning of a tick, with the frames that are pending."""
        assert isinstance(inputs, Begin), inputs
        assert isinstance(self.model, WorksAhead), self.model
        prepared, memory = yield OnHost(partial(self._preparation.begin, state.memory), "preprocess")
        outcome = yield from self.model.ahead(kv, state.model, prepared)
        return Outcome(None, RobotState(outcome.state, memory))

    def goes_on(self, state: RobotState[StateT], inputs: Seen) -> bool:
        """See WorksAhead: with no frames of its own, and the prompt that was expected."""
        return self._preparation.takes_pending(inputs, state.memory)

    def forward(self, cache: KVCache, rows: Sequence[Row[Any]]) -> Sequence[object]:
        return self.model.forward(cache, rows)

    def encode(self, encoder: str, payloads: Sequence[Any]) -> Sequence[object]:
        return self.model.encode(encoder, payloads)

    def ready_steps(self, cache: KVCache, limits: BatchLimits) -> Sequence[Callable[[], object]]:
        return self.model.ready_steps(cache, limits) if isinstance(self.model, MakesReady) else ()

    def save_state(self, state: RobotState[StateT]) -> Saved:
        """See SavesState. Raises BadRequest where the model's sessions cannot be saved."""
        model, memory = self._saver.save_state(state.model), save_memory(state.memory, self._preparation.embodiment)
        return Saved({"model": model.values, "robot": memory.values}, {**model.tensors, **memory.tensors})

    def load_state(self, saved: Saved) -> RobotState[StateT]:
        memory = load_memory(saved.part("robot"), self._preparation.embodiment)
        return RobotState(self._saver.load_state(saved.part("model")), memory)

    def compact(self, state: RobotState[StateT]) -> RobotState[StateT]:
        """See RebuildsHistory."""
        return replace(state, model=self._rebuilder.compact(state.model))

    def load_compact(self, saved: Saved) -> RobotState[StateT]:
        memory = load_memory(saved.part("robot"), self._preparation.embodiment)
        return RobotState(self._rebuilder.load_compact(saved.part("model")), memory)

    def why_inexact(self, state: RobotState[StateT]) -> str | None:
        return self._rebuilder.why_inexact(state.model)

    def rebuild(self, kv: KVState, state: RobotState[StateT]) -> Program[object, RobotState[StateT]]:
        outcome = yield from self._rebuilder.rebuild(kv, state.model)
        return Outcome(outcome.result, replace(state, model=outcome.state))

    @property
    def _rebuilder(self) -> RebuildsHistory[StateT]:
        if not isinstance(self.model, RebuildsHistory):
            raise BadRequest(f"export: compact: sessions of {type(self.model).__name__} cannot be computed anew")
        return self.model

    @property
    def _saver(self) -> SavesState[StateT]:
        if not isinstance(self.model, SavesState):
            raise BadRequest(f"export: sessions of {type(self.model).__name__} cannot leave their process")
        return self.model

    def fake_inputs(self, first: bool) -> Seen:
        """Grey cameras and a state from the middle of the training data."""
        robot = self._preparation.embodiment
        return self._preparation.synthetic_observation(1 if first else robot.frames_per_tick)
