"""`/v1` over a real tiny engine: the same sessions as the robots', the same errors, nothing of anybody else's."""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("diffusers")
pytest.importorskip("fastapi")

from engines import droid_observation, random_checkpoint
from server_fakes import ask, eventually, http_get, raw_client, receive
from websockets.exceptions import ConnectionClosed

from worldkv.client import PolicyClient
from worldkv.engine.engine import EngineConfig
from worldkv.kv.transfer import ParkJob
from worldkv.load import load_policy
from worldkv.server.server import PolicyServer, ServerConfig
from worldkv.wire import pack

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@contextmanager
def serving(*, room: int = 6, **config: Any) -> Iterator[PolicyServer]:
    engine = EngineConfig(block_size=16, max_sessions=room, batch_invariant=True, park_when_full=False)
    policy = load_policy(random_checkpoint("ti2v"), engine)
    try:
        with PolicyServer(policy, ServerConfig(port=0, **config)) as server:
            eventually(lambda: http_get(server.port, "/healthz")[0] == 200, 30)
            yield server
        assert policy.engine.capacity().num_charged == policy.engine.capacity().blocks_shared, "charges leaked"
    finally:
        policy.close()
        policy.engine.shutdown()
        policy.engine.core.cache.pool.check()
        assert policy.engine.core.cache.pool.num_used == 0


@pytest.fixture(scope="module")
def server() -> Iterator[PolicyServer]:
    with serving() as server:
        yield server


