"""Each attention backend against dense attention over the same rows, in one run and, on a GPU, in CUDA graphs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from worldkv.attention.backend import load_backend
from worldkv.attention.names import BACKENDS
from worldkv.bench.timing import measure_in_graph
from worldkv.kv.row import AttentionRow
from worldkv.kv.spec import KVSpec
from worldkv.kv.storage import KVStorage
from worldkv.kv.window import Window


@dataclass(frozen=True)
class AttentionShape:
    name: str
    num_rows: int
    num_queries: int
    num_keys: int
    num_heads: int
    head_dim: int = 128


SHAPES = {
    "dreamzero-14b": [
        AttentionShape("guidance pair, full window", 2, 1785, 7945, 40),
        AttentionShape("guidance pair, first frame", 2, 1785, 2665, 40),
        AttentionShape("text", 2, 1785, 512, 40),
    ],
    "dreamzero-5b": [
        AttentionShape("32 sessions, full window", 64, 125, 475, 24),
        AttentionShape("guidance pair, full window", 2, 125, 475, 24),
        AttentionShape("text, 32 sessions", 64, 125, 512, 24),
    ],
    "tiny": [AttentionShape("guidance pair", 2, 20, 60, 2, 16)],
}


def compare_attention(
    model: str, device: torch.device, dtype: torch.dtype, block_size: int
) -> Iterator[dict[str, object]]:
    """A row per shape and backend: milliseconds, and the ratio to dense attention."""
    for shape in SHAPES[model]:
        dense = measure_in_graph(_dense(shape, device, dtype), device)
        yield {"shape": shape.name, "backend": "dense", "ms": 1e3 * dense, "ratio": 1.0}
        for name in BACKENDS:
            storage, rows = _paged(shape, device, dtype, block_size)
            backend = load_backend(name)
            reason = backend.why_not(storage)
            if reason is not None:
                yield {"shape": shape.name, "backend": name, "skipped": reason}
                continue
            plan = backend.plan(storage, rows)
            q = torch.randn(shape.num_rows * shape.num_queries, shape.num_heads, shape.head_dim, device=device)
            q = q.to(dtype)
            seconds = measure_in_graph(lambda plan=plan, q=q: plan.run(0, q), device)  # type: ignore[misc]
            yield {"shape": shape.name, "backend": name, "ms": 1e3 * seconds, "ratio": seconds / dense}


def _dense(shape: AttentionShape, device: torch.device, dtype: torch.dtype):  # type: ignore[no-untyped-def]
    def random(length: int) -> torch.Tensor:
        return torch.randn(shape.num_rows, shape.num_heads, length, shape.head_dim, device=device, dtype=dtype)

    q, k, v = random(shape.num_queries), random(shape.num_keys), random(shape.num_keys)
    kernels = [SDPBackend.CUDNN_ATTENTION] if device.type == "cuda" and dtype != torch.float32 else [SDPBackend.MATH]

    def run() -> torch.Tensor:
        with sdpa_kernel(kernels):
            return F.scaled_dot_product_attention(q, k, v)

    return run


def _paged(
    shape: AttentionShape, device: torch.device, dtype: torch.dtype, block_size: int
) -> tuple[KVStorage, list[AttentionRow]]:
    """Rows in blocks that lie anywhere in the pool."""
    per_row = -(-shape.num_keys // block_size)
    spec = KVSpec(1, shape.num_heads, shape.head_dim, Window(block_size, 8), ("a",))
    storage = KVStorage(spec, shape.num_rows * per_row, block_size, device, dtype)
    for pool in (*storage.k, *storage.v):
        pool.normal_()
    blocks = np.random.default_rng(0).permutation(shape.num_rows * per_row).astype(np.int32).reshape(-1, per_row)
    return storage, [AttentionRow(row, shape.num_keys, shape.num_queries) for row in blocks]
