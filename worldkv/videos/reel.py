"""What was shown of a session, on disk: its blocks as one mp4 file, of which the beginning goes when it grows too long.

Any thread may ask; one at a time adds. Its files have no name, so they are gone with the process at the latest.
"""

from __future__ import annotations

import os
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

from worldkv.videos.muxer import Mp4

_PIECES = 8  # of which one goes at a time
_READ_BYTES = 1 << 18


@dataclass(eq=False)
class _Piece:
    """Some blocks, one after the other in a file of their own."""

    file: BinaryIO
    first_frame: int
    num_bytes: int = 0

    def __post_init__(self) -> None:
        weakref.finalize(self, self.file.close)  # when the reel has dropped it and nobody reads it any more


@dataclass(frozen=True)
class Film:
    """A reel as it was at one moment. `first_frame`: 0, or what it begins with since more was dropped."""

    init: bytes
    pieces: tuple[_Piece, ...]
    sizes: tuple[int, ...]
    first_frame: int
    num_frames: int

    @property
    def num_bytes(self) -> int:
        return len(self.init) + sum(self.sizes)

    def parts(self) -> Iterator[bytes]:
        """The file, in pieces, whatever becomes of the session meanwhile."""
        yield self.init
        for piece, size in zip(self.pieces, self.sizes, strict=True):
            for at in range(0, size, _READ_BYTES):
                yield os.pread(piece.file.fileno(), min(_READ_BYTES, size - at), at)


class Reel:
    """One session's."""

    def __init__(self, max_bytes: int) -> None:
        """`max_bytes`: on disk, the newest block aside. 0: nothing is kept."""
        self._max_bytes = max_bytes
        self._pieces: deque[_Piece] = deque()
        self._init = b""
        self._num_frames = 0
        self._lock = threading.Lock()
        self._closed = False

    @property
    def keeps(self) -> bool:
        return self._max_bytes > 0 and not self._closed

    def add(self, block: Mp4, first_frame: int, num_frames: int) -> None:
        """The next block of the film; one that comes after a later one is left out. Raises OSError; then the reel is
        as it was."""
        with self._lock:
            if not self.keeps or first_frame < self._num_frames:
                return
            if not self._pieces or self._pieces[-1].num_bytes >= self._max_bytes // _PIECES:
                self._pieces.append(_Piece(tempfile.TemporaryFile(buffering=0), first_frame))  # noqa: SIM115
            piece, rest = self._pieces[-1], memoryview(block.fragment)
            while rest:  # what a failed write leaves behind is written over by the next one
                written = os.pwrite(piece.file.fileno(), rest, piece.num_bytes + len(block.fragment) - len(rest))
                rest = rest[written:]
            piece.num_bytes += len(block.fragment)
            self._init, self._num_frames = block.init, first_frame + num_frames
            while len(self._pieces) > 1 and sum(each.num_bytes for each in self._pieces) > self._max_bytes:
                self._pieces.popleft()
            if self._closed:  # meanwhile
                self._pieces.clear()

    def film(self) -> Film | None:
        """As it is now; None where it is empty. Waits for what is being written: not for an event loop."""
        with self._lock:
            if not self._pieces:
                return None
            pieces = tuple(self._pieces)
            sizes = tuple(piece.num_bytes for piece in pieces)
            first = pieces[0].first_frame
            return Film(self._init, pieces, sizes, first, self._num_frames - first)

    def close(self) -> None:
        """Safe twice, and returns at once, whatever is being written."""
        self._closed = True
        if self._lock.acquire(blocking=False):
            try:
                self._pieces.clear()
            finally:
                self._lock.release()
