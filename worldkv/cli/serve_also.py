"""The second checkpoint of `worldkv serve --also`: a server of its own on the next port, on the same device."""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

from worldkv.cli.common import describe_model, load_app_for
from worldkv.cli.errors import UsageError
from worldkv.cli.preflight import check_folder
from worldkv.cli.video import alone, kind_of
from worldkv.engine.sharing import SharedDevice
from worldkv.server.config import Beside, ServerConfig

if TYPE_CHECKING:
    from worldkv.app import AnyApp
    from worldkv.ranks.ranks import Ranks


def check_also(arguments: argparse.Namespace) -> None:
    """Before anything is loaded. Raises UsageError, or CheckpointError for a folder that is not there."""
    check_folder(arguments.also)
    if arguments.max_sessions is None and arguments.device != "cpu":
        raise UsageError("--max-sessions: expected a number beside --also, got auto: the first would take all of a GPU")


def serve_also(
    arguments: argparse.Namespace, config: ServerConfig, port: int, ends: ExitStack, shared: SharedDevice
) -> Beside:
    """Load and start it, beside the server on `port`; `ends` stops it. Returns where it is."""
    from worldkv.server.listening import take_port
    from worldkv.server.server import PolicyServer

    listening = take_port(config.host, port + 1 if config.port else 0, only_loopback=config.api_key is None)
    for each in listening:
        ends.enter_context(each)
    mine = alone(arguments, arguments.also, arguments.checkpoint)
    app = loaded(mine, ends, shared)
    own_port: int = listening[0].getsockname()[1]
    beside = (Beside(kind_of(arguments.checkpoint), port),)
    server = PolicyServer(app, replace(config, port=own_port, health_port=None, beside=beside), listening)
    ends.enter_context(server)
    print(f"also on port {own_port}, its console too:")
    for line in describe_model(app, arguments.also):
        print(f"  {line}")
    return Beside(kind_of(arguments.also), own_port)


def loaded(
    arguments: argparse.Namespace, ends: ExitStack, shared: SharedDevice | None, ranks: Ranks | None = None
) -> AnyApp:
    """The checkpoint's app, closed by `ends`."""
    app = load_app_for(arguments, max_sessions=arguments.max_sessions, shared=shared, ranks=ranks)
    ends.callback(app.engine.shutdown)
    ends.callback(app.close)
    return app
