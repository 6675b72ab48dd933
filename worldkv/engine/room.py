"""How many sessions a memory holds: one rule, for whoever plans, for whoever allocates. Counts and bytes, no tensor."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from worldkv.kv.spec import KVSpec

WORKSPACE = 0.08  # of a GPU's memory: activations, graphs and libraries' workspaces
DRIVER_BYTES = 650_000_000  # of a GPU, for a process's CUDA context: measured on an H200, driver 580, torch 2.11
MAX_ON_CPU = 4  # sessions, where nobody says how many: a CPU is too slow for more
_HOST_SHARE = 0.5  # of the host's free memory, where nobody says how many
_WAYS_OUT = (
    "fewer sessions (max_sessions), cfg_scale 1 (half the cache), a smaller window (max_chunk_size in config.json)"
)
_OUT_OF_MEMORY = re.compile(r"DefaultCPUAllocator|out of memory|can't allocate memory|bad_alloc", re.IGNORECASE)


class DoesNotFit(ValueError):
    """Memory is too small for what was asked; the text says what would fit."""


def gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.3g} GiB"


@dataclass(frozen=True)
class Room:
    """What a session costs in blocks of a cache, and a block in bytes."""

    bytes_per_block: int
    blocks_per_session: int
    blocks_shared: int
    state_bytes: int = 0  # that a session keeps beside its blocks

    @classmethod
    def of(cls, spec: KVSpec, block_size: int, element_size: int, state_bytes: int = 0) -> Room:
        return cls(
            spec.bytes_per_block(block_size, element_size),
            spec.blocks_per_session(block_size),
            spec.blocks_shared(block_size),
            state_bytes,
        )

    @property
    def bytes_per_session(self) -> int:
        return self.blocks_per_session * self.bytes_per_block + self.state_bytes

    @property
    def bytes_shared(self) -> int:
        return self.blocks_shared * self.bytes_per_block

    def blocks_for(self, num_sessions: int) -> int:
        return num_sessions * self.blocks_per_session + self.blocks_shared

    def bytes_for(self, num_sessions: int) -> int:
        """Of the cache, and of what they keep beside it."""
        return num_sessions * self.bytes_per_session + self.bytes_shared

    def blocks_in(self, num_bytes: int) -> int:
        """All that fit; where sessions keep something beside them, those of whole sessions."""
        if self.state_bytes:
            return self.blocks_for(self.sessions_in(num_bytes))
        return max(0, num_bytes // self.bytes_per_block)

    def sessions_in(self, num_bytes: int) -> int:
        return max(0, (num_bytes - self.bytes_shared) // self.bytes_per_session)

    def num_blocks(self, max_sessions: int | None, free: int, total: int, *, on_gpu: bool) -> int:
        """Of the cache for `max_sessions`. None is all that a GPU has free beside room to work in; on a host, what half
        of its free memory holds, at most MAX_ON_CPU sessions. Raises DoesNotFit."""
        if max_sessions is not None:
            if self.bytes_for(max_sessions) > free:
                raise self._too_many(max_sessions, free, total, on_gpu)
            return self.blocks_for(max_sessions)
        usable = usable_on_gpu(free, total) if on_gpu else round(_HOST_SHARE * free)
        if on_gpu and self.sessions_in(usable):
            return self.blocks_in(usable)
        num_sessions = min(MAX_ON_CPU, max(self.sessions_in(usable), min(1, self.sessions_in(free))))
        if on_gpu or not num_sessions:
            raise self._too_many(1, usable, total, on_gpu)
        return self.blocks_for(num_sessions)

    def _too_many(self, num_sessions: int, free: int, total: int, on_gpu: bool) -> DoesNotFit:
        fit = self.sessions_in(usable_on_gpu(free, total) if on_gpu else free)
        needed = gib(self.bytes_for(num_sessions))
        many = "one session needs" if num_sessions == 1 else f"{num_sessions} sessions need"
        advice = f"{fit} would fit" if fit else f"not one fits: try fp8 products (precision), {_WAYS_OUT}"
        where = f"{WORKSPACE:.0%} of the GPU's {gib(total)} are kept to work in" if on_gpu else "on this host"
        return DoesNotFit(
            f"max_sessions: {many} {needed} of cache ({gib(self.bytes_per_session)} each, {gib(self.bytes_shared)} "
            f"shared), {gib(free)} are free ({where}); {advice}"
        )


def usable_on_gpu(free: int, total: int) -> int:
    """Bytes for the cache, of what is free beside the weights."""
    return max(0, free - round(WORKSPACE * total))


def free_on_host() -> int:
    """Bytes that this process may still take: of the machine, and of its control group where that is less."""
    free = _meminfo().get("MemAvailable") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    group = Path("/sys/fs/cgroup")
    limit, used = _number(group / "memory.max"), _number(group / "memory.current")
    return free if limit is None or used is None else max(0, min(free, limit - used))


def _meminfo() -> dict[str, int]:
    """Linux's books, in bytes; empty elsewhere."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return {}
    fields = (line.replace(":", " ").split() for line in lines)
    return {words[0]: 1024 * int(words[1]) for words in fields if len(words) == 3}


def _number(path: Path) -> int | None:
    """None where there is no such file, or no limit."""
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def is_out_of_memory(error: BaseException) -> bool:
    """Of the host or of a GPU, as Python, torch and CUDA say it. Imports no torch."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and _OUT_OF_MEMORY.search(str(error)) is not None


@contextmanager
def told_if_full(while_doing: str, needs: str = "") -> Iterator[None]:
    """Whatever says inside that memory is full becomes DoesNotFit. `needs`: what it takes, and what is there."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        said = (str(error).splitlines() or ["no more to be had"])[0].rstrip(".")
        told = "; ".join([f"out of memory while {while_doing}", *([needs] if needs else []), said])
        raise DoesNotFit(f"{told}. Try {_WAYS_OUT}, fp8 products (precision), or a larger device") from error
