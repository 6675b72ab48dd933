"""`worldkv serve`: options to a policy, a policy to a server, until a signal ends it."""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from worldkv import __version__
from worldkv.cli.common import (
    add_api_key,
    add_checkpoint,
    add_engine_options,
    describe_model,
)
from worldkv.cli.errors import OK
from worldkv.cli.numbers import gigabytes, real, seconds, session_count, whole
from worldkv.cli.places import add_place
from worldkv.cli.ranks import RANKS_LOST, MakeRanks, add_ranks, end_with, mesh_of, serve_on_ranks
from worldkv.cli.serve_also import check_also, loaded, serve_also
from worldkv.cli.video import alone
from worldkv.engine.sharing import SharedDevice
from worldkv.models.wan.shard import ALONE
from worldkv.server.config import ServerConfig
from worldkv.server.logs import LISTENING, set_up_logging

if TYPE_CHECKING:
    from worldkv.app import AnyApp


MORE = (
    "The folder tells what is served. For robots one port speaks the openpi and the RoboArena dialect; of a causal\n"
    "video model it streams worlds from words, to a browser too. GET /healthz answers 200 once the model is warm,\n"
    "GET /metrics speaks Prometheus. Ctrl-C or SIGTERM lets the ticks in flight end; a second one does not wait."
)
EXAMPLE = "worldkv serve DreamZero-DROID --port 8000"


def add_options(parser: argparse.ArgumentParser) -> None:
    add_checkpoint(parser, what="checkpoint folder")
    parser.add_argument(
        "--host", default=ServerConfig.host, help="address to listen on; beyond loopback --api-key is needed"
    )
    also = "another checkpoint, on the same device and the next port: videos beside robots; who is due first goes first"
    parser.add_argument("--also", type=Path, metavar="DIR", help=f"{also} (none)")
    port = ServerConfig.port
    parser.add_argument(
        "--port",
        type=whole(0, 65535),
        default=port,
        metavar="N",
        help=f"port to listen on; 0 takes a free one ({port})",
    )
    add_api_key(parser, "what robots must send; better in the environment, as WORLDKV_API_KEY")
    parser.add_argument(
        "--max-sessions",
        type=session_count,
        metavar="N",
        help="sessions that the cache has room for, more are parked while idle; auto: all that the GPU has, "
        "on a CPU what half of the free memory holds, up to 4 (auto)",
    )
    parser.add_argument(
        "--park-memory",
        type=real(at_least=0, unit="GB"),
        metavar="GB",
        help="of host memory for parked sessions, at most; 0: none are parked (half of what the machine has)",
    )
    parser.add_argument(
        "--episode-gap",
        type=seconds,
        default=ServerConfig.episode_gap_s,
        metavar="S",
        help="a pause of more seconds begins a new episode (never)",
    )
    _add_limits(parser)
    parser.add_argument("--log-format", choices=("text", "json"), default="text", help="json: one line an event (text)")
    parser.add_argument("--otlp", metavar="URL", help="OpenTelemetry collector for traces of ticks (none)")
    add_place(parser, "--record", "folder", "every session, see `worldkv replay --recording`")
    parser.add_argument(
        "--record-limit-gb", type=gigabytes, default=100.0, metavar="GB", help="record no more than that (100)"
    )
    text = "of one session that is imported, at most; larger models' are larger (1)"
    parser.add_argument(
        "--max-import-gb", type=gigabytes, default=ServerConfig.max_import_bytes / 1e9, metavar="GB", help=text
    )
    _add_network(parser)
    add_ranks(parser)
    add_engine_options(parser, videos=True)


def _add_limits(parser: argparse.ArgumentParser) -> None:
    """How long sessions live, and how many of what one client may have."""
    grace, idle = ServerConfig.session_grace_s, ServerConfig.session_idle_s
    text = f"seconds after which a session ends that its sockets left ({grace:g})"
    parser.add_argument("--session-grace", type=real(0), default=grace, metavar="S", help=text)
    text = f"seconds without a request after which a session ends ({idle:g})"
    parser.add_argument("--session-idle", type=seconds, default=idle, metavar="S", help=text)
    for name, limit, what in (
        ("--max-sessions-per-key", ServerConfig.max_sessions, "sessions, parked ones included,"),
        ("--max-sockets-per-key", ServerConfig.max_connections, "sockets"),
        ("--max-snapshots-per-key", ServerConfig.max_snapshots, "snapshots"),
    ):
        text = f"{what} that one key may have open; without keys, all clients together ({limit})"
        parser.add_argument(name, type=whole(1), default=limit, metavar="N", help=text)


