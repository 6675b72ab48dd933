"""What the clients of a server's sessions may believe, and a machine of its robots and of time: see
`test_session_machine`, which adds the operators."""

from __future__ import annotations

import gc
import logging
import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from clocked_server import ClockedServer, CountingApp, Socket
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from server_fakes import infer_message

from worldkv.server.ends import Ends
from worldkv.server.names import in_env, is_within

GRACE_S, IDLE_S, SWEEP_S = 10.0, 40.0, 2.5
PER_KEY, CAPACITY, SNAPSHOTS = 3, 5, 2
KEYS = ["one", "two"]
NAMES = st.sampled_from([None, "a", "a", "b"])
ENVS = st.sampled_from([None, None, None, "0"])
LONG_AGO = "so long ago"

Id = tuple[str, str]  # key, session id


@dataclass
class Life:
    """An open session as its clients may know it."""

    last_used: float
    private: bool = False
    reserved: bool = False
    with_it: set[Socket] = field(default_factory=set)  # whose last request was for it
    sockets: set[Socket] = field(default_factory=set)  # open ones that have asked for it
    left_at: float | None = None
    in_tick: Socket | None = None

    @property
    def ends_at(self) -> float:
        idle_at = self.last_used + IDLE_S
        return idle_at if self.left_at is None else min(idle_at, max(self.left_at, self.last_used) + GRACE_S)

    def leave(self, socket: Socket, now: float) -> None:
        if socket in self.with_it:
            self.with_it.discard(socket)
            if not self.with_it:
                self.left_at = now


