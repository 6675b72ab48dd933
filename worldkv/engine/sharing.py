"""One device that several engines take in turn: robots' and viewers', say. Threads and times; knows no tensor.

Each engine has a model, a cache and a thread of its own, so neither's mistakes are the other's. What they share is the
device's time, and the rule is the scheduler's: the tick that is due first goes first, whosever it is. Between two of
its batches an engine keeps its place, so that a tick is not stretched by another engine's less urgent ones.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class SharedDevice:
    """Give the same one to every engine of a device. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._due: dict[object, float] = {}  # engine -> when its most urgent tick is due, as long as it has work
        self._holder: object = None

    @contextmanager
    def turn(self, engine: object, due: float | None, is_called: Callable[[], bool] = lambda: False) -> Iterator[bool]:
        """In the `with` no other engine uses the device. Waits until no other's tick is due before `due`, in seconds of
        time.perf_counter; None: this engine has no work, waits for nobody and uses nothing.

        Brings whether the device is this engine's now. It is not where the wait was given up since `is_called`, which
        is asked at each `wake`; the engine keeps its place.
        """
        is_ours = False
        with self._changed:
            if due is None:
                self._leave(engine)
            else:
                self._due[engine] = due
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._can_begin(engine) or is_called())
                is_ours = self._can_begin(engine)
                self._holder = engine if is_ours else self._holder
        try:
            yield is_ours
        finally:
            if is_ours:
                with self._changed:
                    self._holder = None
                    self._changed.notify_all()

    def wake(self) -> None:
        """Whoever waits looks again whether it is called."""
        with self._changed:
            self._changed.notify_all()

    def leave(self, engine: object) -> None:
        """The engine waits for work, or ends: nobody waits for it. Safe twice."""
        with self._changed:
            self._leave(engine)

    def _leave(self, engine: object) -> None:
        if self._due.pop(engine, None) is not None:
            self._changed.notify_all()

    def _can_begin(self, engine: object) -> bool:
        """Of two that are due at once the one that was there first goes first."""
        return self._holder is None and min(self._due, key=lambda each: self._due[each]) is engine
