"""`worldkv bench --parts paced`: robots or viewers at their own pace, on engines in this process or on a server."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from worldkv.bench.paced import Figures, Pace
from worldkv.engine.config import EngineConfig

if TYPE_CHECKING:
    from worldkv.bench.watching import Bench


def measure_engines(arguments: argparse.Namespace, make: Callable[[EngineConfig], Bench]) -> Figures:
    """On a fresh engine for each number of robots."""
    from worldkv.bench.paced_ways import measure_engine

    def measure(num_robots: int, pace: Pace) -> Figures:
        config = EngineConfig(
            block_size=arguments.block_size, max_sessions=num_robots, max_rows=128, attention=arguments.attention
        )
        return measure_engine(make(config), num_robots, pace)

    return by_robots(arguments, measure, arguments.robots)


def measure_servers(arguments: argparse.Namespace) -> Figures:
    """The same on a server that runs already."""
    from worldkv.bench.paced_ways import measure_server

    def measure(num_robots: int, pace: Pace) -> Figures:
        way = (arguments.api_key, arguments.proxy)
        return measure_server(arguments.url, arguments.dialect, num_robots, pace, *way)

    return by_robots(arguments, measure, arguments.robots)


def by_robots(
    arguments: argparse.Namespace, measure: Callable[[int, Pace], Figures], counts: Sequence[int], who: str = "robots"
) -> Figures:
    """Each of these numbers of robots, or the most that are served in time. `measure`: may know a better period."""
    from worldkv.bench.paced import largest_in_time

    rows: list[Figures] = []
    pace = Pace(arguments.period or Pace.period_s, episode_s=arguments.episode, seconds=arguments.seconds)

    def share_late(num_robots: int) -> float:
        row = measure(num_robots, pace)
        rows.append(row)
        print(
            f"  {num_robots:>3} {who}, one reply each {row['period_s']:g} s: p50 {row['p50_ms']} ms, p99 "
            f"{row['p99_ms']} ms, worst {row['worst_ms']} ms, {100 * row['share_late']:.1f} % of {row['replies']} late"
            + (f"; made after ready: {row['made_after_ready']}" if "made_after_ready" in row else ""),
            flush=True,
        )
        for part in row["by_ten_seconds"]:
            print(
                f"      {part['from_s']:>4.0f} s: p50 {part['p50_ms']} ms, p99 {part['p99_ms']} ms, worst "
                f"{part['worst_ms']} ms, {100 * part['share_late']:.1f} % late"
            )
        if arguments.observe is not None:
            row["observed"] = measure(num_robots, replace(pace, lead_s=arguments.observe))
            row["observed_ratio"] = _ratio(row["observed"]["p50_ms"], row["p50_ms"])
            print(
                f"      frames sent as they are taken, the newest {arguments.observe:g} s ahead: p50 "
                f"{row['observed']['p50_ms']} ms, p99 {row['observed']['p99_ms']} ms, "
                f"{100 * row['observed']['share_late']:.1f} % late; p50 is {row['observed_ratio']} of the other",
                flush=True,
            )
        return float(row["share_late"])

    measured: Figures = {"episode_s": arguments.episode}
    if arguments.find:
        measured["most_robots"] = largest_in_time(share_late, min(counts), max(counts))
        print(f"  {measured['most_robots']} {who} get 99 % of their replies within {rows[0]['period_s']:g} s")
    else:
        for num_robots in counts:
            share_late(num_robots)
    by_number = sorted(rows, key=lambda row: int(row["robots"]))
    return {**measured, "who": who, "period_s": rows[0]["period_s"], "rows": by_number}


def _ratio(one: float | None, other: float | None) -> float | None:
    return round(one / other, 3) if one is not None and other else None
