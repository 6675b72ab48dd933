"""Every GPU backend against the reference in bfloat16, with NaN in every free block, rows of many shapes."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no GPU here", allow_module_level=True)

from worldkv.attention.backend import load_backend  # noqa: E402
from worldkv.kv.row import AttentionRow  # noqa: E402
from worldkv.kv.spec import KVSpec  # noqa: E402
from worldkv.kv.storage import KVStorage  # noqa: E402
from worldkv.kv.window import Window  # noqa: E402

SHAPES = {
    "the pair of the 14B": (40, [(1785, 7945)] * 2),
    "a clean pass of the 14B": (40, [(1760, 2640)] * 2),
    "windows at different fills": (24, [(125, 175), (125, 475), (100, 350), (50, 50)]),
    "one short row": (4, [(3, 40)]),
    "three rows, rounded up to four": (24, [(125, 475)] * 3),
    "seventeen rows of three kinds": (24, [(125, 475)] * 6 + [(50, 225)] * 6 + [(100, 300)] * 5),
    "cross-attention": (24, [(125, 257)] * 6),
}


def make(block_size: int, num_heads: int, rows: list[tuple[int, int]], writes: bool = True):
    rng = np.random.default_rng(0)
    spec = KVSpec(1, num_heads, 128, Window(16, 8), ("a",))
    num_blocks = sum(-(-keys // block_size) for _, keys in rows) + 7
    storage = KVStorage(spec, num_blocks, block_size, "cuda", torch.bfloat16)
    ids = rng.permutation(num_blocks).astype(np.int32)
    storage.k[0].fill_(torch.nan)
    storage.v[0].fill_(torch.nan)
    made = []
    for queries, keys in rows:
        count = -(-keys // block_size)
        blocks, ids = ids[:count], ids[count:]
        for pool in (storage.k[0], storage.v[0]):
            pool[torch.from_numpy(blocks).long().cuda()] = torch.randn(
                count, block_size, num_heads, 128, device="cuda", dtype=torch.bfloat16
            )
        logical = np.arange(keys - queries, keys) if keys >= queries else None
        slots = None
        if writes and logical is not None:
            slots = blocks[logical // block_size].astype(np.int64) * block_size + logical % block_size
        made.append(AttentionRow(blocks, keys, queries, slots))
    return storage, made


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("block_size", [16, 64, 128])
@pytest.mark.parametrize("name", ["cudnn", "flash4"])
def test_a_backend_equals_the_reference(shape: str, block_size: int, name: str) -> None:
    torch.manual_seed(0)
    num_heads, rows = SHAPES[shape]
    writes = all(keys >= queries for queries, keys in rows) and shape != "cross-attention"
    storage, made = make(block_size, num_heads, rows, writes)
    reason = load_backend(name).why_not(storage)
    if reason:
        pytest.skip(reason)
    total = sum(queries for queries, _ in rows)
    q, k, v = (torch.randn(total, num_heads, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    given = (q, k, v) if writes else (q,)
    expected = load_backend("reference").plan(storage, made).run(0, *given)
    ours = load_backend(name).plan(storage, made).run(0, *given)
    assert torch.isfinite(ours).all(), "a free block was read"
    error = float((ours.float() - expected.float()).norm() / expected.float().norm())
    assert error < 1e-2, f"relative error {error:.2e}"
