"""Moments between two blocks of a session: marked, gone back to, gone on from in several futures. Each tells what a
viewer is told of it. Lives on the event loop."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, TypeAlias

from worldkv.errors import BadRequest
from worldkv.server.sessions import EndReason, owned
from worldkv.server.video_worlds import MarkInfo, Place, World, Worlds

if TYPE_CHECKING:
    from worldkv.server.service import Service

Event: TypeAlias = dict[str, object]
_MAX_PARENT = 80  # characters of a session's name that its forks' begin with


async def set_mark(service: Service, worlds: Worlds, world: World, name: str) -> Event:
    """Raises AdmissionRefused where the viewer's key holds too many, or there is no room for what a mark keeps."""
    entry = world.entry
    _require_history(world, "mark")
    service.snapshots.require_room(entry.owner)
    snapshot = await service.sessions.ask(entry, entry.session.begin_snapshot)
    entry.history.happened("a mark was set" + (f": {name}" if name else ""))
    held = service.snapshots.add(entry.owner, entry.public_id, snapshot)
    worlds.marks[held] = MarkInfo(name, world.place, world.num_frames)
    event: Event = {"type": "marked", "mark": held.snapshot_id, "name": name}
    return event | {"block": world.place.block, "pts": world.pts}


async def go_back(service: Service, worlds: Worlds, world: World, mark: str) -> Event:
    """To any mark or snapshot of the viewer's key. Raises SnapshotNotFound."""
    entry = world.entry
    held = service.snapshots.get(mark, entry.owner)
    info = worlds.marks.get(held)
    entry.has_history = True
    await service.sessions.ask(entry, entry.session.begin_restore, held.snapshot)
    entry.history.happened(f"went back to a mark of {held.session_id}")
    world.place = Place() if info is None else info.place
    event: Event = {"type": "sought", "mark": mark, "name": "" if info is None else info.name}
    return event | {"block": world.place.block, "pts": world.pts}


async def fork(service: Service, worlds: Worlds, world: World, count: int) -> Event:
    """All of them, or none. Raises AdmissionRefused."""
    sessions, entry = service.sessions, world.entry
    made = []
    _require_history(world, "fork")
    try:
        for _ in range(count):
            name = owned(f"{entry.public_id[:_MAX_PARENT]}-fork-{uuid.uuid4().hex[:6]}", entry.owner)
            with sessions.kept(entry):
                made.append(await sessions.open(name, entry.owner, entry.session))
    except BaseException:
        for one in made:
            await sessions.end(one, EndReason.DELETED, "not all of its forks could be made")
        raise
    for one in made:
        one.history.parent = entry.public_id
        one.history.happened(f"goes on from {entry.public_id}")
        entry.history.happened(f"was forked to {one.public_id}")
        worlds.of(one).place = world.place
    return {"type": "forked", "sessions": [one.public_id for one in made], "block": world.place.block}


def _require_history(world: World, what: str) -> None:
    if world.place.block is None and not world.entry.has_history:
        raise BadRequest(f"type: there is nothing to {what} before the first block")
