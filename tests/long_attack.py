"""All attacks of `server/test_attacks.py` for minutes, several at a time, beside robots and a thousand idle sockets.

    PYTHONPATH=. python tests/long_attack.py --seconds 180
    PYTHONPATH=. python tests/long_attack.py --control --pinned --seconds 30

First the same robots without attackers, for comparison; in the end a rest, in which memory goes back. Prints a table,
and one line of JSON last. The policy computes nothing, so that the server alone is measured.

Attackers take CPU time of their own. With `--control` the same attack is aimed in turn at a decoy, a second server
without robots, and at the robots' server, `--seconds` each: what robots wait longer than beside the decoy is what the
server itself loses. With `--pinned` attackers and the decoy have a core, and robots and their server have another.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any

sys.path += [str(Path(__file__).resolve().parent / "server"), str(Path(__file__).resolve().parents[1] / "client")]

from attackers import ATTACKS
from test_attacks import Helper, Robots, Target, p99, started

IDLE = "idle sockets"
SLOT_S = 6.0  # with the same attackers
QUIET_S = 20.0
REST_S = 65.0  # in which `worldkv.server.memory` comes by twice
PHASES = ("quiet", "decoy", "aimed", "decoy", "aimed", "quiet")  # of a run with a control
OURS, THEIRS = {0}, {1}  # cores, where they are pinned


server = contextlib.contextmanager(partial(started, silent_s=10.0, per_address=2000))


@contextlib.contextmanager
def probed(target: Target, seconds: float) -> Iterator[dict[str, Any]]:
    """In the `with` robots tick, and health is asked for as long as `seconds` on both ports."""
    found: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        probes = {
            name: stack.enter_context(Helper("health_probe.py", port, seconds))
            for name, port in (("health", target.port), ("health port", target.health_port))
        }
        robots = stack.enter_context(Robots(target.port))
        for probe in probes.values():
            probe.go()
        yield found
        for name, probe in probes.items():
            latencies = json.loads(probe.said())
            found[f"{name} not told"] = latencies.count(None)
            found[name] = [latency for latency in latencies if latency is not None]
    found["robots"], found["failures"] = robots.latencies, robots.failures


def attack(target: Target, until: float, most: int, names: Collection[str] = ATTACKS) -> int:
    """Bytes sent. A slot after the other, each with the idle sockets and `most` other attacks of those named."""
    others, sent = cycle(name for name in names if name != IDLE), 0
    with Helper("attackers.py", IDLE, target.port, until - time.monotonic()) as idle:
        idle.go()
        while (left := min(SLOT_S, until - time.monotonic())) > 0.5:
            with contextlib.ExitStack() as stack:
                slot = [
                    stack.enter_context(Helper("attackers.py", name, target.port, left))
                    for name in islice(others, most)
                ]
                for helper in slot:
                    helper.go()
                sent += sum(int(helper.said()) for helper in slot)
    return sent


def compared(name: str, of: Callable[[list[float]], float], idle: list[float], busy: list[float]) -> str:
    return f"{name} {1e3 * of(idle):6.1f} -> {1e3 * of(busy):6.1f} ms ({of(busy) / of(idle):.1f} times)"


@contextlib.contextmanager
def on_cores(cores: set[int]) -> Iterator[None]:
    """Threads and processes that are started in the `with` run on these cores only. None named: on all."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores or before)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def with_control(seconds: float, at_once: int, names: Collection[str], *, pinned: bool) -> None:
    ours, theirs = (OURS, THEIRS) if pinned else (set[int](), set[int]())
    runs: dict[str, list[dict[str, Any]]] = {phase: [] for phase in PHASES}
    with contextlib.ExitStack() as stack:
        servers = {}
        for phase, cores in (("aimed", ours), ("decoy", theirs)):
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            with on_cores(cores):
                servers[phase] = stack.enter_context(server(Path(folder)))
        for phase in PHASES:
            with on_cores(ours), probed(servers["aimed"], seconds) as found:
                if phase == "quiet":
                    time.sleep(seconds)
                else:
                    with on_cores(theirs):
                        attack(servers[phase], time.monotonic() + seconds, at_once, names)
            runs[phase].append(found)
            told = [f"{name} {_told(found[name])}" for name in ("robots", "health")]
            print(f"{phase:6} {'; '.join(told)}; load {os.getloadavg()[0]:.1f}", flush=True)
    result: dict[str, Any] = {"benchmark": "long_attack --control", "seconds": seconds, "pinned": pinned}
    for name in ("robots", "health"):
        for phase, all_found in runs.items():
            latencies = [latency for found in all_found for latency in found[name]]
            values = {"p50_ms": 1e3 * statistics.median(latencies), "p99_ms": 1e3 * p99(latencies)}
            result[f"{name}, {phase}"] = values | {"num": len(latencies)}
        aimed, decoy = result[f"{name}, aimed"], result[f"{name}, decoy"]
        ratios = {key: aimed[key] / decoy[key] for key in ("p50_ms", "p99_ms")}
        print(f"{name}: aimed/decoy p50 {ratios['p50_ms']:.2f}, p99 {ratios['p99_ms']:.2f}")
        result[f"{name}, aimed/decoy"] = {"p50": ratios["p50_ms"], "p99": ratios["p99_ms"]}
    print(json.dumps(result | {"failures": sum(len(found["failures"]) for each in runs.values() for found in each)}))


