"""The logical slot that a token takes, and the slots that a forward sees. Pure arithmetic over counts.

A branch's logical slots are laid out as

    [ sink chunks | ring of `window` chunks | draft tail ]

Chunk i lives at entry i while i < sink, else at sink + (i - sink) mod window. Attention reads no order (keys carry
their rotary position), so what a forward may see is always the prefix [0, n) of the slots: no hole, no padding, and a
table that stops growing when the window is full. The chunks being denoised count as part of the window.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

WindowPolicy = Literal["reset", "slide"]


@dataclass(frozen=True)
class Placement:
    """Where the current tokens of a forward go: video slots in token order, then draft-only tokens at the tail."""

    writes: tuple[range, ...]  # logical slots, in the order of the tokens
    num_visible: int  # the forward attends to slots [0, num_visible)


@dataclass(frozen=True)
class Window:
    """`sink` chunks kept for ever, then a ring of the `window` most recent; `chunk_size` tokens each.

    Under `reset` the history never wraps: a placement past the end raises, and the session restarts instead.
    Under `slide` the oldest chunk after the sink leaves when a new one comes.
    """

    chunk_size: int
    window: int
    sink: int = 0
    policy: WindowPolicy = "slide"

    def __post_init__(self) -> None:
        if self.chunk_size < 1:
            raise ValueError(f"chunk_size: expected at least 1 token, got {self.chunk_size}")
        if self.window < 1:
            raise ValueError(f"window: expected at least 1 chunk, got {self.window}")
        if self.sink < 0:
            raise ValueError(f"sink: expected 0 or more chunks, got {self.sink}")
        if self.policy not in ("reset", "slide"):
            raise ValueError(f"policy: expected 'reset' or 'slide', got {self.policy!r}")

    @property
    def max_chunks(self) -> int:
        """Chunks a forward can see at most, its own included."""
        return self.sink + self.window

    def entry(self, chunk: int) -> int:
        """The entry, counted in chunks from the first slot, where chunk number `chunk` lives."""
        return chunk if chunk < self.sink else self.sink + (chunk - self.sink) % self.window

    def num_slots(self, num_chunks: int) -> int:
        """Slots in use once `num_chunks` chunks have come."""
        return min(num_chunks, self.max_chunks) * self.chunk_size

    def visible_chunks(self, num_chunks: int) -> list[int]:
        """Numbers of the chunks still held once `num_chunks` have come, oldest first."""
        oldest = max(self.sink, num_chunks - self.window)
        return [*range(min(self.sink, num_chunks)), *range(oldest, num_chunks)]

    def has_room(self, num_chunks: int, num_incoming: int) -> bool:
        """Whether `num_incoming` more chunks fit without any leaving."""
        return num_chunks + num_incoming <= self.max_chunks

    def place(self, first_chunk: int, num_chunks: int, num_draft_tokens: int = 0) -> Placement:
        """Slots of chunks [first_chunk, first_chunk + num_chunks), then of `num_draft_tokens` never-history tokens."""
        if num_chunks > self.window:
            raise ValueError(f"a forward of {num_chunks} chunks does not fit the window of {self.window}")
        if self.policy == "reset" and not self.has_room(first_chunk, num_chunks):
            raise ValueError(
                f"window full: {first_chunk} chunks of history and {num_chunks} more exceed {self.max_chunks}; "
                f"policy 'reset' expects the session to restart first"
            )
        writes = self._slots_of(range(first_chunk, first_chunk + num_chunks))
        num_visible = self.num_slots(first_chunk + num_chunks)
        if num_draft_tokens:
            writes.append(range(num_visible, num_visible + num_draft_tokens))
        return Placement(tuple(writes), num_visible + num_draft_tokens)

    def place_again(self, num_chunks: int, num_rewritten: int) -> Placement:
        """Slots of the newest `num_rewritten` of `num_chunks` chunks of history, whose K/V is computed anew.

        Once chunks have left, the sink keeps the K/V that it has: only the ring is written. What comes for other chunks
        goes behind the visible slots, where nobody reads it.
        """
        if not 1 <= num_rewritten <= min(num_chunks, self.max_chunks):
            raise ValueError(
                f"{num_rewritten} chunks cannot be rewritten: expected 1 to {min(num_chunks, self.max_chunks)}, "
                f"{num_chunks} have come and {self.max_chunks} fit the window"
            )
        first, num_visible = num_chunks - num_rewritten, self.num_slots(num_chunks)
        oldest = first if num_chunks <= self.max_chunks else max(first, num_chunks - self.window)
        num_unread = (oldest - first) * self.chunk_size
        unread = [range(num_visible, num_visible + num_unread)] if num_unread else []
        return Placement((*unread, *self._slots_of(range(oldest, num_chunks))), num_visible)

    def _slots_of(self, chunks: range) -> list[range]:
        """In the order of the chunks; those of neighbours joined."""
        found: list[range] = []
        for chunk in chunks:
            start = self.entry(chunk) * self.chunk_size
            if found and found[-1].stop == start:
                found[-1] = range(found[-1].start, start + self.chunk_size)
            else:
                found.append(range(start, start + self.chunk_size))
        return found


@dataclass(frozen=True)
class CopiedChunks:
    """Which chunks a forward's copy has: `history`, read as it stands, oldest first and at the places from 0 on; then
    the forward's own. The first `num_unread` of these are a rewrite's whose places the sink has: nobody reads them."""

    history: tuple[int, ...]
    num_own: int
    num_unread: int = 0

    @classmethod
    def of(cls, window: Window, num_chunks: int, num_own: int, rewrites: bool = False) -> CopiedChunks:
        """Of a forward of `num_own` chunks after `num_chunks` of history, or that computes the newest ones anew."""
        if not rewrites:
            visible = window.visible_chunks(num_chunks + num_own)
            return cls(tuple(chunk for chunk in visible if chunk < num_chunks), num_own)
        first = num_chunks - num_own
        written = first if num_chunks <= window.max_chunks else max(first, num_chunks - window.window)
        visible = window.visible_chunks(num_chunks)
        return cls(tuple(chunk for chunk in visible if chunk < written), num_own, written - first)

    @property
    def num_visible(self) -> int:
        return len(self.history) + self.num_own - self.num_unread
