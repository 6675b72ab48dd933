"""Files of a checkpoint, written whole or not at all; a full disk, a quota and a read-only one are told in words."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from worldkv.errors import CheckpointError
from worldkv.models.checkpoints.words import one_line


def save_tensors(tensors: dict[str, torch.Tensor], path: Path, metadata: Mapping[str, str] | None = None) -> None:
    """Raises CheckpointError that says what is needed; then `path` is as it was before."""
    partial = path.with_suffix(".partial")
    with _told(path, partial, sum(tensor.numel() * tensor.itemsize for tensor in tensors.values())):
        partial.touch()
        mode = partial.stat().st_mode
        save_file(tensors, partial, metadata=None if metadata is None else dict(metadata))
        partial.chmod(mode)  # the library makes files that only their owner may read
        os.replace(partial, path)


def write_text(text: str, path: Path) -> None:
    """As `save_tensors`."""
    partial = path.with_suffix(".partial")
    data = text.encode("utf-8")
    with _told(path, partial, len(data)):
        partial.write_bytes(data)
        os.replace(partial, path)


def copy_file(source: Path, path: Path) -> None:
    """As `save_tensors`."""
    partial = path.with_suffix(".partial")
    with _told(path, partial, source.stat().st_size):
        shutil.copyfile(source, partial)
        os.replace(partial, path)


@contextmanager
def _told(path: Path, partial: Path, num_bytes: int) -> Iterator[None]:
    try:
        try:
            yield
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
    except (OSError, SafetensorError) as error:  # the library's own does not say that it is an OSError's
        reason = error.strerror if isinstance(error, OSError) and error.strerror else one_line(error)
        raise CheckpointError(
            f"{path} could not be written: {reason}. {_size(num_bytes)} are needed for it, {_free(path)} are free "
            "there; what was read is unchanged"
        ) from error


def _free(path: Path) -> str:
    try:
        return _size(shutil.disk_usage(path.parent).free)
    except OSError:
        return "nobody knows how many"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.3f} MB"