def _add_network(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("network")
    group.add_argument(
        "--tls-cert", type=Path, metavar="PEM", help="certificate, its chain included: wss:// and https://"
    )
    group.add_argument("--tls-key", type=Path, metavar="PEM", help="its private key, without a password")
    group.add_argument(
        "--allowed-host",
        action="append",
        default=[],
        metavar="NAME",
        help="a name under which clients ask, beside loopback's and --host; repeatable (any with a key, else none)",
    )
    group.add_argument(
        "--allowed-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="a page, such as https://robots.example.org, that may use a server without a key; repeatable (none)",
    )
    text = "/healthz and /metrics there as well, from their own process, while it loads too (none)"
    group.add_argument("--health-port", type=whole(0, 65535), metavar="N", help=text)
    default = ServerConfig.max_sockets_per_address
    text = f"sockets that may be open from one address ({default})"
    group.add_argument("--max-sockets-per-address", type=whole(1), default=default, metavar="N", help=text)
    text = "and in all (what `ulimit -n` allows, less 256)"
    group.add_argument("--max-sockets", type=whole(1), metavar="N", help=text)


def run(arguments: argparse.Namespace) -> int:
    return _serve(arguments) if mesh_of(arguments) == ALONE else serve_on_ranks(arguments, _serve)


def _serve(arguments: argparse.Namespace, make_ranks: MakeRanks | None = None) -> int:
    """`make_ranks`: the ranks that run the model, this process among them; None: it runs here alone."""
    from worldkv.cli.preflight import check_before_loading, require_packages
    from worldkv.server import memory

    config = _config(arguments)
    require_packages("server", "uvicorn", "fastapi", "websockets")
    set_up_logging(arguments.log_format)
    memory.use_few_heaps()
    if arguments.also is not None:
        check_also(arguments)
    with ExitStack() as ends:
        listening, tracer = check_before_loading(arguments, config, ends)
        health = None
        if config.health_port is not None:
            from worldkv.server.health import HealthServer

            health = ends.enter_context(HealthServer(config.host, config.health_port))
        ranks = None if make_ranks is None else ends.enter_context(make_ranks())
        if arguments.also is None:
            app = loaded(arguments, ends, None, ranks)
        else:
            shared, port = SharedDevice(), listening[0].getsockname()[1]
            config = replace(config, beside=(serve_also(arguments, config, port, ends, shared),))
            app = loaded(alone(arguments, arguments.checkpoint, arguments.also), ends, shared)
        if arguments.record is not None:
            app.record(arguments.record, _about(app, arguments), 1e9 * arguments.record_limit_gb)

        from worldkv.server.server import PolicyServer

        server = PolicyServer(app, config, listening, health)
        if tracer is not None:
            server.trace_with(tracer)
        print(f"worldkv {__version__}")
        for line in describe_model(app, arguments.checkpoint):
            print(f"  {line}")
        if app.random_weights:
            use = "no robot should follow them" if app.speaks == "robots" else "their videos show nothing"
            print(f"  NOTE       random weights: they have learned nothing, and {use}")
        if arguments.record is not None:
            print(f"  recording  every session, to {arguments.record}")
        print(_where(app.speaks, config, server.port, server.health_port), flush=True)
        if ranks is not None:
            end_with(ranks)
        with memory.given_back():
            server.run()
        print("stopped; every session was closed", flush=True)
    return RANKS_LOST if ranks is not None and ranks.leader.lost.is_set() else OK


def _config(arguments: argparse.Namespace) -> ServerConfig:
    return ServerConfig(
        host=arguments.host,
        port=arguments.port,
        api_key=arguments.api_key,
        episode_gap_s=arguments.episode_gap,
        session_grace_s=arguments.session_grace,
        session_idle_s=arguments.session_idle,
        max_sessions=arguments.max_sessions_per_key,
        max_import_bytes=int(1e9 * arguments.max_import_gb),
        max_connections=arguments.max_sockets_per_key,
        max_snapshots=arguments.max_snapshots_per_key,
        tls_cert=arguments.tls_cert,
        tls_key=arguments.tls_key,
        allowed_hosts=tuple(arguments.allowed_host),
        allowed_origins=tuple(arguments.allowed_origin),
        health_port=arguments.health_port,
        max_sockets_per_address=arguments.max_sockets_per_address,
        max_sockets=arguments.max_sockets,
    )


def _about(app: AnyApp, arguments: argparse.Namespace) -> dict[str, object]:
    """What every recording says of where it was made."""
    card, cache = app.engine.card, app.engine.cache_card
    return {
        "checkpoint": arguments.checkpoint.resolve().name,
        "random_weights": app.random_weights,
        **{name: card.facts[name] for name in ("steps", "cfg_scale") if name in card.facts},
        "batch_invariant": app.engine.config.batch_invariant,
        "device": cache.device,
        "dtype": cache.dtype,
        "worldkv": __version__,
    }


def _where(speaks: str, config: ServerConfig, port: int, health_port: int | None) -> str:
    host = f"[{config.host}]" if ":" in config.host else config.host
    key = ', api_key="..."' if config.api_key else ""
    tls = "s" if config.tls_cert is not None else ""
    robot = f'"wss://{host}:{port}"' if tls else f'"{config.host}", {port}'
    dialects, how = {
        "robots": (
            "openpi and RoboArena dialects",
            f"a robot    PolicyClient({robot}{key}).infer(observation), from worldkv.client",
        ),
        "videos": ("worlds from words", f"programs   ws{tls}://{host}:{port}/v1/video, see docs/video.md"),
    }[speaks]
    more = "" if health_port is None else f"\n  health     http://{host}:{health_port}/healthz as well, and /metrics"
    return (
        f"{LISTENING}ws{tls}://{host}:{port} ({dialects})\n"
        f"  health     http{tls}://{host}:{port}/healthz (200 once warm)\n"
        f"  metrics    http{tls}://{host}:{port}/metrics{more}\n"
        f"  people     http{tls}://{host}:{port}/ in a browser\n"
        f"  {how}\n"
        f"  stop       Ctrl-C"
    )
