"""`worldkv generate`: words to an mp4, block after block, through the same app that serves viewers."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, cast

from worldkv.cli.common import add_checkpoint, add_engine_options, describe_model, load_app_for
from worldkv.cli.errors import OK, UsageError
from worldkv.cli.numbers import seconds, whole
from worldkv.cli.places import add_output
from worldkv.show.terminal import Step, progress
from worldkv.show.video import write_video
from worldkv.words import count, reason

if TYPE_CHECKING:
    import numpy as np

    from worldkv.videos.app import VideoApp

MORE = (
    "The video is made block by block, each seeing those before it, as a viewer of `worldkv serve` gets it. Other\n"
    "words take effect at the block that begins at their second or next after it. The same words, seed and device\n"
    "make the same video."
)
EXAMPLE = (
    'worldkv generate --checkpoint LongLive-1.3B --prompt "a quiet lake" --prompt-at 5 "a storm comes" '
    "--seconds 10 -o lake.mp4"
)


def add_options(parser: argparse.ArgumentParser) -> None:
    add_checkpoint(parser, what="checkpoint folder of a causal video model")
    parser.add_argument("--prompt", required=True, metavar="TEXT", help="what the video begins with")
    parser.add_argument(
        "--prompt-at",
        nargs=2,
        action="append",
        default=[],
        metavar=("SECOND", "TEXT"),
        help="other words from that second on; repeatable",
    )
    image = "what it begins with: png, jpeg or webp; for models of one latent frame a block (words alone)"
    parser.add_argument("--image", type=Path, metavar="FILE", help=image)
    parser.add_argument("--seconds", type=seconds, default=5.0, metavar="N", help="of video, at least (5)")
    parser.add_argument("--seed", type=whole(0, 2**63 - 1), default=0, metavar="N", help="of the noise (0)")
    parser.add_argument(
        "--switch",
        default="recache",
        metavar="MODE",
        help="what other words do to the past: recache (it is computed anew under them), keep, or blend (it is kept, "
        "and they come little by little) (recache)",
    )
    parser.add_argument("--blend-blocks", type=whole(1), default=4, metavar="N", help="of --switch blend (4)")
    add_output(parser, "file", "the video", default="video.mp4", endings=(".mp4",))
    add_engine_options(parser, robots=False, videos=True)


def run(arguments: argparse.Namespace) -> int:
    changes, image = _changes(arguments), _image(arguments)
    app = cast("VideoApp", load_app_for(arguments, max_sessions=1, only_family="causal_wan"))
    try:
        requests = _plan(app, arguments, changes, image)
        for line in describe_model(app, arguments.checkpoint):
            print(line)
        if app.random_weights:
            print("NOTE       random weights: they have learned nothing, and the video shows nothing")
        made = _Made()
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        with progress(f"making {count(len(requests), 'block')}") as step:
            write_video(arguments.output, _frames(app, requests, made, step), app.frames_per_second)
    finally:
        app.close()
        app.engine.shutdown()
    print(f"{arguments.output}: {made.words(app.frames_per_second)}")
    for line in made.switches:
        print(f"  {line}")
    return OK


Asked: TypeAlias = dict[str, str | int | bytes]  # fields of a block's request


@dataclass
class _Made:
    """What was made, and how long it took."""

    num_frames: int = 0
    first_s: float = 0.0
    block_s: list[float] = field(default_factory=list)
    switches: list[str] = field(default_factory=list)

    def words(self, rate: int) -> str:
        took = sum(self.block_s)
        return (
            f"{count(self.num_frames, 'frame')}, {self.num_frames / rate:.2f} s of video in {took:.1f} s, "
            f"{self.num_frames / took:.2f} frames a second; the first block came after {self.first_s:.2f} s"
        )


def _changes(arguments: argparse.Namespace) -> list[tuple[float, str]]:
    """(second, words), in the order of time. Raises UsageError."""
    changes = []
    for second, words in arguments.prompt_at:
        try:
            at = seconds(second)
        except argparse.ArgumentTypeError as error:
            raise UsageError(f"--prompt-at: {error}") from None
        if not 0 < at < arguments.seconds:
            raise UsageError(
                f"--prompt-at: expected more than 0 and less than --seconds {arguments.seconds:g}, got {at:g}"
            )
        changes.append((at, words))
    return sorted(changes)


def _image(arguments: argparse.Namespace) -> bytes | None:
    """Raises UsageError."""
    if arguments.image is None:
        return None
    try:
        return cast("Path", arguments.image).read_bytes()
    except OSError as error:
        raise UsageError(f"--image: {reason(error)}") from None


def _plan(
    app: VideoApp, arguments: argparse.Namespace, changes: Sequence[tuple[float, str]], image: bytes | None
) -> list[Asked]:
    """What is asked of each block. Raises UsageError where the video is longer than the model's window lets it be."""
    wanted = arguments.seconds * app.frames_per_second
    longest = app.most_frames
    if longest is not None and wanted > longest:
        raise UsageError(
            f"--seconds: this model sees all its past, and ends with {longest / app.frames_per_second:.2f} s; ask for "
            f"no more, or let its past leave with --window-frames {app.window_frames}"
        )
    requests: list[Asked] = [{"prompt": arguments.prompt, "seed": arguments.seed}]
    num_frames, left = app.frames_of_first_block, list(changes)
    if image is not None:
        if not app.begins_with_an_image:
            raise UsageError(
                "--image: a single picture begins models of one latent frame a block, which this one is not"
            )
        requests[0]["image"], num_frames = image, 1 + app.frames_per_block
    while num_frames < wanted:
        request: Asked = {}
        while left and left[0][0] * app.frames_per_second <= num_frames:
            way: Asked = {"switch": arguments.switch, "blend_blocks": arguments.blend_blocks}
            request = {"prompt": left.pop(0)[1], **way}
        requests.append(request)
        num_frames += app.frames_per_block
    for request in (*requests, {"switch": arguments.switch, "blend_blocks": arguments.blend_blocks}):
        app.read(request)  # nothing is made of words that will be refused
    return requests


def _frames(app: VideoApp, requests: Sequence[Asked], made: _Made, step: Step) -> Iterator[np.ndarray]:
    session = app.open_session()
    for number, request in enumerate(requests):
        began = time.perf_counter()
        block = session.infer(app.read(request)).result().block
        took = time.perf_counter() - began
        made.block_s.append(took)
        made.first_s = made.first_s or took
        if number and block.is_new_prompt:
            at = block.first_frame / app.frames_per_second
            made.switches.append(f"from {at:.2f} s on (block {number}, made in {took:.2f} s): {block.prompt}")
        made.num_frames += len(block.frames)
        step(number + 1, len(requests))
        yield from block.frames
