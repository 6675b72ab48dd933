"""Robots, operators and time in any order, on a whole server: nobody's history is ever another one than it believes."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule, run_state_machine_as_test
from session_model import KEYS, SNAPSHOTS, Id, Life, RobotsMachine

NAMED = st.sampled_from(["a", "b", "a/env=0", "c"])


class SessionMachine(RobotsMachine):
    @rule(key=st.sampled_from(KEYS), name=NAMED, what=st.sampled_from(["DELETE", "reset", "park", "snapshot"]))
    def operate(self, key: str, name: str, what: str) -> None:
        self._look()
        full, life = (key, name), self.alive.get((key, name))
        if life is not None and (life.in_tick is None or what in ("DELETE", "reset")) and not self._is_dead(full):
            self._operate(full, life, what)
        elif life is None:
            assert self._http(key, "GET", name)[0] == 404

    def _operate(self, full: Id, life: Life, what: str) -> None:
        if what == "DELETE":
            assert self._http(full[0], "DELETE", full[1])[0] == 200
            if life.in_tick is not None:
                self._interrupted(life)
            self._ended(full)
            return
        status, body = self._http(full[0], "POST", f"{full[1]}/{what}", full[1])
        if what == "reset":
            assert status == 200
            self._was_reset(full)
            return
        if status == 429:
            assert what == "snapshot"
            assert sum(key == full[0] for key, _ in self.snapshots.values()) == SNAPSHOTS
            self._pass(body["retry_after_ms"] / 1e3)
            self._look()
            if full not in self.alive or self.alive[full].in_tick is not None:
                return
            status, body = self._http(full[0], "POST", f"{full[1]}/{what}", full[1])
        assert status in (200, 201), body
        self.alive[full].last_used = self.server.now
        if what == "snapshot":
            assert body["frames_seen"] == self.counts.get(full, 0)
            self.snapshots[body["snapshot_id"]] = (full[0], body["frames_seen"])

    @rule(data=st.data(), key=st.sampled_from(KEYS), name=NAMED)
    def restore(self, data: st.DataObject, key: str, name: str) -> None:
        self._look()
        full, life = (key, name), self.alive.get((key, name))
        if not self.snapshots or life is None or life.in_tick is not None or self._is_dead(full):
            return
        snapshot = data.draw(st.sampled_from(sorted(self.snapshots)))
        owner, count = self.snapshots[snapshot]
        status, _ = self._http(key, "POST", f"{name}/restore", name, {"snapshot_id": snapshot})
        assert status in ((200, 404) if owner == key else (404,)), "a snapshot of another key's"
        if status == 404:
            if owner == key:
                del self.snapshots[snapshot]
            return
        life.last_used, self.counts[full] = self.server.now, count
        self.snapshots[snapshot] = (owner, count)

    @rule(key=st.sampled_from(KEYS), name=NAMED, parent=st.sampled_from([None, "a", "b"]))
    def open_or_fork(self, key: str, name: str, parent: str | None) -> None:
        self._look()
        full, source = (key, name), None if parent is None else self.alive.get((key, parent))
        if parent is not None and (source is None or source.in_tick is not None or self._is_dead((key, parent))):
            return
        path = "sessions" if parent is None else f"sessions/{parent}/fork"
        status, body = self.server.http(key, "POST", f"/v1/{path}", {"session_id": name}).result()
        if source is not None and (key, parent) in self.alive:
            source.last_used = self.server.now
        if full in self.alive:
            assert status == 400, "an id is taken"
            return
        assert status in (201, 429), body
        if status == 201:
            self.alive[full] = Life(self.server.now, reserved=True)
            self._told(full)
            self.counts[full] = 0 if parent is None else self.counts.get((key, parent), 0)

    def _http(self, key: str, method: str, path: str, name: str = "", body: Any = None) -> tuple[int, Any]:
        where = "/v1/sessions/" + path
        return self.server.http(key, method, where, body).result()  # type: ignore[no-any-return]

    # the rest

    @rule(key=st.sampled_from(KEYS))
    def ends_are_flushed(self, key: str) -> None:
        for number in range(4):
            status, _ = self.server.http(key, "POST", "/v1/sessions", {"session_id": f"flush {number}"}).result()
            if status == 201:
                assert self._http(key, "DELETE", f"flush {number}")[0] == 200

    @precondition(lambda self: any(life.in_tick is None for life in self.alive.values()))
    @rule(data=st.data())
    def the_engine_ends_one(self, data: st.DataObject) -> None:
        full = data.draw(st.sampled_from([full for full, life in self.alive.items() if life.in_tick is None]))
        session = self.app.live.pop(self._in_table(full), None)
        if session is not None:
            session.ended_by_engine = True
            self.killed.add(full)


def test_robots_operators_and_time_in_any_order() -> None:
    run_state_machine_as_test(
        SessionMachine,
        settings=settings(
            max_examples=30,
            stateful_step_count=40,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate],  # a server of its own each: shrinking takes minutes
        ),
    )
