"""One model on two and four ranks computes what it computes on one, and its sessions move between them."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")

import causal  # noqa: E402
from engines import make_engine, make_inputs, random_checkpoint, rest  # noqa: E402

from worldkv.engine.engine import Engine, EngineConfig  # noqa: E402
from worldkv.errors import BadRequest  # noqa: E402
from worldkv.load import load_engine  # noqa: E402
from worldkv.models.checkpoints.tensors import StoredTensors  # noqa: E402
from worldkv.models.dreamzero.checkpoint import Checkpoint, load_network  # noqa: E402
from worldkv.models.dreamzero.folder import DIT_PREFIX  # noqa: E402
from worldkv.models.dreamzero.spec import kv_spec  # noqa: E402
from worldkv.models.dreamzero.verify import GoldenRecording  # noqa: E402
from worldkv.models.session_file import read  # noqa: E402
from worldkv.models.wan.network import Part, Recipe  # noqa: E402
from worldkv.models.wan.shard import WHOLE, Mesh, Shard  # noqa: E402
from worldkv.ranks.codec import packed, unpacked  # noqa: E402
from worldkv.ranks.place import Place  # noqa: E402
from worldkv.ranks.ranks import Ranks  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
TOLERANCE = 1e-5
TIMEOUT_S = 20


@contextmanager
def engine_on(mesh: Mesh, kind: str = "ti2v", **options: Any) -> Iterator[Engine]:
    """A tiny one over ranks, all of whose blocks have come back at its end."""
    with Ranks.start(mesh, timeout_s=TIMEOUT_S) as ranks:
        engine = make_engine(kind, block_size=16, ranks=ranks, **options)
        yield engine
        end(engine)


def end(engine: Engine) -> None:
    for handle in list(engine.core.published.sessions):
        engine.close(handle, "done").result()
    rest(engine)
    engine.core.cache.pool.check()
    assert engine.core.cache.pool.num_used == 0
    engine.shutdown()


def error(ours: Any, expected: Any) -> float:
    ours, expected = torch.as_tensor(ours).float(), torch.as_tensor(expected).float()
    return float((ours - expected).norm() / expected.norm().clamp(min=1e-12))


def expect_same(ours: Any, expected: Any, names: tuple[str, ...]) -> None:
    for name in names:
        found = error(getattr(ours, name), getattr(expected, name))
        assert found < TOLERANCE, f"{name}: relative error {found:.1e}"


def expect_same_pages(ours: bytes, expected: bytes) -> None:
    (about, tensors), (told, wanted) = read(ours), read(expected)
    assert about == told
    for name, tensor in wanted.items():
        assert error(tensors[name], tensor) < TOLERANCE, name


# the recordings


def robots(folder: Path, ranks: Ranks | None) -> tuple[Engine, list[Any]]:
    recording = GoldenRecording.open(folder)
    prompt = recording.prompt("unconditional")
    engine = load_engine(folder, EngineConfig(block_size=16, max_sessions=2), negative_prompt=prompt, ranks=ranks)
    return engine, [recording.inputs(call["call"]) for call in recording.calls["calls"]]


def videos(folder: Path, ranks: Ranks | None) -> tuple[Engine, list[Any]]:
    recording = causal.Recording(folder)
    blocks = range(len(recording.calls["blocks"]))
    return recording.engine(max_sessions=2, ranks=ranks), [recording.request(number) for number in blocks]


def played(folder: Path, ranks: Ranks | None) -> tuple[list[Any], list[Any], bytes]:
    """The recorded ticks of a session, those of another one that is a tick behind and shares its batches, and what the
    first one has at the end."""
    engine, inputs = (videos if "causal" in folder.name else robots)(folder, ranks)
    first, second = engine.open_session(), engine.open_session()
    results: tuple[list[Any], list[Any]] = ([], [])
    for number, each in enumerate(inputs):
        futures = [engine.submit(first, each)]
        if number in (1, 2):
            futures.append(engine.submit(second, inputs[number - 1]))
        for future, done in zip(futures, results, strict=False):
            done.append(future.result(60).result)
    exported = engine.export(first).to_bytes()
    end(engine)
    return *results, exported


@functools.cache
def on_one_rank(folder: Path) -> tuple[list[Any], list[Any], bytes]:
    return played(folder, None)


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("tiny_ti2v", Mesh(2, 1)),
        ("tiny_i2v", Mesh(2, 2)),
        ("tiny_ti2v", Mesh(1, 2)),
        ("tiny_causal_chunk", Mesh(1, 2)),
        ("tiny_causal_recache", Mesh(1, 2)),
    ],
    ids=str,
)
def test_the_recordings_are_the_same_on_ranks_as_on_one(name: str, mesh: Mesh) -> None:
    folder = causal.SHARED / "golden" / name
    if not folder.is_dir():
        pytest.skip(f"no recordings at {folder}")
    expected = on_one_rank(folder)
    with Ranks.start(mesh, timeout_s=TIMEOUT_S) as ranks:
        ours = played(folder, ranks)
    names = ("latents", "video") if "causal" in name else ("actions", "video_latents", "observed_latents")
    for session in (0, 1):
        for result, wanted in zip(ours[session], expected[session], strict=True):
            expect_same(result, wanted, names)
    expect_same_pages(ours[2], expected[2])


# sessions over ranks


def tick(engine: Engine, session: Any, seed: int, prompt: int = 0) -> Any:
    return engine.submit(session, make_inputs(engine, seed, 1 if seed == 0 else 4, prompt)).result(60).result


NAMES = ("actions", "video_latents", "observed_latents")


def same_bits(a: Any, b: Any) -> bool:
    return bool(np.array_equal(a.actions, b.actions)) and torch.equal(a.video_latents, b.video_latents)


def test_forks_snapshots_and_parking_reach_every_rank() -> None:
    alone = make_engine(block_size=16)
    plain = alone.open_session()
    expected = [tick(alone, plain, seed) for seed in range(3)]
    with engine_on(Mesh(2, 2), max_sessions=3) as engine:
        session = engine.open_session()
        for seed in (0, 1):
            expect_same(tick(engine, session, seed), expected[seed], NAMES)
        frozen, fork = engine.snapshot(session), engine.fork(session)
        once = tick(engine, session, 2)
        expect_same(once, expected[2], NAMES)
        engine.restore(session, frozen)
        engine.park(session)
        engine.park(fork)
        assert engine.stats().num_parked == 2
        assert same_bits(tick(engine, session, 2), once), "after a restore and parking"
        assert same_bits(tick(engine, fork, 2), once), "a fork, after parking"
        with pytest.raises(BadRequest):
            engine.submit(session, make_inputs(engine, 1, 4, noise_video=torch.zeros(1, 2, 3))).result(60)
        engine.restore(session, frozen)
        assert same_bits(tick(engine, session, 2), once), "after a tick that failed on all ranks"
        engine.reset(session).result()
        expect_same(tick(engine, session, 0), expected[0], NAMES)
        engine.release(frozen).result()
    end(alone)


def test_a_session_moves_between_meshes_in_the_same_bytes() -> None:
    alone = make_engine(block_size=32)
    session = alone.open_session()
    tick(alone, session, 0)
    tick(alone, session, 1)
    data = alone.export(session).to_bytes()
    wanted = tick(alone, session, 2)
    empty = alone.export(alone.open_session()).to_bytes()
    damaged = bytearray(data)
    damaged[len(data) // 2] ^= 1
    for mesh in (Mesh(2, 2), Mesh(1, 2), Mesh(2, 1)):
        with engine_on(mesh) as engine:
            assert engine.export(engine.import_session(empty)).to_bytes() == empty
            copy = engine.import_session(data)
            assert engine.export(copy).to_bytes() == data, f"on its way through {mesh}"
            foreign = engine.import_session(data, trusts=False)
            assert engine.export(foreign).to_bytes() == data
            expect_same(tick(engine, foreign, 2), wanted, NAMES)
            with pytest.raises(BadRequest):
                engine.import_session(damaged)
            ours = tick(engine, copy, 2)
            expect_same(ours, wanted, NAMES)
            data_after = engine.export(copy).to_bytes()
        expect_same(tick(alone, alone.import_session(data_after), 3), tick(alone, alone.fork(session), 3), NAMES)
    end(alone)


def test_each_rank_has_its_branch_and_its_heads_only() -> None:
    alone = make_engine(block_size=16, max_sessions=2)
    whole, num_weights = alone.capacity(), sum(p.numel() for p in alone.model.dit.blocks.parameters())
    with engine_on(Mesh(2, 2), max_sessions=2) as engine:
        mine = engine.capacity()
        assert engine.core.cache.storage.k[0].shape[2] * 2 == alone.core.cache.storage.k[0].shape[2]
        assert mine.bytes_per_block * 2 == whole.bytes_per_block
        of_history = [each.blocks_per_session - each.blocks_of_conditioning for each in (mine, whole)]
        assert of_history[0] * 2 == of_history[1]
        assert sum(p.numel() for p in engine.model.dit.blocks.parameters()) < 0.6 * num_weights
    end(alone)


def test_a_rank_reads_its_slices_only(monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = Checkpoint.open(random_checkpoint("ti2v"))
    tensors = checkpoint.under(DIT_PREFIX)
    recipe = Recipe("dreamzero", checkpoint.config, tensors, kv_spec(checkpoint.config), "float32", "model")
    read_sizes: list[int] = []
    reading = StoredTensors.read

    def counted(self: StoredTensors, source: Any) -> Any:
        found = reading(self, source)
        read_sizes.append(found.numel() if re.search(r"blocks\..*(attn\.[qkvo]|ffn\.\d)\.weight", source.key) else 0)
        return found

    monkeypatch.setattr(StoredTensors, "read", counted)
    parts = []
    for shard in (WHOLE, Shard(0, 2), Shard(1, 2)):
        read_sizes.clear()
        parts.append((load_network(recipe, Part("cpu", shard)).dit.state_dict(), sum(read_sizes)))
    (whole, num_all), *halves = parts
    assert [2 * count for _, count in halves] == [num_all, num_all]
    for name, dim in (("self_attn.q.weight", 0), ("self_attn.o.weight", 1), ("ffn.0.bias", 0), ("ffn.2.weight", 1)):
        full = f"blocks.0.{name}"
        assert torch.equal(torch.cat([half[full] for half, _ in halves], dim), whole[full]), name
    assert torch.equal(halves[1][0]["blocks.0.self_attn.o.bias"], whole["blocks.0.self_attn.o.bias"])


# what cannot be


def test_a_mesh_that_does_not_fit_is_refused_with_the_reason() -> None:
    with Ranks.start(Mesh(2, 1), timeout_s=TIMEOUT_S) as ranks:
        folder = causal.random_folder()
        with pytest.raises(ValueError, match=r"guidance_parallel.*no guidance when it runs.*tensor_parallel"):
            load_engine(folder, ranks=ranks)
        with pytest.raises(ValueError, match="guidance_parallel: guidance is off"):
            make_engine(ranks=ranks, cfg_scale=1.0)
    expected = r"tensor_parallel: expected a number that divides .* got 3; one of 1, 2"
    with Ranks.start(Mesh(1, 3), timeout_s=TIMEOUT_S) as ranks, pytest.raises(ValueError, match=expected):
        make_engine(ranks=ranks)
    with pytest.raises(ValueError, match="WORLD_SIZE: expected 4 for guidance-parallel 2, tensor-parallel 2, got 2"):
        Ranks.join(Mesh(2, 2), Place(0, 2, "127.0.0.1", 0))


def test_a_place_is_read_off_what_torchrun_sets() -> None:
    said = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
    assert Place.of_environment({}) is None
    assert Place.of_environment(said) == Place(1, 4, "10.0.0.1", 29500)
    assert Place.of_environment({**said, "TORCHELASTIC_USE_AGENT_STORE": "True"}) == Place(
        1, 4, "10.0.0.1", 29500, True
    )
    with pytest.raises(ValueError, match="RANK is set, but not MASTER_ADDR and MASTER_PORT"):
        Place.of_environment({"RANK": "0", "WORLD_SIZE": "2"})


def test_a_command_says_values_and_known_classes_only() -> None:
    value = [None, True, 1.5, "a", {"b": (1, Path("/x"))}, np.arange(6, dtype=np.int32).reshape(2, 3), Mesh(2, 3)]
    said = packed(value)
    read_back = unpacked(said.text, [bytes(array.data) for array in said.arrays], [])
    assert isinstance(read_back, list)
    assert np.array_equal(read_back.pop(5), value.pop(5))
    assert read_back == value
    with pytest.raises(TypeError, match="a Ranks is not sent between ranks"):
        packed([Ranks.__new__(Ranks)])
    with pytest.raises(KeyError):
        unpacked(b'{"~": "class", "name": "Popen", "of": {}}', [], [])