class RobotsMachine(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        logging.disable()  # pytest keeps what is logged, errors with their frames included, which hold sessions
        self.app = CountingApp(CAPACITY)
        self.server = ClockedServer(
            self.app, KEYS, session_grace_s=GRACE_S, session_idle_s=IDLE_S, max_sessions=PER_KEY,
            max_snapshots=SNAPSHOTS,
        )  # fmt: skip
        self.server.service.sessions.ends = Ends(limit=2)
        self.sockets: list[Socket] = []
        self.current: dict[Socket, Id] = {}
        self.at: dict[Socket, str] = {}  # the last request's session, environments left aside
        self.alive: dict[Id, Life] = {}
        self.counts: dict[Id, int] = {}  # ticks of the history that its client believes in
        self.killed: set[Id] = set()  # by the engine
        self.to_tell: set[Id] = set()  # ended, and nobody knows
        self.has_ended: set[Id] = set()
        self.ended_empty: set[Id] = set()
        self.snapshots: dict[str, tuple[str, int]] = {}  # id -> key, ticks
        for key in (*KEYS, KEYS[0]):
            self._connect(key)

    def teardown(self) -> None:
        if not hasattr(self, "server"):
            return
        for socket in list(self.sockets):
            self._close(socket)
        for name in list(self.app.live):
            self.app.live[name].finish_tick()
        self.server.loop.settle()
        self._pass(IDLE_S + 2 * SWEEP_S)
        try:
            assert not self.app.live, "sessions outlive everybody"
            text = self.server.service.metrics.exposition().decode()
            for what in ("sessions", "connections", "snapshots"):
                assert f"\nworldkv_{what} 0.0" in text, text
            self.current.clear()
            gc.collect()
            assert not self.app.made, "something holds sessions that have ended"
            assert all(self.server.http(key, "GET", "/v1/snapshots").result()[1] == {"snapshots": []} for key in KEYS)
        finally:
            self.server.stop()
            logging.disable(logging.NOTSET)

    # what everybody sees

    @invariant()
    def the_list_is_what_must_be_open(self) -> None:
        if hasattr(self, "server"):
            self._look()

    def _look(self) -> None:
        """Whatever has ended meanwhile had its time; whatever had its time has ended."""
        now = self.server.now
        seen: dict[Id, dict[str, Any]] = {}
        for key in KEYS:
            for state in self.server.http(key, "GET", "/v1/sessions").result()[1]["sessions"]:
                seen[key, state["session_id"]] = state
            assert sum(one == key for one, _ in seen) <= PER_KEY, "a key has more sessions than it may"
        assert len(seen) <= CAPACITY
        assert seen.keys() <= self.alive.keys(), "nobody has opened this"
        for name, life in list(self.alive.items()):
            if name in seen:
                assert life.in_tick is not None or now < life.ends_at + SWEEP_S + 0.5, f"{name} lives for too long"
                assert abs(seen[name]["idle_s"] - (now - life.last_used)) < 0.01 or life.in_tick is not None
                assert seen[name]["connections"] == len(life.sockets)
                continue
            if self._is_dead(name) and name in self.killed and now < life.ends_at:
                continue
            del self.alive[name]
            if not self.counts.get(name) and not life.reserved and life.in_tick is None:
                self.ended_empty.add(name)  # it may have made room, or had its time
                continue
            assert now >= life.ends_at, f"{name} ended {life.ends_at - now:g} s too early"
            assert life.in_tick is None, f"{name} ended in a tick"
            self._ended(name)

    def _ended(self, name: Id) -> None:
        self.alive.pop(name, None)
        self.has_ended.add(name)
        self.to_tell.add(name)

    def _told(self, name: Id) -> None:
        """Its client knows that there is no history any more."""
        self.to_tell.discard(name)
        self.ended_empty.discard(name)
        self.counts[name] = 0

    # robots

    @rule(key=st.sampled_from(KEYS))
    def connect(self, key: str) -> None:
        if len(self.sockets) < 5:
            self._connect(key)

    def _connect(self, key: str) -> Socket:
        socket = Socket(self.server, key)
        self.sockets.append(socket)
        self.at[socket] = socket.own_name
        socket.send({"endpoint": "reset"})  # or it would be closed for its silence
        assert socket.read() == "reset successful"
        return socket

    @rule(data=st.data(), name=NAMES, env=ENVS)
    def plain_tick(self, data: st.DataObject, name: str | None, env: str | None) -> None:
        self.tick_of(data, name, env, None, "pick")

    @rule(data=st.data(), name=NAMES, env=ENVS, flag=st.sampled_from([None, None, None, "reset", "resume"]),
          prompt=st.sampled_from(["pick", "pick", "pick", "slow", "fail"]))  # fmt: skip
    def tick(self, data: st.DataObject, name: str | None, env: str | None, flag: str | None, prompt: str) -> None:
        self.tick_of(data, name, env, flag, prompt)

    def tick_of(self, data: st.DataObject, name: str | None, env: str | None, flag: str | None, prompt: str) -> None:
        self._tick(self._some(data), name, env, flag, prompt)

    def _some(self, data: st.DataObject) -> Socket:
        """A socket that waits for nothing; a new one where there is none."""
        idle = [socket for socket in self.sockets if all(life.in_tick is not socket for life in self.alive.values())]
        return data.draw(st.sampled_from(idle)) if idle else self._connect(data.draw(st.sampled_from(KEYS)))

    def _tick(self, socket: Socket, name: str | None, env: str | None, flag: str | None, prompt: str) -> None:
        self._look()
        full = (socket.key, in_env(name or socket.own_name, env))
        was_open, now = full in self.alive, self.server.now
        fields = {"env_id": env} if env is not None else {}
        socket.send(infer_message(name, prompt, **fields, **({flag: True} if flag else {})))
        answer = socket.read()
        if isinstance(answer, str) and not was_open and self._is_refusal(socket, full, flag, answer):
            return
        life = self._turn_to(socket, full, name)
        life.last_used = now
        if flag == "reset":
            if life.in_tick is not None:
                self._interrupted(life)
            self.counts[full] = 0
            self.to_tell.discard(full)
        if isinstance(answer, str):
            self._failed(socket, full, prompt, answer)
            return
        assert full not in self.to_tell or flag == "reset", f"{full} started afresh in silence"
        if answer is None:
            assert prompt == "slow", "no answer"
            life.in_tick = socket
            return
        self._ticked(full, answer)

    def _ticked(self, full: Id, answer: np.ndarray) -> None:
        self.counts[full] = self.counts.get(full, 0) + 1
        assert int(answer[0, 0]) == self.counts[full], f"{full} goes on another history than its client believes"

    def _turn_to(self, socket: Socket, full: Id, name: str | None) -> Life:
        life = self.alive.setdefault(full, Life(self.server.now, private=name is None))
        self.ended_empty.discard(full)
        before = self.alive.get(self.current.get(socket, full))
        self.current[socket] = full
        self.at[socket] = name or socket.own_name
        life.with_it.add(socket)
        life.sockets.add(socket)
        life.left_at = None
        if before is not None and before is not life:
            before.leave(socket, self.server.now)
        return life

    def _is_refusal(self, socket: Socket, full: Id, flag: str | None, answer: str) -> bool:
        """Whether the session that was to be opened was not."""
        if "has ended: " in answer:
            assert flag != "reset"
            assert full in self.to_tell | self.ended_empty or (LONG_AGO in answer and full in self.has_ended), answer
            self._told(full)
        elif "is not known here (was" in answer:
            assert flag == "resume"
            assert full not in self.to_tell
            self.counts[full] = 0
        elif answer.startswith("admission_refused"):
            assert full not in self.to_tell or flag == "reset", "its end is told first"
            self._gone(socket)
            self._try_again_in_time(full, answer)
            return True
        else:
            return False
        self._gone(socket)
        return True

    def _failed(self, socket: Socket, full: Id, prompt: str, answer: str) -> None:
        """A tick of an open session, answered with an error."""
        life = self.alive[full]
        if answer.startswith("session_busy"):
            assert life.in_tick is not None
        elif answer.startswith("session_not_found"):
            session = self.app.live.get(self._in_table(full))
            assert session is None, "it has not ended"
            del self.alive[full]
            self._told(full)
            self.has_ended.add(full)
        else:
            assert prompt == "fail", answer
            assert answer.startswith("internal")
            assert full not in self.to_tell, f"{full} started afresh in silence"
        self._gone(socket)

    def _try_again_in_time(self, full: Id, answer: str) -> None:
        """What a refusal says about when to come back is true."""
        hint = re.search(r"retry_after_ms=(\d+)", answer)
        mine = f"{PER_KEY} sessions are open" in answer
        left = [
            life for name, life in self.alive.items()
            if not life.with_it and life.in_tick is None
            and (name[0] == full[0] if mine else not self._is_dead(name))
        ]  # fmt: skip
        if hint is None:
            assert not left, f"one of them will end: {answer}"
            return
        self._pass(int(hint[1]) / 1e3)
        fresh = self._connect(full[0])
        fresh.send(infer_message("new"))
        again = fresh.read()
        assert not isinstance(again, str) or "has ended" in again, f"{answer}; and then {again}"
        if isinstance(again, str):
            self._told((full[0], "new"))
            self._gone(fresh)
            return
        self._turn_to(fresh, (full[0], "new"), "new").last_used = self.server.now
        self._ticked((full[0], "new"), again)

    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        running = [name for name, life in self.alive.items() if life.in_tick is not None]
        if not running:
            return
        full = data.draw(st.sampled_from(running))
        life = self.alive[full]
        socket, life.in_tick, life.last_used = life.in_tick, None, self.server.now
        self.app.live[self._in_table(full)].finish_tick()
        self.server.loop.settle()
        if socket in self.sockets:
            self._ticked(full, socket.read())
        else:
            self.counts[full] = self.counts.get(full, 0) + 1

    @rule(data=st.data(), name=NAMES, env=ENVS)
    def reset(self, data: st.DataObject, name: str | None, env: str | None) -> None:
        socket = self._some(data)
        self._look()
        fields = {"session_id": name, "env_id": env}
        socket.send({"endpoint": "reset"} | {key: value for key, value in fields.items() if value is not None})
        assert socket.read() == "reset successful"
        base = name or self.at[socket]
        known = {*self.alive, *self.to_tell, *self.counts}
        if env is not None:
            hit = [(socket.key, in_env(base, env))]
        else:
            hit = [full for full in known if full[0] == socket.key and is_within(full[1], base)]
        for full in hit:
            self._was_reset(full)

    def _was_reset(self, full: Id) -> None:
        life = self.alive.get(full)
        if life is not None:
            if life.in_tick is not None:
                self._interrupted(life)
            life.last_used = self.server.now
            if full in self.killed and self._is_dead(full) and not self._is_in_table(full):
                del self.alive[full]
        self._told(full)

    def _interrupted(self, life: Life) -> None:
        """Its tick in flight has ended, and its client was told why."""
        socket, life.in_tick = life.in_tick, None
        life.last_used = self.server.now
        if socket in self.sockets:
            assert socket.read().startswith("session_ended")
            self._gone(socket)

    @rule(data=st.data())
    def disconnect(self, data: st.DataObject) -> None:
        if self.sockets:
            self._close(data.draw(st.sampled_from(self.sockets)))

    def _close(self, socket: Socket) -> None:
        self._look()
        socket.close()
        self._gone(socket, closed_by_server=False)

    def _gone(self, socket: Socket, *, closed_by_server: bool = True) -> None:
        assert socket.closed_by_server is closed_by_server
        self.sockets.remove(socket)
        self.current.pop(socket, None)
        for full, life in list(self.alive.items()):
            if socket not in life.sockets:
                continue
            life.leave(socket, self.server.now)
            life.sockets.discard(socket)
            if life.private:
                del self.alive[full]
        for full in [full for full in self.to_tell if full[1].startswith(socket.own_name)]:
            self.to_tell.discard(full)

    # the rest

    @rule(seconds=st.sampled_from([0.5, 4.0, 9.0, 13.0, 45.0]))
    def time_passes(self, seconds: float) -> None:
        self._pass(seconds)

    def _pass(self, seconds: float) -> None:
        self.server.pass_time(seconds)

    def _is_dead(self, full: Id) -> bool:
        return self._in_table(full) not in self.app.live

    def _is_in_table(self, full: Id) -> bool:
        owner = f"key{KEYS.index(full[0]) + 1}"
        return any(entry.public_id == full[1] for entry in self.server.service.sessions.of(owner))

    def _in_table(self, full: Id) -> str:
        return f"{full[1]}@key{KEYS.index(full[0]) + 1}"
