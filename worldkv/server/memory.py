"""The memory of a process that serves for weeks: what requests leave behind goes back to the system.

Two things keep it otherwise, and neither is a leak. glibc keeps freed buffers for each thread apart, in heaps that
buffers of all sizes have broken into pieces. Python finds what refers to itself (an error and the frames of its
traceback, say, which hold a request's cameras) only when it looks at all objects, which it does rarely.
`worldkv serve` calls the first two, which settle things of the whole process.
"""

from __future__ import annotations

import ctypes
import gc
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

_EVERY_S = 30.0
_MMAP_FROM = 256 * 1024  # bytes; such buffers are the system's again as soon as they are freed
_NUM_HEAPS = 2
_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8  # of malloc.h


def use_few_heaps() -> None:
    """To be called before threads are started. Nothing happens where the C library is not glibc."""
    libc = _glibc()
    if libc is not None:
        libc.mallopt(_M_ARENA_MAX, _NUM_HEAPS)
        libc.mallopt(_M_MMAP_THRESHOLD, _MMAP_FROM)  # a fixed one: by itself it grows up to 32 MiB


@contextmanager
def given_back(every_s: float = _EVERY_S) -> Iterator[None]:
    """In the `with`, from now and then: what nobody can reach is freed, what is free goes back.

    What there is already, the model for one, is taken to stay and not looked at again.
    """
    ended = threading.Event()

    def keep() -> None:
        libc = _glibc()
        while not ended.wait(every_s):
            gc.collect()
            if libc is not None:
                libc.malloc_trim(0)

    gc.collect()
    gc.freeze()
    thread = threading.Thread(target=keep, name="worldkv-memory", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        gc.unfreeze()


def forget_frames(error: BaseException | None) -> None:
    """What the frames of an error, and of those behind it, still held: a request's cameras, for one.

    They hold the task that holds the error, so nothing else would free them before the next search.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:  # errors that were raised again may stand in a ring
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _glibc() -> ctypes.CDLL | None:
    try:
        libc = ctypes.CDLL("libc.so.6")
        libc.gnu_get_libc_version  # noqa: B018 - musl has none
    except (OSError, AttributeError):
        return None
    return libc
