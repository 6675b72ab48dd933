"""`worldkv serve` on several ranks: who starts them, who follows, and who begins anew when one is lost.

By itself the command watches over a server process, which starts the other ranks. Where torchrun has set RANK, each
process is a rank already. Imports no torch until a rank needs it.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING

from worldkv.cli.errors import FAILED, OK, UsageError
from worldkv.cli.numbers import seconds, whole
from worldkv.models.wan.shard import Mesh

if TYPE_CHECKING:
    from worldkv.ranks.ranks import Ranks

RANKS_LOST = 75  # exit code of a server whose ranks are to be started anew
_WATCHED = "WORLDKV_WATCHED"  # in the environment of a server process that is watched over
_TOLD_S, _ENDS_S = 2.0, 15.0  # for the last answers to leave and /healthz to say why; then for the server to end
_QUICKLY_S, _MOST_QUICKLY = 60.0, 3  # a server that ends within so long, so often in a row, is not begun again
_LOOK_S = 0.5

MakeRanks = Callable[[], "Ranks"]


def add_mesh(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("ranks (docs/ranks.md)")
    text = "ranks of a GPU each for the branches of guidance: 2, or 1 for none (1)"
    group.add_argument("--guidance-parallel", type=whole(1), default=1, metavar="N", help=text)
    text = "ranks that share the heads and feed-forwards of each branch (1)"
    group.add_argument("--tensor-parallel", type=whole(1), default=1, metavar="N", help=text)


def add_ranks(parser: argparse.ArgumentParser) -> None:
    add_mesh(parser)
    text = "in which a rank answers; then all are started anew (60)"
    parser.add_argument("--rank-timeout", type=seconds, default=60.0, metavar="S", help=text)


def mesh_of(arguments: argparse.Namespace) -> Mesh:
    return Mesh(arguments.guidance_parallel, arguments.tensor_parallel)


def serve_on_ranks(arguments: argparse.Namespace, serve: Callable[[argparse.Namespace, MakeRanks], int]) -> int:
    """What this process is to do; `serve`: the server of rank 0. Returns the exit code."""
    if getattr(arguments, "also", None) is not None:
        raise UsageError("--also: expected one model on several ranks; serve the other one by itself")
    if arguments.device not in ("auto", "cpu", "cuda"):
        raise UsageError(
            f"--device: each rank takes a GPU of its own; expected auto, cpu or cuda, got {arguments.device}"
        )
    if "RANK" not in os.environ and _WATCHED not in os.environ:
        return _watch_over(sys.argv[1:])
    from worldkv.ranks.follower import follow
    from worldkv.ranks.leader import RanksLost
    from worldkv.ranks.place import Place

    place = Place.of_environment()
    if place is not None and place.rank > 0:
        follow(place)
        return OK
    try:
        return serve(arguments, lambda: _ranks(arguments, place))
    except RanksLost as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return RANKS_LOST


def _ranks(arguments: argparse.Namespace, place: object) -> Ranks:
    from worldkv.cli.common import choose_device
    from worldkv.ranks.place import Place
    from worldkv.ranks.ranks import Ranks

    mesh, device = mesh_of(arguments), choose_device(arguments.device).type
    if isinstance(place, Place):
        return Ranks.join(mesh, place, device, arguments.rank_timeout)
    return Ranks.start(mesh, device, arguments.rank_timeout)


def end_with(ranks: Ranks) -> None:
    """From now on this process ends when its ranks are lost, or who watches over it is gone."""
    threading.Thread(target=_wait_for_the_end, args=(ranks, os.getppid()), name="worldkv-ranks", daemon=True).start()


def _wait_for_the_end(ranks: Ranks, parent: int) -> None:
    while not ranks.leader.lost.wait(_LOOK_S):
        if _WATCHED in os.environ and os.getppid() != parent:
            break
    time.sleep(_TOLD_S)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_ENDS_S)
    os.kill(os.getpid(), signal.SIGKILL)


def _watch_over(arguments: list[str]) -> int:
    """Run the server as a process of its own, and again when its ranks, or itself, were lost."""
    quick_ends = 0
    told_to_stop = False
    server: subprocess.Popen[bytes] | None = None

    def pass_on(number: int, frame: FrameType | None) -> None:
        nonlocal told_to_stop
        told_to_stop = True
        if server is not None:
            server.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, pass_on)
    while True:
        began = time.monotonic()
        command = [sys.executable, "-m", "worldkv", *arguments]
        # in a session of its own: a terminal's Ctrl-C comes from here, once
        server = subprocess.Popen(command, env={**os.environ, _WATCHED: "1"}, start_new_session=True)
        if told_to_stop:
            server.terminate()
        code = server.wait()
        if told_to_stop or code not in (RANKS_LOST, -signal.SIGKILL, -signal.SIGABRT, -signal.SIGSEGV):
            return code if code >= 0 else FAILED
        quick_ends = quick_ends + 1 if time.monotonic() - began < _QUICKLY_S else 0
        if quick_ends == _MOST_QUICKLY:
            print(f"error: ranks were lost {quick_ends} times in a row, each time soon", file=sys.stderr, flush=True)
            return FAILED
        print("ranks were lost: all of them are started anew", file=sys.stderr, flush=True)
