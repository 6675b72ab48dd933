"""Writes sessions to disk as they run: what was observed, what was answered, when; `recording` reads it back.

One folder a session: session.json says who and what, events.jsonl has a line per tick, reset and end, in order, and
ticks/ a safetensors file per tick. A thread of its own writes; serving never waits for it. What it cannot keep up with,
or has no room for, is not recorded, and the recording says so.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import re
import threading
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
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
_MAX_WAITING = 64  # ticks; 2 MB each for DROID

logger = logging.getLogger(__name__)


class Recorder:
    """Records every session of a policy under `folder`. `about` goes into each session.json. Thread-safe.

    Past `limit_bytes` it records no more. `close` writes what waits.
    """

    def __init__(self, folder: Path, about: Mapping[str, Any], limit_bytes: float = float("inf")) -> None:
        """Raises OSError where the folder cannot be made."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.num_bytes = sum(
            path.stat().st_size for path in folder.rglob("*") if path.is_file()
        )  # of all sessions there
        self._about = dict(about)
        self._limit = limit_bytes
        self._works: queue.Queue[Callable[[], None] | None] = queue.Queue(_MAX_WAITING)
        self._failed = False
        self.wrote(0)
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

    def put(self, work: Callable[[], None]) -> bool:
        """Have `work` done soon; False where there is no room for it."""
        if self._failed:
            return False
        try:
            self._works.put_nowait(work)
        except queue.Full:
            return False
        return True

    def wrote(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        if self.num_bytes > self._limit and not self._failed:
            logger.warning("recording stops: %s holds %.1f GB, the limit", self.folder, self.num_bytes / 1e9)
            self._failed = True

    def _run(self) -> None:
        while (work := self._works.get()) is not None:
            if self._failed:  # what had been taken before that
                continue
            try:
                work()
            except (OSError, SafetensorError) as error:  # a full disk, say: robots go on
                if not self._failed:
                    logger.warning("recording stops: %s", error)
                self._failed = True
            except Exception:
                logger.exception("a tick was not recorded")


class SessionRecorder:
    """One session's. Calls come in the session's own order, and return at once."""

    def __init__(self, recorder: Recorder, session_id: str, about: Mapping[str, Any]) -> None:
        self._recorder = recorder
        self._session_id = session_id
        self._about = dict(about)
        self._began = time.time()
        self._folder: Path | None = None
        self._num_ticks = 0
        self._gap = False

    @property
    def folder(self) -> Path | None:
        """Where it is written; None before there is something."""
        return self._folder

    def tick(self, reply: PolicyReply) -> None:
        """An answered one, with what was observed."""
        number, now = self._num_ticks, time.time()
        self._num_ticks += 1
        self._tell_gap(now)
        if not self._recorder.put(lambda: self._write_tick(number, now, reply)) and not self._gap:
            self._gap = True
            logger.warning("session %s: tick %d is not recorded: the disk is behind or full", self._session_id, number)

    def event(self, name: str, **details: Any) -> None:
        now = time.time()
        if not self._num_ticks:
            if name in _NOT_FROM_HERE:  # what was before its first tick is not in it
                self._about["forked_from"] = f"what was {name} before its first tick"
            return
        self._tell_gap(now)
        if not self._recorder.put(lambda: self._write_event(now, name, details)):
            self._gap = True

    def _tell_gap(self, now: float) -> None:
        """As soon as there is room: something before this is not recorded."""
        if self._gap and self._recorder.put(lambda: self._write_event(now, "gap", {})):
            self._gap = False

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
        line = json.dumps({"event": name, "seconds": round(now - self._began, 4), **details}) + "\n"
        with (self._open() / EVENTS_FILE).open("a", encoding="utf-8") as file:
            file.write(line)
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
            (folder / TICKS).mkdir()
            said = {"format": FORMAT, "session_id": self._session_id, "began": began.isoformat(), **self._about}
            (folder / SESSION_FILE).write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")
            self._folder = folder
        return self._folder
