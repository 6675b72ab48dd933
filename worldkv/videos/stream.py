"""When a stream's next block may be begun, and when it is due: arithmetic over times that its caller reads off a clock.

A viewer gets no more than a few blocks ahead of what it has shown, so one that is slow or silent is waited for. At the
pace "live" a block is due when the one before it has been seen to its end at the model's frame rate, and is begun only
as long before that as the last ones took, with some to spare: words that come meanwhile are seen soon.
"""

from __future__ import annotations

from collections import deque

AHEAD = {"live": 2, "fast": 4}  # blocks that were begun and not shown yet
_RECENT = 8  # blocks, of which the slowest counts
_TIMES, _PLUS_S = 1.5, 0.1  # of what that took: what encoding and sending take is not seen here


class Schedule:
    """One viewer's. `block_s`: how long a block lasts."""

    def __init__(self, pace: str, block_s: float, *, acknowledges: bool = True) -> None:
        self._ahead = AHEAD[pace]
        self._is_live = pace == "live"
        self._block_s = block_s
        self._took: deque[float] = deque(maxlen=_RECENT)
        self._begun = 0.0
        self._acknowledges = acknowledges
        self._outstanding: deque[int] = deque()  # numbers of blocks, as they were made
        self._due: float | None = None  # of the next block; None: as soon as can be
        self._held = False  # the viewer had to be waited for

    @property
    def is_full(self) -> bool:
        """Whether the viewer has to show something first."""
        return len(self._outstanding) >= self._ahead

    @property
    def lead_s(self) -> float:
        """How long before it is due a block is begun: one block's time at first, then half of that to twice that."""
        if not self._took:
            return self._block_s
        return min(max(_TIMES * max(self._took) + _PLUS_S, self._block_s / 2), 2 * self._block_s)

    def wait_s(self, now: float) -> float | None:
        """Seconds until the next block may be begun; None: until the viewer has shown another one."""
        if self.is_full:
            self._held = True
            return None
        if not self._is_live or self._due is None:
            return 0.0
        return max(0.0, self._due - self.lead_s - now)

    def begin(self, now: float) -> float | None:
        """A block is begun. Returns when it is due; None: nobody waits for it at a certain time."""
        if self._held and self._due is not None:  # what the viewer took longer for is not the block's delay
            self._due = max(self._due, now + self.lead_s)
        self._held, self._begun = False, now
        return self._due if self._is_live else None

    def made(self, block: int, seconds: float, now: float) -> float:
        """A block that lasts `seconds` is there. Returns by how much it is late; what comes after it is due later."""
        self._outstanding.append(block)
        self._took.append(now - self._begun)
        due = now if self._due is None or not self._is_live else self._due
        late = max(0.0, now - due)
        self._due = due + late + seconds
        return late

    def shown(self, block: int) -> None:
        """The viewer has begun to show this one, and with it all before; a number that it was not sent says nothing."""
        if block in self._outstanding:
            while self._outstanding.popleft() != block:
                pass

    def taken(self) -> None:
        """A block has gone into the socket: of a viewer that says nothing, all that is known."""
        if not self._acknowledges and self._outstanding:
            self._outstanding.popleft()

    def pause(self) -> None:
        """Nothing is due until the next block is there."""
        self._due = None

    def jump(self) -> None:
        """The viewer goes elsewhere, and is not expected to show what it still has."""
        self._outstanding.clear()
        self._due = None
