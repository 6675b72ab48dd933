"""What the server remembers of each session of videos beside the session itself: who plays it, where its timeline is,
and what was shown. Lives on the event loop."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from worldkv.videos.program import FRAMES_PER_SECOND
from worldkv.videos.reel import Reel

if TYPE_CHECKING:
    from worldkv.server.entry import Entry
    from worldkv.server.snapshots import HeldSnapshot
    from worldkv.server.video_stream import Stream


@dataclass(frozen=True)
class Place:
    """Between two blocks of a session. `block`: the one before, None at its beginning; `next_frame`: of the session,
    None where that is not known."""

    block: int | None = None
    next_frame: int | None = None


@dataclass(frozen=True)
class MarkInfo:
    """What a snapshot is to a viewer. `at_frame`: on the timeline of what was shown."""

    name: str
    place: Place
    at_frame: int


@dataclass(eq=False)
class World:
    """One session. `num_frames`: made for viewers since it was opened, also what a seek has left behind: the timeline
    only goes on. `lock`: held for a tick; `film_lock`: while a block is added to the reel, in the order in which they
    were shown. `stream`: the viewer that plays it; another one may take it over."""

    entry: Entry
    reel: Reel
    place: Place = field(default_factory=Place)
    num_frames: int = 0
    stream: Stream | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    film_lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def pts(self) -> float:
        """Seconds of the timeline so far, exact: sixteenths."""
        return self.num_frames / FRAMES_PER_SECOND

    def end(self) -> None:
        """Its session has ended."""
        self.reel.close()
        if self.stream is not None:
            self.stream.wake()


class Worlds:
    """All of one server's."""

    def __init__(self, max_bytes: int) -> None:
        """`max_bytes`: of what was shown of each, on disk."""
        self._max_bytes = max_bytes
        self._worlds: WeakKeyDictionary[Entry, World] = WeakKeyDictionary()
        self.marks: WeakKeyDictionary[HeldSnapshot, MarkInfo] = WeakKeyDictionary()  # others are operators'

    def of(self, entry: Entry) -> World:
        """Of an open session."""
        world = self.known(entry)
        if world is None:
            world = self._worlds[entry] = World(entry, Reel(self._max_bytes))
            entry.at_end.append(world.end)
        return world

    def known(self, entry: Entry) -> World | None:
        """None: nobody has looked at it yet."""
        return self._worlds.get(entry)
