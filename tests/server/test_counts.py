"""What limits others: turns of the event loop."""

from __future__ import annotations

import asyncio

from worldkv.server.counts import Turns


def test_one_begins_in_each_turn_of_the_loop_in_the_order_of_coming() -> None:
    async def run() -> list[tuple[int, int]]:
        turns, begun, turn = Turns(), [], 0

        async def ask(number: int) -> None:
            await turns.begin()
            begun.append((turn, number))

        asked = [asyncio.create_task(ask(number)) for number in range(20)]
        for turn in range(60):
            if turn == 3:
                asked[10].cancel()
            await asyncio.sleep(0)
        last = asyncio.create_task(ask(20))
        await asyncio.wait_for(last, 5)
        return begun

    begun = asyncio.run(run())
    assert [number for _, number in begun] == [*range(10), *range(11, 21)]
    assert len({turn for turn, _ in begun[:-1]}) == len(begun) - 1, "two began in one turn"
    assert begun[-2][0] < 30, "a turn was left out"
