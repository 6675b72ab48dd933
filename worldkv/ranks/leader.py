"""Rank 0 tells the others what to do: one command at a time on each lane, and an answer from everybody, in time.

There are two lanes: the engine's work, and copies beside it. Whatever goes wrong on some ranks and not on others ends
the whole group, since its parts no longer fit together: `RanksLost` says who, and how.
"""

from __future__ import annotations

import json
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch

from worldkv.errors import EngineStopped
from worldkv.ranks.channel import Buffer, Channel
from worldkv.ranks.codec import packed, tensor_shapes, unpacked
from worldkv.ranks.worker import Ticket, Worker

LaneName = Literal["work", "copies"]
LANES: tuple[LaneName, ...] = ("work", "copies")
_SLOW_S = 3600.0  # for loading and for making ready, in which nobody answers soon
_LEAVE_S = 5.0
SLOW = frozenset({"join", "load", "make_pages", "make_ready"})


class RanksLost(EngineStopped):
    """The ranks can compute no more; the text says why. They are started anew, and sessions come from exports."""


class Leader:
    """Over connections to the other ranks, by lane and rank. `end`: called once, when the group is lost or closed, with
    the seconds that the others may take to leave. `why`: what is known of a rank that has gone."""

    def __init__(
        self,
        worker: Worker,
        channels: Mapping[LaneName, Mapping[int, Channel]],
        timeout_s: float,
        end: Callable[[float], None] = lambda wait_s: None,
        why: Callable[[int], str] = lambda rank: "",
    ) -> None:
        self.worker, self.timeout_s = worker, timeout_s
        self._end, self._why = end, why
        self._failing = threading.Lock()
        self.fault: RanksLost | None = None
        self.lost = threading.Event()
        self._is_closed = False
        self.work, self.copies = (Lane(self, channels[name], is_work=name == "work") for name in LANES)
        self.dropped: deque[Ticket] = deque()  # copies that nobody here holds any more

    def check(self) -> None:
        """Raises RanksLost where a rank has gone; looks at lanes at rest, and waits for none."""
        for lane in (self.work, self.copies):
            lane.look()
        if self.fault is not None:
            raise self.fault
        if self.dropped and self.copies.is_free():
            self.copies.call("drop", [self.dropped.popleft() for _ in range(len(self.dropped))])

    def fail(self, rank: int, what: str) -> RanksLost:
        """End the group. The first cause is kept."""
        with self._failing:
            if self.fault is None:
                known = self._why(rank)
                self.fault = RanksLost(f"rank {rank} {what}{f' ({known})' if known else ''}")
                self._close(0.0)
                self.lost.set()
            return self.fault

    def close(self) -> None:
        """Let the others go. Safe twice."""
        with self._failing:
            self.fault = self.fault or RanksLost("the ranks were closed")
            self._close(_LEAVE_S)

    def _close(self, wait_s: float) -> None:
        if not self._is_closed:
            self._is_closed = True
            for lane in (self.work, self.copies):
                lane.close()
            self._end(wait_s)


