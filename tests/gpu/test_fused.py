"""Triton's kernels against the plain ones, graphs against the same work launched kernel by kernel."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no GPU here", allow_module_level=True)
pytest.importorskip("diffusers")

from engines import make_engine, make_inputs, random_checkpoint  # noqa: E402

from worldkv.attention import cudnn  # noqa: E402
from worldkv.kv.spec import KVSpec  # noqa: E402
from worldkv.kv.storage import KVStorage  # noqa: E402
from worldkv.kv.window import Window  # noqa: E402
from worldkv.load import start_engine  # noqa: E402
from worldkv.models.dreamzero.checkpoint import Checkpoint, load_encoders  # noqa: E402
from worldkv.models.graphs import GraphedCall  # noqa: E402
from worldkv.models.wan import fused_vae, kernels, kernels_triton  # noqa: E402
from worldkv.models.wan.fused import FusedBlocks  # noqa: E402
from worldkv.models.wan.graphs import GraphedBlocks  # noqa: E402

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def relative_error(ours: Any, expected: Any) -> float:
    if isinstance(ours, kernels.Quantised):
        ours, expected = (q.values.float() * q.scales for q in (ours, expected))
    ours, expected = ours.float().cpu(), expected.float().cpu()
    return float((ours - expected).norm() / expected.norm())


def random(*shape: int, dtype: Any) -> Any:
    return torch.randn(*shape).to(dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("width", [64, 3072, 5120])
@pytest.mark.parametrize("quantise", [False, True])
@pytest.mark.parametrize("per_level", [False, True])
def test_residual_norm(dtype: Any, width: int, quantise: bool, per_level: bool) -> None:
    torch.manual_seed(0)
    x, delta, tables = random(37, width, dtype=dtype), random(37, width, dtype=dtype), random(3, 6, width, dtype=dtype)
    level, weight = torch.randint(0, 3, (37,)), random(width, dtype=dtype)

    def run(device: str) -> Any:
        own, d, t, lv, w = (tensor.to(device, copy=True) for tensor in (x, delta, tables, level, weight))
        table = kernels.NormTable(t[:, 1], t[:, 0], True) if per_level else kernels.NormTable(w, t[0, 0], False)
        gate = t[:, 2] if per_level else None
        y = kernels.residual_norm(own, lv, 1e-6, delta_TD=d, gate_UD=gate, table=table, quantise=quantise)
        return own, y

    (x_gpu, y_gpu), (x_cpu, y_cpu) = run("cuda"), run("cpu")
    assert relative_error(x_gpu, x_cpu) < TOLERANCE[dtype]
    assert relative_error(y_gpu, y_cpu) < (0.02 if quantise else TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("heads", "head_dim"), [(2, 32), (24, 128), (40, 128)])
def test_norm_rotate_write(dtype: Any, heads: int, head_dim: int) -> None:
    torch.manual_seed(0)
    width, tokens = heads * head_dim, 29
    given = [random(tokens, 3 * width, dtype=dtype), random(width, dtype=dtype), random(width, dtype=dtype)]
    given += [torch.randn(tokens, 1, head_dim // 2) for _ in range(2)]
    slots = torch.randperm(64)[:tokens]

    def run(device: str) -> list[Any]:
        storage = KVStorage(KVSpec(1, heads, head_dim, Window(1, 1), ("a",)), 4, 16, device, dtype)
        q = kernels.norm_rotate_write(*(t.to(device) for t in given), storage, 0, slots.to(device), 1e-6)
        return [q, *storage.slots(0)]

    for ours, expected in zip(run("cuda"), run("cpu"), strict=True):
        assert relative_error(ours, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("gelu", [False, True])
def test_rows_in_float8_and_rms_norm(dtype: Any, gelu: bool) -> None:
    x, weight = random(31, 13824, dtype=dtype), random(13824, dtype=dtype)
    ours, expected = kernels.quantise_rows(x.cuda(), gelu=gelu), kernels.quantise_rows(x, gelu=gelu)
    assert relative_error(ours, expected) < 0.02
    assert relative_error(kernels.rms_norm(x.cuda(), weight.cuda(), 1e-6), kernels.rms_norm(x, weight, 1e-6)) < 1e-2


def episode(blocks: str, kind: str, num_ticks: int = 10, window_policy: str = "reset") -> list[Any]:
    """Two sessions ticking out of step, over more than two windows, in bfloat16 through cuDNN."""
    options = {"device": "cuda", "dtype": torch.bfloat16, "attention": "cudnn", "window_policy": window_policy}
    engine = make_engine(kind, block_size=16, max_rows=4, **options)
    dit = engine.model.dit
    if blocks == "fused":
        dit.run_blocks = dit.run_blocks._blocks
    elif blocks == "plain":
        dit.run_blocks = dit._run_blocks
    else:
        assert isinstance(dit.run_blocks, GraphedBlocks)
        assert isinstance(dit.run_blocks._blocks, FusedBlocks)
        engine.make_ready()
    first, second = engine.open_session(), engine.open_session()
    results = []
    for tick in range(num_ticks):
        futures = [engine.submit(first, make_inputs(engine, tick, 1 if tick == 0 else 4))]
        if tick % 3:
            futures.append(engine.submit(second, make_inputs(engine, 100 + tick, 1 if tick == 1 else 4)))
        answers = [future.result().result for future in futures]
        results += [(answer.video_latents, answer.actions) for answer in answers]
    if blocks == "graphs":
        assert dit.run_blocks.num_captured > 1, "nothing was captured"
    engine.shutdown()
    return results


@pytest.mark.parametrize("kind", ["ti2v", "i2v"])
def test_graphs_give_what_the_same_kernels_give_one_by_one(kind: str) -> None:
    for (ours, actions), (expected, expected_actions) in zip(
        episode("graphs", kind), episode("fused", kind), strict=True
    ):
        assert relative_error(ours, expected) < 2e-2, "batches differ in who shares them, so not bit for bit"
        assert np.isfinite(actions).all()
        assert np.linalg.norm(actions - expected_actions) < 5e-2 * np.linalg.norm(expected_actions)


@pytest.mark.parametrize("kind", ["ti2v", "i2v"])
def test_fused_blocks_stay_near_the_plain_ones(kind: str) -> None:
    for (ours, _), (expected, _) in zip(episode("fused", kind, 5), episode("plain", kind, 5), strict=True):
        assert relative_error(ours, expected) < 0.1


def made(model: Any) -> dict[str, int]:
    graphs = [model.dit.run_blocks, *model.encoding.graphed.values()]
    return {
        "graphs": sum(each.num_captured for each in graphs),
        "attention plans": cudnn.num_graphs(),
        "kernels": kernels_triton.num_compiled(),
    }


@pytest.mark.parametrize("kind", ["ti2v", "i2v"])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_nothing_is_made_after_warm_up_whoever_joins_leaves_restarts_or_dreams(
    kind: str, batch_invariant: bool
) -> None:
    options = {"device": "cuda", "dtype": torch.bfloat16, "attention": "cudnn", "batch_invariant": batch_invariant}
    engine = make_engine(kind, block_size=16, max_sessions=7, **options)
    engine.warm_up()
    before, launched = made(engine.model), []
    blocks = engine.model.dit.run_blocks
    eager = blocks._blocks
    blocks._blocks = lambda inputs: launched.append(len(inputs.x)) or eager(inputs)
    dice = np.random.default_rng(0)
    sessions: list[Any] = []
    for turn in range(16):
        if len(sessions) < 7 and dice.random() < 0.5:
            sessions.append((engine.open_session(), []))
        futures = []
        for session, ticks in sessions:
            if dice.random() < 0.3 and ticks:
                continue
            inputs = make_inputs(engine, turn, 1 if not ticks or dice.random() < 0.1 else 4, prompt=len(ticks) % 2)
            if ticks and dice.random() < 0.1:
                inputs = replace(inputs, frames=None)
            ticks.append(turn)
            futures.append(engine.submit(session, inputs))
        for future in futures:
            assert np.isfinite(future.result().result.actions).all()
        if sessions and dice.random() < 0.2:
            engine.close(sessions.pop(0)[0], "leaves")
    engine.shutdown()
    assert made(engine.model) == before
    assert launched == [], "forwards that found no graph, by their tokens"


def test_two_engines_of_one_model_write_to_their_own_pages() -> None:
    options = {"device": "cuda", "dtype": torch.bfloat16, "attention": "cudnn"}
    one = make_engine("ti2v", block_size=16, **options)
    two = start_engine(one.model, one.config, "cuda", torch.bfloat16)
    results = []
    for engine in (one, two, one):
        engine.make_ready()
        session = engine.open_session()
        results.append(engine.submit(session, make_inputs(engine, 0, 1)).result().result.actions)
        engine.close(session, "done")
    assert np.array_equal(results[0], results[1])
    assert np.array_equal(results[0], results[2])
    one.shutdown()
    two.shutdown()


def test_a_call_of_any_size_gives_what_the_function_gives() -> None:
    weight = torch.randn(8, 8, device="cuda")
    call = GraphedCall(lambda x: torch.tanh(x @ weight))
    for size in (1, 2, 4):
        call.prepare(size, torch.zeros(1, 8, device="cuda"))
    for size in (3, 1, 9, 4, 2, 6):
        x = torch.randn(size, 8, device="cuda")
        assert torch.allclose(call(x), torch.tanh(x @ weight), atol=1e-5)
    assert call.num_captured == 3
    other = torch.randn(2, 3, 8, device="cuda")
    assert torch.allclose(call(other), torch.tanh(other @ weight), atol=1e-5), "another shape runs as usual"


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("channels", [3, 96, 160, 640])
@pytest.mark.parametrize("tail_frames", [0, 1, 2])
def test_norm_activate_pad(dtype: Any, norms: bool, channels: int, tail_frames: int) -> None:
    torch.manual_seed(0)
    x, tail = random(2, channels, 3, 5, 7, dtype=dtype), random(2, channels, tail_frames, 5, 7, dtype=dtype)
    gamma = random(channels, dtype=dtype) if norms else None

    def run(device: str) -> Any:
        own, before, weight = (None if t is None else t.to(device) for t in (x, tail if tail_frames else None, gamma))
        own = own.contiguous(memory_format=torch.channels_last_3d)
        return fused_vae.norm_activate_pad(own, before, weight, (2, 1, 1))

    ours, expected = run("cuda"), run("cpu")
    assert ours.shape == expected.shape
    assert ours.is_contiguous(memory_format=torch.channels_last_3d)
    assert relative_error(ours, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("kind", ["ti2v", "i2v"])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_the_fused_vae_is_the_plain_one(kind: str, dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    plain, fast = (
        load_encoders(Checkpoint.open(random_checkpoint(kind)), device="cuda", dtype=dtype).vae for _ in range(2)
    )
    fast.accelerate()
    torch.manual_seed(0)
    video = (torch.rand(2, 3, 9, 64, 96, device="cuda") * 2 - 1).to(dtype)
    with torch.no_grad():
        latents = plain.encode(video)
        assert relative_error(fast.encode(video), latents) < 5 * TOLERANCE[dtype]
        assert relative_error(fast.decode(latents), plain.decode(latents)) < 5 * TOLERANCE[dtype]
