"""The joint of engine and model: the engine's requests of a model, and a program's requests of the engine.

A tick is a program, a generator: it yields requests, is sent their results, and returns its outcome. The engine runs
the requests of many programs together. Three rules keep that safe:

- a program holds no reference of the cache (acquired conditioning, say) over a yield: what fails there would leak it;
- it returns the session's new state and stores it nowhere, so a tick that fails has changed nothing;
- networks run by `Forward` and `Encode` requests only, work on the host that takes long or waits by `OnHost`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, runtime_checkable

if TYPE_CHECKING:
    import torch

    from worldkv.kv.branch import ForwardContext
    from worldkv.kv.cache import KVCache
    from worldkv.kv.conditioning import ConditioningEntry
    from worldkv.kv.row import AttentionRow
    from worldkv.kv.spec import KVSpec
    from worldkv.kv.state import KVState
    from worldkv.models.saving import Saved

InputsT = TypeVar("InputsT")
StateT = TypeVar("StateT")
ResultT = TypeVar("ResultT")
RowInputsT = TypeVar("RowInputsT")
InputsT_contra = TypeVar("InputsT_contra", contravariant=True)
ResultT_co = TypeVar("ResultT_co", covariant=True)
RowInputsT_co = TypeVar("RowInputsT_co", covariant=True)


@dataclass(frozen=True)
class Row(Generic[RowInputsT_co]):
    """One branch of one session in one forward: what the cache needs, and the family's own inputs.

    `num_draft_tokens`: tokens after the chunks' own that never become history (actions and a state, say).
    """

    context: ForwardContext  # where it writes, what it sees, whether it commits
    conditioning: Mapping[str, ConditioningEntry]
    num_draft_tokens: int
    inputs: RowInputsT_co

    def activate(self) -> AttentionRow:
        """Take the blocks it writes to, now that it really runs; later calls return the same. Raises OutOfBlocks."""
        return self.context.activate(self.num_draft_tokens)


@dataclass(frozen=True)
class Forward:
    """Run these rows in one forward; sent back: an output for each. Committing rows become history together, once the
    forward has succeeded."""

    rows: tuple[Row[Any], ...]
    stage: str  # under which its time is told: "commit", "denoise" or the family's own


@dataclass(frozen=True)
class Encode:
    """Run one encoder (or decoder); sent back: its output. `payload`: its input. Equal encoders share batches."""

    encoder: str
    payload: Any
    stage: str = "encode"


@dataclass(frozen=True)
class OnHost:
    """Call a function on one of the host's threads; sent back: what it returns. It must not touch the cache.

    Should its tick end meanwhile, the result is dropped.
    """

    function: Callable[[], Any]
    stage: str


Request = Forward | Encode | OnHost


@dataclass(frozen=True)
class Outcome(Generic[ResultT, StateT]):
    """A program's return value: the tick's result, and the session's state after it."""

    result: ResultT
    state: StateT


Program = Generator[Request, Any, Outcome[ResultT, StateT]]


@dataclass(frozen=True)
class ModelCard:
    """The facts of a model that people are shown. `sizes`: in a few words. `facts`: the family's own; plain values.
    `weights`: what tells them from others of the same sizes, see models/fingerprint; "": nothing does."""

    family: str
    sizes: str
    num_weight_bytes: int
    window_chunks: int
    facts: Mapping[str, Any]
    weights: str = ""


class WorldModel(Protocol[InputsT, StateT, ResultT]):
    """An autoregressive diffusion world model. Holds weights and constants, nothing of any session.

    Generic over a tick's inputs, a session's state beside its K/V (an immutable value) and a tick's result.
    """

    @property
    def spec(self) -> KVSpec: ...

    @property
    def card(self) -> ModelCard: ...

    def new_state(self, old: StateT | None = None) -> StateT:
        """The state of a session that has not begun; or, given the one it had, of one that was just reset."""
        ...

    def program(self, kv: KVState, state: StateT, inputs: InputsT) -> Program[ResultT, StateT]:
        """One tick. Changes `kv` only through commits and `reset`."""
        ...

    def forward(self, cache: KVCache, rows: Sequence[Row[Any]]) -> Sequence[object]:
        """An output per row, their K/V written to the cache."""
        ...

    def encode(self, encoder: str, payloads: Sequence[Any]) -> Sequence[object]:
        """An output per payload."""
        ...

    def fake_inputs(self, first: bool) -> InputsT:
        """Inputs of a session's first tick or a later one: for warm-up, tests and measuring."""
        ...


