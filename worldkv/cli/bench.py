"""`worldkv bench`: what this machine can do, what the paged engine makes of it, and what the plain way would."""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from worldkv.attention.names import check_name
from worldkv.bench.paced import Figures, Pace
from worldkv.bench.released import RELEASED, TINY, TINY_VIDEO, VIDEO_MODELS
from worldkv.cli.bench_choices import (
    AT_ONCE,
    COMPARED,
    DEFAULT_STEPS,
    OWN_ENGINE,
    PARTS,
    ROBOTS,
    SESSIONS,
    check_combination,
    expect_options_of_video,
    is_compared,
)
from worldkv.cli.bench_paced import measure_engines, measure_servers
from worldkv.cli.bench_told import told_exports
from worldkv.cli.common import (
    add_attention,
    add_block_size,
    add_device,
    add_precision,
    add_server_address,
    add_steps,
    check_precision,
    choose_device,
    choose_dtype,
)
from worldkv.cli.numbers import seconds, whole
from worldkv.cli.places import add_output
from worldkv.cli.video import add_video_options, expect_options_of
from worldkv.engine.config import EngineConfig
from worldkv.show.terminal import spinner

if TYPE_CHECKING:
    import torch

    from worldkv.bench.watching import Bench

MORE = (
    "In one run: the machine's own ceilings, each attention backend against dense attention, ticks by stage, many\n"
    "sessions at once, a plain baseline that does the same work as the reference does it, float8 products. Prints\n"
    "a table, leaves bench.json and plots in the output folder; the last line is the JSON. Of causal video: blocks\n"
    "of one session and how soon pictures come (ticks), of several (sessions), paced viewers, a plain baseline."
)
EXAMPLE = "worldkv bench --model dreamzero-5b --sessions 1 8 32"


def add_options(parser: argparse.ArgumentParser) -> None:
    models = (*RELEASED, TINY, *VIDEO_MODELS, TINY_VIDEO)
    parser.add_argument("--model", choices=models, default=TINY, help=f"whose sizes are measured ({TINY})")
    add_device(parser)
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=PARTS,
        default=AT_ONCE,
        metavar="PART",
        help=f"of {', '.join(PARTS)} (all but paced, parking and export)",
    )
    many = f"at once, for the part of that name ({' '.join(map(str, SESSIONS))})"
    parser.add_argument("--sessions", type=whole(1), nargs="+", default=SESSIONS, metavar="N", help=many)
    paced = parser.add_argument_group("robots, or viewers of video, at their own pace (--parts paced)")
    number = "how many (4 8 16; of viewers 1 2 3)"
    paced.add_argument("--robots", type=whole(1), nargs="+", default=ROBOTS, metavar="N", help=number)
    find = "the most robots, from the least to the most of --robots, that get 99 %% of their replies in time"
    paced.add_argument("--find", action="store_true", help=find)
    period = f"between a robot's asks; later replies are late ({Pace.period_s}; of viewers as long as a block plays)"
    paced.add_argument("--period", type=seconds, metavar="S", help=period)
    paced.add_argument("--episode", type=seconds, metavar="S", help="after about that another robot comes (never)")
    length = f"of each run ({Pace.seconds:g})"
    paced.add_argument("--seconds", type=seconds, default=Pace.seconds, metavar="S", help=length)
    observe = "send frames as they are taken, the newest S before its ask; measured beside those who send all with it"
    paced.add_argument("--observe", type=seconds, metavar="S", help=observe)
    add_server_address(paced, default=None)
    paced.add_argument("--dialect", choices=("openpi", "roboarena"), default="roboarena", help="for --url (roboarena)")
    add_output(parser, "folder", "results and plots", default="bench-output")
    add_attention(parser)
    add_block_size(parser)
    add_precision(parser)
    add_steps(parser)
    add_video_options(parser)


def run(arguments: argparse.Namespace) -> int:
    is_video = arguments.model in (*VIDEO_MODELS, TINY_VIDEO)
    expect_options_of("causal_wan" if is_video else "dreamzero", arguments)
    if is_video:
        expect_options_of_video(arguments)
        from worldkv.cli.bench_video import run_video

        return _leave(arguments.output, run_video(arguments, AT_ONCE))
    check_combination(arguments)
    if arguments.url is not None:
        about = {"benchmark": "bench", "model": arguments.url, "weights": "unknown", "device": "a server"}
        return _leave(arguments.output, {**about, "paced": measure_servers(arguments)})
    check_name(arguments.attention)
    with spinner("starting up"):
        import torch

        from worldkv.bench.timing import copy_ceiling, matrix_ceiling

        device = choose_device(arguments.device)
        check_precision(arguments.precision, device)
        dtype = choose_dtype("auto", device)
    results: dict[str, Any] = {
        "benchmark": "bench",
        "model": arguments.model,
        "weights": "random",
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu",
        "torch": torch.__version__,
        "dtype": str(dtype).removeprefix("torch."),
        "block_size": arguments.block_size,
        "precision": arguments.precision,
        "steps": arguments.steps or DEFAULT_STEPS,
    }
    print(
        f"{arguments.model} with random weights on {results['device']}, torch {torch.__version__}, {results['dtype']}"
    )
    with torch.no_grad():
        ceiling = matrix_ceiling(device, dtype)
        results["ceilings"] = {"matrix_tflops": round(ceiling, 4), "copy_gb_per_s": round(copy_ceiling(device), 1)}
        print(
            "ceilings: {matrix_tflops:.4g} TFLOP/s of matrix products, {copy_gb_per_s} GB/s of copies".format(
                **results["ceilings"]
            )
        )
        if "attention" in arguments.parts:
            results["attention"] = _attention(arguments, device, dtype)
        if "paced" in arguments.parts:
            results["paced"] = measure_engines(arguments, partial(_engine, arguments, device, dtype))
        if "parking" in arguments.parts:
            results["parking"] = _parking(arguments, device, dtype)
        if "export" in arguments.parts:
            results["export"] = _export(arguments, device, dtype)
        if set(arguments.parts) - {"attention", *OWN_ENGINE}:
            _measure_engine(arguments, device, dtype, results)
    return _leave(arguments.output, results)


