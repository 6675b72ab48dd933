"""A session's recording as a tar file, streamed from the disk while the session may go on, or be deleted."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from pathlib import Path

_PADDING = 512  # a tar file's unit
_LINES = ".jsonl"


def tar_parts(folder: Path) -> Iterator[bytes]:
    """What lies in the folder, file by file, each as it is when its turn comes. What vanishes meanwhile is left out,
    and so is a line that is being written: whoever reads the recording is told that it is cut.
    """
    for path in _files(folder):
        try:
            data, modified = path.read_bytes(), int(path.stat().st_mtime)
        except OSError:  # gone, or its disk is
            continue
        if path.suffix == _LINES:
            data = data[: data.rfind(b"\n") + 1]
        header = tarfile.TarInfo(f"{folder.name}/{path.relative_to(folder).as_posix()}")
        header.size, header.mtime = len(data), modified
        yield header.tobuf()
        yield data
        yield bytes(-len(data) % _PADDING)
    yield bytes(2 * _PADDING)


def _files(folder: Path) -> Iterator[Path]:
    """The session's own first: every tick that they tell of is there by then."""
    yield from sorted(path for path in folder.iterdir() if path.is_file() and _is_whole(path))
    yield from sorted(path for path in folder.rglob("*/*") if path.is_file() and _is_whole(path))


def _is_whole(path: Path) -> bool:
    """Whether nobody writes to it under another name first."""
    return path.suffix != ".partial" and not path.name.startswith(".")
