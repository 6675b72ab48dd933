"""The edges of /v1: listed ids, seeds, snapshots that go while they are used."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future

import pytest
from server_fakes import eventually
from test_rest import call, observation, serving

from worldkv.client import PolicyClient

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def test_a_listed_session_can_be_read_with_several_keys():
    with serving(api_key="one,two") as server, PolicyClient("127.0.0.1", server.port, api_key="one") as robot:
        robot.infer(observation(0))
        listed = call(server, "GET", "/v1/sessions", key="one")[1]["sessions"]

        for s in listed:
            assert call(server, "GET", f"/v1/sessions/{s['session_id']}", key="one")[0] == 200, s["session_id"]


def test_a_noise_seed_beyond_64_bits_is_a_bad_request():
    with serving() as server, PolicyClient("127.0.0.1", server.port) as robot:
        robot.infer(observation(0))
        sid = call(server, "GET", "/v1/sessions")[1]["sessions"][0]["session_id"]
        assert call(server, "POST", f"/v1/sessions/{sid}/imagine", {"noise_seed": 2**70})[0] == 400


def hold(engine):
    gate = threading.Event()
    engine._worker.errand(lambda: gate.wait(20))
    time.sleep(0.7)
    return gate


def test_a_snapshot_released_under_a_waiting_restore_is_not_a_server_fault():
    with serving() as server, PolicyClient("127.0.0.1", server.port) as robot:
        robot.infer(observation(0))
        sid = call(server, "GET", "/v1/sessions")[1]["sessions"][0]["session_id"]
        snap = call(server, "POST", f"/v1/sessions/{sid}/snapshot")[1]["snapshot_id"]
        # DELETE's errand is queued first, as soon as restore has looked the snapshot up
        service = server._service
        entry_restore = service.sessions.ask
        got = []

        async def slow(entry, function, *args):
            import asyncio

            await asyncio.sleep(0.5)
            return await entry_restore(entry, function, *args)

        service.sessions.ask = slow
        t = threading.Thread(
            target=lambda: got.append(call(server, "POST", f"/v1/sessions/{sid}/restore", {"snapshot_id": snap}))
        )
        t.start()
        time.sleep(0.2)
        assert call(server, "DELETE", f"/v1/snapshots/{snap}")[0] == 200
        t.join()
        service.sessions.ask = entry_restore
        assert got[0][0] == 404


def test_a_snapshot_taken_during_shutdown_is_released():
    from engines import random_checkpoint
    from server_fakes import http_get

    from worldkv.engine.engine import EngineConfig
    from worldkv.load import load_policy
    from worldkv.server.server import PolicyServer, ServerConfig

    policy = load_policy(random_checkpoint("ti2v"), EngineConfig(block_size=16, max_sessions=6))
    server = PolicyServer(policy, ServerConfig(port=0)).start()
    try:
        eventually(lambda: http_get(server.port, "/healthz")[0] == 200, 30)
        robot = PolicyClient("127.0.0.1", server.port)
        robot.infer(observation(0), session_id="a") if False else None
        call(server, "POST", "/v1/sessions", {"session_id": "a"})
        service = server._service
        entry = service.sessions.get("a")
        entry.session.infer(observation(0)).result()
        real = entry.session.begin_snapshot

        def slow():
            snapshot, late = real().result(), Future()
            threading.Timer(1.5, late.set_result, [snapshot]).start()
            return late

        entry.session.begin_snapshot = slow
        threading.Thread(target=lambda: call(server, "POST", "/v1/sessions/a/snapshot"), daemon=True).start()
        time.sleep(0.5)
        server.stop()
        time.sleep(2)
        c = policy.engine.capacity()
        assert c.num_charged == c.blocks_shared, f"{c.num_charged - c.blocks_shared} blocks stay charged"
    finally:
        policy.close()
        policy.engine.shutdown()
