"""A session's recording as a tar file, streamed from the disk while the session may go on."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from pathlib import Path

_CHUNK = 1 << 20
_PADDING = 512  # a tar file's unit


def tar_parts(folder: Path) -> Iterator[bytes]:
    """What lies in the folder now, file by file; a file that grows meanwhile is cut where it ended at first."""
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and _is_whole(path)):
        size = path.stat().st_size
        header = tarfile.TarInfo(f"{folder.name}/{path.relative_to(folder).as_posix()}")
        header.size, header.mtime = size, int(path.stat().st_mtime)
        yield header.tobuf()
        with path.open("rb") as file:
            left = size
            while left:
                data = file.read(min(left, _CHUNK))
                yield data or bytes(left)  # cut off meanwhile, by a full disk say: the tar file stays one
                left -= len(data) or left
        yield bytes(-size % _PADDING)
    yield bytes(2 * _PADDING)


def _is_whole(path: Path) -> bool:
    """Whether nobody writes to it under another name first."""
    return path.suffix != ".partial" and not path.name.startswith(".")
