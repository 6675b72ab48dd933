"""`worldkv demo`: the whole system at work, from nothing but the package.

Two processes and a real websocket: the server is `worldkv serve` on a tiny checkpoint of random weights, the robot is a
drawn arm here, which follows the actions that come back.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

import numpy as np

from worldkv.cli.common import add_ticks
from worldkv.cli.errors import OK
from worldkv.cli.places import add_output
from worldkv.cli.preflight import require_packages
from worldkv.client import PolicyClient
from worldkv.demo.server_process import ServerProcess
from worldkv.demo.synthetic import CONTROL_HZ, MAX_SPEED, SyntheticArm
from worldkv.demo.world import show_world
from worldkv.show.captions import captioned
from worldkv.show.episode import Episode, EpisodeTick, tile_cameras
from worldkv.show.live_table import LiveTable
from worldkv.show.records import record_of_answer
from worldkv.show.terminal import progress, spinner
from worldkv.show.video import write_video
from worldkv.words import count

_HORIZON = 24  # actions a tick, as DreamZero's
_BLOCK_SIZE = "16"  # smaller than a frame of the tiny model, so that blocks come and go visibly
_REMARKS = {
    "actions": (
        "To look at: joints are answered relative to where the arm was seen, so each chunk starts from there; all "
        "chunks have one shape, since the noise is the same at every tick; what is answered is not cut off, so it may "
        f"leave the gripper's range; the arm turns by {MAX_SPEED:g} rad/s at most and stops at its limits."
    ),
    "cache": (
        "To look at: a tick adds two frames until the window is full; one session is open, the pool has room for four."
    ),
    "latency": (
        "To look at: the first frame of a window is encoded as a whole clip, hence the tall bars. A tiny model on a "
        "CPU: a real one on a GPU spends most of a tick denoising."
    ),
}

MORE = (
    "Writes a tiny checkpoint of random weights, serves it in a second process and drives it over a real\n"
    "websocket with a drawn arm that follows the actions. The weights have learned nothing, so neither do the\n"
    "motions mean anything: it shows the machinery. Prints the address of its console; in a terminal it\n"
    "stays until it is stopped. Needs no GPU and no download."
)
EXAMPLE = "worldkv demo --ticks 12 --output demo-output"


def add_options(parser: argparse.ArgumentParser) -> None:
    add_output(parser, "folder", "video and plots", default="demo-output")
    add_ticks(parser, 12, "to make")
    parser.add_argument("--video", action="store_true", help="a world from words instead of a robot; ticks are blocks")
    parser.add_argument("--once", action="store_true", help="stop after them (what scripts get)")
    parser.add_argument("--stay", action="store_true", help="go on until Ctrl-C (what a terminal gets)")


def run(arguments: argparse.Namespace) -> int:
    require_packages("plots", "matplotlib", option="--output")
    require_packages("video", "av", option="--output")
    if arguments.video:
        with _sigterm_as_interrupt():
            show_world(arguments.output, arguments.ticks, stays=_stays(arguments))
        return OK
    output, started = arguments.output, time.monotonic()
    checkpoint = output / "checkpoint"
    with spinner("writing a tiny checkpoint"):
        window_frames = _write_checkpoint(checkpoint)
    print(f"{checkpoint}: random weights, nothing was learned; the motions are noise, the machinery is real")
    arm = SyntheticArm()
    episode = Episode(CONTROL_HZ, window_frames, "random weights", remarks=_REMARKS)
    options = ["--device", "cpu", "--block-size", _BLOCK_SIZE, "--max-sessions", "4"]
    with _sigterm_as_interrupt(), ServerProcess(checkpoint, output / "server.log", options) as server:
        with spinner("starting a policy server in a second process, and waiting for it to be warm"):
            server.wait_until_ready()
        print(
            f"`worldkv serve` runs as process {server.pid} on port {server.port}; a robot with three cameras connects"
        )
        print(f"watch it in a browser: http://127.0.0.1:{server.port}/")
        title = f'"{arm.prompt}", {count(arguments.ticks, "tick")} over a websocket'
        with PolicyClient(port=server.port, session_id="demo-arm") as robot:
            with LiveTable(window_frames, title=title) as table:
                observed = _drive(arm, robot, arguments.ticks, episode, table)
            _save(output, episode, observed, time.monotonic() - started)
            if _stays(arguments):
                print(
                    f"the arm goes on; watch it at http://127.0.0.1:{server.port}/ and stop it with Ctrl-C", flush=True
                )
                _go_on(arm, robot)
    print("next")
    print(f"  worldkv inspect {checkpoint}")
    print(f"  worldkv serve --checkpoint {checkpoint}")
    print(f"  worldkv replay --checkpoint {checkpoint} --clip FOLDER     (three camera files of a real episode)")
    return OK


def _stays(arguments: argparse.Namespace) -> bool:
    """As told; else for people, who can press Ctrl-C, and not for scripts, which cannot."""
    return bool(arguments.stay or (sys.stdout.isatty() and not arguments.once))


def _save(output: Path, episode: Episode, observed: np.ndarray, seconds: float) -> None:
    with progress("writing video and plots") as step:
        files = {"observed.mp4": "what the arm's three cameras saw"}
        words = "the wrist's camera above, the two exterior ones below: what the model is shown"
        write_video(output / "observed.mp4", (captioned(frame, words) for frame in observed), 4 * CONTROL_HZ / _HORIZON)
        files |= episode.save(output, step)
    print(f"{seconds:.0f} s; look into {output}/")
    for name, what in {**files, "server.log": "what the server said"}.items():
        print(f"  {name:<24} {what}")


def _go_on(arm: SyntheticArm, robot: PolicyClient) -> None:
    """At the robot's own rate, until Ctrl-C or SIGTERM."""
    with suppress(KeyboardInterrupt):
        while True:
            began = time.monotonic()
            arm.execute(np.array(robot.infer(arm.observe())))
            time.sleep(max(0.0, _HORIZON / CONTROL_HZ - (time.monotonic() - began)))


def _write_checkpoint(folder: Path) -> int:
    """Returns the frames of a full window."""
    from worldkv.models.checkpoints.files import CONFIG_FILE, read_json
    from worldkv.models.dreamzero.config import DreamZeroConfig
    from worldkv.models.dreamzero.random import write_random_checkpoint

    write_random_checkpoint(folder, action_horizon=_HORIZON)
    return DreamZeroConfig.from_json(read_json(folder / CONFIG_FILE)).window_frames


def _drive(arm: SyntheticArm, robot: PolicyClient, num_ticks: int, episode: Episode, table: LiveTable) -> np.ndarray:
    """The episode; returns all that the cameras saw, uint8 [T, H, W, 3]."""
    observation = arm.observe()
    observed = [tile_cameras(observation)]
    for number in range(num_ticks):
        reply = robot.infer(observation, details=True)
        assert isinstance(reply, dict), "details come in a map"
        record = record_of_answer(reply, number, robot.session_id)
        table.add(record)
        followed = arm.execute(reply["actions"])
        observation = arm.observe()
        observed.append(tile_cameras(observation))
        predicted = reply["predicted_video"]
        seen = np.repeat(observed[-1], len(predicted) // len(observed[-1]), axis=0)
        seconds = number * _HORIZON / CONTROL_HZ
        episode.ticks.append(EpisodeTick(record, reply["actions"], seconds, predicted, seen, followed))
    return np.concatenate(observed)


@contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    """So that the server is stopped whoever stops us."""

    def interrupt(_signal: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
