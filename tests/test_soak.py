"""64 clients that come, go, reset, fork, send rubbish and vanish, beside robots that must not notice.

WORLDKV_SOAK_SECONDS=300 makes it a soak of minutes; the default is what a test run can bear.
"""

from __future__ import annotations

import ctypes
import gc
import json
import logging
import os
import random
import socket
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("diffusers")
pytest.importorskip("fastapi")

from engines import droid_observation, random_checkpoint
from server_fakes import ask, eventually, http_get, raw_client, receive

from worldkv.client import PolicyClient
from worldkv.engine.engine import EngineConfig
from worldkv.errors import ConnectionLost, RemoteError
from worldkv.load import load_policy
from worldkv.server.server import PolicyServer, ServerConfig
from worldkv.wire import pack

SECONDS = float(os.environ.get("WORLDKV_SOAK_SECONDS", "20"))
NUM_STEADY, TICKS = 8, 4
PAUSES = {"comer": (0, 0.3), "vanisher": (0.2, 2), "resetter": (0, 0.3), "rubbish": (0.2, 2), "planner": (0, 0.3)}
MOST_GROWTH_MIB = 64  # of the process, from the first third to the end: allocator slack, not a leak of minutes

pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning"), pytest.mark.timeout(SECONDS + 240)]


class Soak:
    """The server under test and what its clients were told."""

    def __init__(self, server: PolicyServer) -> None:
        self.port = server.port
        self.until = time.monotonic() + SECONDS
        self.told: Counter[tuple[str, str]] = Counter()  # (who, error code)
        self.done: Counter[str] = Counter()
        self.failures: list[str] = []

    def running(self) -> bool:
        return time.monotonic() < self.until and not self.failures

    def blame(self, who: str, text: str, *allowed: str) -> None:
        """An error was told; it has to be one that this client brought about, or a full house."""
        code = text.split(":", 1)[0]
        self.told[who, code] += 1
        if code not in ("admission_refused", *allowed):
            self.failures.append(f"{who} was told: {text}")

    def call(self, who: str, method: str, path: str, body: Any = None, *allowed: str) -> dict[str, Any] | None:
        data = None if body is None else json.dumps(body).encode()
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/v1{path}", data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                reply: dict[str, Any] = json.load(response)
                return reply
        except urllib.error.HTTPError as error:
            with error:
                told = json.load(error)
            self.blame(who, f"{told['code']}: {told['message']}", *allowed)
            return None

    def infer(self, who: str, client: PolicyClient, observation: dict[str, Any], *allowed: str) -> np.ndarray | None:
        """Actions; None after an error that is allowed."""
        try:
            reply = client.infer(observation)
        except RemoteError as error:
            self.blame(who, str(error), *allowed)
            return None
        self.done[who] += 1
        return np.array(reply["actions"] if isinstance(reply, dict) else reply)


def observation(seed: int, tick: int) -> dict[str, Any]:
    rng, prompt = np.random.default_rng([seed, tick]), f"do task {seed % 3}"
    return droid_observation(rng, 1 if tick == 0 else 4, prompt, size=(45, 80))


def steady(soak: Soak, number: int, expected: list[np.ndarray]) -> None:
    """Episode after episode; whatever is refused for want of room is tried again, and comes out the same."""
    with PolicyClient(port=soak.port, session_id=f"steady {number}") as client:
        while soak.running():
            for tick in range(TICKS):
                actions = None
                while actions is None and soak.running():
                    actions = soak.infer("steady", client, observation(number, tick))
                    if actions is None:
                        time.sleep(0.05)
                if actions is not None and _relative_error(actions, expected[tick]) > 1e-5:
                    soak.failures.append(f"steady {number}, tick {tick}: another result than alone")
            if soak.running():
                client.reset()


def _relative_error(ours: np.ndarray, alone: np.ndarray) -> float:
    return float(np.linalg.norm(ours - alone) / np.linalg.norm(alone))


def comer(soak: Soak, dice: random.Random) -> None:
    """A new session for some ticks; some in openpi's dialect, whose connection is the session."""
    with PolicyClient(port=soak.port) as client:
        for tick in range(dice.randrange(1, 4)):
            if soak.infer("comer", client, observation(dice.randrange(100), tick)) is None:
                return
    soak.call("comer", "DELETE", f"/sessions/{client.session_id}")


