"""The cost of an open console: a robot's ticks with a page that watches its session, and without, in one run.

    python -m worldkv.bench.console

The page is a socket that asks for all that a browser does: the overview twice a second, frames, the imagined video of
each tick. Prints one line of JSON last.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import numpy as np

from worldkv.client import PolicyClient
from worldkv.engine.engine import EngineConfig
from worldkv.load import load_policy
from worldkv.models.dreamzero.random import write_random_checkpoint
from worldkv.server.server import PolicyServer, ServerConfig
from worldkv_client.address import ServerAddress
from worldkv_client.dialling import Route

_PERIOD_S = 1.0  # a robot asks when its chunk is over; in between the page has its time


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=6, help="of ten ticks each way (6)")
    parser.add_argument("--period", type=float, default=_PERIOD_S, help="seconds from tick to tick (1)")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore", UserWarning)
    folder = write_random_checkpoint(Path(tempfile.mkdtemp()) / "random", kind="ti2v", view_height=16, view_width=48)
    policy = load_policy(folder, EngineConfig(max_sessions=2))
    times: dict[str, list[float]] = {"without": [], "with": [], "watched": []}
    with (
        PolicyServer(policy, ServerConfig(port=0)) as server,
        PolicyClient(port=server.port, session_id="arm") as robot,
    ):
        tick(robot, 0)
        number = 1
        for _ in range(arguments.rounds):
            for name, watched in (("without", None), ("with", []), ("watched", ["arm"])):
                page = None
                if watched is not None:  # a process of its own, as a browser is
                    watch = ["worldkv.bench.console", "--look", str(server.port), *watched]
                    page = subprocess.Popen([sys.executable, "-m", *watch])
                    time.sleep(1.5)
                for _ in range(10):
                    started = time.perf_counter()
                    tick(robot, number)
                    number += 1
                    times[name].append(1e3 * (time.perf_counter() - started))
                    time.sleep(max(0.0, arguments.period - (time.perf_counter() - started)))
                if page is not None:
                    page.kill()
                    page.wait()
    policy.close()
    policy.engine.shutdown()
    p50 = {name: statistics.median(values) for name, values in times.items()}
    ratios = {name: round(p50[name] / p50["without"], 3) for name in ("with", "watched")}
    print(f"tick p50: overview open {ratios['with']:.3f}, session watched {ratios['watched']:.3f} of without a page")
    print(json.dumps({"benchmark": "console", "ticks_each": 10 * arguments.rounds, "p50_ratio": ratios}))


def tick(robot: PolicyClient, number: int) -> None:
    frames = np.random.default_rng(number).integers(0, 256, (3, 1 if number == 0 else 4, 180, 320, 3), dtype=np.uint8)
    observation = {f"observation/exterior_image_{n}_left": frames[n] for n in (0, 1)}
    observation |= {"observation/wrist_image_left": frames[2], "prompt": "stack the cups"}
    robot.infer(observation | {"observation/joint_position": np.zeros(7), "observation/gripper_position": np.zeros(1)})


def look(port: str, watched: list[str]) -> None:
    """The page, until it is killed."""
    with Route(ServerAddress("127.0.0.1", int(port))).websocket("/v1/console", max_size=None) as page:
        page.send(json.dumps({"key": None}))
        page.send(json.dumps({"watch": watched}))
        while True:
            page.recv()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--look"]:
        look(sys.argv[2], sys.argv[3:])
    else:
        main()
