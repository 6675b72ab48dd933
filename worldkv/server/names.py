"""What sessions are called: by their clients, and in a server where every key has ids of its own. Pure functions."""

from __future__ import annotations

from worldkv.errors import BadRequest
from worldkv.wire import MAX_SESSION_ID_CHARACTERS

_ENV = "/env="


def owned(session_id: str, owner: str) -> str:
    """The table's name for a client's session: every key has ids of its own, so those of others do not exist for it."""
    return f"{session_id}@{owner}" if owner else session_id


def disowned(name: str, owner: str) -> str:
    """What the client calls it."""
    return name.removesuffix(f"@{owner}") if owner else name


def in_env(session_id: str, env_id: str | None) -> str:
    """What the session of one environment is called: `robot/env=3`. No two pairs have one name.

    Raises BadRequest where that is longer than a name may be.
    """
    if env_id is None:
        return session_id
    name = session_id + _ENV + env_id.replace("%", "%25").replace("/", "%2F")
    if len(name) > MAX_SESSION_ID_CHARACTERS:
        raise BadRequest(
            f"env_id: expected {name[:40]}..., which is how the session of this environment is called, to have at most "
            f"{MAX_SESSION_ID_CHARACTERS} characters, got {len(name)}; use a shorter id"
        )
    return name


def is_within(name: str, session_id: str) -> bool:
    """Whether `name` is the session `session_id`, or that of one of its environments."""
    return name == session_id or (name.startswith(session_id + _ENV) and "/" not in name[len(session_id + _ENV) :])
