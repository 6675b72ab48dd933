"""What the descriptions of checkpoint folders share: faults collected, headings, sums of bytes."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import TypeVar

from worldkv.errors import CheckpointError
from worldkv.kv.spec import KVSpec
from worldkv.models.checkpoints.source import Stored
from worldkv.models.checkpoints.words import one_line
from worldkv.show.terminal import size_text
from worldkv.words import count

_ITEM_SIZES = {"bfloat16": 2, "float32": 4}

T = TypeVar("T")


class Problems:
    """Everything wrong so far; one text may list many faults."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def of(self, look: Callable[[], T]) -> T | None:
        """The result of `look`; None where it raises a CheckpointError, which is kept."""
        try:
            return look()
        except CheckpointError as error:
            self.texts.append(str(error))
            return None

    def report(self) -> bool:
        lines = [one_line(line) for text in self.texts for line in text.split("\n")]
        faults = list(dict.fromkeys(line for line in lines if line and not line.endswith(":")))  # no headlines
        print()
        if not faults:
            print("nothing is missing; serve it with `worldkv serve --checkpoint` and this folder")
            return True
        print("what is wrong")
        for fault in faults:
            print(f"  {fault}")
        return False


def show_heading(text: str) -> None:
    print(f"\n{text}")


def part_line(part: str, tensors: Collection[Stored]) -> str:
    sizes = [math.prod(stored.shape) for stored in tensors]
    num_bytes = sum(count * stored.dtype.itemsize for count, stored in zip(sizes, tensors, strict=True))
    kinds = ", ".join(sorted({str(stored.dtype) for stored in tensors}))
    return f"  {part:<18} {len(sizes):>5} tensors {sum(sizes) / 1e6:>11.3f} M {size_text(num_bytes):>11}  {kinds}"


def show_cache(spec: KVSpec, block_size: int) -> None:
    num_blocks, num_branches = spec.blocks_per_session(block_size), len(spec.branches)
    per_branch = spec.blocks_per_branch(block_size)
    show_heading(f"K/V cache  blocks of {block_size} slots")
    show_rows(
        {
            "a session": f"{num_blocks} blocks at most: {count(num_branches, 'branch', 'branches')} of {per_branch}, "
            f"{num_blocks - num_branches * per_branch} for conditioning"
        }
    )
    for name, itemsize in _ITEM_SIZES.items():
        frame = spec.chunk_size * spec.bytes_per_token(itemsize)
        block = spec.bytes_per_block(block_size, itemsize)
        print(
            f"  in {name:<10} {size_text(frame)} a frame and branch, {size_text(num_branches * frame)} a frame, "
            f"{size_text(block)} a block, {size_text(num_blocks * block)} a session"
        )


def show_rows(rows: Mapping[str, str]) -> None:
    for name, value in rows.items():
        print(f"  {name:<18} {value}")
