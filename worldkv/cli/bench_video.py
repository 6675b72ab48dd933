"""`worldkv bench` of causal video: blocks of one session and of several, viewers at their own pace, the plain way."""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable
from dataclasses import replace

import torch

from worldkv.bench.exports import measure_exports
from worldkv.bench.paced import Figures, Pace
from worldkv.bench.plain_video import measure_plain_video
from worldkv.bench.timing import matrix_ceiling
from worldkv.bench.videos import (
    VideoBench,
    build_video_engine,
    measure_blocks,
    measure_video_sessions,
    random_video_model,
)
from worldkv.bench.viewers import measure_first_pictures, measure_viewers
from worldkv.cli.bench_choices import ROBOTS, SESSIONS, expect_no_pace
from worldkv.cli.bench_paced import by_robots
from worldkv.cli.bench_told import told_exports
from worldkv.cli.common import check_precision, choose_device, choose_dtype
from worldkv.cli.errors import UsageError
from worldkv.cli.video import OF_VIDEO
from worldkv.engine.config import EngineConfig
from worldkv.models.causal_wan.folder import Choices
from worldkv.videos.program import FRAMES_PER_SECOND
from worldkv.videos.request import VideoRequest

_PARTS = ("ticks", "sessions", "baseline", "paced", "export")
_OF_ONE_ENGINE = ("ticks", "sessions", "baseline")  # paced takes a fresh one for each number of viewers
_RANDOM = "random"
_SESSIONS, _VIEWERS = [1, 2, 4], [1, 2, 3]  # where nobody says: one session fills a GPU


def run_video(arguments: argparse.Namespace, all_parts: tuple[str, ...]) -> Figures:
    """`all_parts`: what is measured of robots where nobody chooses."""
    parts = _chosen_parts(arguments, all_parts)
    for name in ("preset", "lora"):
        if getattr(arguments, name) is not None:
            raise UsageError(f"--{name}: the models that are measured by name have settings of their own")
    device = choose_device(arguments.device)
    check_precision(arguments.precision, device)
    dtype = choose_dtype("auto", device)
    tiny = arguments.tiny_decoder is not None
    if tiny and str(arguments.tiny_decoder) != _RANDOM:
        raise UsageError(f"--tiny-decoder: expected {_RANDOM}, as all weights here are, got {arguments.tiny_decoder}")
    other = ("preset", "lora", "tiny_decoder")
    choices = Choices(**{name: getattr(arguments, name) for name in OF_VIDEO if name not in other})
    results: Figures = {
        "benchmark": "bench",
        "model": arguments.model,
        "weights": "random",
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu",
        "torch": torch.__version__,
        "dtype": str(dtype).removeprefix("torch."),
        "block_size": arguments.block_size,
        "precision": arguments.precision,
    }

    with torch.no_grad():
        results["matrix_tflops"] = round(matrix_ceiling(device, dtype), 4)
        began = time.perf_counter()
        how = {"precision": arguments.precision, "tiny_decoder": tiny}
        model = random_video_model(arguments.model, choices, device, dtype, **how)
        print(f"{arguments.model} with random weights, made in {time.perf_counter() - began:.0f} s", flush=True)
        video = model.config
        results["decoder"] = model.encoders.decoder.label
        results |= {"pixels": [video.height, video.width], "window_frames": video.blocks.held_frames}

        def engine(max_sessions: int) -> VideoBench:
            rest = {"block_size": arguments.block_size, "attention": arguments.attention}
            return build_video_engine(model, EngineConfig(max_sessions=max_sessions, **rest))

        if set(parts) & set(_OF_ONE_ENGINE):
            counts = _SESSIONS if arguments.sessions == SESSIONS else arguments.sessions
            _measure_one(engine(max(counts) if "sessions" in parts else 1), parts, counts, results)
        if "export" in parts:
            results["export"] = _export(engine(2))
        if "paced" in parts:
            results["paced"] = _paced(arguments, engine)
    return results


