"""How fast a checkpoint folder of true size goes from the disk to the GPU, against the disk's own rate, in one run.

    python -m worldkv.bench.loading --model dreamzero-14b --folder /somewhere/with/50GB

Writes the folder with random numbers where it is not there yet. Prints one line of JSON last.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from worldkv.bench.released import RELEASED
from worldkv.engine.engine import EngineConfig
from worldkv.load import load_engine
from worldkv.models.dreamzero.true_size import write_true_structure

_CHUNK = 16 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", choices=RELEASED, default="dreamzero-5b")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    if not (arguments.folder / "config.json").is_file():
        print("writing", arguments.folder, flush=True)
        write_true_structure(arguments.folder, RELEASED[arguments.model](), content=True)
    files = sorted(arguments.folder.glob("*.safetensors"))
    num_bytes = sum(path.stat().st_size for path in files)
    result = {"benchmark": "loading", "model": arguments.model, "gigabytes": round(num_bytes / 1e9, 2)}
    forget(files)
    result["disk_gb_per_s"] = round(read_rate(files[0]), 2)
    print(result, flush=True)
    for name in ("cold", "warm"):
        if name == "cold":
            forget(files)
        with watched() as seen:
            config = EngineConfig(max_sessions=None if arguments.device == "cuda" else 1)
            engine = load_engine(arguments.folder, config, device=arguments.device, dtype=torch.bfloat16)
        rate = num_bytes / seen["seconds"] / 1e9
        result[name] = {"gb_per_s": round(rate, 2), **{key: round(value, 2) for key, value in seen.items()}}
        result["capacity"] = engine.capacity().explain()
        engine.shutdown()
        del engine
        gc.collect()
        print(result, flush=True)
    print(json.dumps(result))


def forget(files: list[Path]) -> None:
    """Has the operating system drop its copies, so that the disk itself is read."""
    for path in files:
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_rate(path: Path) -> float:
    start, done, buffer = time.perf_counter(), 0, bytearray(_CHUNK)
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            done += count
    return done / (time.perf_counter() - start) / 1e9


@contextmanager
def watched() -> Iterator[dict[str, float]]:
    """Seconds, and the most anonymous host memory that was added meanwhile (pages of the files are not)."""
    seen = {"seconds": 0.0, "peak_host_gb": 0.0}
    before, start, stop = anonymous(), time.perf_counter(), threading.Event()

    def watch() -> None:
        while not stop.wait(0.05):
            seen["peak_host_gb"] = max(seen["peak_host_gb"], (anonymous() - before) / 1e9)

    thread = threading.Thread(target=watch)
    thread.start()
    yield seen
    seen["seconds"] = time.perf_counter() - start
    stop.set()
    thread.join()


def anonymous() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon")).split()[1]) << 10


if __name__ == "__main__":
    main()