def vanisher(soak: Soak, dice: random.Random) -> None:
    """Gone in the middle of a tick, of a frame, or of the greeting."""
    if dice.random() < 0.3:
        with socket.create_connection(("127.0.0.1", soak.port)) as plain:
            plain.send(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\n"[: dice.randrange(1, 50)])
        return
    named = {"endpoint": "infer", "session_id": f"ghost {dice.randrange(4)}"} if dice.random() < 0.5 else {}
    message = {k: v for k, v in observation(1, 0).items() if named or "image_0" not in k} | named
    with raw_client(soak.port) as ws:
        ws.send(pack(message))
        time.sleep(dice.uniform(0, 0.1))
        with suppress(OSError):
            ws.socket.shutdown(socket.SHUT_RDWR)
    soak.done["vanisher"] += 1


def resetter(soak: Soak, dice: random.Random) -> None:
    """Two sockets on one session: one ticks, the other resets it or closes it under its hands."""
    name = f"reset {dice.randrange(6)}"
    with PolicyClient(port=soak.port, session_id=name) as client:
        other = threading.Thread(target=_disturb, args=(soak, name, dice.choice(["reset", "delete"])))
        other.start()
        for tick in range(3):
            soak.infer("resetter", client, observation(5, tick), "session_ended", "session_busy", "session_not_found")
        other.join()


def _disturb(soak: Soak, name: str, how: str) -> None:
    time.sleep(0.05)
    method, path = ("POST", f"/sessions/{name}/reset") if how == "reset" else ("DELETE", f"/sessions/{name}")
    soak.call("resetter", method, path.replace(" ", "%20"), None, "session_not_found")


def rubbish(soak: Soak, dice: random.Random) -> None:
    bad: list[Any] = [
        dice.randbytes(dice.randrange(1, 2000)),
        pack({"endpoint": "dance"}),
        pack(observation(0, 0) | {"endpoint": "infer", "prompt": "x" * 100_000}),
        pack(observation(0, 0) | {"endpoint": "infer", "observation/joint_position": np.full(7, np.nan)}),
        pack(observation(0, 0) | {"endpoint": "infer", "observation/wrist_image_left": np.zeros((0, 0, 3), np.uint8)}),
        b"\x91" * 5000,
        "text",
    ]
    with raw_client(soak.port) as ws:
        text = ask(ws, dice.choice(bad)) if (chosen := dice.choice(bad)) != "text" else _send_text(ws, chosen)
        soak.blame("rubbish", str(text), "bad_request")
    soak.call("rubbish", "POST", "/sessions", {"session_id": dice.choice([3, "", None, []]), "x": 1}, "bad_request")
    soak.done["rubbish"] += 1


def _send_text(ws: Any, text: str) -> Any:
    ws.send(text)
    return receive(ws)


def planner(soak: Soak, dice: random.Random) -> None:
    """Snapshots, forks, futures, a way back, parking."""
    name = f"plan-{dice.randrange(1 << 30)}"
    children = [f"{name}-{i}" for i in range(2)]
    with PolicyClient(port=soak.port, session_id=name) as client:
        if soak.infer("planner", client, observation(7, 0)) is None:
            return
        taken = soak.call("planner", "POST", f"/sessions/{name}/snapshot")
        if taken is not None:
            for child in children:
                body = {"session_id": child, "snapshot_id": taken["snapshot_id"]}
                if soak.call("planner", "POST", f"/sessions/{name}/fork", body) is not None:
                    with PolicyClient(port=soak.port, session_id=child) as other:
                        soak.infer("planner", other, observation(8, 1))
                    soak.call("planner", "DELETE", f"/sessions/{child}")
            soak.call("planner", "POST", f"/sessions/{name}/restore", {"snapshot_id": taken["snapshot_id"]})
            soak.call("planner", "POST", f"/sessions/{name}/park")
            soak.infer("planner", client, observation(7, 1))
            soak.call("planner", "DELETE", f"/snapshots/{taken['snapshot_id']}")
    soak.call("planner", "DELETE", f"/sessions/{name}")


def client_thread(soak: Soak, act: Callable[[Soak, random.Random], None], seed: int) -> None:
    dice = random.Random(seed)
    while soak.running():
        try:
            act(soak, dice)
        except ConnectionLost as error:
            soak.failures.append(f"{act.__name__} lost its connection: {error}")
        except Exception as error:
            soak.failures.append(f"{act.__name__} failed: {type(error).__name__}: {error}")
        time.sleep(dice.uniform(*PAUSES[act.__name__]))


@contextmanager
def serving() -> Iterator[PolicyServer]:
    """Room for 20 sessions and their snapshots, so that many have to be parked or refused."""
    engine = EngineConfig(block_size=16, max_sessions=20)
    policy = load_policy(random_checkpoint("ti2v"), engine)
    try:
        with PolicyServer(policy, ServerConfig(port=0, session_grace_s=2.0)) as server:
            eventually(lambda: http_get(server.port, "/healthz")[0] == 200, 30)
            yield server
        capacity = policy.engine.capacity()
        assert capacity.num_charged == capacity.blocks_shared, "something is charged to nobody"
    finally:
        policy.close()
        policy.engine.shutdown()
        policy.engine.core.cache.pool.check()
        assert policy.engine.core.cache.pool.num_used == 0


def resident_mib() -> float:
    """What is really held: first what is free goes back to the system."""
    gc.collect()
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE") / 2**20


def alone(port: int, number: int) -> list[np.ndarray]:
    with PolicyClient(port=port) as client:
        return [np.array(client.infer(observation(number, tick))) for tick in range(TICKS)]


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from /proc")
def test_64_clients_of_every_kind_and_nobody_suffers_for_another(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.CRITICAL)  # a record kept for the report would keep its request's frames
    kinds = {comer: 14, vanisher: 12, resetter: 10, rubbish: 10, planner: 10}
    with serving() as server:
        expected = [alone(server.port, number) for number in range(NUM_STEADY)]
        soak = Soak(server)
        threads = [threading.Thread(target=steady, args=(soak, n, expected[n])) for n in range(NUM_STEADY)]
        seeds = iter(range(1000))
        for act, count in kinds.items():
            threads += [threading.Thread(target=client_thread, args=(soak, act, next(seeds))) for _ in range(count)]
        assert len(threads) == 64
        for thread in threads:
            thread.start()
        time.sleep(SECONDS / 3)
        early = resident_mib()
        for thread in threads:
            thread.join()
        late = resident_mib()
        print(f"\n{SECONDS:g} s; done {dict(soak.done)}; told {dict(soak.told)}; {early:.0f} -> {late:.0f} MiB")
        assert not soak.failures, "\n".join(soak.failures[:10])
        assert soak.done["steady"] >= NUM_STEADY * TICKS, "the steady ones starved"
        assert all(soak.done[act.__name__] for act in (comer, vanisher, resetter, rubbish, planner))
        assert late - early < MOST_GROWTH_MIB
        assert "worldkv_connections 0.0" in http_get(server.port, "/metrics")[1]
        assert http_get(server.port, "/healthz")[0] == 200
