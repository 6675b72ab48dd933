"""Engines one after the other in one process: each finds the memory of those before it."""

from __future__ import annotations

import gc

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no GPU here", allow_module_level=True)
pytest.importorskip("diffusers")

from engines import make_engine  # noqa: E402


def test_an_engine_that_was_shut_down_leaves_its_pages_to_the_next() -> None:
    options = {"block_size": 128, "device": "cuda", "dtype": torch.bfloat16}
    small = make_engine("ti2v", num_blocks=16, **options)
    card = small.cache_card
    num_blocks = int(0.6 * torch.cuda.mem_get_info()[0] / (card.num_bytes / 16))
    small.shutdown()
    del small
    gc.collect()
    gc.disable()  # or it might come by chance
    try:
        for _ in range(3):
            engine = make_engine("ti2v", num_blocks=num_blocks, **options)
            engine.shutdown()
            del engine
    finally:
        gc.enable()
