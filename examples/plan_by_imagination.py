"""Plan by imagination: branch one history into many futures, dream each a few ticks, keep the best.

    python examples/plan_by_imagination.py [--checkpoint DIR] [--futures 8] [--depth 3]

Without a checkpoint a tiny one with random weights is made: its dreams are noise, but the machinery is the real one.
The score here is how smoothly the imagined arm moves; put your own reward model in its place.

What to look at: forking takes no block; dreaming copies those that a future writes to, and only those; when all futures
but one are closed, their blocks are free again. Conditioning is stored once, however many sessions read it.
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from worldkv.engine.engine import Engine, EngineConfig
from worldkv.load import load_engine
from worldkv.models.dreamzero.checkpoint import Checkpoint
from worldkv.models.dreamzero.random import write_random_checkpoint
from worldkv.models.world_action import TickInputs, TickResult
from worldkv.robots.dataset import read_embodiment
from worldkv.words import count


def main(argv: Sequence[str] | None = None) -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--checkpoint", type=Path, help="DreamZero checkpoint folder (default: random weights)")
    options.add_argument("--futures", type=int, default=8, help="how many futures to imagine (8)")
    options.add_argument("--depth", type=int, default=3, help="imagined ticks of each (3)")
    arguments = options.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = arguments.checkpoint or write_random_checkpoint(Path(folder) / "random", view_height=16)
        config = EngineConfig(block_size=16, max_sessions=arguments.futures + 1, batch_invariant=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # about the tokenizer that a random checkpoint lacks
            engine = load_engine(checkpoint, config, window_policy="slide")  # dreams need not restart
        observation = first_frame(checkpoint)
        try:
            plan(engine, observation, arguments.futures, arguments.depth)
        finally:
            engine.shutdown()


def plan(engine: Engine, observation: TickInputs, num_futures: int, depth: int) -> None:
    session = engine.open_session("robot")
    for _ in range(2):
        engine.submit(session, observation).result()
        observation = replace(observation, frames=np.repeat(observation.frames, 4, axis=0))
    report(engine, "the robot has seen 3 latent frames")

    futures = [engine.fork(session, f"future {i}") for i in range(num_futures)]
    report(engine, f"forked into {num_futures} futures")

    dream = replace(observation, frames=None)  # no camera: each tick goes on from what the last one predicted
    rollouts: list[list[TickResult]] = [[] for _ in futures]
    for _ in range(depth):
        pending = [engine.submit(f, replace(dream, noise_seed=i)) for i, f in enumerate(futures)]
        for rollout, future in zip(rollouts, pending, strict=True):
            rollout.append(future.result().result)
    report(engine, f"each has dreamt {depth} ticks, {num_futures} at a time")

    scores = [score(rollout) for rollout in rollouts]
    best = int(np.argmax(scores))
    print("\nfuture   score: minus the mean jump from action to action; nearer to 0 is smoother")
    for i, value in enumerate(scores):
        print(f"{i:>6}   {value:.4f}{'   <- chosen' if i == best else ''}")

    for i, future in enumerate(futures):
        if i != best:
            engine.close(future, "another future was chosen")
    engine.close(session, "continued in its best future")
    print()
    report(engine, "all others are closed")
    result = engine.submit(futures[best], replace(dream, noise_seed=best)).result().result
    steps, numbers = result.actions.shape
    print(f"the chosen future goes on at frame {result.start_frame}: {steps} actions of {numbers} numbers")


def score(rollout: list[TickResult]) -> float:
    """Higher is smoother: minus the mean jump between consecutive actions over the whole dream."""
    actions = np.concatenate([result.actions for result in rollout])
    return -float(np.abs(np.diff(actions, axis=0)).mean())


def report(engine: Engine, what: str) -> None:
    num_stored = engine.inspect(lambda core: len(core.cache.conditioning))  # once all before it is done
    stats = engine.stats()
    stored = count(num_stored, "conditioning entry", "conditioning entries")
    print(
        f"{what:<34} {stats.blocks_used:>4} blocks in use, {stats.blocks_shared:>2} of them shared by histories, "
        f"{stats.blocks_copied:>3} copied so far; {stored} for {count(stats.num_sessions, 'session')}"
    )


def first_frame(folder: Path) -> TickInputs:
    """A made-up camera image, state and prompt of the sizes that the checkpoint expects."""
    checkpoint = Checkpoint.open(folder)
    embodiment = read_embodiment(checkpoint.conf, checkpoint.metadata)
    rng = np.random.default_rng(0)
    text_len = checkpoint.config.dit.text_len
    token_ids = np.zeros((1, text_len), dtype=np.int64)
    token_ids[0, :3] = (7, 8, 1)
    height, width = embodiment.image_size
    return TickInputs(
        rng.integers(0, 256, (1, height, width, 3), dtype=np.uint8),
        np.zeros((1, embodiment.max_state_dim)),
        token_ids,
        (token_ids != 0).astype(np.int64),
    )


if __name__ == "__main__":
    main()
