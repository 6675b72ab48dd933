"""Between the core and the model: runs batches of requests, and functions on host threads.

The core hands over requests and takes results; the executor decides where they are computed. This one runs the model in
the same process. Its `run` is called on the engine's thread only.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol, TypeVar

from worldkv.engine.pacing import Pacer
from worldkv.errors import ModelError
from worldkv.kv.cache import KVCache
from worldkv.models.base import Encode, Forward, WorldModel

_HOST_THREADS = 4

T = TypeVar("T")


class Executor(Protocol):
    """A place where requests are computed."""

    @property
    def rows_per_forward(self) -> Mapping[int, int]:
        """Number of rows -> forwards of that many, so far."""
        ...

    def run(self, requests: Sequence[Forward | Encode]) -> list[object]:
        """Run requests of one kind together: for each its result, or the Exception that is its own."""
        ...

    def check(self) -> None:
        """Raises where nothing can be computed any more: the engine ends with that reason. Called at every turn."""
        ...

    def on_host(self, function: Callable[[], T]) -> Future[T]:
        """Call it on a host thread."""
        ...

    def shutdown(self) -> None:
        """Wait for the host threads. Safe twice."""
        ...


class LocalExecutor:
    """Runs `model` over `cache` in this process. `alone`: each row and payload by itself, so that no result
    depends on what it shares a batch with."""

    def __init__(self, model: WorldModel[object, object, object], cache: KVCache, *, alone: bool = False) -> None:
        self._model = model
        self._cache = cache
        self._alone = alone
        self.device = cache.storage.device
        self._pacer = Pacer(self.device)
        self._threads = ThreadPoolExecutor(_HOST_THREADS, thread_name_prefix="worldkv-host")
        self.rows_per_forward: Counter[int] = Counter()

    def run(self, requests: Sequence[Forward | Encode]) -> list[object]:
        """A batch that fails as a whole is run again one request at a time, so only the guilty one fails."""
        try:
            results = self._together(requests)
        except Exception as error:
            if len(requests) == 1:
                return [error]
            return [result for request in requests for result in self.run([request])]
        self._pacer.batch_queued()
        return results

    def check(self) -> None:
        """This process is here."""

    def on_host(self, function: Callable[[], T]) -> Future[T]:
        return self._threads.submit(function)

    def shutdown(self) -> None:
        self._threads.shutdown(wait=True)

    def _together(self, requests: Sequence[Forward | Encode]) -> list[object]:
        first = requests[0]
        if isinstance(first, Encode):
            payloads = [request.payload for request in requests if isinstance(request, Encode)]
            groups = [[payload] for payload in payloads] if self._alone else [payloads]
            return [o for group in groups for o in self._checked(self._model.encode(first.encoder, group), len(group))]
        rows = [row for request in requests if isinstance(request, Forward) for row in request.rows]
        forwards = [[row] for row in rows] if self._alone else [rows]
        outputs = [
            output
            for forward in forwards
            for output in self._checked(self._model.forward(self._cache, forward), len(forward))
        ]
        self.rows_per_forward.update(len(forward) for forward in forwards)
        iterator = iter(outputs)
        return [list(itertools.islice(iterator, len(r.rows))) for r in requests if isinstance(r, Forward)]

    def _checked(self, outputs: object, count: int) -> Sequence[object]:
        if not isinstance(outputs, Sequence) or len(outputs) != count:
            came = f"{len(outputs)}" if isinstance(outputs, Sequence) else type(outputs).__name__
            raise ModelError(
                f"{type(self._model).__name__}: expected a list with an output for each of {count} rows or payloads, "
                f"got {came}"
            )
        return outputs
