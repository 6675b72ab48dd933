"""The edges of sockets and keys: private sessions, origins, limits, a tick right after a reset."""

from __future__ import annotations

import json
import threading
import time

import pytest
from engines import random_checkpoint
from test_rest import call, observation, serving
from websockets.sync.client import connect

from worldkv.engine.engine import EngineConfig
from worldkv.load import load_policy
from worldkv.wire import pack

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def openpi(tick):
    o = observation(tick)
    o.pop("observation/exterior_image_0_left")
    return o


def test_a_listed_private_session_can_be_read_with_several_keys():
    with serving(api_key="one,two") as server:
        with connect(
            f"ws://127.0.0.1:{server.port}/",
            compression=None,
            max_size=None,
            additional_headers={"Authorization": "Api-Key one"},
        ) as ws:
            ws.recv()
            ws.send(pack(openpi(0)))
            ws.recv(timeout=20)
            listed = call(server, "GET", "/v1/sessions", key="one")[1]["sessions"]
            got = {
                s["session_id"]: call(server, "GET", f"/v1/sessions/{s['session_id']}", key="one")[0] for s in listed
            }

        assert set(got.values()) == {200}


def test_a_robot_can_tick_right_after_somebody_reset_its_session():
    policy = load_policy(random_checkpoint("ti2v"), EngineConfig(block_size=16, max_sessions=2))
    try:
        session = policy.open_session("a")
        session.infer(observation(0)).result()
        gate = threading.Event()
        executor = policy.engine.core.executor
        real = executor.run

        def slow(requests):
            gate.wait(10)
            return real(requests)

        executor.run = slow  # a forward under way
        first = session.infer(observation(1))
        time.sleep(0.5)
        session.reset()
        second = session.infer(observation(0))
        time.sleep(0.3)
        gate.set()
        assert first.exception(5).code == "session_ended"
        second.result(10)
    finally:
        gate.set()
        policy.close()
        policy.engine.shutdown()


def test_a_malformed_origin_is_unauthorised_not_internal():
    with serving() as server:
        assert call(server, "GET", "/v1/sessions", Origin="http://[x")[0] in (400, 401)


def test_console_sockets_count_as_sockets():
    from contextlib import ExitStack

    with serving(max_connections=2) as server, ExitStack() as stack:
        kinds = []
        for _ in range(8):
            ws = stack.enter_context(connect(f"ws://127.0.0.1:{server.port}/v1/console"))
            ws.send("{}")
            kinds.append(json.loads(ws.recv(timeout=10))["type"])

        assert "refused" in kinds
