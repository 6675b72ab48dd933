"""A request that belongs to no session, run as a tick of its own. Engine thread only."""

from __future__ import annotations

from collections.abc import Generator
from concurrent.futures import Future
from typing import TYPE_CHECKING

from worldkv.engine.session import Tick
from worldkv.models.base import Encode, Outcome, Request

if TYPE_CHECKING:
    from worldkv.engine.core import EngineCore


def start_alone(core: EngineCore, request: Encode, answer: Future[object]) -> None:
    """Answer with the request's output."""
    result: Future[object] = Future()
    tick = Tick(None, result)
    result.add_done_callback(lambda done: _pass_on(done, answer))
    core.start(tick, _once(request))


def _once(request: Encode) -> Generator[Request, object, Outcome[object, object]]:
    """A program of one request."""
    result = yield request
    return Outcome(result, None)


def _pass_on(done: Future[object], answer: Future[object]) -> None:
    error = done.exception()
    if error is not None:
        answer.set_exception(error)
    else:
        answer.set_result(getattr(done.result(), "result"))  # noqa: B009