def _leave(folder: Path, results: Figures) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "bench.json").write_text(json.dumps(results, indent=1) + "\n")
    _plot(folder, results)
    print(json.dumps(results))
    return 0


def _engine(
    arguments: argparse.Namespace,
    device: torch.device,
    dtype: torch.dtype,
    config: EngineConfig,
    progress: Callable[[str], None] = lambda _: None,
) -> Bench:
    from worldkv.bench.models import build_engine

    return build_engine(
        arguments.model,
        config,
        device,
        dtype,
        precision=arguments.precision,
        steps=arguments.steps or DEFAULT_STEPS,
        progress=progress,
    )


def _parking(arguments: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> Figures:
    """In a pool that two sessions fill."""
    from worldkv.bench.parking import measure_parking

    config = EngineConfig(block_size=arguments.block_size, max_sessions=2, attention=arguments.attention)
    bench = _engine(arguments, device, dtype, config)
    try:
        bench.engine.warm_up()
        measured = measure_parking(bench)
    finally:
        bench.engine.shutdown()
    print(
        f"parking {measured['parked_gib']} GiB: {measured['park_s']} s there (the first time "
        f"{measured['first_park_s']}), {measured['return_s']} s back, {measured['moves']} moves\n"
        f"  ticks of another session, by fill, ms: alone {measured['alone_ms']}, beside it {measured['beside_ms']} "
        f"({measured['worst_ratio']} of alone at most), while host memory is pinned {measured['pinning_ms']}"
    )
    return measured


def _export(arguments: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> Figures:
    """Of a session whose window is full."""
    from worldkv.bench.exports import measure_exports
    from worldkv.bench.ticks import fill_window

    config = EngineConfig(block_size=arguments.block_size, max_sessions=2, attention=arguments.attention)
    bench = _engine(arguments, device, dtype, config)
    try:
        bench.engine.warm_up()
        return told_exports(measure_exports(bench.engine, fill_window(bench)))
    finally:
        bench.engine.shutdown()


def _attention(arguments: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> list[dict[str, Any]]:
    from worldkv.bench.attention import compare_attention

    rows = []
    for row in compare_attention(arguments.model, device, dtype, arguments.block_size):
        rows.append(row)
        figures = row.get("skipped") or f"{row['ms']:8.3f} ms  {row['ratio']:5.2f} of dense"
        print(f"  {row['shape']:<30} {row['backend']:<10} {figures}")
    return rows


def _measure_engine(
    arguments: argparse.Namespace, device: torch.device, dtype: torch.dtype, results: dict[str, Any]
) -> None:
    from worldkv.bench.models import sessions_that_fit
    from worldkv.bench.steady import made_so_far

    parts = [part for part in arguments.parts if part not in COMPARED or is_compared(arguments)]
    counts = sessions_that_fit(arguments.model, arguments.sessions)
    config = EngineConfig(
        block_size=arguments.block_size, max_sessions=max([1, *counts]), max_rows=128, attention=arguments.attention
    )
    bench = _engine(arguments, device, dtype, config, progress=lambda part: print(f"making {part}"))
    try:
        began = time.perf_counter()
        bench.engine.warm_up()
        results["warm_up_s"] = round(time.perf_counter() - began, 1)
        print(f"warm after {results['warm_up_s']} s: {made_so_far(bench)}")
        if "ticks" in arguments.parts:
            results["ticks"] = _ticks(bench, results["ceilings"]["matrix_tflops"], "DiT")
            results["begun"] = _begun(bench)
        if "sessions" in arguments.parts:
            results["sessions"] = _sessions(bench, counts)
        if "steady" in arguments.parts and device.type == "cuda":
            results["steady"] = _steady(bench, max(counts), 24 if arguments.model == "dreamzero-14b" else 100)
        if "profile" in arguments.parts and device.type == "cuda":
            results["profile"] = _profile(bench)
        if "memory" in arguments.parts and device.type == "cuda":
            results["memory"] = _memory(bench)
        if len(parts) < len(arguments.parts):
            print(f"{' and '.join(COMPARED)} are left out: they compare with {DEFAULT_STEPS} steps, not in float8")
        if "baseline" in parts:
            results["baseline"] = _baseline(bench)
            if "ticks" in results:
                ratio = results["baseline"]["dit_ms_mean"] / results["ticks"]["dit_ms_mean"]
                results["baseline"]["ratio"] = round(ratio, 2)
                print(f"  the paged engine is {ratio:.2f} times faster")
        if "fp8" in parts and device.type == "cuda":
            results["fp8"] = _float8(bench, results["ceilings"]["matrix_tflops"])
    finally:
        bench.engine.shutdown()


def _ticks(bench: Bench, ceiling: float, name: str) -> dict[str, Any]:
    from worldkv.bench.ticks import measure_window

    measured = measure_window(bench)
    measured["fraction_of_ceiling"] = round(measured["achieved_tflops"] / ceiling, 3)
    print(
        f"{name}: {measured['dit_ms_mean']:.1f} ms a chunk (histories of 1, 3, 5, 7 frames: "
        f"{measured['dit_ms_by_history']}), {measured['achieved_tflops']:.0f} TFLOP/s, "
        f"{100 * measured['fraction_of_ceiling']:.1f} % of the matrix ceiling"
    )
    print(f"  encoders, ms: {measured['encoder_ms']}; whole ticks, ms: {measured['tick_ms']}")
    return measured


def _begun(bench: Bench) -> dict[str, float]:
    from worldkv.bench.ticks import measure_begun

    measured = measure_begun(bench)
    print(
        f"  a reply: {measured['reply_ms']} ms; {measured['begun_reply_ms']} ms, {measured['ratio']} of that, where "
        "its frames were sent as they were taken"
    )
    return measured


def _sessions(bench: Bench, counts: Iterable[int]) -> list[dict[str, Any]]:
    from worldkv.bench.ticks import measure_sessions

    rows = []
    for row in measure_sessions(bench, list(counts)):
        rows.append(row)
        print(
            f"  {row['sessions']:>3} sessions: {row['ticks_per_s']:7.2f} ticks/s, p50 {row['p50_ms']:8.1f} ms, "
            f"p99 {row['p99_ms']:8.1f} ms; DiT {row['dit_s_per_round']:.3f} s for a tick of all"
        )
    return rows


def _steady(bench: Bench, num_sessions: int, num_ticks: int) -> dict[str, Any]:
    from worldkv.bench.steady import measure_steadiness

    measured = measure_steadiness(bench, min(num_sessions, 8), num_ticks)
    print(
        f"after warm-up, in {measured['ticks']} ticks of {measured['sessions']} sessions: made "
        f"{measured['made_after_warm_up']}, host waits {measured['host_waits']} {measured['where']}"
    )
    return measured


def _profile(bench: Bench) -> list[dict[str, Any]]:
    from worldkv.bench.steady import profile_forwards

    rows = profile_forwards(bench)
    for row in rows:
        print(f"  {row['ms']:9.2f} ms {row['calls']:>6} calls  {row['kernel']}")
    return rows


def _memory(bench: Bench) -> dict[str, Any]:
    """What is allocated on the device against what is accounted for."""
    import torch

    card = bench.engine.cache_card
    weights, pool = bench.engine.card.num_weight_bytes, card.num_bytes
    allocated = torch.cuda.memory_allocated(card.device)
    gib = {name: round(value / 2**30, 2) for name, value in (("weights", weights), ("pool", pool), ("all", allocated))}
    print(f"memory, GiB: {gib}; unaccounted {100 * (1 - (weights + pool) / allocated):.1f} %")
    return {"gib": gib, "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2)}


def _baseline(bench: Bench) -> dict[str, Any]:
    from worldkv.bench.baseline import measure_baseline

    measured = measure_baseline(bench.model.dit, bench.model.config)
    print(
        f"plain baseline: {measured['dit_ms_mean']:.1f} ms a chunk (histories of 1, 3, 5, 7 frames: "
        f"{measured['dit_ms_by_history']})"
    )
    return measured


def _float8(bench: Bench, ceiling: float) -> dict[str, Any]:
    """The last thing to be measured: the products' own weights are given up."""
    from worldkv.bench.ticks import relative_errors, seen_tick
    from worldkv.models.wan.graphs import accelerate

    expected = seen_tick(bench)
    accelerate(bench.model.dit, "fp8")
    errors = relative_errors(seen_tick(bench), expected)
    measured = _ticks(bench, ceiling, "DiT, float8 products")
    measured["relative_error"] = errors
    print("  relative error against bfloat16: " + ", ".join(f"{name} {error:.2e}" for name, error in errors.items()))
    return measured


def _plot(folder: Path, results: dict[str, Any]) -> None:
    try:
        from worldkv.show.bench_plot import plot_bench
    except ImportError:
        print("no plot: matplotlib is not installed; pip install 'worldkv[plots]'")
        return
    for suffix in ("png", "svg"):
        plot_bench(folder / f"bench.{suffix}", results)
    print(f"results and plots are in {folder}")
