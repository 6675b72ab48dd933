"""Which backends there are, and what one says that cannot serve."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from worldkv.attention.backend import BACKENDS, load_backend
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