@dataclass(frozen=True)
class BatchLimits:
    """The most that the engine puts into one batch: rows of a forward, calls of an encoder. A tick's own rows make one
    in any case."""

    max_rows: int
    max_encodes: int


@runtime_checkable
class MakesReady(Protocol):
    """A model that makes things by shape (graphs, plans, tuned kernels), which would hold up the first ticks."""

    def ready_steps(self, cache: KVCache, limits: BatchLimits) -> Sequence[Callable[[], object]]:
        """What to call in turn on the engine's thread, before the first session opens, so that nothing is made
        afterwards."""
        ...


@runtime_checkable
class KeepsTensors(Protocol[StateT]):
    """A model whose sessions' states hold much of the device's memory: how far a decoder has come, say. The engine
    charges each session and snapshot for it, and moves it to the host with the K/V of a parked session."""

    @property
    def max_state_bytes(self) -> int:
        """The most that one session's takes there, with the copy that a tick in flight may roll back to."""
        ...

    def state_bytes(self, state: StateT) -> int:
        """What this one takes."""
        ...

    def move_state(self, state: StateT, device: torch.device | str) -> StateT:
        """The same with its tensors on `device`, bit for bit, once they are there. On any thread; the given one is not
        changed, and is dropped by its owner."""
        ...


@runtime_checkable
class SavesState(Protocol[StateT]):
    """A model whose sessions can leave their process: it says what their states are made of. See models/saving."""

    def save_state(self, state: StateT) -> Saved:
        """Everything of it, and of the model what a reader has to have as well. Waits for the device."""
        ...

    def load_state(self, saved: Saved) -> StateT:
        """What `save_state` was given, on the host where the model KeepsTensors, else where its ticks want it. On any
        thread. Raises BadRequest, naming the place, for all that this model could not have saved."""
        ...


@runtime_checkable
class RebuildsHistory(Protocol[StateT]):
    """A model that can compute a session's K/V anew from what its state remembers (prompt, latents, an image), by clean
    passes: its sessions can be exported without their pages."""

    def compact(self, state: StateT) -> StateT:
        """Without what `rebuild` makes again; to be saved by `save_state`."""
        ...

    def load_compact(self, saved: Saved) -> StateT:
        """What `compact` returned, on the host. On any thread. Raises BadRequest as `load_state` does."""
        ...

    def why_inexact(self, state: StateT) -> str | None:
        """Why what `rebuild` makes would not be what was there, bit for bit, in a few words; None: it would."""
        ...

    def rebuild(self, kv: KVState, state: StateT) -> Program[object, StateT]:
        """Make the history of a state that `load_compact` returned, in an empty `kv`. The outcome's state is the
        session's from then on."""
        ...


@runtime_checkable
class WorksAhead(Protocol[InputsT_contra, StateT]):
    """A model whose ticks can begin before they are asked for, with what is known by then.

    Such a program ends where the rest of the tick would go on. It returns as its state what `program` is given then, in
    place of the session's; until then the session's own stays as it was, and so it does wherever the tick turns out to
    be another one.
    """

    def ahead(self, kv: KVState, state: StateT, inputs: InputsT_contra) -> Program[object, StateT]:
        """The beginning of a tick. Its commits are history only once the tick has succeeded."""
        ...

    def goes_on(self, state: StateT, inputs: InputsT_contra) -> bool:
        """Whether a tick with these inputs would have begun in just this way; `state`: what `ahead` returned."""
        ...


@runtime_checkable
class RunsOnRanks(Protocol):
    """A model whose network several ranks may run together."""

    @property
    def whole_spec(self) -> KVSpec:
        """What they keep of a session together; `spec`: each of them."""
        ...


def batches_of_alike(payloads: Sequence[Any], max_elements: int) -> list[list[int]]:
    """Groups payloads of equal shapes into batches of at most `max_elements` elements; a larger payload is its own
    batch. Returns indices."""
    groups: dict[Any, list[int]] = {}
    for index, payload in enumerate(payloads):
        groups.setdefault(tuple(tensor.shape for tensor in payload), []).append(index)
    batches = []
    for shapes, alike in groups.items():
        most = max(1, max_elements // max(1, *(shape.numel() for shape in shapes)))
        batches += [alike[start : start + most] for start in range(0, len(alike), most)]
    return batches
