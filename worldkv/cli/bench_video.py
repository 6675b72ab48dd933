"""`worldkv bench` of causal video: blocks of one session, then of several."""

from __future__ import annotations

import argparse
import json
import platform

import torch

from worldkv.bench.timing import matrix_ceiling
from worldkv.bench.videos import Figures, build_video_engine, measure_blocks, measure_video_sessions
from worldkv.cli.bench_choices import SESSIONS
from worldkv.cli.common import check_precision, choose_device, choose_dtype
from worldkv.cli.errors import OK, UsageError
from worldkv.cli.video import OF_VIDEO
from worldkv.engine.config import EngineConfig
from worldkv.models.causal_wan.folder import Choices

_PARTS = ("ticks", "sessions")
_SESSIONS = [1, 2, 4]  # where nobody says: one session fills a GPU


def run_video(arguments: argparse.Namespace, all_parts: tuple[str, ...]) -> int:
    """`all_parts`: what is measured of robots where nobody chooses."""
    parts = _PARTS if tuple(arguments.parts) == all_parts else tuple(arguments.parts)
    if unknown := [part for part in parts if part not in _PARTS]:
        raise UsageError(f"--parts: of causal video {' and '.join(_PARTS)} are measured, got {unknown[0]}")
    for name in ("preset", "lora"):
        if getattr(arguments, name) is not None:
            raise UsageError(f"--{name}: the models that are measured by name have settings of their own")
    device = choose_device(arguments.device)
    check_precision(arguments.precision, device)
    dtype = choose_dtype("auto", device)
    counts = _SESSIONS if arguments.sessions == SESSIONS else arguments.sessions
    config = EngineConfig(
        block_size=arguments.block_size,
        max_sessions=max(counts) if "sessions" in parts else 1,
        attention=arguments.attention,
    )
    choices = Choices(**{name: getattr(arguments, name) for name in OF_VIDEO if name not in ("preset", "lora")})
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
        ceiling = round(matrix_ceiling(device, dtype), 4)
        results["matrix_tflops"] = ceiling
        bench = build_video_engine(arguments.model, choices, config, device, dtype, precision=arguments.precision)
        try:
            video = bench.model.config
            results |= {"pixels": [video.height, video.width], "window_frames": video.blocks.held_frames}
            bench.engine.warm_up()
            if "ticks" in parts:
                results["ticks"] = _ticks(measure_blocks(bench, ceiling), arguments.model)
            if "sessions" in parts:
                rows: list[Figures] = []
                results["sessions"] = rows
                for row in measure_video_sessions(bench, counts):
                    rows.append(row)
                    print(
                        f"  {row['sessions']} sessions: block to block p50 {row['p50_ms']} ms, p99 {row['p99_ms']} ms, "
                        f"{row['frames_per_s_of_each']} frames/s each at least",
                        flush=True,
                    )
        finally:
            bench.engine.shutdown()
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / "bench.json").write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results))
    return OK


def _ticks(measured: Figures, model: str) -> Figures:
    print(
        f"{model}: a block of {measured['frames_per_block']} pictures, its window full: DiT {measured['dit_ms']} ms "
        f"({measured['frames_per_s_of_dit']} frames/s), decoding {measured['decode_ms']} ms, in all "
        f"{measured['block_ms']} ms ({measured['frames_per_s']} frames/s); {measured['achieved_tflops']} TFLOP/s, "
        f"{measured['fraction_of_ceiling']} of the matrix ceiling",
        flush=True,
    )
    return measured