def call(
    server: PolicyServer, method: str, path: str, body: Any = None, key: str | None = None, **headers: str
) -> tuple[int, Any]:
    """(status, decoded JSON)"""
    data = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
    headers |= {"content-type": "application/json"}
    if key is not None:
        headers["authorization"] = f"Api-Key {key}"
    request = urllib.request.Request(f"http://127.0.0.1:{server.port}{path}", data, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def observation(tick: int, seed: int = 0) -> dict[str, Any]:
    return droid_observation(np.random.default_rng([seed, tick]), 1 if tick == 0 else 4)


def tick(server: PolicyServer, session_id: str, number: int, key: str | None = None, seed: int = 0) -> np.ndarray:
    with PolicyClient(port=server.port, session_id=session_id, api_key=key) as client:
        return np.array(client.infer(observation(number, seed)))


def delete(server: PolicyServer, *session_ids: str, key: str | None = None) -> None:
    for session_id in session_ids:
        assert call(server, "DELETE", f"/v1/sessions/{session_id}", key=key) == (200, {"ended": "deleted"})


def test_a_session_opened_here_is_ticked_there_and_seen_in_both(server: PolicyServer) -> None:
    status, opened = call(server, "POST", "/v1/sessions", {"session_id": "arm"})
    assert (status, opened["session_id"], opened["frames_seen"], opened["blocks"]) == (201, "arm", 0, 0)
    tick(server, "arm", 0)
    _, state = call(server, "GET", "/v1/sessions/arm")
    assert (state["state"], state["busy"], state["frames_seen"], state["named"]) == ("live", False, 1, True)
    assert state["blocks"] > 0
    assert [s["session_id"] for s in call(server, "GET", "/v1/sessions")[1]["sessions"]] == ["arm"]
    assert call(server, "POST", "/v1/sessions/arm/reset")[1]["frames_seen"] == 0
    delete(server, "arm")
    assert call(server, "GET", "/v1/sessions")[1] == {"sessions": []}
    with raw_client(server.port, greeted=False) as ws:
        receive(ws)
        text = ask(ws, observation(0) | {"endpoint": "infer", "session_id": "arm"})
    assert "session arm has ended: it was deleted (deleted)" in text, "its robot is told once"


def test_an_id_may_hold_slashes_and_the_server_may_choose_one(server: PolicyServer) -> None:
    assert call(server, "POST", "/v1/sessions", {"session_id": "lab/left arm"})[0] == 201
    assert call(server, "GET", "/v1/sessions/lab/left%20arm")[1]["session_id"] == "lab/left arm"
    assert call(server, "POST", "/v1/sessions/lab%2Fleft%20arm/reset")[0] == 200
    status, chosen = call(server, "POST", "/v1/sessions")
    assert (status, len(chosen["session_id"])) == (201, 32)
    delete(server, "lab/left%20arm", chosen["session_id"])


def test_a_snapshot_is_restored_and_forked_and_both_go_on_bit_for_bit(server: PolicyServer) -> None:
    for number in range(2):
        tick(server, "robot", number)
    status, snapshot = call(server, "POST", "/v1/sessions/robot/snapshot")
    assert (status, snapshot["session_id"], snapshot["frames_seen"]) == (201, "robot", 3)
    assert snapshot["blocks_charged"] > 0
    expected = tick(server, "robot", 2)
    name = {"snapshot_id": snapshot["snapshot_id"]}
    assert call(server, "POST", "/v1/sessions/robot/restore", name)[1]["frames_seen"] == 3
    assert np.array_equal(tick(server, "robot", 2), expected)
    assert call(server, "POST", "/v1/sessions/robot/fork", name | {"session_id": "twin"})[0] == 201
    assert np.array_equal(tick(server, "twin", 2), expected)
    assert call(server, "POST", "/v1/sessions/twin/fork", {"session_id": "third"})[1]["frames_seen"] == 5
    assert np.array_equal(tick(server, "third", 3), tick(server, "robot", 3)), "frames remembered, K/V and noise alike"
    delete(server, "robot", "twin", "third")
    assert [s["snapshot_id"] for s in call(server, "GET", "/v1/snapshots")[1]["snapshots"]] == [name["snapshot_id"]]
    assert call(server, "DELETE", f"/v1/snapshots/{name['snapshot_id']}") == (200, {"ended": "released"})
    status, error = call(server, "DELETE", f"/v1/snapshots/{name['snapshot_id']}")
    assert (status, error["code"]) == (404, "snapshot_not_found")


def test_a_parked_session_shows_its_bytes_and_comes_back_with_its_next_tick(server: PolicyServer) -> None:
    tick(server, "sleeper", 0)
    tick(server, "awake", 0)
    parked = call(server, "POST", "/v1/sessions/sleeper/park")[1]
    assert (parked["state"], parked["blocks"], parked["frames_seen"]) == ("parked", 0, 1)
    assert parked["bytes_parked"] > 0
    assert f"worldkv_parked_bytes {float(parked['bytes_parked'])}" in http_get(server.port, "/metrics")[1]
    assert np.array_equal(tick(server, "sleeper", 1), tick(server, "awake", 1))
    assert call(server, "GET", "/v1/sessions/sleeper")[1]["state"] == "live"
    call(server, "POST", "/v1/sessions/sleeper/park")
    for _ in range(2):  # without a tick, too; safe twice
        resumed = call(server, "POST", "/v1/sessions/sleeper/resume")[1]
        assert (resumed["state"], resumed["bytes_parked"], resumed["frames_seen"]) == ("live", 0, 3)
    assert np.array_equal(tick(server, "sleeper", 2), tick(server, "awake", 2))
    delete(server, "sleeper", "awake")


def test_capacity_and_metrics_agree(server: PolicyServer) -> None:
    tick(server, "one", 0)
    tick(server, "two", 0)
    books = call(server, "GET", "/v1/capacity")[1]
    metrics = http_get(server.port, "/metrics")[1]
    assert books["num_charged"] == 2 * books["blocks_per_session"] + books["blocks_shared"]
    assert str(books["num_blocks"]) in books["explanation"]
    for state, name in (("total", "num_blocks"), ("used", "num_used"), ("charged", "num_charged")):
        assert f'worldkv_blocks{{state="{state}"}} {float(books[name])}' in metrics
    assert f'worldkv_blocks{{state="free"}} {float(books["num_blocks"] - books["num_used"])}' in metrics
    hits = float(metrics.split('worldkv_conditioning_lookups_total{outcome="hit"} ')[1].split()[0])
    assert hits > 0, "the second session's prompt was stored"
    assert 'worldkv_rows_per_forward_bucket{le="2"}' in metrics
    delete(server, "one", "two")


REFUSED = {
    "id taken": ("POST", "/v1/sessions", {"session_id": "held"}, 400, "'held' is open already"),
    "id of a wrong type": ("POST", "/v1/sessions", {"session_id": 3}, 400, "session_id: Input should be a valid"),
    "id empty": ("POST", "/v1/sessions", {"session_id": ""}, 400, "session_id: expected 1 to 256"),
    "unknown field": ("POST", "/v1/sessions", {"session": "a"}, 400, "session: Extra inputs are not permitted, got"),
    "no JSON": ("POST", "/v1/sessions", b"{", 400, "JSON decode error"),
    "no UTF-8": ("POST", "/v1/sessions", b"\xff\xfe", 400, ""),
    "a bomb": ("POST", "/v1/sessions", b"[" * 60_000, 400, ""),
    "too long": ("POST", "/v1/sessions", b" " * 100_000, 413, "body: expected at most 65536 bytes"),
    "unknown session": ("GET", "/v1/sessions/nobody", None, 404, "session nobody is not known here"),
    "unknown session's end": ("DELETE", "/v1/sessions/nobody", None, 404, "session nobody is not known here"),
    "unknown snapshot": (
        "POST", "/v1/sessions/held/restore", {"snapshot_id": "x"}, 404, "snapshot x is not known here",
    ),
    "no snapshot": ("POST", "/v1/sessions/held/restore", {}, 400, "snapshot_id: Field required"),
    "unknown verb": ("POST", "/v1/sessions/held/dance", None, 404, "no such operation; /openapi.json lists all"),
    "unknown path": ("GET", "/v2", None, 404, "no such operation; /openapi.json lists all"),
}  # fmt: skip


@pytest.mark.parametrize(("method", "path", "body", "status", "text"), REFUSED.values(), ids=REFUSED)
def test_a_bad_request_is_told_in_json_and_changes_nothing(
    server: PolicyServer, method: str, path: str, body: Any, status: int, text: str
) -> None:
    call(server, "POST", "/v1/sessions", {"session_id": "held"})
    came, error = call(server, method, path, body)
    assert came == status
    assert text in error["message"]
    assert set(error) <= {"code", "message", "error_id", "retry_after_ms"}
    assert "Traceback" not in json.dumps(error)
    assert call(server, "GET", "/v1/sessions/held")[0] == 200, "the server and the session are as before"
    assert len(call(server, "GET", "/v1/sessions")[1]["sessions"]) == 1


def test_what_does_not_fit_is_refused_with_what_would_help_and_when_to_come_back() -> None:
    with serving(room=2, session_grace_s=60) as server:
        for name in ("a", "b"):
            tick(server, name, 0)
        status, error = call(server, "POST", "/v1/sessions", {"session_id": "c"})
        assert (status, error["code"]) == (429, "admission_refused")
        assert "close a session, release a snapshot" in error["message"]
        assert error["retry_after_ms"] > 0
        assert call(server, "POST", "/v1/sessions/a/snapshot")[0] == 429
        assert call(server, "POST", "/v1/sessions/a/fork")[0] == 429
        assert 'worldkv_errors_total{code="admission_refused"} 3.0' in http_get(server.port, "/metrics")[1]
        delete(server, "b")
        assert call(server, "POST", "/v1/sessions/a/fork", {"session_id": "c"})[0] == 201


def test_every_operation_is_described() -> None:
    with serving() as server:
        status, described = call(server, "GET", "/openapi.json")
    assert status == 200
    operations = {f"{method.upper()} {path}" for path, methods in described["paths"].items() for method in methods}
    one = "/v1/sessions/{session_id}"
    assert operations == {
        "GET /v1/sessions", "POST /v1/sessions", f"GET {one}", f"DELETE {one}", f"POST {one}/reset", f"POST {one}/park",
        f"POST {one}/snapshot", f"POST {one}/restore", f"POST {one}/fork", "GET /v1/snapshots",
        "DELETE /v1/snapshots/{snapshot_id}", "GET /v1/capacity", "GET /v1/app", "GET /v1/embodiment",
        f"POST {one}/imagine", f"GET {one}/stream", f"GET {one}/recording", f"POST {one}/resume",
        f"GET {one}/export", "POST /v1/sessions/import",
    }  # fmt: skip
    assert "Failure" in described["components"]["schemas"]


def test_a_session_belongs_to_the_key_that_opened_it() -> None:
    with serving(api_key="ours, theirs") as server:
        ours = tick(server, "arm", 0, key="ours", seed=1)
        tick(server, "arm", 0, key="theirs", seed=2)  # the same id, another session
        snapshot = call(server, "POST", "/v1/sessions/arm/snapshot", key="ours")[1]["snapshot_id"]
        mine = {"session_id": "mine"}
        assert call(server, "POST", "/v1/sessions", mine, key="ours")[0] == 201
        unknown = call(server, "GET", "/v1/sessions/nobody", key="theirs")[1]
        for method, path, body in (
            ("GET", "/v1/sessions/mine", None),
            ("DELETE", "/v1/sessions/mine", None),
            ("POST", "/v1/sessions/mine/reset", None),
            ("POST", "/v1/sessions/mine/fork", {}),
        ):
            status, error = call(server, method, path, body, key="theirs")
            assert status == 404
            assert error["message"] == unknown["message"].replace("nobody", "mine"), "as if it were unknown"
        name = {"snapshot_id": snapshot}
        assert call(server, "POST", "/v1/sessions/arm/restore", name, key="theirs")[1]["code"] == "snapshot_not_found"
        assert call(server, "DELETE", f"/v1/snapshots/{snapshot}", key="theirs")[0] == 404
        assert call(server, "GET", "/v1/snapshots", key="theirs")[1] == {"snapshots": []}
        listed = call(server, "GET", "/v1/sessions", key="theirs")[1]["sessions"]
        assert [state["session_id"] for state in listed] == ["arm"]
        assert call(server, "POST", "/v1/sessions/arm/restore", name, key="ours")[0] == 200
        delete(server, "arm", key="theirs")
        assert np.array_equal(ours, tick(server, "again", 0, key="ours", seed=1))
        assert call(server, "GET", "/v1/sessions/arm", key="ours")[1]["frames_seen"] == 1, (
            "untouched by the other's end"
        )


@pytest.mark.parametrize("key", [None, "wrong", "ours, theirs", "ours,", ""])
def test_without_a_key_nothing_is_told(key: str | None) -> None:
    with serving(api_key="ours,theirs") as server:
        for method, path in (("GET", "/v1/sessions"), ("POST", "/v1/sessions"), ("GET", "/v1/capacity")):
            status, error = call(server, method, path, key=key)
            assert (status, error["code"]) == (401, "unauthorised")
            assert "ours" not in json.dumps(error)
        assert not call(server, "GET", "/v1/sessions", key="ours")[1]["sessions"]


def test_each_key_has_its_limits() -> None:
    limits = {"max_connections": 2, "max_sessions": 2, "max_snapshots": 1}
    with serving(api_key="ours,theirs", **limits) as server:
        for name in ("a", "b"):
            assert call(server, "POST", "/v1/sessions", {"session_id": name}, key="ours")[0] == 201
        status, error = call(server, "POST", "/v1/sessions", {"session_id": "c"}, key="ours")
        assert (status, "2 sessions are open, the most that one client may have" in error["message"]) == (429, True)
        assert call(server, "POST", "/v1/sessions", {"session_id": "c"}, key="theirs")[0] == 201
        tick(server, "a", 0, key="ours")
        assert call(server, "POST", "/v1/sessions/a/snapshot", key="ours")[0] == 201
        status, error = call(server, "POST", "/v1/sessions/a/snapshot", key="ours")
        assert (status, "1 snapshots are held" in error["message"]) == (429, True)
        header = {"additional_headers": {"Authorization": "Api-Key ours"}, "greeted": False}
        with raw_client(server.port, **header) as one, raw_client(server.port, **header) as two:
            receive(one), receive(two)
            with raw_client(server.port, **header) as three:
                assert "2 sockets are open, the most that one client may have" in receive(three)
        eventually(lambda: "worldkv_connections 0.0" in http_get(server.port, "/metrics")[1])
        with raw_client(server.port, **header) as again:
            receive(again)
            again.ping().wait(5)


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://127.0.0.1:1"])
def test_a_page_of_another_site_reaches_nothing(server: PolicyServer, origin: str) -> None:
    assert call(server, "POST", "/v1/sessions", {}, Origin=origin)[1]["code"] == "unauthorised"
    with raw_client(server.port, greeted=False, origin=origin) as ws:
        assert receive(ws).startswith("unauthorised: origin: expected a page of this server")
        with pytest.raises(ConnectionClosed):
            ws.recv(timeout=5)


def test_a_name_that_was_made_to_point_here_is_not_trusted(server: PolicyServer) -> None:
    rebound = {"Origin": "http://evil.example", "Host": "evil.example"}
    assert call(server, "POST", "/v1/sessions", {}, **rebound)[0] == 401
    own = f"http://127.0.0.1:{server.port}"
    status, opened = call(server, "POST", "/v1/sessions", {}, Origin=own)
    assert status == 201
    delete(server, opened["session_id"])


def test_a_snapshot_that_nobody_uses_is_given_back() -> None:
    with serving(session_idle_s=0.5) as server:
        tick(server, "robot", 0)
        assert call(server, "POST", "/v1/sessions/robot/snapshot")[0] == 201
        assert "worldkv_snapshots 1.0" in http_get(server.port, "/metrics")[1]
        eventually(lambda: "worldkv_snapshots 0.0" in http_get(server.port, "/metrics")[1])
        eventually(lambda: call(server, "GET", "/v1/capacity")[1]["num_sessions"] == 0)


def test_operations_during_a_tick_wait_for_it_and_a_reset_ends_it(server: PolicyServer) -> None:
    engine = server._service.app.engine
    executor, slowly = engine.core.executor, [True]
    run = executor.run

    def slow(requests: list[Any]) -> list[Any]:
        time.sleep(0.3 * slowly[0])
        return run(requests)

    executor.run = slow
    try:
        with raw_client(server.port) as ws:
            ws.send(pack(observation(0) | {"endpoint": "infer", "session_id": "busy"}))
            eventually(lambda: call(server, "GET", "/v1/sessions/busy")[1].get("busy") is True)
            status, held = call(server, "POST", "/v1/sessions/busy/snapshot")
            assert (status, held["frames_seen"]) == (201, 1), "frozen within the tick"
            assert call(server, "DELETE", f"/v1/snapshots/{held['snapshot_id']}")[0] == 200
            assert isinstance(receive(ws), np.ndarray)
            ws.send(pack(observation(1) | {"endpoint": "infer", "session_id": "busy"}))
            eventually(lambda: call(server, "GET", "/v1/sessions/busy")[1].get("busy") is True)
            assert call(server, "POST", "/v1/sessions/busy/reset")[0] == 200
            slowly[0] = False
            assert receive(ws).startswith("session_ended: session busy was reset, during this tick")
    finally:
        slowly[0] = False
        executor.run = run
    delete(server, "busy")


def test_metrics_and_health_answer_while_a_session_is_copied_to_the_host(
    server: PolicyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on, copy = threading.Event(), threading.Event(), ParkJob.copy

    def held(job: ParkJob) -> None:
        begun.set()
        assert go_on.wait(20)
        copy(job)

    call(server, "POST", "/v1/sessions", {"session_id": "copied"})
    monkeypatch.setattr(ParkJob, "copy", held)
    thread = threading.Thread(target=call, args=(server, "POST", "/v1/sessions/copied/park"))
    thread.start()
    try:
        assert begun.wait(10)
        assert "worldkv_sessions_parked 0.0" in http_get(server.port, "/metrics")[1]
        assert http_get(server.port, "/healthz")[0] == 200
        assert call(server, "GET", "/v1/capacity")[0] == 200
    finally:
        go_on.set()
        thread.join(10)
    assert "worldkv_sessions_parked 1.0" in http_get(server.port, "/metrics")[1]
    delete(server, "copied")


def endings() -> list[str]:
    """The last word of every operation on a session."""
    from worldkv.server.rest import router

    words = {route.path.rpartition("/")[2] for route in router.routes if "{session_id" in route.path}  # type: ignore[attr-defined]
    return sorted(word for word in words if "{" not in word)


@pytest.mark.parametrize("ending", endings())
def test_an_id_that_ends_like_an_operation_can_be_read_reset_and_deleted(server: PolicyServer, ending: str) -> None:
    assert len(endings()) >= 8
    for name in (f"left/{ending}", ending):
        whole = urllib.parse.quote(name, safe="")
        assert call(server, "POST", "/v1/sessions", {"session_id": name})[0] == 201
        status, told = call(server, "GET", f"/v1/sessions/{whole}")
        assert (status, told.get("session_id")) == (200, name)
        assert call(server, "POST", f"/v1/sessions/{whole}/reset")[1]["session_id"] == name
        assert call(server, "POST", f"/v1/sessions/{name}/reset")[1]["session_id"] == name
        assert call(server, "DELETE", f"/v1/sessions/{whole}")[0] == 200
        assert call(server, "GET", f"/v1/sessions/{whole}")[0] == 404


def test_ids_with_plain_slashes_are_read_as_before(server: PolicyServer) -> None:
    assert call(server, "POST", "/v1/sessions", {"session_id": "left/arm"})[0] == 201
    for path in ("left/arm", "left%2Farm", "left%2farm"):
        assert call(server, "GET", f"/v1/sessions/{path}")[1]["session_id"] == "left/arm"
    assert call(server, "GET", "/v1/sessions/left/arm/recording")[1]["code"] == "bad_request", "nothing is recorded"
    assert call(server, "GET", "/v1/sessions/left/arm?x=/recording")[0] == 200
    assert call(server, "DELETE", "/v1/sessions/left/arm")[0] == 200
