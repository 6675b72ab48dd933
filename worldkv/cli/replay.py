"""`worldkv replay`: a recorded session or a clip of three cameras, through a checkpoint here or a server."""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import TYPE_CHECKING

from worldkv.cli.common import (
    add_checkpoint,
    add_engine_options,
    add_server_address,
    describe_model,
    load_policy_for,
)
from worldkv.cli.errors import FAILED, OK
from worldkv.cli.numbers import real, whole
from worldkv.cli.places import add_output, add_place
from worldkv.cli.preflight import require_packages
from worldkv.client import PolicyClient
from worldkv.show import clip as clips
from worldkv.show import recorded
from worldkv.show.episode import Episode
from worldkv.show.lerobot import check_lerobot, write_lerobot
from worldkv.show.live_table import LiveTable
from worldkv.show.terminal import progress
from worldkv.words import count
from worldkv_client import ServerAddress

if TYPE_CHECKING:
    from worldkv.robots.policy import Policy


MORE = (
    "A recording is what `worldkv serve --record` wrote of a session: its ticks are run again and compared with\n"
    "what was answered; any difference above --tolerance makes the exit code 1,\n"
    "and so does a recording that has been cut short. One with ticks missing in between is refused.\n"
    "A clip is a folder with exterior_image_1_left.mp4, exterior_image_2_left.mp4 and wrist_image_left.mp4, at 15\n"
    "frames a second. The first request sends frame 0, request k the frames a-23, a-16, a-8 and a, with\n"
    "a = 23 + 24 (k - 1); joints and gripper are zero; with --url a server gets them, over its socket.\n"
    "Out come actions (npz, csv), predicted video, plots."
)
EXAMPLE = "worldkv replay --checkpoint DreamZero-DROID --clip droid_clip --output replay-output"


def add_options(parser: argparse.ArgumentParser) -> None:
    add_checkpoint(parser, needed=False, what="DreamZero checkpoint folder")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--clip", type=Path, metavar="DIR", help="folder with the three camera files")
    source.add_argument("--recording", type=Path, metavar="DIR", help="folder of a recorded session")
    add_server_address(parser, default=None)
    parser.add_argument(
        "--tolerance",
        type=real(at_least=0),
        default=0.0,
        metavar="X",
        help="largest relative difference from the recording (0: bit for bit)",
    )
    add_place(parser, "--lerobot", "folder", "the recording as a LeRobot dataset as well; needs pyarrow")
    add_output(parser, "folder", "actions, video and plots", default="replay-output")
    parser.add_argument("--prompt", metavar="TEXT", help="instruction (that of the public DROID test clip)")
    parser.add_argument("--ticks", type=whole(1), metavar="N", help="of a clip, to run (all)")
    parser.add_argument("--max-calls", dest="ticks", type=whole(1), help=argparse.SUPPRESS)  # its name before
    add_engine_options(parser)


def run(arguments: argparse.Namespace) -> int:
    _check_combination(arguments)
    if arguments.url is not None:
        ServerAddress.parse(arguments.url)  # before anything is made or read for it
    require_packages("plots", "matplotlib", option="--output")
    require_packages("video", "av", option="--output")
    if arguments.recording is not None:
        return _replay_recording(arguments)
    episode = _send_clip(arguments) if arguments.url is not None else _run_clip(arguments)
    return _leave(episode, arguments.output)


def _check_combination(arguments: argparse.Namespace) -> None:
    """No option is taken and then ignored. Raises ValueError."""
    if arguments.url is None and arguments.checkpoint is None:
        raise ValueError("--checkpoint: expected a folder; without one a clip can go to a server, with --url")
    if arguments.url is None and arguments.proxy != "auto":
        raise ValueError("--proxy: is for a server; give its --url, or leave it out")
    if arguments.url is not None and (arguments.checkpoint is not None or arguments.recording is not None):
        raise ValueError("--url: a server has its own checkpoint and gets a clip; leave --checkpoint, --recording out")
    of_clips = {"--prompt": arguments.prompt, "--ticks": arguments.ticks}
    of_recordings = {"--lerobot": arguments.lerobot, "--tolerance": arguments.tolerance or None}
    for name, value in (of_clips if arguments.recording is not None else of_recordings).items():
        if value is not None:
            raise ValueError(f"{name}: is for a {'clip' if name in of_clips else 'recording'}; leave it out")


