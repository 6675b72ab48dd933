"""What several callers do to one id at once: found in a review, each with the wrong answer it once gave."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
from server_fakes import FakePolicy, FakePolicySession, http_get, serving

from worldkv.errors import AdmissionRefused, BadRequest, SessionNotFound
from worldkv.server.config import ServerConfig
from worldkv.server.metrics import Metrics
from worldkv.server.sessions import Asked, SessionTable


class Forking(FakePolicy):
    def __init__(self, **k):
        super().__init__(**k)
        self.gate = threading.Event()
        self.entered = threading.Event()
        self.threads = ThreadPoolExecutor(4)

    def begin_fork(self, source, session_id):
        def fork():
            assert self.gate.wait(10)
            if getattr(source, "is_closed", False):
                raise SessionNotFound(f"session {source.session_id} is closed")
            return FakePolicy.open_session(self, session_id)

        self.entered.set()
        return self.threads.submit(fork)

    def forked(self, session, source):
        session.source = source
        return session

    def open_session(self, session_id=None):
        if session_id == "x":
            self.entered.set()
            assert self.gate.wait(10)
        return super().open_session(session_id)


def table(policy):
    return SessionTable(policy, ServerConfig(), Metrics(policy.engine), ThreadPoolExecutor(8))


def test_two_forks_to_one_id_do_not_get_the_same_session():
    async def main():
        policy = Forking()
        t = table(policy)
        a = await t.open("a", "")
        b = await t.open("b", "")
        a.has_history = b.has_history = True
        one = asyncio.create_task(t.open("fork", "", a.session))
        await asyncio.sleep(0.05)
        two = asyncio.create_task(t.open("fork", "", b.session))
        await asyncio.sleep(0.05)
        policy.gate.set()
        got = await asyncio.gather(one, two, return_exceptions=True)

        assert isinstance(got[1], BadRequest) or got[1].session.source is b.session, (
            "201 for a fork of b that is a's history"
        )

    asyncio.run(main())


def test_opening_beside_a_robots_first_tick_does_not_disable_reset():
    async def main():
        policy = Forking()
        t = table(policy)
        request = Asked(named=True)
        ticked, more = asyncio.Event(), asyncio.Event()

        async def robot():
            async with t.use("x", object(), request) as entry:
                entry.has_history = True  # as Connection._infer does
                ticked.set()
                await more.wait()

        r = asyncio.create_task(robot())
        await asyncio.sleep(0.05)
        opening = asyncio.create_task(t.open("x", ""))
        await asyncio.sleep(0.05)
        policy.gate.set()
        await ticked.wait()
        await asyncio.gather(opening, return_exceptions=True)
        more.set()
        await r
        await t.reset("x")
        assert policy.live["x"].num_resets == 1, "the reset was answered and nothing was forgotten"

    asyncio.run(main())


def test_forking_an_empty_session_when_full_does_not_delete_it():
    async def main():
        policy = Forking(capacity=1)
        policy.gate.set()
        t = table(policy)
        a = await t.open("a", "")
        with pytest.raises(AdmissionRefused):
            await t.open("fork", "", a.session)
        assert t.get("a")

    asyncio.run(main())


def test_another_keys_open_session_is_not_closed_to_make_room():
    async def main():
        policy = Forking(capacity=1)
        t = table(policy)
        await t.open("a@key1", "key1")
        with suppress(AdmissionRefused):
            await t.open("b@key2", "key2")
        assert t.get("a@key1")

    asyncio.run(main())


class Imagining(FakePolicy):
    def open_session(self, session_id=None):
        assert len(self.live) < self.capacity
        s = self.live[session_id] = ImaginingSession(session_id, self)
        return s


class ImaginingSession(FakePolicySession):
    def describe(self):
        return {"state": "live", "busy": False, "frames_seen": 0, "blocks": 0, "bytes_parked": 0, "inexact": None}

    def imagine(self, seed):
        from concurrent.futures import Future

        f = Future()
        threading.Thread(
            target=lambda: (self.policy.release.wait(20), f.set_exception(BadRequest("x"))), daemon=True
        ).start()
        return f


def test_imagined_ticks_do_not_take_the_servers_threads():
    import json
    import urllib.request

    policy = Imagining(capacity=64)
    with serving(policy) as server:

        def post(path, body=None):
            r = urllib.request.Request(
                f"http://127.0.0.1:{server.port}{path}",
                json.dumps(body or {}).encode(),
                {"content-type": "application/json"},
                method="POST",
            )
            try:
                return urllib.request.urlopen(r, timeout=30).status
            except Exception as e:
                return e

        for i in range(32):
            assert post("/v1/sessions", {"session_id": f"s{i}"}) == 201
        for i in range(32):
            threading.Thread(target=post, args=(f"/v1/sessions/s{i}/imagine",), daemon=True).start()
        time.sleep(1)
        health = http_get(server.port, "/healthz")
        policy.release.set()
        assert health[0] == 200, health
