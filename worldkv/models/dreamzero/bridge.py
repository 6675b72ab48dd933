"""`ARDiffusionKVState`: the face of a session's K/V that DreamZero-style model code is given.

Two branches are chosen by `is_negative`: False is the conditional one, True the unconditional one. A thin layer over
KVState; model code written for per-layer cache objects runs on pages without knowing it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from worldkv.kv.branch import ForwardContext
from worldkv.kv.cache import KVCache
from worldkv.kv.conditioning import ConditioningEntry
from worldkv.kv.row import AttentionRow


@dataclass(frozen=True)
class BranchHistory:
    """The adapter of one branch: which of the cache's branches it is, and the request it belongs to."""

    request_id: str
    branch: str


class LayerContext:
    """One layer of one forward. `attend` is the only operation: write the current K/V and attend, in one call."""

    def __init__(self, forward: _PagedForward, layer: int) -> None:
        self._forward = forward
        self._layer = layer

    def attend(self, q_THD: Any, k_THD: Any, v_THD: Any) -> Any:
        """Write this layer's current K/V and attend to history and current tokens; returns [T, heads, head_dim].

        T is seq_len, or more in a draft: tokens past seq_len (actions, state) are never history.
        """
        return self._forward.plan(q_THD.shape[0]).run(self._layer, q_THD, k_THD, v_THD)


class _PagedForward:
    """Activates a context at the first layer that really runs and keeps its attention plan for the others."""

    def __init__(self, cache: KVCache, context: ForwardContext) -> None:
        self.context = context
        self._cache = cache
        self._plan: Any = None

    def plan(self, num_queries: int) -> Any:
        """Raises ValueError for a number of tokens that is not this forward's, RuntimeError once it is over."""
        if self.context.closed:
            raise RuntimeError("this forward was committed, abandoned or replaced; ask for the layers' contexts anew")
        num_draft_tokens = num_queries - self.context.num_tokens
        if num_draft_tokens < 0 or (num_draft_tokens and self.context.commits):
            raise ValueError(f"expected {self.context.num_tokens} tokens in this forward, got {num_queries}")
        row = self.context.activate(num_draft_tokens)
        if row.num_queries != num_queries:
            raise ValueError(f"this forward began with {row.num_queries} tokens, this layer brings {num_queries}")
        if self._plan is None:
            self._plan = self._cache.backend.plan(self._cache.storage, [row])
        return self._plan


@dataclass(frozen=True)
class LayerCrossKV:
    """One layer's conditioning K/V. `attend` reads it paged; `kv` returns copies [tokens, heads, head_dim]."""

    cache: KVCache
    layer: int
    entries: dict[str, ConditioningEntry]

    def kv(self, kind: str) -> tuple[Any, Any]:
        entry = self.entries[kind]
        return self.cache.storage.gather(self.layer, entry.blocks, np.arange(entry.num_tokens, dtype=np.int64))

    def attend(self, kind: str, q_THD: Any) -> Any:
        row: AttentionRow = self.entries[kind].row(q_THD.shape[0])
        return self.cache.backend.plan(self.cache.storage, [row]).run(self.layer, q_THD)


class ARDiffusionKVState:
    """One session's K/V for a DreamZero rollout.

    `conditional` and `unconditional` name the branches' request ids; `num_layers` must be the cache's own.
    """

    def __init__(
        self, cache: KVCache, conditional: BranchHistory, unconditional: BranchHistory, num_layers: int
    ) -> None:
        if num_layers != cache.spec.num_layers:
            raise ValueError(f"num_layers: the cache has {cache.spec.num_layers}, got {num_layers}")
        if conditional.branch == unconditional.branch:
            raise ValueError(f"both branches are {conditional.branch!r}; they must not share a history")
        self._cache = cache
        self._histories = (conditional, unconditional)
        self._forwards: dict[str, _PagedForward] = {}
        self.state = cache.create_state((conditional.branch, unconditional.branch))

    def history(self, is_negative: bool) -> BranchHistory:
        return self._histories[is_negative]

    def get_kv_caches(
        self, is_negative: bool, seq_len: int | None = None, commit_current: bool = False
    ) -> list[LayerContext]:
        """Per-layer contexts for one forward of one branch. Raises ValueError when `seq_len` is missing."""
        if seq_len is None:
            raise ValueError("seq_len: expected the number of current video tokens of this forward, got None")
        self.prepare_paged_context(is_negative, seq_len, commit_current)
        forward = self._forwards[self.history(is_negative).branch]
        return [LayerContext(forward, layer) for layer in range(self._cache.spec.num_layers)]

    def prepare_paged_context(self, is_negative: bool, seq_len: int, commit_current: bool) -> ForwardContext:
        """The branch's context for the next forward; allocates nothing.

        Raises ValueError unless `seq_len` is a multiple of chunk_size, RuntimeError if an allocated commit is pending.
        """
        branch = self.history(is_negative).branch
        context = self.state.prepare(branch, seq_len, commit_current)
        self._forwards[branch] = _PagedForward(self._cache, context)
        return context

    def commit_paged_context(self, is_negative: bool) -> None:
        """After a successful forward: its chunks become history. A no-op where nothing is pending."""
        self.state.commit(self.history(is_negative).branch)

    def abandon_paged_contexts(self) -> None:
        """After a failed or cancelled forward: both branches are at their last commit, every block is back."""
        self.state.abandon()

    def set_cross_kv(self, is_negative: bool, kind: str, key: str, layers: Iterable[tuple[Any, Any]]) -> None:
        """Publish one kind ("text", "image") from per-layer K/V; equal keys are stored once."""
        kinds = self._cache.spec.conditioning
        if kind not in kinds:
            raise ValueError(f"kind: expected one of {list(kinds)}, got {kind!r}")
        entry = self._cache.conditioning.publish(key, kinds[kind], layers)
        self.state.set_conditioning(self.history(is_negative).branch, kind, entry)

    def get_cross_kv_caches(self, is_negative: bool) -> list[LayerCrossKV]:
        """Per-layer text and image K/V; raises ConditioningMissing, with branch and flags, when not populated."""
        entries = dict(self.state.conditioning(self.history(is_negative).branch))
        return [LayerCrossKV(self._cache, layer, entries) for layer in range(self._cache.spec.num_layers)]

    def reset(self, *, keep_cross_text: bool = False) -> None:
        """Drop both histories and their conditioning, but for text if it is kept; request ids stay."""
        self._forwards.clear()
        self.state.reset(keep=("text",) if keep_cross_text else ())

    def close(self) -> None:
        """Return both branches' blocks; safe to call twice."""
        self._forwards.clear()
        self.state.close()
