"""Which backends there are, and what one says that cannot serve."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch

from worldkv.attention import backend as backends
from worldkv.attention.backend import BACKENDS, ByShape, choose_backend, load_backend, self_check
from worldkv.attention.reference import ReferenceBackend
from worldkv.kv.row import AttentionRow
from worldkv.kv.spec import KVSpec
from worldkv.kv.storage import KVStorage
from worldkv.kv.window import Window


def test_an_unknown_backend_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="reference"):
        load_backend("hope")


@pytest.mark.parametrize("name", BACKENDS)
def test_a_backend_says_in_one_line_why_it_cannot_serve_a_cpu(name: str) -> None:
    storage = KVStorage(KVSpec(1, 1, 4, Window(4, 4), ("a",)), 2, 16)
    backend = load_backend(name)
    assert backend.name == name
    reason = backend.why_not(storage)
    assert (reason is None) == (name == "reference")
    assert reason is None or ("GPU" in reason and "\n" not in reason)


class Wrong(ReferenceBackend):
    """Right about everything but the result."""

    name = "wrong"

    def plan(self, storage, rows, limits=None):  # type: ignore[no-untyped-def]
        plan = super().plan(storage, rows)
        run = plan.run
        plan.run = lambda *arguments: run(*arguments) * 1.1  # type: ignore[method-assign]
        return plan


class Broken(Wrong):
    name = "broken"

    def plan(self, storage, rows, limits=None):  # type: ignore[no-untyped-def]
        raise RuntimeError("no kernel image")


def storage_on_cpu() -> KVStorage:
    return KVStorage(KVSpec(1, 2, 16, Window(4, 4), ("a",)), 4, 16)


def test_the_reference_passes_its_own_check() -> None:
    assert self_check(ReferenceBackend(), storage_on_cpu()) == 0.0


@pytest.mark.parametrize(("kind", "reason"), [(Wrong, "relative error 1.0e-01"), (Broken, "no kernel image")])
def test_a_backend_that_fails_its_check_is_not_used(
    kind: type[Wrong], reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(BACKENDS, kind.name, (__name__, kind.__name__))
    monkeypatch.setattr(backends, "_FAST", (kind.name,))
    assert choose_backend("auto", storage_on_cpu()).name == "reference"
    assert caplog.records, "the fall back has to be loud"
    with pytest.raises(ValueError, match=reason):
        choose_backend(kind.name, storage_on_cpu())


@pytest.mark.parametrize(
    ("num_rows", "queries", "keys", "expected"),
    [(2, 600, 2000, "wrong"), (2, 600, 500, "reference"), (2, 100, 400, "wrong"), (64, 100, 400, "reference")],
)
def test_the_shape_of_the_rows_chooses_between_two_backends(
    num_rows: int, queries: int, keys: int, expected: str
) -> None:
    both = ByShape(Wrong(), ReferenceBackend())
    assert both.name == "wrong+reference"
    storage = KVStorage(KVSpec(1, 1, 8, Window(4, 4), ("a",)), 128, 16)
    row = AttentionRow(torch.arange(128, dtype=torch.int32).numpy(), keys, queries)
    q = torch.randn(num_rows * queries, 1, 8)
    storage.v[0].normal_()
    right = ReferenceBackend().plan(storage, [row] * num_rows).run(0, q)
    factor = 1.1 if expected == "wrong" else 1.0
    assert torch.allclose(both.plan(storage, [row] * num_rows).run(0, q), right * factor)
