"""A rank that does what the leader tells it, until the leader lets it go or is gone."""

from __future__ import annotations

import hmac
import json
import os
import signal
import socket
import threading
from collections.abc import Callable

import torch

from worldkv.ranks.channel import Channel, plain
from worldkv.ranks.codec import tensor_shapes, unpacked
from worldkv.ranks.leader import LANES, answer_of, from_bytes
from worldkv.ranks.place import START_S, Place
from worldkv.ranks.worker import Worker

LEADER_KEY = "worldkv/leader"  # in the store: where it listens
_NO_ANSWER = frozenset({"forward"})  # its outputs are on every rank; the leader has its own


def follow(place: Place) -> None:
    """Returns when the leader lets this rank go, or is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal, to everybody: the leader ends its ticks first
    store = place.store()
    where = plain(store.get(LEADER_KEY))
    channels = {lane: _connect(place.rank, lane, where) for lane in LANES}
    worker = Worker(place.rank, store)
    copies = threading.Thread(target=_copy, args=(worker, channels["copies"]), name="worldkv-copies", daemon=True)
    copies.start()
    _serve(worker, channels["work"], _shared(worker))


def _connect(rank: int, lane: str, where: dict[str, object]) -> Channel:
    connection = socket.create_connection((str(where["host"]), int(str(where["port"]))), timeout=START_S)
    channel = Channel(connection)
    hello = {"rank": rank, "lane": lane, "key": where["key"], "pid": os.getpid()}
    channel.send(json.dumps(hello).encode())
    return channel


def accepted(listener: socket.socket, key: str, timeout_s: float) -> tuple[int, str, Channel]:
    """The leader's side: the next rank that calls, and its lane. Raises OSError for a stranger, and for nobody."""
    listener.settimeout(timeout_s)
    connection, _ = listener.accept()
    channel = Channel(connection)
    hello = plain(channel.receive(timeout_s)[0])
    if not hmac.compare_digest(str(hello.get("key")), key):
        channel.close()
        raise ConnectionRefusedError("a stranger called")
    return int(str(hello["rank"])), str(hello["lane"]), channel


def _copy(worker: Worker, channel: Channel) -> None:
    _serve(worker, channel, from_bytes)
    # The leader is gone. The main thread may wait for it inside a collective, and would until that gives up.
    signal.raise_signal(signal.SIGTERM)


Arguments = Callable[[bytes, list[bytearray], int], object]


def _serve(worker: Worker, channel: Channel, arguments: Arguments) -> None:
    while True:
        try:
            text, parts = channel.receive()
            head = plain(text)
            result = _done(worker, str(head["command"]), arguments, parts, int(str(head["num_arrays"])))
            channel.send(*answer_of(result))
        except OSError:
            return


def _done(worker: Worker, command: str, arguments: Arguments, parts: list[bytearray], num_arrays: int) -> object:
    """The result, or the exception."""
    try:
        given = arguments(bytes(parts[0]), parts[1:], num_arrays)
        assert isinstance(given, list)
        result = worker.run(command, given)
        return None if command in _NO_ANSWER else result
    except Exception as error:
        return error


def _shared(worker: Worker) -> Arguments:
    """Of work: its tensors come by a collective."""

    def arguments(text: bytes, parts: list[bytearray], num_arrays: int) -> object:
        shapes = tensor_shapes(text)
        tensors: list[torch.Tensor] = worker.mesh.take(shapes) if shapes else []
        return unpacked(text, parts[:num_arrays], tensors)

    return arguments
