"""What sessions keep beside their K/V, where a model says that they do: on the device it is charged, and moved with it;
on the host, what their history could be computed anew from counts against the room for parked sessions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from worldkv.errors import BadRequest, ModelError
from worldkv.models.base import KeepsTensors, RebuildsHistory

if TYPE_CHECKING:
    from worldkv.kv.cache import KVCache


class States:
    """Of one engine's model. Where it keeps nothing, nothing is charged, and nothing is moved."""

    def __init__(self, model: object, cache: KVCache) -> None:
        self._keeper = model if isinstance(model, KeepsTensors) else None
        self._rebuilder = model if isinstance(model, RebuildsHistory) else None
        self._most = 0 if self._keeper is None else self._keeper.max_state_bytes
        if not isinstance(self._most, int) or self._most < 0:
            raise ModelError(f"{type(model).__name__}.max_state_bytes: expected bytes, got {self._most!r}")
        self._device = cache.storage.device
        self._block_bytes = cache.storage.num_bytes // cache.storage.num_blocks

    @property
    def blocks_per_session(self) -> int:
        """Blocks that take as much memory as one session's state at most."""
        return -(-self._most // self._block_bytes)

    def num_bytes(self, state: object) -> int:
        """Raises what the model raises: call it where a mistake of its author can be told."""
        return 0 if self._keeper is None else int(self._keeper.state_bytes(state))

    def expected_bytes(self, state: object) -> int:
        """The most that it may be where the model cannot say; raises nothing."""
        try:
            return self.num_bytes(state)
        except Exception:
            return self._most

    def compact_bytes(self, state: object) -> int:
        """Of a compact export: what its session remembers for that, on the host for the most part."""
        if self._rebuilder is None:
            return 0
        from worldkv.models.saving import num_bytes  # here: it needs torch

        try:
            return num_bytes(self._rebuilder.compact(state))
        except BadRequest:  # it rebuilds those of some models, and not of this one
            return 0

    def to_host(self, state: object) -> object:
        """On any thread, and within `KVStorage.aside`: it waits for what made it."""
        return state if self._keeper is None else self._keeper.move_state(state, "cpu")

    def to_device(self, state: object) -> object:
        return state if self._keeper is None else self._keeper.move_state(state, self._device)
