"""Several viewers that do anything, in any order, and vanish: nothing fails inside, and nothing is left behind."""

from __future__ import annotations

import os
import random
import socket as sockets
import threading
import time
from collections import Counter
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("diffusers")
pytest.importorskip("fastapi")
pytest.importorskip("av")

from server_fakes import eventually
from video_viewers import Block, Viewer, call, running_app, serving, viewer

from worldkv.server.server import PolicyServer

SECONDS = float(os.environ.get("WORLDKV_ANYTHING_S", "5"))
NAMES = ("a", "b", "c")
WORDS = ("a quiet lake", "a storm", "rain")


class Somebody:
    """One viewer after the other on one thread. `told`: how often each error came."""

    def __init__(self, server: PolicyServer, seed: int, marks: list[str]) -> None:
        self.server = server
        self.random = random.Random(seed)
        self.marks = marks
        self.told: Counter[str] = Counter()
        self.num_blocks = 0
        self.failure: BaseException | None = None

    def live(self, until: float) -> None:
        try:
            while time.monotonic() < until:
                self.watch(until)
        except BaseException as error:
            self.failure = error

    def watch(self, until: float) -> None:
        with viewer(self.server, shows=self.random.random() < 0.8) as one:
            for _ in range(self.random.randint(3, 25)):
                if time.monotonic() > until:
                    break
                kind, fields = self.choose()
                one.say(kind, **fields)
                self.listen(one, self.random.random() * 0.3)
            if self.random.random() < 0.5:
                one.socket.socket.shutdown(sockets.SHUT_RDWR)

    def choose(self) -> tuple[str, dict[str, Any]]:
        pick = self.random.choice
        mark = pick(self.marks) if self.marks else "none"
        starts = [
            ("start", {"prompt": pick(WORDS), "session_id": pick(NAMES), "format": pick(["jpeg", "mp4"])}),
            ("start", {"prompt": pick(WORDS), "session_id": pick(NAMES), "pace": "fast"}),
            ("start", {"session_id": pick(NAMES)}),
            ("start", {"from_mark": mark, "session_id": pick(NAMES)}),
        ]
        others = [
            ("prompt", {"prompt": pick(WORDS), "switch": pick(["recache", "keep"]), "id": 1}),
            ("play", {}),
            ("pause", {}),
            ("mark", {"name": "here"}),
            ("seek", {"mark": mark}),
            ("fork", {"count": self.random.randint(1, 4)}),
            ("stop", {}),
            ("shown", {"block": self.random.randint(0, 9)}),
        ]
        return pick(starts if self.random.random() < 0.4 else others)

    def listen(self, one: Viewer, seconds: float) -> None:
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            try:
                message = one.next(timeout=left)
            except TimeoutError:
                return
            if isinstance(message, Block):
                self.num_blocks += 1
            elif message["type"] == "error":
                self.told[message["code"]] += 1
            elif message["type"] == "marked":
                self.marks.append(message["mark"])
            elif message["type"] == "forked" and self.random.random() < 0.7:
                for name in message["sessions"]:
                    call(self.server, "DELETE", f"sessions/{name}")


@pytest.mark.timeout(120 + 2 * SECONDS)
def test_viewers_that_do_anything_leave_nothing_behind() -> None:
    limits = {"max_sessions": 12, "max_snapshots": 8, "session_grace_s": 0.5, "session_idle_s": 5}
    with running_app(max_sessions=6) as app, serving(app, **limits) as server:
        marks: list[str] = []
        people = [Somebody(server, seed, marks) for seed in range(4)]
        until = time.monotonic() + SECONDS
        threads = [threading.Thread(target=one.live, args=(until,), daemon=True) for one in people]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SECONDS + 60)
        told: Counter[str] = sum((one.told for one in people), Counter())
        print(f"{sum(one.num_blocks for one in people)} blocks, told {dict(told)}")
        assert [one.failure for one in people if one.failure is not None] == []
        expected = {"bad_request", "session_not_found", "snapshot_not_found", "admission_refused", "session_ended"}
        assert set(told) <= expected, told
        assert sum(one.num_blocks for one in people) > SECONDS
        eventually(lambda: call(server, "GET", "sessions")["sessions"] == [], 20)
        eventually(lambda: call(server, "GET", "snapshots")["snapshots"] == [], 20)
        eventually(lambda: app.engine.capacity().num_charged == 0, 20)
        assert len(server._service.connections) == 0
