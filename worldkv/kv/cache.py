"""One cache: a pool of block ids, the tensors behind them, the conditioning store, and the attention backend."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from worldkv.kv.block_pool import BlockPool
from worldkv.kv.conditioning import ConditioningStore
from worldkv.kv.spec import KVSpec
from worldkv.kv.state import KVState

if TYPE_CHECKING:
    from worldkv.kv.storage import KVStorage
    from worldkv.kv.transfer import ParkedKV


class KVCache:
    """The parts that all sessions of one engine share. `backend` plans attention over `storage` (worldkv.attention)."""

    def __init__(self, spec: KVSpec, storage: KVStorage, backend: Any) -> None:
        self.spec = spec
        self.storage = storage
        self.backend = backend
        self.pool = BlockPool(storage.num_blocks)
        self.conditioning = ConditioningStore(self.pool, storage)

    @property
    def bytes_per_block(self) -> int:
        """K and V of all layers."""
        return self.storage.bytes_per_block

    # for exports: where several ranks have a part of each session, theirs together

    @property
    def whole_spec(self) -> KVSpec:
        return self.spec

    def whole(self, parked: ParkedKV) -> ParkedKV:
        """A parked history with all branches and heads. On a host thread."""
        return parked

    def parted(self, whole: ParkedKV) -> ParkedKV:
        """The inverse: one that can be resumed. Raises BadRequest where it cannot be. On a host thread."""
        return whole

    def create_state(self, branches: tuple[str, ...] | None = None) -> KVState:
        """An empty session state over `branches` (default: all of the spec's)."""
        return KVState(self, branches)
