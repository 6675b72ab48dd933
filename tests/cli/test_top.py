"""`worldkv top`: an id can be copied whole, on any terminal; `film` takes enough of its beginning."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("websockets")

from worldkv.cli.errors import UsageError
from worldkv.cli.film import session_meant
from worldkv.cli.top import fitting, lines
from worldkv.errors import ConnectionLost

LONG = "episode-" + "0123456789abcdef" * 12  # 200 characters
HELLO = {
    "version": "1",
    "model": "tiny",
    "device": "cpu",
    "attention": "reference",
    "random_weights": False,
    "window_frames": 9,
    "name": "oxe_droid",
}


def session(name: str) -> dict[str, Any]:
    return {
        "id": name,
        "state": "idle",
        "busy": False,
        "frames_seen": 3,
        "blocks": 7,
        "ticks": 2,
        "latency_ms": [10.0, 20.0],
        "margin_s": 0.5,
    }


def overview(*names: str) -> dict[str, Any]:
    memory = {"used": 7, "total": 40, "charged": 20, "bytes_per_block": 1024}
    rest = {"num_parked": 0, "num_other_sessions": 0, "more_sessions": 3, "in_flight": 1, "refused": 0, "now": 0.0}
    return {"memory": memory, "sessions": [session(name) for name in names], **rest}


def test_a_long_id_is_printed_whole() -> None:
    shown = lines(HELLO, overview("arm", LONG))
    assert LONG in shown
    assert any(line.startswith("arm ") and "20 ms" in line for line in shown)
    assert sum("20 ms" in line for line in shown) == 2


def test_80_columns_fold_an_id_and_lose_nothing() -> None:
    shown = fitting(lines(HELLO, overview("arm", LONG)), 80, 24)
    assert max(map(len, shown)) <= 80
    assert LONG in "".join(shown)


def test_what_a_terminal_has_no_room_for_is_counted() -> None:
    whole = lines(HELLO, overview(*(f"arm-{n}" for n in range(40))))
    shown = fitting(whole, 200, 24)
    assert len(shown) == 24
    assert shown[-1] == f"... {len(whole) - 23} more lines: worldkv top --once"
    assert shown[:23] == whole[:23]


def test_one_session_is_one_session() -> None:
    shown = "\n".join(lines(HELLO, overview("arm")))
    assert "1 session," in shown
    assert "1 tick in flight" in shown


def test_film_takes_an_id_or_enough_of_its_beginning() -> None:
    open_ones = overview("arm", "arm-2", LONG)
    assert session_meant("arm", open_ones) == "arm", "an id itself, though it begins another one's"
    assert session_meant("arm-", open_ones) == "arm-2"
    assert session_meant("epi", open_ones) == LONG
    with pytest.raises(UsageError, match="'a' begins several: arm, arm-2; give more of it"):
        session_meant("a", open_ones)
    with pytest.raises(ConnectionLost, match="'leg' is not open; open are arm"):
        session_meant("leg", open_ones)
