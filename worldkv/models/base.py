"""What the engine asks of a model, and what a model's tick asks of the engine.

A tick is a generator: it yields requests, is sent their results, and returns its outcome. It never runs the network
itself, so the engine is free to run the requests of many ticks together.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from worldkv.kv.cache import KVCache
from worldkv.kv.conditioning import ConditioningEntry
from worldkv.kv.forward import ForwardContext
from worldkv.kv.spec import KVSpec
from worldkv.kv.state import KVState

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class ForwardRow:
    """One branch of one session in one forward. Shapes: C latent channels, F frames, h x w latent pixels."""

    context: ForwardContext
    conditioning: Mapping[str, ConditioningEntry]
    latents: torch.Tensor  # [C, F, h, w]
    condition: torch.Tensor | None  # [C', F, h, w], concatenated on channels where the model wants it
    first_frame: int  # absolute frame index in the window
    timestep: int
    actions: torch.Tensor | None = None  # [horizon, action_dim]
    state: torch.Tensor | None = None  # [num_states, max_state_dim]
    action_timestep: int = 0


@dataclass(frozen=True)
class RowOutput:
    """Velocities (noise - clean) of one row; None for a clean pass, which only fills the cache."""

    video_velocity: torch.Tensor | None  # [C, F, h, w]
    action_velocity: torch.Tensor | None  # [horizon, action_dim]


@dataclass(frozen=True)
class ForwardRequest:
    """Run these rows in one forward; committing rows become history together once it has succeeded."""

    rows: tuple[ForwardRow, ...]
    stage: str  # "commit" or "denoise"


@dataclass(frozen=True)
class EncodeRequest:
    """Run one encoder; `encoder` names it, `payload` is what it takes. Equal encoders may run as a batch."""

    encoder: str
    payload: Any
    stage: str = "encode"


Request = ForwardRequest | EncodeRequest
Tick = Generator[Request, Any, tuple[Any, Any]]  # returns (result, the rollout after this tick)


class WorldModel(Protocol):
    """An autoregressive diffusion world model. Holds weights only, nothing of any session."""

    spec: KVSpec

    def new_rollout(self) -> Any:
        """The non-K/V state of an episode that has not begun; an immutable value."""
        ...

    def tick(self, cache: KVCache, kv: KVState, rollout: Any, inputs: Any) -> Tick:
        """The program of one tick. Changes `kv` only through commits and `reset`; returns (result, new rollout)."""
        ...

    def forward(self, cache: KVCache, rows: Sequence[ForwardRow]) -> list[RowOutput]: ...

    def encode(self, encoder: str, payloads: Sequence[Any]) -> list[Any]: ...


def batches_of_alike(payloads: Sequence[Any], most_numbers: int) -> list[list[int]]:
    """Indices of payloads of equal shapes, as many at once as hold no more numbers than that (one always does)."""
    groups: dict[Any, list[int]] = {}
    for index, payload in enumerate(payloads):
        groups.setdefault(tuple(tensor.shape for tensor in payload), []).append(index)
    batches = []
    for shapes, alike in groups.items():
        most = max(1, most_numbers // max(1, *(shape.numel() for shape in shapes)))
        batches += [alike[start : start + most] for start in range(0, len(alike), most)]
    return batches