def _chosen_parts(arguments: argparse.Namespace, all_parts: tuple[str, ...]) -> tuple[str, ...]:
    parts = tuple(arguments.parts)
    if parts == all_parts:
        parts = tuple(part for part in _OF_ONE_ENGINE if part != "baseline" or arguments.precision == "model")
    if unknown := [part for part in parts if part not in _PARTS]:
        raise UsageError(f"--parts: of causal video {', '.join(_PARTS)} are measured, got {unknown[0]}")
    if "baseline" in parts and arguments.precision != "model":
        raise UsageError("--precision: baseline compares in the model's own precision; leave one of them out")
    if "paced" not in parts:
        expect_no_pace(arguments, "is for viewers at their own pace; give --parts paced as well")
    return parts


def _measure_one(bench: VideoBench, parts: tuple[str, ...], counts: list[int], results: Figures) -> None:
    try:
        began = time.perf_counter()
        bench.engine.warm_up()
        results["warm_up_s"] = round(time.perf_counter() - began, 1)
        print(f"ready after {results['warm_up_s']} s", flush=True)
        if "ticks" in parts:
            results["ticks"] = _ticks(measure_blocks(bench, results["matrix_tflops"]), results["model"])
            results["first"] = measured = measure_first_pictures(bench)
            print("pictures after an ask: " + ", ".join(f"{name} {ms}" for name, ms in measured.items()), flush=True)
        if "sessions" in parts:
            results["sessions"] = _sessions(bench, counts)
        if "baseline" in parts:
            model = bench.model
            results["baseline"] = plain = measure_plain_video(model.dit, model.config, model.encoders.vae.sizes)
            print(f"plain baseline of a block: DiT {plain['dit_ms']} ms, decoding {plain['decode_ms']} ms", flush=True)
            if "ticks" in results:
                for name in ("dit", "decode"):
                    plain[f"{name}_ratio"] = round(plain[f"{name}_ms"] / results["ticks"][f"{name}_ms"], 2)
                print(
                    f"  of the engine's: DiT {plain['dit_ratio']}, decoding {plain['decode_ratio']} times", flush=True
                )
    finally:
        bench.engine.shutdown()


def _export(bench: VideoBench) -> Figures:
    """Of a session whose window is full, and which no frame has left."""
    try:
        bench.engine.warm_up()
        session, request = bench.engine.open_session(), VideoRequest("a world that nobody sees")
        for _ in range(bench.blocks_to_fill):
            bench.engine.submit(session, request).result()
        return told_exports(measure_exports(bench.engine, session))
    finally:
        bench.engine.shutdown()


def _sessions(bench: VideoBench, counts: list[int]) -> list[Figures]:
    rows = []
    for row in measure_video_sessions(bench, counts):
        rows.append(row)
        print(
            f"  {row['sessions']} sessions: block to block p50 {row['p50_ms']} ms, p99 {row['p99_ms']} ms, "
            f"{row['frames_per_s_of_each']} frames/s each at least",
            flush=True,
        )
    return rows


def _paced(arguments: argparse.Namespace, engine: Callable[[int], VideoBench]) -> Figures:
    def measure(num_viewers: int, pace: Pace) -> Figures:
        bench = engine(num_viewers)
        period_s = arguments.period or bench.frames_per_block / FRAMES_PER_SECOND
        return measure_viewers(bench, num_viewers, replace(pace, period_s=period_s))

    return by_robots(arguments, measure, _VIEWERS if arguments.robots == ROBOTS else arguments.robots, "viewers")


def _ticks(measured: Figures, model: str) -> Figures:
    print(
        f"{model}: a block of {measured['frames_per_block']} pictures, its window full: DiT {measured['dit_ms']} ms "
        f"({measured['frames_per_s_of_dit']} frames/s), decoding {measured['decode_ms']} ms, in all "
        f"{measured['block_ms']} ms ({measured['frames_per_s']} frames/s); {measured['achieved_tflops']} TFLOP/s, "
        f"{measured['fraction_of_ceiling']} of the matrix ceiling",
        flush=True,
    )
    return measured
