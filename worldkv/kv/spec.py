"""A model's needs of the cache, and their cost in blocks and bytes, before anything is allocated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from worldkv.kv.block_table import blocks_for
from worldkv.kv.footprint import Step as Step
from worldkv.kv.footprint import Tick, chunks_reached, most_blocks
from worldkv.kv.row import RowLimits
from worldkv.kv.window import Window


@dataclass(frozen=True)
class KVSpec:
    """The K/V a world model keeps per session.

    `window.chunk_size` tokens are the unit of history. `ticks` has each kind of tick that follows a history, as the
    forwards it runs in turn. `restarts` has those that begin a new window while the old history stands for a roll-back;
    under `reset` one of them runs in the place of a tick that does not fit. Numbers of draft-only tokens are the most
    that may come.
    `conditioning` maps each kind ("text", "image", ...) to its number of tokens. `entries_per_session` says how many
    different entries of a kind one session reads (default: one for each branch), `entries_shared` how many are the same
    for all sessions.

    With `reads_copy` forwards do not read history itself but a copy of what they see, in temporal order, which the
    model fills: keys that are turned by their place in the window are stored unturned. See `CopiedWindow`.
    """

    num_layers: int
    num_heads: int
    head_dim: int
    window: Window
    branches: tuple[str, ...]
    ticks: tuple[Tick, ...] = ((Step(1, commits=True),),)
    restarts: tuple[Tick, ...] = ()
    conditioning: Mapping[str, int] = field(default_factory=dict)
    entries_per_session: Mapping[str, int] = field(default_factory=dict)
    entries_shared: Mapping[str, int] = field(default_factory=dict)
    reads_copy: bool = False

    def __post_init__(self) -> None:
        if not self.ticks:
            raise ValueError("ticks: expected at least one kind of tick, got none")
        for name in ("ticks", "restarts"):
            for tick in getattr(self, name):
                self._check(name, tick)

    def _check(self, name: str, tick: Tick) -> None:
        if not tick:
            raise ValueError(f"{name}: expected at least one forward in each tick, got none")
        if self.reads_copy and any(step.num_draft_tokens for step in tick):
            raise ValueError(f"{name}: expected no draft tokens where forwards read a copy of the window")
        window, widest = self.window, max(step.num_added for step in tick)
        if widest > window.window:
            raise ValueError(f"{name}: expected forwards of 1 to {window.window} chunks (the window), got {widest}")
        if any(step.num_chunks > window.max_chunks for step in tick):
            raise ValueError(f"{name}: expected to rewrite {window.max_chunks} chunks at most, the sink and the window")
        must_fit = window.policy == "reset" and (name == "restarts" or not self.restarts)
        if must_fit and not window.has_room(0, chunks_reached(tick)):
            raise ValueError(
                f"{name}: a tick of {chunks_reached(tick)} chunks does not fit an empty window of {window.max_chunks}; "
                f"expected a larger window"
            )

    @property
    def chunk_size(self) -> int:
        return self.window.chunk_size

    @property
    def row_limits(self) -> RowLimits:
        """Of one branch's rows, in any forward: their current tokens, and what they see with them."""
        num_draft_tokens = max(step.num_draft_tokens for step in self.steps)
        return RowLimits(
            max(map(self.tokens_of, self.steps)), self.window.max_chunks * self.chunk_size + num_draft_tokens
        )

    @property
    def steps(self) -> tuple[Step, ...]:
        """Every kind of forward of a tick, once."""
        return tuple(dict.fromkeys(step for tick in (*self.ticks, *self.restarts) for step in tick))

    def tokens_of(self, step: Step) -> int:
        """Current tokens of a row at this step."""
        return step.num_chunks * self.chunk_size + step.num_draft_tokens

    def bytes_per_token(self, element_size: int, scale_size: int = 0) -> int:
        """Bytes of K and V of one token over all layers; `scale_size`: of each head's scale, see PageFormat."""
        return 2 * self.num_layers * self.num_heads * (self.head_dim * element_size + scale_size)

    def bytes_per_block(self, block_size: int, element_size: int, scale_size: int = 0) -> int:
        return block_size * self.bytes_per_token(element_size, scale_size)

    def blocks_per_branch(self, block_size: int) -> int:
        """Most blocks one branch holds at any moment of a tick, the history the tick may have to roll back to included.

        The bound is reached.
        """
        return most_blocks(self.window, self.ticks, self.restarts, block_size, self.reads_copy)

    def blocks_of_conditioning(self, block_size: int) -> int:
        """Most blocks of conditioning one session holds: an old entry stays until the tick that replaces it is over."""
        return sum(
            2 * self.entries_per_session.get(kind, len(self.branches)) * blocks_for(num_tokens, block_size)
            for kind, num_tokens in self.conditioning.items()
        )

    def blocks_per_session(self, block_size: int) -> int:
        """Most blocks one session holds at any moment."""
        return len(self.branches) * self.blocks_per_branch(block_size) + self.blocks_of_conditioning(block_size)

    def blocks_shared(self, block_size: int) -> int:
        """Blocks of conditioning that all sessions read and the cache stores once."""
        return sum(
            count * blocks_for(self.conditioning[kind], block_size) for kind, count in self.entries_shared.items()
        )
