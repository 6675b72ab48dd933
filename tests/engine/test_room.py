"""How many sessions fit: one rule for the plan, for the engine and for the words that say it beforehand."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("diffusers")

import torch
from engines import make_engine, random_checkpoint

from worldkv import load
from worldkv.bench.plan import Plan, make_plan, sizes_of_checkpoint, sizes_of_model
from worldkv.engine.engine import EngineConfig
from worldkv.engine.room import MAX_ON_CPU, DoesNotFit, Room, free_on_host, is_out_of_memory, told_if_full
from worldkv.kv.storage import KVStorage
from worldkv.models.dreamzero.checkpoint import Checkpoint
from worldkv.models.dreamzero.checkpoint import load as load_model

ROOM = Room(bytes_per_block=10, blocks_per_session=4, blocks_shared=2)
OUT_OF_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 15.00 GiB. GPU 0 has 3 GiB free.\nMore lines"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: 12 bytes"),
    MemoryError(),
]


class FakeGpu:
    """A GPU of so many bytes, as `start_engine` sees it; what it allocates lies on the host."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, free: int, total: int) -> None:
        monkeypatch.setattr(load, "memory_of", lambda device: (free, total))
        monkeypatch.setattr(load, "KVStorage", lambda spec, n, size, _, dtype: KVStorage(spec, n, size, "cpu", dtype))


@pytest.mark.filterwarnings("ignore:.*no tokenizer")
@pytest.mark.parametrize("cfg_scale", [None, 1.0])
@pytest.mark.parametrize("megabytes", [730, 745, 760])
def test_what_starts_is_what_was_planned(
    megabytes: int, cfg_scale: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = random_checkpoint("ti2v")
    plan = make_plan(sizes_of_checkpoint(folder, [], None), megabytes / 1e3, "model", cfg_scale, "reset", 16)
    assert plan.num_sessions > 0
    model = load_model(Checkpoint.open(folder), dtype=torch.bfloat16, cfg_scale=cfg_scale)
    FakeGpu(monkeypatch, plan.memory - plan.driver - plan.dit - plan.encoders, plan.memory)
    engine = load.start_engine(model, EngineConfig(block_size=16), "cuda", torch.bfloat16)
    try:
        capacity = engine.capacity()
    finally:
        engine.shutdown()
    assert (capacity.num_blocks, capacity.num_more_sessions) == (plan.num_blocks, plan.num_sessions)
    assert capacity.blocks_per_session * capacity.bytes_per_block == plan.charge


def test_the_plan_adds_up() -> None:
    plans: list[Plan] = [
        make_plan(sizes_of_model("dreamzero-14b"), memory, "model", None, "reset", 128) for memory in (48, 80, 141)
    ]
    for plan in plans:
        used = plan.dit + plan.encoders + plan.driver + plan.workspace + plan.shared + plan.num_sessions * plan.charge
        assert (plan.missing == 0) == (plan.num_sessions > 0)
        assert used <= plan.memory < used + plan.charge + plan.missing or plan.num_sessions == 0
    assert [plan.num_sessions for plan in plans] == [0, 1, 5]
    assert plans[0].fork < plans[0].charge
    with_room = (plans[0].memory + plans[0].missing) / 1e9 + 0.3  # the workspace grows with it
    assert make_plan(sizes_of_model("dreamzero-14b"), 1.1 * with_room, "model", None, "reset", 128).num_sessions == 1


@pytest.mark.parametrize("memory", [0.0, -141.0, float("nan"), float("inf")])
def test_no_plan_is_made_for_no_memory(memory: float) -> None:
    with pytest.raises(ValueError, match=r"memory: expected more than 0 GB"):
        make_plan(sizes_of_model("dreamzero-5b"), memory, "model", None, "reset", 128)


def test_as_many_as_fit_are_all_of_a_gpu_and_a_few_of_a_host() -> None:
    assert ROOM.num_blocks(None, free=208, total=1000, on_gpu=True) == (208 - 80) // 10
    with pytest.raises(DoesNotFit, match=r"one session needs .* not one fits"):
        ROOM.num_blocks(None, free=130, total=1000, on_gpu=True)
    assert ROOM.num_blocks(None, free=10**6, total=10**6, on_gpu=False) == ROOM.blocks_for(MAX_ON_CPU)
    assert ROOM.num_blocks(None, free=200, total=200, on_gpu=False) == ROOM.blocks_for(2), "half of what is free"
    assert ROOM.num_blocks(None, free=70, total=70, on_gpu=False) == ROOM.blocks_for(1), "one, rather than none"
    with pytest.raises(DoesNotFit, match="not one fits"):
        ROOM.num_blocks(None, free=50, total=50, on_gpu=False)


def test_a_number_of_sessions_that_does_not_fit_is_told_what_would(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ROOM.num_blocks(3, free=140, total=140, on_gpu=False) == 14
    with pytest.raises(DoesNotFit, match=r"max_sessions: 4 sessions need .* 3 would fit"):
        ROOM.num_blocks(4, free=140, total=140, on_gpu=False)
    monkeypatch.setattr(load, "free_on_host", lambda: 2_000_000)
    with pytest.raises(DoesNotFit, match=r"max_sessions: 500 sessions need .* are free"):
        make_engine("ti2v", block_size=16, max_sessions=500)


def test_the_host_s_free_memory_is_known() -> None:
    assert 2**20 < free_on_host() < 2**50


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("where", ["KVStorage", "weights"])
def test_memory_that_runs_out_says_what_would_fit(
    error: Exception, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise error

    target = "worldkv.load.KVStorage" if where == "KVStorage" else "worldkv.models.dreamzero.checkpoint.load_module"
    monkeypatch.setattr(target, full)
    with pytest.raises(DoesNotFit, match="out of memory while ") as told:
        make_engine("ti2v", block_size=16, max_sessions=3)
    text = str(told.value)
    for words in ("fewer sessions (max_sessions)", "cfg_scale 1", "fp8", "a smaller window"):
        assert words in text
    assert ("a session " in text and "would fit" in text) if where == "KVStorage" else "KiB" in text or "GiB" in text
    assert "\n" not in text
    assert is_out_of_memory(error)


def test_other_errors_stay_what_they_are() -> None:
    with pytest.raises(RuntimeError, match="shapes"), told_if_full("doing things"):
        raise RuntimeError("shapes differ")
    assert not is_out_of_memory(RuntimeError("shapes differ"))
