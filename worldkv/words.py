"""Words for people: how many of what, and what the system's errors mean. Imports nothing of worldkv."""

from __future__ import annotations

import errno
import os
import re

_REASONS = {
    errno.ENOENT: "does not exist",
    errno.EACCES: "permission denied",
    errno.EPERM: "permission denied",
    errno.EROFS: "the disk is read-only",
    errno.ENOSPC: "no space is left on the disk",
    errno.EDQUOT: "the disk quota is used up",
    errno.EISDIR: "is a folder; a file was expected",
    errno.ENOTDIR: "is a file; a folder was expected",
    errno.EADDRINUSE: "the address is in use: stop what listens there, or choose another port",
    errno.EADDRNOTAVAIL: "this machine has no such address",
    errno.ECONNREFUSED: "nothing listens there",
    errno.EHOSTUNREACH: "that machine cannot be reached",
    errno.ENETUNREACH: "that network cannot be reached",
}
_ERRNO = re.compile(r"\[(?:Errno|WinError|SSL[^\]]*) ?(-?\d+)?\] ")


def count(number: int, noun: str, plural: str | None = None) -> str:
    """`1 file`, `2 files`; `plural` where an s does not make it."""
    return f"{number} {noun if number == 1 else plural or f'{noun}s'}"


def reason(error: OSError) -> str:
    """Why, without a number: `permission denied`."""
    if error.errno is not None and error.errno in _REASONS and _is_plain(error):
        return _REASONS[error.errno]
    text = without_errno(error.strerror or str(error))
    return text[:1].lower() + text[1:]


def _is_plain(error: OSError) -> bool:
    """Whether its text is the system's own, perhaps with more behind it, and not what we made of it."""
    assert error.errno is not None
    return error.strerror is None or error.strerror.startswith(os.strerror(error.errno))


def of_os_error(error: OSError) -> str:
    """`path: why`."""
    names = [str(name) for name in (error.filename, error.filename2) if name is not None]
    return ": ".join([" -> ".join(names), reason(error)] if names else [reason(error)])


def without_errno(text: str) -> str:
    """`[Errno 111] Connection refused` and the like, wherever they stand in a text, less their numbers."""
    return _ERRNO.sub("", text)
