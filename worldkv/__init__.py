"""A paged KV cache, an engine and a server for autoregressive diffusion world models.

The names below are imported when they are first used, so that `import worldkv` costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from worldkv.client import PolicyClient as PolicyClient
    from worldkv.engine.engine import Engine as Engine
    from worldkv.engine.engine import EngineConfig as EngineConfig
    from worldkv.engine.session import SessionHandle as SessionHandle
    from worldkv.engine.sharing import SharedDevice as SharedDevice
    from worldkv.load import load_app as load_app
    from worldkv.load import load_engine as load_engine
    from worldkv.load import load_policy as load_policy
    from worldkv.load import load_videos as load_videos
    from worldkv.load import start_engine as start_engine
    from worldkv.models.causal_wan.random import write_random_causal_wan as write_random_causal_wan
    from worldkv.models.dreamzero.random import write_random_checkpoint as write_random_checkpoint
    from worldkv.server.server import PolicyServer as PolicyServer
    from worldkv.server.server import ServerConfig as ServerConfig

_MODULES = {
    "Engine": "worldkv.engine.engine",
    "EngineConfig": "worldkv.engine.engine",
    "PolicyClient": "worldkv.client",
    "PolicyServer": "worldkv.server.server",
    "ServerConfig": "worldkv.server.server",
    "SessionHandle": "worldkv.engine.session",
    "SharedDevice": "worldkv.engine.sharing",
    "load_app": "worldkv.load",
    "load_engine": "worldkv.load",
    "load_policy": "worldkv.load",
    "load_videos": "worldkv.load",
    "start_engine": "worldkv.load",
    "write_random_causal_wan": "worldkv.models.causal_wan.random",
    "write_random_checkpoint": "worldkv.models.dreamzero.random",
}


def __getattr__(name: str) -> object:
    """A public name, from where it lives."""
    if name not in _MODULES:
        raise AttributeError(f"module 'worldkv' has no attribute {name!r}; it has {', '.join(sorted(_MODULES))}")
    import importlib

    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted([*_MODULES, "__version__"])
