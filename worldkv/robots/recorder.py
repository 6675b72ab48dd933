"""Writes sessions to disk as they run: what was observed, what was answered, when; `recording` reads it back.

One folder a session: session.json says who and what, events.jsonl has a line per tick, reset and end, in order, and
ticks/ a safetensors file per tick. A thread of its own writes; serving never waits for it. What it cannot keep up with,
or has no room for, is not recorded; a line "gap" says so as soon as one can be written. Recording goes on once there is
room again.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import queue
import re
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from io import RawIOBase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

if TYPE_CHECKING:
    from worldkv.robots.policy import PolicyReply

FORMAT = 1
SESSION_FILE, EVENTS_FILE, TICKS = "session.json", "events.jsonl", "ticks"
_NOT_FROM_HERE = ("restored", "imagined")  # after these events a recording cannot be replayed from its own data
END = "closed"
_MAX_WAITING = 64  # ticks; 2 MB each for DROID
_MAX_OWING = 4096  # sessions
_LOOK_S = 1.0  # an idle writer, whether somebody owes
_LONGEST_PAUSE_S = 30.0

logger = logging.getLogger(__name__)


class Recorder:
    """Records every session of a policy under `folder`. `about` goes into each session.json. Thread-safe.

    Past `limit_bytes`, or where the disk has no room, it stops, and tries again after `retry_s` seconds and then less
    and less often. `close` writes what waits.
    """

    def __init__(
        self, folder: Path, about: Mapping[str, Any], limit_bytes: float = float("inf"), retry_s: float = 1.0
    ) -> None:
        """Raises OSError where the folder cannot be made."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.num_bytes = _size_of(folder)  # of all sessions there
        self._about = dict(about)
        self._limit = limit_bytes
        self._works: queue.Queue[tuple[SessionRecorder, int, Callable[[], None]] | None] = queue.Queue(_MAX_WAITING)
        self._owing: dict[SessionRecorder, None] = {}  # those that have lost something and not said so yet
        self._retry = _Retry(retry_s)
        self._thread = threading.Thread(target=self._run, name="worldkv-recorder", daemon=True)
        self._thread.start()

    def begin(self, session_id: str, **details: Any) -> SessionRecorder:
        """The recorder of one session; nothing is written before its first tick. `details`: how it began."""
        return SessionRecorder(self, session_id, self._about | details)

    def close(self) -> None:
        """Safe twice."""
        if self._thread.is_alive():
            self._works.put(None)
            self._thread.join()

    def put(self, session: SessionRecorder, place: int, work: Callable[[], None]) -> bool:
        """Have `work` done soon, which the session asked for at that place; False where there is no room for it."""
        if self._retry.due():
            with suppress(queue.Full):
                self._works.put_nowait((session, place, work))
                return True
        return False

    def wrote(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes

    def owes(self, session: SessionRecorder) -> None:
        """It has lost something, and says so as soon as it can."""
        if len(self._owing) < _MAX_OWING:
            self._owing[session] = None

    def _run(self) -> None:
        while True:
            try:
                item = self._works.get(timeout=self._retry.seconds_left() if self._owing else _LOOK_S)
            except queue.Empty:
                self._settle()
                continue
            if item is None:
                self._retry.hurry()  # the last chance to say what is missing
                self._settle()
                return
            self._attempt(*item)

    def _settle(self) -> None:
        """Have those that lost something say so: nothing waits that they asked for before."""
        for session in list(self._owing):
            self._owing.pop(session, None)  # first: what it loses from now on is owed again
            until = session.lost_until
            if until <= session.num_done:
                continue
            if self._works.empty() and self._retry.due():
                self._attempt(session, until - 1, functools.partial(session.settle, until))
            else:
                self.owes(session)

    def _attempt(self, session: SessionRecorder, place: int, work: Callable[[], None]) -> None:
        try:
            if not self._retry.due():
                raise _Paused
            self._require_room()
            work()
        except _Paused:
            self._lost(session, place)
        except (OSError, SafetensorError) as error:  # a full disk, say: robots go on
            if self._retry.failed():
                logger.warning("recording stops until there is room again: %s", error)
            self._lost(session, place)
        except Exception:
            logger.exception("a tick was not recorded")
            self._lost(session, place)
        else:
            if self._retry.worked():
                logger.warning("recording goes on in %s; what came meanwhile is missing", self.folder)

    def _lost(self, session: SessionRecorder, place: int) -> None:
        session.lost(place)
        self.owes(session)

    def _require_room(self) -> None:
        """Raises OSError past the limit; somebody may have made room."""
        if self.num_bytes > self._limit and self._retry.is_waiting:
            self.num_bytes = _size_of(self.folder)
        if self.num_bytes > self._limit:
            raise OSError(f"{self.folder} holds {self.num_bytes / 1e9:.1f} GB, the limit")


class SessionRecorder:
    """One session's. Calls come in the session's own order, and return at once."""

    def __init__(self, recorder: Recorder, session_id: str, about: Mapping[str, Any]) -> None:
        self._recorder = recorder
        self._session_id = session_id
        self._about = dict(about)
        self._began = time.time()
        self._folder: Path | None = None
        self._num_ticks = 0
        self._num_asked = 0  # ticks and events
        self.num_done = 0  # of these: written, or told to be missing; the writing thread's
        self._last: tuple[int, Callable[[], None]] | None = None  # the end's place and line
        self._is_torn = False  # events.jsonl ends within a line
        self._told = False  # the log knows that something is missing
        self._lost_asking = self._lost_writing = 0  # each set by one thread

    @property
    def lost_until(self) -> int:
        """Nothing before this place will still be written, once nothing waits."""
        return max(self._lost_asking, self._lost_writing)

    @property
    def folder(self) -> Path | None:
        """Where it is written; None before there is something."""
        return self._folder

    def tick(self, reply: PolicyReply) -> None:
        """An answered one, with what was observed."""
        number, now = self._num_ticks, time.time()
        self._num_ticks += 1
        if self._ask(lambda: self._write_tick(number, now, reply)):
            self._told = False
        elif not self._told:
            self._told = True
            logger.warning("session %s: tick %d is not recorded: the disk is behind or full", self._session_id, number)

    def event(self, name: str, **details: Any) -> None:
        now = time.time()
        if not self._num_ticks:
            if name in _NOT_FROM_HERE:  # what was before its first tick is not in it
                self._about["forked_from"] = f"what was {name} before its first tick"
            return
        line = functools.partial(self._write_event, now, name, details)
        if name == END:
            self._last = (self._num_asked, line)
        self._ask(line)

    def lost(self, place: int) -> None:
        """The writing thread could not do what was asked for at that place."""
        self._lost_writing = max(self._lost_writing, place + 1)

    def settle(self, until: int) -> None:
        """Write that what was asked for before the place `until` is missing, but for the end, which is written late."""
        last = self._last
        is_end_lost = last is not None and self.num_done <= last[0] < until
        self._write_gap(until - is_end_lost)
        if is_end_lost and last is not None:
            self._write(last[0], last[1])

    def _ask(self, work: Callable[[], None]) -> bool:
        place = self._num_asked
        self._num_asked += 1
        if self._recorder.put(self, place, lambda: self._write(place, work)):
            return True
        self._lost_asking = place + 1
        self._recorder.owes(self)
        return False

    def _write(self, place: int, work: Callable[[], None]) -> None:
        self._write_gap(place)
        work()
        self.num_done = place + 1

    def _write_gap(self, until: int) -> None:
        """A line for what is missing before the place `until`, if anything is."""
        if until > self.num_done:
            self._write_event(time.time(), "gap", {"missing": until - self.num_done})
            self.num_done = until

    def _write_tick(self, number: int, now: float, reply: PolicyReply) -> None:
        observation = reply.observation
        assert observation is not None, "an imagined tick is an event, not a tick"
        tensors = {
            f"frames.{name}": torch.from_numpy(np.array(frames))
            for name, frames in observation.frames.items()
            if frames is not None
        }
        tensors |= {f"state.{key}": torch.from_numpy(np.array(value)) for key, value in observation.state.items()}
        tensors["actions"] = torch.from_numpy(np.array(reply.actions))
        tensors["video_latents"] = reply.result.video_latents.cpu().contiguous()
        file = f"{number:06d}.safetensors"
        path = self._open() / TICKS / file
        partial = path.with_suffix(".partial")
        try:
            save_file(tensors, partial)
            os.replace(partial, path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        self._recorder.wrote(path.stat().st_size)
        facts = reply.facts
        details = {
            "file": file,
            "prompt": observation.prompt,
            "num_frames": observation.num_frames,
            "restart_reason": facts["restart_reason"],
            "frames_cached": facts["frames_cached"],
            "blocks_used": facts["blocks_used"],
            "blocks_free": facts["blocks_free"],
            "timings_ms": {stage: round(value, 3) for stage, value in reply.timings.items()},
            "warnings": list(reply.warnings),
        }
        self._write_event(now, "tick", {"tick": number, **details})

    def _write_event(self, now: float, name: str, details: Mapping[str, Any]) -> None:
        said = {"event": name, "seconds": round(now - self._began, 4), **details}
        line = ("\n" if self._is_torn else "") + json.dumps(said) + "\n"
        with (self._open() / EVENTS_FILE).open("ab", buffering=0) as file:
            end = file.tell()
            try:
                _write_all(file, line.encode())
            except OSError:
                self._is_torn = True
                file.truncate(end)  # half a line would spoil the next one
                self._is_torn = line.startswith("\n")
                raise
        self._is_torn = False
        self._recorder.wrote(len(line))

    def _open(self) -> Path:
        """The session's folder, made when there is something to write."""
        if self._folder is None:
            began = datetime.fromtimestamp(self._began, UTC)
            name = re.sub(r"[^\w.-]", "_", self._session_id, flags=re.ASCII)[:64].lstrip(".") or "session"
            folder, number = self._recorder.folder / f"{began:%Y%m%d-%H%M%S}-{name}", 1
            while True:
                try:
                    folder.mkdir(parents=True)
                    break
                except FileExistsError:
                    number += 1
                    folder = self._recorder.folder / f"{began:%Y%m%d-%H%M%S}-{name}-{number}"
            said = {"format": FORMAT, "session_id": self._session_id, "began": began.isoformat(), **self._about}
            try:
                (folder / TICKS).mkdir()
                (folder / SESSION_FILE).write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")
            except OSError:
                shutil.rmtree(folder, ignore_errors=True)  # half of one would look like a damaged recording
                raise
            self._folder = folder
        return self._folder


class _Paused(Exception):
    """It is too early to try the disk again."""


class _Retry:
    """When the disk is tried again after it failed: after `first_s`, then twice as long each time, up to a limit."""

    def __init__(self, first_s: float) -> None:
        self._first = self._pause = first_s
        self._at: float | None = None  # None: it works
        self._worked_at = 0.0

    @property
    def is_waiting(self) -> bool:
        return self._at is not None

    def due(self) -> bool:
        return self._at is None or time.monotonic() >= self._at

    def hurry(self) -> None:
        if self._at is not None:
            self._at = time.monotonic()

    def seconds_left(self) -> float:
        return 0.0 if self._at is None else max(self._at - time.monotonic(), 0.0)

    def failed(self) -> bool:
        """Whether it worked before."""
        now, was_waiting = time.monotonic(), self.is_waiting
        if not was_waiting and now - self._worked_at > _LONGEST_PAUSE_S:
            self._pause = self._first
        self._at = now + self._pause
        self._pause = min(2 * self._pause, max(self._first, _LONGEST_PAUSE_S))
        return not was_waiting

    def worked(self) -> bool:
        """Whether it had failed before."""
        if self._at is None:
            return False
        self._at, self._worked_at = None, time.monotonic()
        return True


def _size_of(folder: Path) -> int:
    """Of all files in it, in bytes. What is deleted meanwhile counts as nothing."""
    total = 0
    for path in folder.rglob("*"):
        with suppress(OSError):
            total += path.stat().st_size if path.is_file() else 0
    return total


def _write_all(file: RawIOBase, data: bytes) -> None:
    """A nearly full disk takes a part and says no error."""
    while data:
        written = file.write(data)
        data = data[written or 0 :]
