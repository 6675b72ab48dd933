"""The demo of videos: a tiny model of random weights, served in a second process, watched by a program."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

from worldkv.demo.server_process import ServerProcess
from worldkv.demo.viewer import ShownBlock, Viewer, viewer
from worldkv.show.terminal import progress, spinner
from worldkv.show.video import read_video
from worldkv.show.world_plot import plot_world
from worldkv.words import count

WORDS = ("a quiet lake at dawn", "a storm over the lake", "the lake under stars")
_SESSION = "demo-world"
_HEIGHT, _WIDTH, _RATE = 96, 160, 16
_PERIOD_S = 0.75  # of a block
_FILES = {
    "world.mp4": "the video, as the viewer got it",
    "world.png": "a frame of each block, with its words, and what each took to make",
    "server.log": "what the server said",
}


def show_world(output: Path, num_blocks: int, *, stays: bool) -> None:
    """Serve it, watch `num_blocks`, and leave film and picture in `output`. `stays`: go on until Ctrl-C.

    Raises ConnectionLost, EngineStopped.
    """
    checkpoint, started = output / "video-checkpoint", time.monotonic()
    with spinner("writing a tiny checkpoint"):
        _write_checkpoint(checkpoint)
    print(f"{checkpoint}: random weights, nothing was learned; the video is noise, the machinery is real")
    size = ["--height", str(_HEIGHT), "--width", str(_WIDTH)]
    options = ["--device", "cpu", "--block-size", "16", "--max-sessions", "4", *size]
    film = output / "world.mp4"
    with ServerProcess(checkpoint, output / "server.log", options) as server:
        with spinner("starting a server of videos in a second process, and waiting for it to be warm"):
            server.wait_until_ready()
        print(f"`worldkv serve` runs as process {server.pid} on port {server.port}; a viewer connects")
        print(f"make worlds of your own in a browser: http://127.0.0.1:{server.port}/")
        with film.open("wb") as file, viewer(server.port, file) as watching:
            blocks = _watch(watching, num_blocks)
            watching.pause()
        _leave(output, film, blocks, time.monotonic() - started)
        if stays:
            print(f"the server goes on at http://127.0.0.1:{server.port}/; stop it with Ctrl-C", flush=True)
            with suppress(KeyboardInterrupt):
                while server.exit_code is None:
                    time.sleep(0.5)
    print("next")
    print(f'  worldkv generate {checkpoint} --prompt "{WORDS[0]}" {" ".join(size)}')
    print(f"  worldkv serve {checkpoint} {' '.join(size)}")


def _watch(watching: Viewer, num_blocks: int) -> list[ShownBlock]:
    """Other words every few blocks."""
    watching.start(WORDS[0], _SESSION)
    blocks: list[ShownBlock] = []
    with progress(f"watching {count(num_blocks, 'block')}") as step:
        while len(blocks) < num_blocks:
            blocks.append(watching.block())
            step(len(blocks), num_blocks)
            part = len(blocks) * len(WORDS) // num_blocks
            if part < len(WORDS) and part != (len(blocks) - 1) * len(WORDS) // num_blocks:
                watching.say(WORDS[part])
    return blocks


def _leave(output: Path, film: Path, blocks: list[ShownBlock], took_s: float) -> None:
    frames = read_video(film)
    middles = [frames[round(block.at_s * _RATE) + block.num_frames // 2] for block in blocks]
    note = f"Random weights: nothing was learned. {_WIDTH} x {_HEIGHT} pixels, {_RATE} frames a second of video."
    prompts, made_ms = [block.prompt for block in blocks], [block.made_ms for block in blocks]
    plot_world(output / "world.png", middles, prompts, made_ms, 1e3 * _PERIOD_S, note)
    switches = [block for block in blocks if block.words_applied]
    made = f"{count(len(frames), 'frame')}, other words {count(len(switches), 'time')}"
    print(f"{took_s:.0f} s; {made}; look into {output}/")
    for name, what in _FILES.items():
        print(f"  {name:<24} {what}")


def _write_checkpoint(folder: Path) -> None:
    from worldkv.models.causal_wan.random import write_random_causal_wan

    write_random_causal_wan(folder)
