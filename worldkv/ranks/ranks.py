"""The ranks of one model, from the first process's side: started or joined, then given to `load_engine`."""

from __future__ import annotations

import json
import multiprocessing
import secrets
import signal
import socket
import time
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import cast

import torch

from worldkv.engine.config import EngineConfig
from worldkv.engine.core import Observer
from worldkv.engine.engine import Engine
from worldkv.engine.sharing import SharedDevice
from worldkv.models.base import InputsT, ResultT, RunsOnRanks, StateT, WorldModel
from worldkv.models.checkpoints.modules import Progress
from worldkv.models.wan.dit import WanDiT
from worldkv.models.wan.network import LoadNetwork, Network, Recipe
from worldkv.models.wan.shard import Mesh
from worldkv.ranks.cache import RankedCache
from worldkv.ranks.channel import Channel
from worldkv.ranks.executor import RanksExecutor
from worldkv.ranks.follower import LEADER_KEY, accepted, follow
from worldkv.ranks.leader import LANES, LaneName, Leader, RanksLost
from worldkv.ranks.network import RankedNetwork
from worldkv.ranks.place import START_S, Place, TCPStore
from worldkv.ranks.worker import Worker

TIMEOUT_S = 60.0  # in which a rank answers a command, and a collective ends
_CHECK_S = 0.5


class Ranks:
    """`start` makes the other processes, `join` waits for those that somebody else has started. `close` it, or use it
    as a context, once its engine is shut down."""

    def __init__(self, mesh: Mesh, device: str, place: Place, timeout_s: float, others: Others | None = None) -> None:
        self.mesh, self.device, self.timeout_s = mesh, device, timeout_s
        self._others = others
        try:
            store = place.store()
            if others is not None:
                others.start(Place(0, mesh.num_ranks, place.host, store.port))
            worker = Worker(0, store)
            channels = self._gather(place, store)
            end = (lambda _: None) if others is None else others.end
            why = (lambda rank: "") if others is None else others.why
            self.leader = Leader(worker, channels, timeout_s, end, why)
            self.leader.work.call("join", mesh, device, timeout_s)
        except BaseException:
            if others is not None:
                others.end(0.0)
            raise

    @classmethod
    def start(cls, mesh: Mesh, device: str = "cpu", timeout_s: float = TIMEOUT_S) -> Ranks:
        """With processes of its own, on this machine; this one is rank 0. `device`: cpu or cuda. `timeout_s`: in which
        a rank answers, and a collective ends."""
        return cls(mesh, device, Place(0, mesh.num_ranks, "127.0.0.1", 0), timeout_s, Others(mesh.num_ranks))

    @classmethod
    def join(cls, mesh: Mesh, place: Place, device: str = "cpu", timeout_s: float = TIMEOUT_S) -> Ranks:
        """With ranks that come by themselves, each calling `follow`. Raises ValueError where they are not as many."""
        if place.num_ranks != mesh.num_ranks:
            raise ValueError(
                f"WORLD_SIZE: expected {mesh.num_ranks} for {mesh}, got {place.num_ranks}; start as many processes"
            )
        return cls(mesh, device, place, timeout_s)

    def _gather(self, place: Place, store: TCPStore) -> dict[LaneName, dict[int, Channel]]:
        """Let every rank call on every lane. Raises RanksLost where one does not, in time."""
        channels: dict[LaneName, dict[int, Channel]] = {lane: {} for lane in LANES}
        missing = {(rank, lane) for rank in range(1, self.mesh.num_ranks) for lane in LANES}
        with socket.create_server((place.host, 0)) as listener:
            key = secrets.token_hex(16)
            where = {"host": place.host, "port": listener.getsockname()[1], "key": key}
            store.set(LEADER_KEY, json.dumps(where))
            until = time.monotonic() + START_S
            while missing:
                if self._others is not None and (gone := self._others.gone()):
                    raise RanksLost(f"rank {gone[0]} did not start: {self._others.why(gone[0])}")
                if time.monotonic() > until:
                    ranks = sorted({rank for rank, _ in missing})
                    raise RanksLost(f"ranks {ranks} have not come in {START_S:g} s")
                try:
                    rank, name, channel = accepted(listener, key, _CHECK_S)
                except OSError:  # nobody yet, or a stranger
                    continue
                lane = next(each for each in LANES if each == name)
                channels[lane][rank] = channel
                missing.discard((rank, lane))
        return {lane: dict(sorted(found.items())) for lane, found in channels.items()}

    # see models.wan.network.Across

    def load(self, recipe: Recipe, load: LoadNetwork, progress: Progress | None) -> tuple[WanDiT, Network]:
        self.leader.worker.progress = progress
        self.leader.work.call("load", recipe)
        return self.leader.worker.network.dit, RankedNetwork(self.leader)

    # for start_engine

    @property
    def own_device(self) -> torch.device:
        """Of rank 0."""
        return self.leader.worker.mesh.device

    def memory(self) -> tuple[int, int]:
        """(free, total) bytes of the rank that has least."""
        found = [pair for pair in self.leader.work.call("memory") if isinstance(pair, tuple)]
        return min(found)

    def engine(
        self,
        model: WorldModel[InputsT, StateT, ResultT],
        num_blocks: int,
        config: EngineConfig,
        *,
        observer: Observer | None = None,
        shared: SharedDevice | None = None,
    ) -> Engine[InputsT, StateT, ResultT]:
        """A running one over `num_blocks` blocks on each rank. Raises ValueError for a model that ranks cannot run."""
        if not isinstance(model, RunsOnRanks):
            raise ValueError(f"ranks: {type(model).__name__} does not say what it keeps on one rank (`whole_spec`)")
        self.leader.work.call("make_pages", model.spec, num_blocks, config.block_size, config.attention)
        cache = RankedCache(self.leader, self.mesh, model.spec, model.whole_spec)
        untyped = cast("WorldModel[object, object, object]", model)
        executor = RanksExecutor(self.leader, untyped, cache, alone=config.batch_invariant)
        return Engine(model, cache, config, observer=observer, executor=executor, shared=shared)

    def close(self) -> None:
        """Let all ranks go; those that do not end by themselves are ended. Safe twice."""
        self.leader.close()
        self.leader.worker.mesh.leave()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Others:
    """The processes of ranks 1 and up."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self.processes: dict[int, BaseProcess] = {}

    def start(self, leader: Place) -> None:
        """They come from a process that has imported torch and never used it: a start takes a moment."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["worldkv.ranks.follower"])
        for rank in range(1, self._num_ranks):
            place = Place(rank, leader.num_ranks, leader.host, leader.port)
            process = context.Process(target=follow, args=(place,), name=f"worldkv-rank-{rank}", daemon=True)
            process.start()
            self.processes[rank] = process

    def gone(self) -> list[int]:
        return [rank for rank, process in self.processes.items() if not process.is_alive()]

    def why(self, rank: int) -> str:
        """How it ended, or that it lives, in words."""
        process = self.processes.get(rank)
        if process is None:
            return ""
        process.join(_CHECK_S)
        code = process.exitcode
        if code is None:
            return f"process {process.pid} is alive"
        how = signal.Signals(-code).name if code < 0 else f"status {code}"
        return f"process {process.pid} ended with {how}"

    def end(self, wait_s: float) -> None:
        """They have been let go; whoever stays for longer is killed."""
        until = time.monotonic() + wait_s
        for process in self.processes.values():
            process.join(max(0.0, until - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
