"""SIGTERM before there is a server to handle it: a service that is told to stop stops, whatever it is loading.

Imports nothing that takes time: as the first process of a container, only what is handled arrives.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Sequence
from types import FrameType

_SERVICES = ("serve",)
_ENDS_WITHIN_S = 15.0
_KILLED = 128 + signal.SIGTERM


def end_at_sigterm(arguments: Sequence[str]) -> None:
    """For a command that is a service: exit code 0, as after serving, since nobody loses anything. The second signal
    ends the process where it stands, and so does time: code 143."""
    is_service = tuple(arguments[:1]) in {(name,) for name in _SERVICES}
    in_main_thread = threading.current_thread() is threading.main_thread()
    if is_service and in_main_thread and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _end)


def _end(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, _end_now)
    timer = threading.Timer(
        _ENDS_WITHIN_S, os._exit, (_KILLED,)
    )  # something that was imported may swallow what follows
    timer.daemon = True
    timer.start()
    print("stopped by SIGTERM", file=sys.stderr, flush=True)
    raise SystemExit(0)


def _end_now(number: int, frame: FrameType | None) -> None:
    os._exit(_KILLED)
