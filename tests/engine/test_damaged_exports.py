"""Exports that are damaged, foreign or made up: a refusal that says what is wrong, and nothing is left behind."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")

import causal  # noqa: E402
from engines import droid_observation, make_engine, make_inputs, random_checkpoint, rest  # noqa: E402
from toy_model import ToyModel, make_toy_engine  # noqa: E402

from worldkv.engine.engine import Engine, EngineConfig  # noqa: E402
from worldkv.errors import BadRequest  # noqa: E402
from worldkv.load import load_policy  # noqa: E402
from worldkv.models.fingerprint import fingerprint  # noqa: E402
from worldkv.models.session_file import Part, read, write  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    engine = make_engine("ti2v", block_size=16)
    yield engine
    engine.shutdown()


@pytest.fixture(scope="module")
def export(engine: Engine) -> bytes:
    session = engine.open_session()
    for seed in range(2):
        engine.submit(session, make_inputs(engine, seed, 1 if seed == 0 else 4)).result()
    data = engine.export(session).to_bytes()
    engine.close(session, "done").result()
    return data


def refusal(engine: Engine, data: bytes) -> str:
    with pytest.raises(BadRequest) as refused:
        engine.import_session(data, "damaged")
    rest(engine)
    capacity = engine.capacity()
    engine.core.cache.pool.check()
    assert engine.core.cache.pool.num_used == 0, "blocks leaked"
    assert capacity.num_charged == capacity.blocks_shared, "charges leaked"
    assert "damaged" not in engine.core.names, "its name leaked"
    assert str(refused.value).startswith("import: ")
    return str(refused.value)


def changed(data: bytes, change: Callable[[Any, dict[str, Any]], None]) -> bytes:
    """With a checksum that is right: by someone who means it."""
    about, tensors = read(data)
    about, tensors = copy.deepcopy(dict(about)), dict(tensors)
    change(about, tensors)
    return write(about, {name: Part.of(tensor) for name, tensor in tensors.items()}).to_bytes()


def test_whatever_is_cut_flipped_or_swapped_is_refused(engine: Engine, export: bytes) -> None:
    dice = random.Random(15)
    for _ in range(150):
        data = bytearray(export)
        kind = dice.choice(("cut", "flip", "swap", "grow", "head"))
        if kind == "cut":
            del data[dice.randrange(len(data)) :]
        elif kind == "grow":
            data += bytes(dice.randrange(1, 64))
        elif kind == "swap":
            a, b = (dice.randrange(0, len(data) - 64) for _ in range(2))
            data[a : a + 64], data[b : b + 64] = data[b : b + 64], data[a : a + 64]
            if data == export:
                continue
        else:
            data[dice.randrange(2000 if kind == "head" else len(data))] ^= 1 << dice.randrange(8)
        refusal(engine, bytes(data))


@pytest.mark.parametrize("data", [b"", b"x", bytes(8), b"\xff" * 100, b"\x02" + bytes(7) + b"{}", b"PK\x03\x04" * 99])
def test_what_is_no_export_is_refused(engine: Engine, data: bytes) -> None:
    refusal(engine, data)


MADE_UP: dict[str, tuple[Callable[[Any, dict[str, Any]], None], str]] = {
    "kind": (lambda about, _: about.update(kind="other"), "export.kind"),
    "family": (lambda about, _: about["model"].update(family="other"), "model.family: expected 'dreamzero'"),
    "window": (lambda about, _: about["model"].update(window=77), "model.window"),
    "dtype": (lambda about, _: about["model"].update(pages="torch.bfloat16"), "model.pages"),
    "no branch": (lambda about, _: about["branches"].pop("unconditional"), "branches"),
    "chunks": (lambda about, _: about["branches"]["conditional"].update(num_chunks=9**9), "num_chunks"),
    "a truth": (lambda about, _: about["branches"]["conditional"].update(num_chunks=True), "num_chunks"),
    "fewer chunks": (lambda about, _: about["branches"]["conditional"].update(num_chunks=1), "expected torch.float32"),
    "entry": (lambda about, _: about["branches"]["conditional"]["conditioning"].update(text=99), "conditioning"),
    "swapped": (lambda about, _: about["branches"]["conditional"]["conditioning"].update(image=0, text=2), "entr"),
    "no key": (lambda about, _: about["entries"][0].update(key=7), "entries.0.key"),
    "no state": (lambda about, _: about.pop("state"), "expected dict, got None"),
    "prompt": (lambda about, _: about["state"]["state"].update(prompt_key=5), "state.prompt_key: expected str, got 5"),
    "field": (lambda about, _: about["state"]["state"].update(evil=1), "state: expected the fields"),
    "page": (lambda _, tensors: tensors.pop("branch.conditional.layer0.k"), "branch.conditional.layer0.k"),
    "half": (
        lambda _, tensors: tensors.update({"entry0.layer0.v": tensors["entry0.layer0.v"].half()}),
        "entry0.layer0.v: expected torch.float32",
    ),
    "prediction": (
        lambda _, tensors: tensors.update({"state.prediction": torch.zeros(2, 2)}),
        "state.prediction: expected",
    ),
}


@pytest.mark.parametrize("what", MADE_UP)
def test_what_is_made_up_is_refused_by_name(engine: Engine, export: bytes, what: str) -> None:
    change, words = MADE_UP[what]
    assert words in refusal(engine, changed(export, change))


def test_another_version_is_told(engine: Engine, export: bytes) -> None:
    text = export.replace(b'"version": "2"', b'"version": "1"', 1)
    assert "version: this worldkv reads 2, got 1" in refusal(engine, text)


def _everywhere(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    named = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in list(named):
        yield from _everywhere(each, (*path, key))


def test_no_value_in_any_place_breaks_more_than_its_import() -> None:
    """A robot's and a viewer's sessions: each place of the description holds something else, once."""
    policy = load_policy(random_checkpoint("ti2v"), EngineConfig(block_size=16, max_sessions=2))
    session = policy.open_session()
    session.infer(droid_observation(np.random.default_rng(1), 1)).result()
    session.observe(policy.read_ahead(droid_observation(np.random.default_rng(2), 2))).result()
    robots = policy.engine.export(session.handle).to_bytes()
    session.close("done").result()
    videos = causal.make_engine()
    viewer = videos.open_session()
    for prompt, how in ((0, "keep"), (1, "blend")):
        causal.run(videos, viewer, causal.make_request(prompt, switch=how))
    data = videos.export(viewer).to_bytes()
    videos.close(viewer, "done").result()
    for engine, whole in ((policy.engine, robots), (videos, data)):
        session = engine.import_session(whole)
        engine.close(session, "done").result()
        others = (None, -1, "x", [], {}, 1e300)
        for number, path in enumerate(_everywhere(read(whole)[0])):
            _import_with(engine, whole, path, others[number % len(others)])
        engine.shutdown()


def _import_with(engine: Engine, whole: bytes, path: tuple[Any, ...], other: Any) -> None:
    def change(about: Any, _: dict[str, Any]) -> None:
        for key in path[:-1]:
            about = about[key]
        about[path[-1]] = other

    data = changed(whole, change)
    try:
        session = engine.import_session(data)
    except BadRequest as error:
        assert str(error).startswith("import: "), (path, other)  # noqa: PT017
    else:  # a value that could be: another warning that was told, another prompt's words
        engine.close(session, "done").result()
    rest(engine)
    assert engine.core.cache.pool.num_used == 0, (path, other)
    assert not engine.core.names, (path, other)


def test_a_model_that_saves_nothing_says_so() -> None:
    toy = make_toy_engine(ToyModel())
    session = toy.open_session()
    with pytest.raises(BadRequest, match="sessions of ToyModel cannot leave their process"):
        toy.export(session)
    with pytest.raises(BadRequest, match="cannot leave"):
        toy.import_session(json.dumps({}).encode())
    toy.shutdown()


def test_a_session_of_other_weights_of_the_same_sizes_is_refused() -> None:
    """One number of one tensor differs, and everything by its seed."""
    engine = make_engine("ti2v", block_size=16)
    session = engine.open_session()
    engine.submit(session, make_inputs(engine, 0, 1)).result()
    exports = [engine.export(session, compact=compact).to_bytes() for compact in (False, True)]
    model = engine.model
    before = fingerprint(model.dit)
    assert before == model.dit.fingerprint
    weight = next(iter(model.dit.parameters()))
    with torch.no_grad():
        weight.view(-1)[1] += 1
        assert fingerprint(model.dit) != before
        weight.view(-1)[1] -= 1
    engine.close(session, "done").result()
    model._weights = "0" * 32
    for data in exports:
        assert f"import: model.weights: expected '{'0' * 32}', as here" in refusal(engine, data)
    engine.shutdown()


def test_another_model_s_session_is_refused(export: bytes) -> None:
    for other in (make_engine("i2v"), causal.make_engine(), make_engine("ti2v", window_policy="slide")):
        assert "import: model." in refusal(other, export)
        other.shutdown()
