"""uvicorn's protocols, with limits: how long a client may be silent, how much a stranger may send, how many frames.

Each is a class of uvicorn's, told less than the application would stand. Whoever breaks a limit loses its socket.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame

from worldkv.server.counts import Bucket
from worldkv.server.gate import Gate
from worldkv.server.http import KNOWN_SENDER, LONG_BODY, MAX_BODY_BYTES, SERVE_FIRST
from worldkv.server.turns import FairSelector

_STRANGERS_BYTES = 16 * 1024  # of a message, while nobody knows who sends
_SLICES = 384, 4096  # bytes that are parsed before limits are looked at: 64 empty frames; within a frame more
_FRAMES, _FRAMES_PER_S, _BYTES_PER_FRAME = 64, 50, 512  # at once; then; and one more for so many bytes
_PIECES = 256  # of a request's body
_LEAST_OF_A_PIECE = 1024  # bytes on average, of a long one
_POLICY_VIOLATION = 1008


class LimitedConfig(uvicorn.Config):
    """uvicorn's, and what the protocols below ask for."""

    def __init__(self, app: FastAPI, gate: Gate, silent_s: float, **options: Any) -> None:
        super().__init__(app, http=LimitedHTTP, ws=LimitedWebSocket, **options)
        self.gate = gate
        self.silent_s = silent_s

    def get_loop_factory(self) -> Callable[[], asyncio.AbstractEventLoop]:
        """A loop whose `accept` the gate can be (see there), and that serves robots first."""
        return lambda: asyncio.SelectorEventLoop(FairSelector(self.gate.last, self.gate.doors))


class LimitedHTTP(H11Protocol):
    """A request has `silent_s` to arrive whole, its answer as long to be read on. A long body that the application has
    allowed (ASGI extension LONG_BODY) has as long for each piece."""

    config: LimitedConfig
    _deadline: asyncio.TimerHandle | None = None
    _stalled: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.conn = _Pieces(h11.SERVER, _STRANGERS_BYTES)
        super().connection_made(transport)
        self.config.gate.connected(transport)
        self._deadline = self._hang_up_later()

    def data_received(self, data: bytes) -> None:
        if self._deadline is not None and cast(_Pieces, self.conn).is_long:
            self._deadline.cancel()
            self._deadline = self._hang_up_later()
        super().data_received(data)
        self._look_whether_it_came()

    def handle_events(self) -> None:
        super().handle_events()
        if self.scope is not None and self.scope["type"] == "http":  # its task has not begun
            extensions = cast(dict[str, object], self.scope).setdefault("extensions", {})
            cast(dict[str, object], extensions)[LONG_BODY] = self._allow_long_body

    def _allow_long_body(self, num_bytes: int) -> None:
        cast(_Pieces, self.conn).allow(num_bytes)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._deadline is None:
            self._deadline = self._hang_up_later()
        self._look_whether_it_came()

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        self._forget_timers()
        self.config.gate.has_asked(self.transport)
        super().handle_websocket_upgrade(event)

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_timers()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        try:
            super().send_400_response(msg)
        except h11.LocalProtocolError:  # an answer is under way already
            self.transport.abort()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stalled = self._stalled or self._hang_up_later()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    def _hang_up_later(self) -> asyncio.TimerHandle:
        return self.loop.call_later(self.config.silent_s, self.transport.abort)

    def _look_whether_it_came(self) -> None:
        if self._deadline is not None and self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
            self._deadline.cancel()
            self._deadline = None
            self.config.gate.has_asked(self.transport)

    def _forget_timers(self) -> None:
        for timer in (self._deadline, self._stalled):
            if timer is not None:
                timer.cancel()
        self._deadline = self._stalled = None


class _Pieces(h11.Connection):
    """Refuses a body in crumbs, each of which costs as much as a whole one, and one that nobody reads to its end."""

    _num_pieces = _num_bytes = 0
    _most_pieces, _most_bytes = _PIECES, 2 * MAX_BODY_BYTES

    @property
    def is_long(self) -> bool:
        return self._most_pieces > _PIECES

    def allow(self, num_bytes: int) -> None:
        """Of the body of this request."""
        self._most_pieces = _PIECES + num_bytes // _LEAST_OF_A_PIECE
        self._most_bytes = num_bytes + MAX_BODY_BYTES

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._num_pieces = self._num_bytes = 0
            self._most_pieces, self._most_bytes = _PIECES, 2 * MAX_BODY_BYTES
        elif isinstance(event, h11.Data):
            self._num_pieces += 1
            self._num_bytes += len(event.data)
            if self._num_pieces > self._most_pieces or self._num_bytes > self._most_bytes:
                raise h11.RemoteProtocolError("a body in too many pieces")
        return event


class LimitedWebSocket(WebSocketsSansIOProtocol):
    """Messages are short until the application knows the sender (ASGI extension KNOWN_SENDER); frames come at a rate
    that somebody could mean."""

    config: LimitedConfig
    _stalled: asyncio.TimerHandle | None = None
    _is_dropped = False
    _num_frames = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._budget = Bucket(_FRAMES, _FRAMES_PER_S)
        self._limit_messages(min(_STRANGERS_BYTES, self.config.ws_max_size))

    async def run_asgi(self) -> None:
        extensions = cast(dict[str, object], self.scope["extensions"])
        extensions[KNOWN_SENDER] = partial(self._limit_messages, self.config.ws_max_size)
        extensions[SERVE_FIRST] = partial(self.config.gate.serve_first, self.transport)
        await super().run_asgi()

    def data_received(self, data: bytes) -> None:
        start, size = 0, _SLICES[0]
        while start < len(data) and not self._is_dropped and not self.transport.is_closing():
            piece, before = data[start : start + size], self._num_frames
            self._budget.give(len(piece) / _BYTES_PER_FRAME)
            super().data_received(piece)
            start += size
            size = _SLICES[self._num_frames == before]

    def handle_cont(self, event: Frame) -> None:
        if self._may_go_on():
            super().handle_cont(event)

    def handle_text(self, event: Frame) -> None:
        if self._may_go_on():
            super().handle_text(event)

    def handle_bytes(self, event: Frame) -> None:
        if self._may_go_on():
            super().handle_bytes(event)

    def handle_ping(self) -> None:
        if self._may_go_on():
            super().handle_ping()

    def handle_pong(self, event: Frame) -> None:
        if self._may_go_on():
            super().handle_pong(event)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stalled = self._stalled or self.loop.call_later(self.config.ws_ping_timeout or 60, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._forget_timer()

    def shutdown(self) -> None:
        if self._stalled is None:
            super().shutdown()
        else:  # who reads nothing hears no farewell, and what was to be said before is not waited for
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_timer()
        super().connection_lost(exc)

    def _forget_timer(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    def _limit_messages(self, num_bytes: int) -> None:
        name = "max_message_size" if hasattr(self.conn, "max_message_size") else "max_size"  # as websockets has it
        setattr(self.conn, name, num_bytes)

    def _may_go_on(self) -> bool:
        """Whether this frame is not one too many; from the first that is on, none is."""
        self._num_frames += 1
        if not self._is_dropped and not self._budget.take():
            self._is_dropped = True
            self.conn.fail(_POLICY_VIOLATION, "too many small frames")
            self.transport.write(b"".join(self.conn.data_to_send()))
            self.close_sent = True
            self.transport.close()
        return not self._is_dropped
