"""Whose session has ended is told once, whatever ended since: no other key and no number of ends flushes that."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from server_fakes import FakePolicy

from worldkv.errors import SessionNotFound
from worldkv.server.config import ServerConfig
from worldkv.server.ends import End, EndReason, Ends, IdFilter
from worldkv.server.metrics import Metrics
from worldkv.server.sessions import Asked, SessionTable

NUM_CYCLES = 4240
NAMED = Asked(named=True)


def make_table(**config: Any) -> SessionTable:
    policy = FakePolicy(capacity=100)
    return SessionTable(policy, ServerConfig(**config), Metrics(policy.engine), ThreadPoolExecutor(4))


async def tick(table: SessionTable, session_id: str, owner: str = "", asked: Asked = NAMED) -> None:
    async with table.use(session_id, "a connection", asked, owner) as entry:
        entry.has_history = True


async def open_and_delete(table: SessionTable, num_cycles: int, owner: str) -> None:
    for number in range(num_cycles):
        entry = await table.open(f"{number}@{owner}", owner)
        await table.end(entry, EndReason.DELETED, "it was deleted")


@pytest.mark.parametrize("other", ["key2", "key1"], ids=["another key", "the same key"])
def test_a_robot_whose_session_ended_is_told_whatever_was_ended_since(other: str) -> None:
    async def main() -> None:
        table = make_table()
        await tick(table, "robot@key1", "key1")
        await table.end(table.get("robot@key1"), EndReason.IDLE, "it had no request")
        await open_and_delete(table, NUM_CYCLES, other)
        reason = "it had no request" if other == "key2" else "long ago"
        with pytest.raises(SessionNotFound, match=f"has ended: .*{reason}"):
            table.get("robot@key1", "key1")
        with pytest.raises(SessionNotFound, match=f"has ended: .*{reason}.*; the next request for it starts a new"):
            await tick(table, "robot@key1", "key1")
        await tick(table, "robot@key1", "key1")  # told once
        await table.end(table.get("robot@key1"), EndReason.IDLE, "it had no request again")
        with pytest.raises(SessionNotFound, match="no request again"):
            await tick(table, "robot@key1", "key1")
        await tick(table, "robot@key1", "key1")
        shown = [end.public_id for end in table.ends.recent("key1")]
        assert ("robot" in shown[:1]) == (other == "key2"), "another key fills what people are shown"

    asyncio.run(main())


def test_new_ids_start_after_any_number_of_ends() -> None:
    async def main() -> None:
        table = make_table()
        await open_and_delete(table, NUM_CYCLES + 2000, "")
        for number in range(200):
            await tick(table, f"new {number}")
            await table.end(table.get(f"new {number}"), EndReason.DELETED, "it was deleted")

    asyncio.run(main())


@pytest.mark.parametrize("how", ["reset", "restart", "open"])
def test_whoever_starts_afresh_on_purpose_is_not_told_of_a_forgotten_end(how: str) -> None:
    async def main() -> None:
        table = make_table()
        table.ends = Ends(limit=2)
        await open_and_delete(table, 5, "")
        if how == "reset":
            await table.reset("0@")
        elif how == "open":
            await table.open("0@", "")
        await tick(table, "0@", asked=Asked(named=True, restart=how == "restart"))
        await table.end(table.get("0@"), EndReason.MADE_ROOM, "it had no history")
        await tick(table, "0@")

    asyncio.run(main())


def test_the_memory_of_a_key_has_a_size() -> None:
    ends = Ends(limit=10)
    for number in range(1000):
        ends.add("", f"id {number}", End("it was deleted", 1.0))
    assert len(ends.names("")) == 10
    for number in range(990):
        assert ends.find("", f"id {number}") is not None, "a silent start"
        ends.settle("", f"id {number}")
    assert len(ends._of("").told) == 10


def test_ends_private_to_a_socket_go_with_it() -> None:
    ends, socket = Ends(), object()
    ends.add("", "its", End("idle", 1.0, socket))
    ends.add("", "named", End("idle", 1.0))
    ends.forget_connection("", socket)
    assert ends.names("") == ["named"]


def test_the_filter_misses_none_and_is_rarely_wrong() -> None:
    ids = IdFilter(1 << 16)
    for number in range(4096):  # 16 bits each, as a million in the full size
        ids.add(f"old {number}")
    assert all(f"old {number}" in ids for number in range(4096))
    assert sum(f"new {number}" in ids for number in range(20_000)) < 40, "expected are 9"
