"""`worldkv serve`: options to a policy, a policy to a server, until a signal ends it."""

from __future__ import annotations

import argparse

from worldkv import __version__
from worldkv.cli.common import OK, describe_model, is_random, load_policy_for
from worldkv.robots.policy import Policy
from worldkv.robots.recorder import Recorder
from worldkv.server.logs import LISTENING, set_up_logging
from worldkv.server.server import PolicyServer, ServerConfig
from worldkv.server.tracing import TickTracer


def run(arguments: argparse.Namespace) -> int:
    config = ServerConfig(
        host=arguments.host,
        port=arguments.port,
        api_key=arguments.api_key,
        episode_gap_s=arguments.episode_gap,
    )
    set_up_logging(arguments.log_format)
    tracer = None if arguments.otlp is None else TickTracer.to_collector(arguments.otlp)
    policy = load_policy_for(arguments, max_sessions=arguments.max_sessions)
    try:
        if arguments.record is not None:
            policy.recorder = _recorder(policy, arguments)
        server = PolicyServer(policy, config)
        if tracer is not None:
            server.trace_with(tracer)
        server.listen()
        print(f"worldkv {__version__}")
        for line in describe_model(policy, arguments.checkpoint):
            print(f"  {line}")
        if is_random(arguments.checkpoint):
            print("  NOTE       random weights: they have learned nothing, and no robot should follow them")
        if arguments.record is not None:
            print(f"  recording  every session, to {arguments.record}")
        print(_where(config, server.port), flush=True)
        server.run()
        print("stopped; every session was closed", flush=True)
    finally:
        policy.close()
        policy.engine.shutdown()
    return OK


def _recorder(policy: Policy, arguments: argparse.Namespace) -> Recorder:
    storage, robot = policy.engine.cache.storage, policy.embodiment
    about = {
        "checkpoint": arguments.checkpoint.resolve().name,
        "random_weights": is_random(arguments.checkpoint),
        "embodiment": robot.tag,
        "rate_hz": robot.fps,
        "steps": policy.engine.model.steps,
        "cfg_scale": policy.engine.model.config.cfg_scale,
        "batch_invariant": policy.engine.config.batch_invariant,
        "device": str(storage.device),
        "dtype": str(storage.dtype).removeprefix("torch."),
        "worldkv": __version__,
    }
    return Recorder(arguments.record, about, 1e9 * arguments.record_limit_gb)


def _where(config: ServerConfig, port: int) -> str:
    host = f"[{config.host}]" if ":" in config.host else config.host
    key = ', api_key="..."' if config.api_key else ""
    return (
        f"{LISTENING}ws://{host}:{port} (openpi and RoboArena dialects)\n"
        f"  health     http://{host}:{port}/healthz (200 once warm)\n"
        f"  metrics    http://{host}:{port}/metrics\n"
        f"  people     http://{host}:{port}/ in a browser\n"
        f'  a robot    PolicyClient("{config.host}", {port}{key}).infer(observation), from worldkv.client\n'
        f"  stop       Ctrl-C"
    )
