"""Causal video on a GPU: what is made ahead, graphs against the same kernels one by one, the decoder's pieces."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no GPU here", allow_module_level=True)
pytest.importorskip("diffusers")

from causal import SHARED, make_engine, make_request, relative_error, run  # noqa: E402

from worldkv.attention import cudnn  # noqa: E402
from worldkv.cli.main import main  # noqa: E402
from worldkv.kv.spec import KVSpec  # noqa: E402
from worldkv.kv.storage import KVStorage  # noqa: E402
from worldkv.kv.window import Window  # noqa: E402
from worldkv.models.causal_wan.random import TINY  # noqa: E402
from worldkv.models.wan import kernels, kernels_triton, vae_triton  # noqa: E402

FRAMEWISE = replace(TINY, frames_per_block=1, window_frames=5, sink_frames=1)
KINDS = {
    "chunks": TINY,
    "chunks, relative": replace(TINY, rope="relative"),
    "frames": FRAMEWISE,
    "frames, relative": replace(FRAMEWISE, rope="relative"),
}
ON_GPU = {"device": "cuda", "dtype": torch.bfloat16, "attention": "cudnn"}


def made(model: Any) -> dict[str, int]:
    return {
        "graphs": model.dit.run_blocks.num_captured,
        "attention plans": cudnn.num_graphs(),
        "kernels": kernels_triton.num_compiled() + vae_triton.num_compiled(),
    }


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("precision", ["model", "fp8"])
def test_nothing_is_made_after_warm_up_whoever_joins_leaves_or_takes_other_words(kind: str, precision: str) -> None:
    engine = make_engine(KINDS[kind], max_sessions=5, precision=precision, **ON_GPU)
    engine.warm_up()
    before, launched = made(engine.model), []
    blocks = engine.model.dit.run_blocks
    eager = blocks._blocks
    blocks._blocks = lambda inputs: launched.append(len(inputs.x)) or eager(inputs)
    dice = np.random.default_rng(0)
    sessions: list[Any] = []
    for turn in range(20):
        if len(sessions) < 5 and dice.random() < 0.6:
            sessions.append(engine.open_session())
        ways = [(int(dice.integers(3)), str(dice.choice(["recache", "keep", "blend"]))) for _ in sessions]
        requests = [make_request(prompt, switch=switch, blend_blocks=2) for prompt, switch in ways]
        futures = [engine.submit(*pair) for pair in zip(sessions, requests, strict=True)]
        for future in futures:
            assert torch.isfinite(future.result().result.video).all()
        if sessions and dice.random() < 0.2:
            engine.close(sessions.pop(0), "leaves")
        if sessions and turn % 5 == 4:
            engine.park(sessions[0])
    engine.shutdown()
    assert made(engine.model) == before
    assert launched == [], "forwards that found no graph, by their tokens"


def video(kind: str, how: str) -> list[Any]:
    engine = make_engine(KINDS[kind], **ON_GPU)
    dit = engine.model.dit
    if how == "graphs":
        engine.make_ready()
    else:
        dit.run_blocks = dit.run_blocks._blocks if how == "fused" else dit._run_blocks
    session = engine.open_session()
    blocks = [run(engine, session, make_request(number // 4, seed=1)) for number in range(8)]
    engine.shutdown()
    return blocks


@pytest.mark.parametrize("kind", KINDS)
def test_graphs_give_what_the_same_kernels_give_one_by_one(kind: str) -> None:
    for ours, expected in zip(video(kind, "graphs"), video(kind, "fused"), strict=True):
        assert relative_error(ours.latents, expected.latents) < 1e-3
        assert relative_error(ours.video, expected.video) < 1e-2


@pytest.mark.parametrize("kind", KINDS)
def test_fused_blocks_stay_near_the_plain_ones(kind: str) -> None:
    for ours, expected in zip(video(kind, "fused")[:3], video(kind, "plain")[:3], strict=True):
        assert relative_error(ours.latents, expected.latents) < 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "head_dim"), [(2, 32), (12, 128)])
def test_keys_are_kept_unturned_beside_the_turned_ones(dtype: Any, heads: int, head_dim: int) -> None:
    torch.manual_seed(0)
    width, tokens = heads * head_dim, 29
    given = [torch.randn(tokens, 3 * width), torch.randn(width), torch.randn(width)]
    phases = [torch.randn(tokens, 1, head_dim // 2) for _ in range(2)]
    slots, kept = torch.randperm(64)[: 2 * tokens].split(tokens)
    kept = torch.where(torch.arange(tokens) % 3 == 0, -1, kept)

    def computed(device: str) -> list[Any]:
        storage = KVStorage(KVSpec(1, heads, head_dim, Window(1, 1), ("a",)), 4, 16, device, dtype)
        tensors = [*(t.to(device, dtype) for t in given), *(t.to(device) for t in phases)]
        q = kernels.norm_rotate_write(*tensors, storage, 0, slots.to(device), 1e-6, kept.to(device))
        return [q, *storage.slots(0)]

    for ours, expected in zip(computed("cuda"), computed("cpu"), strict=True):
        assert relative_error(ours.float().cpu(), expected.float()) < (1e-5 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("name", ["tiny_causal_chunk", "tiny_causal_recache"])
def test_every_recorded_quantity_within_a_thousandth(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = SHARED / "golden" / name
    if not folder.is_dir():
        pytest.skip(f"no recordings at {folder}")
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    assert main(["verify", str(folder), "--device", "cuda", "--tolerance", "1e-3", "--interleave", "2"]) == 0
