"""The tensors of the cache. Knows block ids, never sessions, windows or who owns a block.

K and V are separate allocations per layer, [num_blocks, block_size, heads, head_dim], so that a compiler sees two
tensors that one op mutates, and are zero-initialised, so that no kernel multiplies a stray NaN by zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from worldkv.device import upload
from worldkv.kv.block_table import blocks_for
from worldkv.kv.host import HostBlocks, HostPieces
from worldkv.kv.pages import PageFormat
from worldkv.kv.spec import KVSpec

Mark = torch.cuda.Event | None  # a point in the device's queue; None on a device without one


class KVStorage:
    """`num_blocks` blocks of `block_size` slots (a power of two) for every layer of `spec`."""

    def __init__(
        self,
        spec: KVSpec,
        num_blocks: int,
        block_size: int = 128,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        if block_size < 1 or block_size & (block_size - 1):
            raise ValueError(f"block_size: expected a power of two, got {block_size}")
        self.num_blocks, self.block_size = num_blocks, block_size
        self.device, self.format = torch.device(device), PageFormat(dtype)
        self.bytes_per_block = self.format.bytes_per_block(spec, block_size)
        self.num_copied = 0  # blocks copied on write so far
        self._host = HostPieces((block_size, spec.num_heads, spec.head_dim), dtype, pinned=self.device.type == "cuda")
        self._copies: torch.cuda.Stream | None = None  # for copies beside the engine's work
        if self.device.type == "cuda":
            self._copies = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        shape = (num_blocks, block_size, spec.num_heads, spec.head_dim)
        self.k = [torch.zeros(shape, device=device, dtype=dtype) for _ in range(spec.num_layers)]
        self.v = [torch.zeros(shape, device=device, dtype=dtype) for _ in range(spec.num_layers)]

    def like(self, num_layers: int, num_blocks: int) -> KVStorage:
        """Another one with blocks of the same kind, for trials."""
        other = copy(self)
        other.num_blocks = num_blocks
        other.bytes_per_block = self.bytes_per_block // self.num_layers * num_layers
        shape = (num_blocks, *self.k[0].shape[1:])
        other.k = [self.k[0].new_zeros(shape) for _ in range(num_layers)]
        other.v = [self.v[0].new_zeros(shape) for _ in range(num_layers)]
        return other

    @property
    def dtype(self) -> torch.dtype:
        return self.format.dtype

    @property
    def num_layers(self) -> int:
        return len(self.k)

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (*self.k, *self.v))

    def slots(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a layer as [num_blocks * block_size, heads, head_dim] views."""
        return self.k[layer].flatten(0, 1), self.v[layer].flatten(0, 1)

    def write(self, layer: int, slots: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor) -> None:
        """Write T tokens' K and V at the physical `slots`, int64 [T]. Only the fused GPU kernel writes beside this.

        Waits for nothing, so it can be captured in a CUDA graph.
        """
        for pool, tokens in zip(self.slots(layer), (k_THD, v_THD), strict=True):
            pool.index_copy_(0, slots, tokens.to(pool.dtype))

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, (source, destination), in every layer."""
        if not copies:
            return
        self.num_copied += len(copies)
        source, destination = upload(list(copies), self.device).unbind(1)
        for tensor in (*self.k, *self.v):
            tensor[destination] = tensor[source]

    def write_blocks(self, layer: int, blocks: Sequence[int], k_THD: torch.Tensor, v_THD: torch.Tensor) -> None:
        """Write T tokens' K and V from the first slot of `blocks` on; what follows in the last block is zeroed."""
        if blocks_for(k_THD.shape[0], self.block_size) != len(blocks):
            raise ValueError(f"{k_THD.shape[0]} tokens do not fill {len(blocks)} blocks of {self.block_size} slots")
        starts = np.asarray(blocks, dtype=np.int64)[:, None] * self.block_size
        slots = upload((starts + np.arange(self.block_size)).reshape(-1), self.device)
        pad = (0, 0, 0, 0, 0, len(slots) - k_THD.shape[0])
        k, v = (F.pad(tokens.to(self.device, self.dtype), pad) for tokens in (k_THD, v_THD))
        self.write(layer, slots, k, v)

    def gather(
        self, layer: int, blocks: npt.NDArray[np.int32], logical_slots: npt.NDArray[np.int64]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of K and V [T, heads, head_dim] at the given logical slots of a block table."""
        physical = blocks[logical_slots // self.block_size].astype(np.int64) * self.block_size
        index = upload(physical + logical_slots % self.block_size, self.device)
        k, v = self.slots(layer)
        return k[index], v[index]

    def host_bytes(self, num_blocks: int) -> int:
        """Host memory that a copy of so many blocks takes."""
        return 2 * self.num_layers * self._host.bytes_for(num_blocks)

    def pin_ahead(self, num_blocks: int) -> None:
        """Pin the host memory for a copy of so many blocks, on any thread; nothing without a GPU."""
        self._host.pin_ahead(2 * self.num_layers * num_blocks)

    def read_blocks(self, blocks: Sequence[int]) -> HostBlocks:
        """Copy blocks to the host, piece by piece; asynchronous on a GPU, so within `aside`."""
        parts = torch.split(upload(list(blocks), self.device, torch.long), self._host.num_blocks)
        layers = [
            ([self._host.copy(k[part]) for part in parts], [self._host.copy(v[part]) for part in parts])
            for k, v in zip(self.k, self.v, strict=True)
        ]
        return self._host.kept(layers, len(blocks))

    def laid_out(self, layers: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> HostBlocks:
        """Tokens' K and V of every layer, [tokens, heads, head_dim] on the host, as blocks of this storage's size. They
        share memory, but for the last piece, whose end is zeroed."""
        pieces = [(self._pieces_of(k), self._pieces_of(v)) for k, v in layers]
        num_blocks = blocks_for(len(layers[0][0]), self.block_size)
        return HostBlocks(pieces, num_blocks, num_blocks * self.bytes_per_block)

    def _pieces_of(self, tokens: torch.Tensor) -> list[torch.Tensor]:
        size = self.block_size
        pieces = []
        for run in torch.split(tokens, self._host.num_blocks * size):
            whole = F.pad(run, (0, 0, 0, 0, 0, -len(run) % size)) if len(run) % size else run
            pieces.append(whole.view(-1, size, *tokens.shape[1:]))
        return pieces

    def load_blocks(self, blocks: Sequence[int], host: HostBlocks) -> None:
        """Copy blocks from the host into `blocks`, in order; asynchronous on a GPU, so within `aside`."""
        parts = torch.split(upload(list(blocks), self.device, torch.long), self._host.num_blocks)
        for layer, of_layer in enumerate(host.layers):
            for pool, pieces in zip((self.k[layer], self.v[layer]), of_layer, strict=True):
                for part, piece in zip(parts, pieces, strict=True):
                    pool.index_copy_(0, part, piece[: len(part)].to(self.device, non_blocking=True))

    def mark(self) -> Mark:
        """All that this thread has queued on the device by now."""
        if self._copies is None:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

    @contextmanager
    def aside(self, mark: Mark) -> Iterator[None]:
        """Copies made inside come after `mark` and beside what is queued later, on any thread; at the end, also where
        one fails, they have been waited for."""
        if self._copies is None:
            yield
            return
        assert mark is not None, "a mark of another device"
        with torch.cuda.stream(self._copies):
            self._copies.wait_event(mark)
            try:
                yield
            finally:
                end = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
                end.record()
                end.synchronize()
