"""One viewer's play of one session: block after block, what the viewer asks for between two of them, and no more blocks
than it has shown. Knows no socket: what it has to tell goes into a queue that is read as fast as the viewer reads.

Lives on the event loop. A block that fails has changed nothing, the words that wait for it included: `play` asks for
it again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections import deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, cast

from worldkv.errors import BadRequest, EngineStopped, SessionEnded, SessionNotFound, WorldKVError
from worldkv.server.sessions import Asked, owned
from worldkv.server.video_moments import Event, fork, go_back, set_mark
from worldkv.server.video_worlds import Place, World, Worlds
from worldkv.videos.messages import (
    Fork,
    Mark,
    Message,
    NewPrompt,
    Pause,
    Play,
    Seek,
    Shown,
    Start,
    Stop,
    field_of,
)
from worldkv.videos.muxer import require_encoder
from worldkv.videos.program import FRAMES_PER_SECOND
from worldkv.videos.request import VideoRequest
from worldkv.videos.stream import Schedule
from worldkv.wire import public_error

if TYPE_CHECKING:
    from worldkv.server.entry import Entry
    from worldkv.server.service import Service
    from worldkv.videos.app import VideoReply

_MAX_WAITING = 64  # messages for the next moment between two blocks
_MAX_IDS = 16  # of prompts, for one block
_NOT_STARTED = "nothing was started yet on this socket; `start` begins a world or attaches to one"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Made:
    """A block for the viewer. `at_frame`: of its first picture, on the timeline."""

    reply: VideoReply
    world: World
    format: str
    at_frame: int
    header: Event


@dataclass(frozen=True)
class _Coming:
    """What the next block is asked for with, and whose words these were."""

    request: VideoRequest = field(default_factory=VideoRequest)
    ids: tuple[object, ...] = ()


class Stream:
    """One socket's. `hear` what its viewer says; `run` until `end`."""

    def __init__(self, service: Service, worlds: Worlds, owner: str, connection: object, label: str) -> None:
        self.outbox: asyncio.Queue[Event | Made] = asyncio.Queue(2)  # blocks wait here with all their pixels
        self._service = service
        self._worlds = worlds
        self._owner = owner
        self._connection = connection
        self._label = label
        self._commands: deque[Message] = deque()
        self._changed = asyncio.Event()
        self._ended = False
        self._world: World | None = None
        self._start = Start()
        self._schedule = self._new_schedule()
        self._playing = False
        self._coming = _Coming()
        self._frames_left: int | None = None
        self._sought: str | None = None  # the mark, until the first block after it
        self._unsent: list[Made] = []

    @property
    def session_id(self) -> str:
        """For the log."""
        return "" if self._world is None else self._world.entry.session_id

    def hear(self, message: Message) -> None:
        """Raises BadRequest where more is asked for than between two blocks can be."""
        if isinstance(message, Shown):
            self._schedule.shown(message.block)
        elif len(self._commands) >= _MAX_WAITING:
            raise BadRequest(f"message: {_MAX_WAITING} wait already for the end of the block that is being made")
        else:
            self._commands.append(message)
        self._changed.set()

    def is_wanted(self, made: Made) -> bool:
        """Whether a block that came out of the queue is still to be shown here."""
        return made in self._unsent

    def taken(self, made: Made) -> None:
        """A block has gone into the socket."""
        if made in self._unsent:
            self._unsent.remove(made)
        self._schedule.taken()
        self._changed.set()

    def surrender(self) -> None:
        """What was made and has not gone into the socket will not. The timeline goes on where it was shown up to, and
        the next viewer is told how many frames it has missed."""
        for made in reversed(self._unsent):
            if made.world.stream in (None, self):
                made.world.num_frames = made.at_frame
                made.world.place = replace(made.world.place, next_frame=made.reply.block.first_frame)
        self._unsent.clear()

    def wake(self) -> None:
        self._changed.set()

    def end(self) -> None:
        """The viewer is gone; a block that is being made is made to its end."""
        self._ended = True
        self._changed.set()

    async def run(self) -> None:
        try:
            while not self._ended:
                self._changed.clear()
                await self._look_whether_it_is_ours()
                if self._commands:
                    await self._do(self._commands.popleft())
                    continue
                wait_s = self._schedule.wait_s(time.perf_counter()) if self._playing else None
                if wait_s == 0:
                    await self._block()
                else:
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self._changed.wait(), wait_s)
        finally:
            await self._leave()

    async def fail(self, error: Exception, about: Message | None = None) -> None:
        """Tell the viewer of an error, and the log."""
        code, message = public_error(error)
        error_id = uuid.uuid4().hex[:8]
        self._service.metrics.errors.labels(code).inc()
        level = logging.ERROR if code == WorldKVError.code else logging.WARNING
        fields = {"event": "error", "code": code, "error_id": error_id, "session": self.session_id}
        logger.log(level, "error %s told to a viewer: %s", error_id, error, exc_info=error, extra=fields)
        event: Event = {"type": "error", "code": code, "message": message, "error_id": error_id}
        event |= {"field": field_of(error), "about": type(about).__name__.lower() if about is not None else None}
        event["playing"] = self._playing
        if (retry := getattr(error, "retry_after_ms", None)) is not None:
            event["retry_after_ms"] = retry
        if isinstance(about, NewPrompt):
            event["about"], event["id"] = "prompt", about.id
        await self.outbox.put(event)

    # what a viewer asks for

    async def _do(self, message: Message) -> None:
        try:
            if isinstance(message, Start):
                await self._begin(message)
                return
            world = self._world
            if world is None:
                raise BadRequest(f"type: {_NOT_STARTED}")
            if isinstance(message, NewPrompt):
                await self._take_words(message)
            elif isinstance(message, Play | Pause):
                await self._set_playing(isinstance(message, Play))
            elif isinstance(message, Mark):
                await self.outbox.put(await set_mark(self._service, self._worlds, world, message.name))
            elif isinstance(message, Seek):
                await self._seek(world, message.mark)
            elif isinstance(message, Fork):
                await self.outbox.put(await fork(self._service, self._worlds, world, message.count))
            elif isinstance(message, Stop):
                await self._leave("it was asked for")
        except Exception as error:
            await self.fail(error, message)

    async def _begin(self, start: Start) -> None:
        await self._service.until_ready()
        require_encoder()
        if start.prompt is None and start.session_id is None and start.from_mark is None:
            raise BadRequest("prompt: a new world begins with words")
        request = await self._read(start)
        await self._leave("another one is started")
        world = self._worlds.of(await self._entry(start))
        if world.stream is not None:
            world.stream.surrender()
            world.stream.wake()
        world.stream, self._world = self, world
        self._start, self._schedule = start, self._new_schedule(start)
        self._coming, self._playing, self._frames_left = _Coming(request), True, start.num_frames
        about = self._service.app.describe()
        told = {name: about[name] for name in ("width", "height", "frames_per_second", "frames_per_block")}
        event: Event = {"type": "started", "session_id": world.entry.public_id, **told}
        event |= {"format": start.format, "pace": start.pace, "block": world.place.block, "pts": world.pts}
        await self.outbox.put(event)
        if start.from_mark is not None:
            await self._seek(world, start.from_mark)

    async def _entry(self, start: Start) -> Entry:
        """The session that is meant; a new one where words begin it. Raises SessionNotFound, SnapshotNotFound."""
        sessions, owner = self._service.sessions, self._owner
        session_id = owned(start.session_id or f"world-{uuid.uuid4().hex[:12]}", owner)
        if start.from_mark is not None:
            held = self._service.snapshots.get(start.from_mark, owner)
            if start.session_id is None or all(entry.session_id != session_id for entry in sessions.of(owner)):
                fork = await sessions.open(session_id, owner, held.snapshot)
                fork.history.parent = held.session_id
        resume = start.prompt is None or start.from_mark is not None
        asked = Asked(named=True, resume=resume, prompt=start.prompt, may_pause=True)
        async with sessions.use(session_id, self._connection, asked, owner) as entry:
            return entry

    async def _take_words(self, message: NewPrompt) -> None:
        new, before = await self._read(message), self._coming
        if len(before.ids) >= _MAX_IDS:
            raise BadRequest(f"prompt: {_MAX_IDS} wait already for the next block")
        seed = before.request.seed if new.seed is None else new.seed
        self._coming = _Coming(replace(new, seed=seed), (*before.ids, message.id))

    async def _read(self, message: Start | NewPrompt) -> VideoRequest:
        names = ("prompt", "switch", "blend_blocks", "seed", "image")
        given = {name: getattr(message, name, None) for name in names}
        fields = {name: value for name, value in given.items() if value is not None}
        return cast("VideoRequest", await self._service.in_thread(self._service.app.read, fields))

    async def _set_playing(self, playing: bool) -> None:
        self._playing = playing
        if not playing:
            self._schedule.pause()
        await self.outbox.put({"type": "playing" if playing else "paused"})

    async def _seek(self, world: World, mark: str) -> None:
        event = await go_back(self._service, self._worlds, world, mark)
        self._sought = mark
        self._schedule.jump()
        await self.outbox.put(event)

    # blocks

    async def _block(self) -> None:
        world, coming = self._world, self._coming
        assert world is not None, "only what was started plays"
        try:
            async with world.lock:
                if world.stream is not self:
                    return
                deadline = self._schedule.begin(time.perf_counter())
                reply = await self._tick(world, coming.request, deadline)
                made = self._made(world, reply, coming.ids)
        except Exception as error:
            self._playing = False
            self._schedule.pause()
            self._service.metrics.requests.labels(self._label, "error").inc()
            if self._world is world and self._service.sessions.is_open(world.entry):
                await self.fail(error)
            return
        self._service.metrics.requests.labels(self._label, "abandoned" if self._ended else "ok").inc()
        self._unsent.append(made)
        if self._ended:
            return
        await self.outbox.put(made)
        if self._frames_left is not None:
            self._frames_left -= len(reply.block.frames)
            if self._frames_left <= 0:
                await self._leave("all that was asked for is there")

    async def _tick(self, world: World, request: VideoRequest, deadline: float | None) -> VideoReply:
        asked = Asked(named=True, resume=True, prompt=request.prompt, may_pause=True)
        use = self._service.sessions.use(world.entry.session_id, self._connection, asked, self._owner)
        async with use as entry:
            future = asyncio.wrap_future(entry.session.infer(request, deadline))
            entry.has_history = True
            try:
                reply = cast("VideoReply", await future)
            except asyncio.CancelledError:
                if not future.cancelled():
                    raise  # we were, at a shutdown that does not wait
                raise SessionEnded(f"session {entry.session_id}: the block was cancelled") from None
        self._service.ticked(entry, reply)
        return reply

    def _made(self, world: World, reply: VideoReply, ids: tuple[object, ...]) -> Made:
        block, at_frame = reply.block, world.num_frames
        expected = world.place.next_frame
        num_frames = len(block.frames)
        late_s = self._schedule.made(block.number, num_frames / FRAMES_PER_SECOND, time.perf_counter())
        header: Event = {
            "type": "block",
            "session_id": world.entry.public_id,
            "block": block.number,
            "first_frame": block.first_frame,
            "num_frames": num_frames,
            "pts": world.pts,
            "prompt": block.prompt,
            "applied": list(ids),
            "frames_recached": block.model.num_recached,
            "timings": {stage: round(ms, 2) for stage, ms in reply.timings.items()},
            "late": late_s > 0,
            "late_ms": round(1e3 * late_s, 1),
            "frames_skipped": 0 if expected is None else max(0, block.first_frame - expected),
            "sought": self._sought,
            "format": self._start.format,
        }
        self._coming, self._sought = _Coming(), None
        world.num_frames += num_frames
        world.place = Place(block.number, block.first_frame + num_frames)
        return Made(reply, world, self._start.format, at_frame, header)

    # who plays what

    async def _look_whether_it_is_ours(self) -> None:
        world = self._world
        if world is None:
            return
        if not self._service.sessions.is_open(world.entry):
            end = self._service.sessions.ends.find(self._owner, world.entry.session_id)
            self._service.sessions.ends.settle(self._owner, world.entry.session_id)  # its client is being told
            await self._leave()
            if self._service.draining:
                raise EngineStopped("the server is shutting down")
            why = "it was closed" if end is None else end.text
            await self.fail(SessionNotFound(f"session {world.entry.public_id} has ended: {why}"))
        elif world.stream is not self:
            await self._leave("another viewer has taken it over")

    async def _leave(self, why: str | None = None) -> None:
        """The session stays, for as long as the server keeps one that nobody is connected to. `why` None: nobody is
        there to be told."""
        world, self._world = self._world, None
        self._playing, self._coming = False, _Coming()
        if world is None:
            return
        if world.stream is self:
            world.stream = None
        if self._service.sessions.is_open(world.entry):
            await self._service.sessions.detach(self._connection, self._owner)
        if why is not None:
            event: Event = {"type": "stopped", "session_id": world.entry.public_id, "why": why}
            await self.outbox.put(event | {"block": world.place.block, "done": (self._frames_left or 1) <= 0})

    def _new_schedule(self, start: Start | None = None) -> Schedule:
        start = start or Start()
        return Schedule(start.pace, self._service.app.period_s, acknowledges=start.acknowledges)