class Lane:
    """One command at a time. Tensors of work are shared by a collective, those of copies are sent as bytes."""

    def __init__(self, leader: Leader, channels: Mapping[int, Channel], *, is_work: bool) -> None:
        self._leader, self._channels, self._is_work = leader, dict(channels), is_work
        self._lock = threading.RLock()

    def call(self, command: str, *arguments: object) -> list[object]:
        """Every rank's result, the leader's first. Raises what the leader raised where all ranks raised too; else
        RanksLost."""
        return self.call_each(command, [arguments] * (len(self._channels) + 1))

    def call_each(self, command: str, arguments: Sequence[Sequence[object]]) -> list[object]:
        """As `call`, with other arguments for each rank; those of work are the same for all."""
        with self._lock:
            if self._leader.fault is not None:
                raise self._leader.fault
            own: object
            try:
                self._tell(command, arguments)
                own = self._leader.worker.run(command, arguments[0])
            except Exception as error:
                own = error
            if self._leader.fault is not None:
                raise self._leader.fault
            answers = self._answers(command)
            return self._agreed(command, own, answers)

    def is_free(self) -> bool:
        """Whether nobody else calls now."""
        if not self._lock.acquire(blocking=False):
            return False
        self._lock.release()
        return True

    def look(self) -> None:
        """Find who has gone, if nobody calls now: at rest nobody has anything to say."""
        if self._leader.fault is not None or not self._lock.acquire(blocking=False):
            return
        try:
            for rank, channel in self._readable(self._channels, 0.0):
                self._leader.fail(rank, self._gone(channel))
        finally:
            self._lock.release()

    def close(self) -> None:
        for channel in self._channels.values():
            channel.close()

    def _tell(self, command: str, arguments: Sequence[Sequence[object]]) -> None:
        """Raises RanksLost where somebody cannot be told."""
        same = all(each is arguments[0] for each in arguments)
        said = packed(list(arguments[0]))
        for rank, channel in self._channels.items():
            mine = said if same else packed(list(arguments[rank]))
            tensors = [] if self._is_work else [as_bytes(tensor) for tensor in mine.tensors]
            head = json.dumps({"command": command, "num_arrays": len(mine.arrays)}).encode()
            parts: list[Buffer] = [mine.text, *(array.reshape(-1).view("u1").data for array in mine.arrays), *tensors]
            try:
                channel.send(head, parts, self._leader.timeout_s)
            except OSError as error:
                raise self._leader.fail(rank, f"was lost, when it was to {command}: {error}") from error
        if self._is_work and said.tensors:
            self._leader.worker.mesh.share(said.tensors)

    def _answers(self, command: str) -> dict[int, object]:
        """Of the others: results, and the text of an error as an exception. Raises RanksLost."""
        waiting, answers = dict(self._channels), {}
        until = time.monotonic() + (_SLOW_S if command in SLOW else self._leader.timeout_s)
        while waiting:
            found = list(self._readable(waiting, until - time.monotonic()))
            if not found:
                rank = next(iter(waiting))
                raise self._leader.fail(rank, f"has not answered for {self._leader.timeout_s:g} s, told to {command}")
            for rank, channel in found:
                try:
                    text, parts = channel.receive(self._leader.timeout_s)
                except OSError as error:
                    raise self._leader.fail(rank, f"was lost, told to {command}: {error}") from error
                answers[rank] = read_answer(text, parts)
                del waiting[rank]
        return answers

    def _agreed(self, command: str, own: object, answers: Mapping[int, object]) -> list[object]:
        results = [own, *(answers[rank] for rank in sorted(answers))]
        failed = [rank for rank, result in enumerate(results) if isinstance(result, Exception)]
        if not failed:
            return results
        if len(failed) < len(results) or command in ("agree", "join"):
            raise self._leader.fail(failed[0], f"failed, told to {command}: {results[failed[0]]}")
        self.call("agree")  # or they only failed because they cannot hear one another
        assert isinstance(own, Exception)
        raise own

    def _readable(self, channels: Mapping[int, Channel], timeout_s: float) -> list[tuple[int, Channel]]:
        poll = select.poll()
        ranks = {}
        for rank, channel in channels.items():
            if channel.fileno() >= 0:
                poll.register(channel.fileno(), select.POLLIN)
                ranks[channel.fileno()] = rank
        return [(ranks[number], channels[ranks[number]]) for number, _ in poll.poll(max(0.0, timeout_s) * 1000)]

    def _gone(self, channel: Channel) -> str:
        try:
            channel.receive(self._leader.timeout_s)
        except OSError as error:
            return f"was lost, at rest: {error}"
        return "spoke out of turn"


def as_bytes(tensor: torch.Tensor) -> Buffer:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else b""


def from_bytes(text: bytes, parts: Sequence[bytearray], num_arrays: int) -> object:
    """A value whose arrays and tensors have come as bytes."""
    shapes = tensor_shapes(text)
    tensors = [
        torch.frombuffer(part, dtype=each.dtype).reshape(each.shape)
        if part
        else torch.empty(each.shape, dtype=each.dtype)
        for part, each in zip(parts[num_arrays:], shapes, strict=True)
    ]
    return unpacked(text, parts[:num_arrays], tensors)


def answer_of(value: object) -> tuple[bytes, list[Buffer]]:
    """What a rank sends back: a result, or the error."""
    if isinstance(value, Exception):
        return json.dumps({"error": f"{type(value).__name__}: {value}"}).encode(), []
    said = packed(value)
    arrays: list[Buffer] = [array.reshape(-1).view("u1").data for array in said.arrays]
    tensors = [as_bytes(tensor) for tensor in said.tensors]
    return json.dumps({"num_arrays": len(arrays)}).encode(), [said.text, *arrays, *tensors]


def read_answer(text: bytes, parts: Sequence[bytearray]) -> object:
    """The inverse of `answer_of`."""
    head = json.loads(text)
    if "error" in head:
        return RuntimeError(head["error"])
    return from_bytes(bytes(parts[0]), parts[1:], head["num_arrays"])