def _told(latencies: list[float]) -> str:
    p50, longest = statistics.median(latencies), max(latencies)
    return f"p50 {1e3 * p50:.1f}, p99 {1e3 * p99(latencies):.1f}, max {1e3 * longest:.0f} ms of {len(latencies)}"


def without_control(seconds: float, at_once: int, names: Collection[str]) -> None:
    with tempfile.TemporaryDirectory() as folder, server(Path(folder)) as target:
        with probed(target, QUIET_S) as quiet:
            time.sleep(QUIET_S)
        before, logged = target.resident_bytes, target.log.stat().st_size
        with probed(target, seconds) as attacked:
            sent = attack(target, time.monotonic() + seconds, at_once, names)
        after, written = target.resident_bytes, target.log.stat().st_size - logged
        time.sleep(REST_S)
        rested, text = target.resident_bytes, target.log.read_text()
    result: dict[str, Any] = {"benchmark": "long_attack", "seconds": seconds, "sent_bytes": sent}
    for name in ("robots", "health", "health port"):
        idle, busy = quiet[name], attacked[name]
        print(f"{name:12} {compared('p50', statistics.median, idle, busy)}; {compared('p99', p99, idle, busy)}", end="")
        print(f"; max {1e3 * max(busy):.0f} ms of {len(busy)}")
        result[name] = {"p50_ms": 1e3 * statistics.median(busy), "p99_ms": 1e3 * p99(busy)}
        result[name] |= {
            "p50_ratio": statistics.median(busy) / statistics.median(idle),
            "p99_ratio": p99(busy) / p99(idle),
        }
    not_told = {name: attacked[f"{name} not told"] for name in ("health", "health port")}
    print(f"failures of robots {attacked['failures']}; health not told {not_told}; sent {sent >> 20} MiB")
    print(f"logged {written >> 10} KiB; resident {before >> 20} -> {after >> 20}, after a rest {rested >> 20} MiB")
    forged = "\x1b" in text or any(line.startswith("2026-01-01 00:00:00,000") for line in text.splitlines())
    print(f"forged lines: {'some' if forged else 'none'}; errors of the server's own: {text.count(' E worldkv')}")
    result |= {"logged_bytes": written, "resident_mib": [each >> 20 for each in (before, after, rested)]}
    print(json.dumps(result | {"failures": len(attacked["failures"]), "not_told": not_told, "forged": forged}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=180.0, help="of attack, with --control of each phase (180)")
    parser.add_argument("--at-once", type=int, default=3, help="attacks at once, beside the idle sockets (3)")
    parser.add_argument("--only", choices=ATTACKS, action="append", metavar="ATTACK", help="this one; may be repeated")
    parser.add_argument("--control", action="store_true", help="compare with an attack on a second server")
    parser.add_argument("--pinned", action="store_true", help="with --control: attackers have a core of their own")
    arguments = parser.parse_args()
    names = arguments.only or ATTACKS
    if arguments.control:
        with_control(arguments.seconds, min(arguments.at_once, len(names)), names, pinned=arguments.pinned)
    else:
        without_control(arguments.seconds, arguments.at_once, names)


if __name__ == "__main__":
    main()