def _run_clip(arguments: argparse.Namespace) -> Episode:
    clip = clips.read_clip(arguments.clip)
    schedule = clips.frame_schedule(clips.num_frames(clip))[: arguments.ticks]
    policy = load_policy_for(arguments, max_sessions=1)
    try:
        episode = _episode(policy, arguments)
        with LiveTable(
            episode.window_frames, title=f"{arguments.clip.name}: {count(len(schedule), 'request')}"
        ) as table:
            answer = clips.answered_here(policy.open_session())
            clips.drive(answer, clip, schedule, arguments.prompt or clips.DEFAULT_PROMPT, episode, table)
    finally:
        policy.close()
        policy.engine.shutdown()
    return episode


def _send_clip(arguments: argparse.Namespace) -> Episode:
    clip = clips.read_clip(arguments.clip)
    schedule = clips.frame_schedule(clips.num_frames(clip))[: arguments.ticks]
    episode = Episode(clips.CLIP_HZ, window_frames=0)
    title = f"{arguments.clip.name}: {count(len(schedule), 'request')} to {arguments.url}"
    client = PolicyClient(arguments.url, api_key=arguments.api_key, proxy=arguments.proxy)
    with client, LiveTable(0, title=title) as table:
        answer = clips.answered_by(client)
        clips.drive(answer, clip, schedule, arguments.prompt or clips.DEFAULT_PROMPT, episode, table)
    return episode


def _replay_recording(arguments: argparse.Namespace) -> int:
    from worldkv.robots.recording import Recording

    recording = Recording.open(arguments.recording)
    recording.require_self_contained()
    cuts, recording = recording.cuts(), recording.before_cuts()
    for cut in cuts:
        print(f"the recording is cut: {cut.text}")
    if arguments.lerobot is not None:
        check_lerobot(arguments.lerobot)
    arguments.batch_invariant |= bool(recording.about.get("batch_invariant"))
    policy = load_policy_for(arguments, max_sessions=1)
    try:
        robot, episode = policy.embodiment, _episode(policy, arguments)
        episode.action_names = recorded.action_names(robot)
        title = f"{recording.folder.name}: {count(recording.num_ticks, 'tick')}"
        with LiveTable(episode.window_frames, title=title) as table:
            difference = recorded.drive(policy.open_session(), recording, robot, episode, table)
        if arguments.lerobot is not None:
            write_lerobot(arguments.lerobot, recording, robot)
            part = ", of the part before the cut" if cuts else ""
            print(f"LeRobot dataset in {arguments.lerobot}{part}")
    finally:
        policy.close()
        policy.engine.shutdown()
    _leave(episode, arguments.output)
    equal = f"{difference.num_equal} of {count(difference.num_ticks, 'tick')} are equal to the recording bit for bit"
    print(f"{equal}; largest relative difference {difference.largest:.1e}")
    if difference.exceeds(arguments.tolerance):
        print(
            "they differ: another checkpoint, device or dtype, or sessions shared its batches then (docs/recording.md)"
        )
        return FAILED
    if cuts:
        print(f"only the {recording.num_ticks} ticks before the cut were replayed; hence exit code {FAILED}")
    return FAILED if cuts else OK


def _episode(policy: Policy, arguments: argparse.Namespace) -> Episode:
    for line in describe_model(policy, arguments.checkpoint):
        print(line)
    note = "random weights" if policy.random_weights else ""
    return Episode(policy.embodiment.fps, policy.engine.card.window_chunks, note)


def _leave(episode: Episode, folder: Path) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    with progress("writing video and plots") as step:
        files = episode.save(folder, step)
    totals = [record.total_ms for record in episode.records]
    restarts = sum(record.restart_reason is not None for record in episode.records)
    num_actions = sum(len(tick.actions) for tick in episode.ticks)
    print(
        f"requests: {len(totals)}, windows started: {restarts}, actions: {num_actions}, all finite; "
        f"median {statistics.median(totals):.0f} ms a request"
    )
    if episode.note:
        print(f"{episode.note}: what you see is noise, not a prediction")
    print(f"look into {folder}/")
    for name, what in files.items():
        print(f"  {name:<24} {what}")
    return OK
