"""How much one key has open at once, how often something may happen, how much at a time. Know not what they count."""

from __future__ import annotations

import time
from collections import Counter

from worldkv.errors import AdmissionRefused


class PerKey:
    """Lives on the event loop. Things of one kind, `kind` in words, of which one key may have `limit` at once."""

    def __init__(self, kind: str, limit: int, way_out: str, option: str = "") -> None:
        """`way_out`: what its client can do; `option`: sets the limit. When one ends is not known, so no time to try
        again is told."""
        self._option = f" ({option})" if option else ""
        self._way_out = way_out
        self._kind = kind
        self._limit = limit
        self._owner_of: dict[object, str] = {}
        self._num_of: Counter[str] = Counter()

    def add(self, thing: object, owner: str) -> None:
        """Raises AdmissionRefused where `owner` has as many as one key may."""
        if self._num_of[owner] >= self._limit:
            text = f"{self._limit} {self._kind}, the most that one client may have{self._option}; {self._way_out}"
            raise AdmissionRefused(text)
        self._owner_of[thing] = owner
        self._num_of[owner] += 1

    def forget(self, thing: object) -> None:
        """Safe twice, and for what was never added."""
        owner = self._owner_of.pop(thing, None)
        if owner is not None:
            self._num_of[owner] -= 1
            if not self._num_of[owner]:
                del self._num_of[owner]


class Bucket:
    """Holds `size` tokens, and gets `per_second` back until it is full again."""

    def __init__(self, size: float, per_second: float) -> None:
        self._size = size
        self._per_second = per_second
        self._left = size
        self._at = time.monotonic()

    def take(self) -> bool:
        """One token, if there is one."""
        now = time.monotonic()
        self._left = min(self._left + (now - self._at) * self._per_second, self._size)
        self._at = now
        if self._left < 1:
            return False
        self._left -= 1
        return True

    def give(self, tokens: float) -> None:
        self._left = min(self._left + tokens, self._size)
