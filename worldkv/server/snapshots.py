"""Which snapshots clients hold. Each belongs to the key that took it, and ends when nobody uses it.

A snapshot outlives its session. Lives on the event loop; what may wait runs on the threads it is given.
"""

from __future__ import annotations

import asyncio
import logging
import math
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING

from worldkv.errors import AdmissionRefused, SnapshotNotFound
from worldkv.server.metrics import Metrics

if TYPE_CHECKING:
    from worldkv.app import AnyApp
    from worldkv.engine.engine import SnapshotHandle

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class HeldSnapshot:
    snapshot_id: str
    owner: str
    session_id: str  # of the session it was taken of, as its client calls it
    snapshot: SnapshotHandle
    last_used: float  # on the event loop's clock


class SnapshotTable:
    """All snapshots of one server. One key may hold `limit` of them; one that is not asked for in `unused_s` ends."""

    def __init__(self, app: AnyApp, limit: int, unused_s: float, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics
        self._limit = limit
        self._unused_s = unused_s
        self._held: dict[str, HeldSnapshot] = {}

    def require_room(self, owner: str) -> None:
        """Raises AdmissionRefused where one more would be too many, with the time until the next one ends."""
        if len(self.of(owner)) >= self._limit:
            self.release_unused()
        held = self.of(owner)
        if len(held) >= self._limit:
            wait_s = min(one.last_used for one in held) + self._unused_s - _now()
            most = f"{self._limit} snapshots are held, the most that one client may have (--max-snapshots-per-key)"
            text = f"{most}; release one"
            raise AdmissionRefused(text, retry_after_ms=max(0, math.ceil(1e3 * wait_s)))

    def add(self, owner: str, session_id: str, snapshot: SnapshotHandle) -> HeldSnapshot:
        """Keep a snapshot that was just taken; released again, with AdmissionRefused, if others were faster."""
        try:
            self.require_room(owner)
        except AdmissionRefused:
            self._app.release(snapshot)
            raise
        held = HeldSnapshot(uuid.uuid4().hex, owner, session_id, snapshot, _now())
        self._held[held.snapshot_id] = held
        self._metrics.snapshots.set(len(self._held))
        return held

    def get(self, snapshot_id: str, owner: str) -> HeldSnapshot:
        """Raises SnapshotNotFound, for another key's as for one that never was."""
        held = self._held.get(snapshot_id)
        if held is None or held.owner != owner:
            raise SnapshotNotFound(f"snapshot {snapshot_id} is not known here; it was released or never taken")
        held.last_used = _now()
        return held

    def of(self, owner: str) -> list[HeldSnapshot]:
        """All of one key's, the oldest first."""
        return [held for held in self._held.values() if held.owner == owner]

    def release(self, held: HeldSnapshot, why: str) -> None:
        """Safe twice."""
        if self._held.pop(held.snapshot_id, None) is not None:
            self._metrics.snapshots.set(len(self._held))
            self._app.release(held.snapshot)
            logger.info("snapshot %s of session %s released: %s", held.snapshot_id, held.session_id, why)

    def release_unused(self) -> None:
        since = _now() - self._unused_s
        for held in [held for held in self._held.values() if held.last_used <= since]:
            self.release(held, f"not used for {self._unused_s:g} s")

    def release_all(self, why: str) -> None:
        for held in list(self._held.values()):
            self.release(held, why)


def _now() -> float:
    return asyncio.get_running_loop().time()
