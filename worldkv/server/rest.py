"""`/v1`: sessions and snapshots over HTTP, for people, planners and dashboards. Ticks stay on the websockets.

The same sessions as the robots': opened here, ticked there, or the other way round. The types below are the API's
description (`/openapi.json`).
"""

from __future__ import annotations

import asyncio
import dataclasses
import uuid
from contextlib import suppress
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Request
from fastapi.routing import APIRoute
from fastapi.security import APIKeyHeader
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import StreamingResponse
from starlette.routing import Match
from starlette.types import Scope

from worldkv.engine.admission import Capacity
from worldkv.errors import AdmissionRefused, BadRequest, MessageTooLarge, RequestTimedOut, SessionNotFound
from worldkv.server.console.stream import BOUNDARY, parts, require_encoder
from worldkv.server.download import tar_parts
from worldkv.server.http import owner_of
from worldkv.server.service import Service
from worldkv.server.sessions import EndReason, Entry, Imported, owned
from worldkv.server.snapshots import HeldSnapshot
from worldkv.wire import normalise_session_id

API_VERSION = "1"


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class OpenBody(Body):
    """`session_id` left out: the server chooses one."""

    session_id: str | None = None


class ForkBody(Body):
    """`session_id`: the new session's. `snapshot_id`: fork that snapshot instead of the session as it is now."""

    session_id: str | None = None
    snapshot_id: str | None = None


class ImagineBody(Body):
    """`noise_seed`: another seed, another future; left out, the model's own."""

    noise_seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None


class RestoreBody(Body):
    snapshot_id: str


class SessionState(BaseModel):
    """`frames_seen`: latent frames since its window began. `blocks`: of history, those shared with others included.
    `inexact`: why its history is not, to the bit, what it was before it was brought here; null: it is."""

    session_id: str
    state: Literal["live", "parked"]
    busy: bool
    frames_seen: int
    blocks: int
    bytes_parked: int
    inexact: str | None
    named: bool
    connections: int
    idle_s: float


class SnapshotState(BaseModel):
    snapshot_id: str
    session_id: str
    frames_seen: int
    blocks_charged: int


class Sessions(BaseModel):
    sessions: list[SessionState]


class Snapshots(BaseModel):
    snapshots: list[SnapshotState]


class AppDescription(BaseModel):
    """`speaks`: the kind of app. `about`: its own words."""

    speaks: str
    name: str
    about: dict[str, Any]


class Ended(BaseModel):
    ended: str


class Books(BaseModel):
    """The engine's blocks, see `explanation`."""

    bytes_per_block: int
    num_blocks: int
    num_used: int
    num_charged: int
    blocks_per_session: int
    blocks_per_branch: int
    blocks_of_conditioning: int
    blocks_shared: int
    num_sessions: int
    num_more_sessions: int
    explanation: str


class Failure(BaseModel):
    """`error_id` finds the reason in the server's log."""

    code: str
    message: str
    error_id: str
    retry_after_ms: int | None = None


_KEY = APIKeyHeader(name="Authorization", description="`Api-Key <key>`, where the server has keys", auto_error=False)


async def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


Served = Annotated[Service, Depends(_service)]


async def _owner(request: Request, service: Served, _: Annotated[str | None, Depends(_KEY)]) -> str:
    return owner_of(request, service)


Owner = Annotated[str, Depends(_owner)]


async def _ready_service(_: Owner, service: Served) -> Service:
    await service.until_ready()
    return service


async def _entry(session_id: str, owner: Owner, service: Served) -> Entry:
    return service.sessions.get(owned(normalise_session_id(session_id), owner), owner)


ReadyService = Annotated[Service, Depends(_ready_service)]
OfSession = Annotated[Entry, Depends(_entry)]

_FAILURES: dict[int | str, dict[str, Any]] = {
    status: {"model": Failure} for status in (400, 401, 404, 409, 413, 429, 500, 503)
}


class _Ending(APIRoute):
    """Ids may hold slashes. What an operation is called stands after a slash of the URL; one that is written %2F is the
    id's: `sessions/arm%2Frecording` reads the session "arm/recording".
    """

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        match, found = super().matches(scope)
        ending, written = self.path.rpartition("/")[2], scope.get("raw_path")
        if "{" in ending or not written or written.partition(b"?")[0].endswith(f"/{ending}".encode()):
            return match, found
        return Match.NONE, {}


router = APIRouter(prefix="/v1", responses=_FAILURES, route_class=_Ending)
# Ids may hold slashes, so a path's end is told apart first.


@router.get("/app")
async def describe_app(_: Owner, service: Served) -> AppDescription:
    """What is served: what a request has to hold, and what it is answered."""
    return AppDescription(speaks=service.app.speaks, name=service.app.name, about=dict(service.app.describe()))


@router.get("/sessions")
async def list_sessions(owner: Owner, service: Served) -> Sessions:
    """This key's open sessions, in the order in which they were opened."""
    states = []
    for entry in service.sessions.of(owner):
        with suppress(SessionNotFound):  # the engine has ended it, and its client is still to be told
            states.append(_state(entry))
    return Sessions(sessions=states)


@router.post("/sessions", status_code=201)
async def open_session(owner: Owner, service: ReadyService, body: OpenBody | None = None) -> SessionState:
    """Open an empty session; robots tick it by its id."""
    return _state(await service.sessions.open(_new_id(body, owner), owner))


_BYTES = {"requestBody": {"content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}}}


@router.post("/sessions/import", status_code=201, openapi_extra=_BYTES)
async def import_session(
    request: Request, owner: Owner, service: ReadyService, session_id: str | None = None, exact: bool = False
) -> SessionState:
    """A new session that goes on from an export, which is the body. Of another model, robot or version, or damaged, it
    is refused whole. The history of a compact one is computed anew; where that cannot be exact, `inexact` says why,
    and with `exact` it is refused."""
    limit = service.config.max_import_bytes
    told = request.headers.get("content-length", "")
    if limit == 0 or (told.isdecimal() and int(told) > limit):
        most = f"expected at most {limit} bytes (--max-import-gb, ServerConfig.max_import_bytes)"
        raise MessageTooLarge(f"body: {most}, got {told[:20] or 'more'}")
    if service.importing.locked():
        raise AdmissionRefused("another session is being imported", retry_after_ms=1000)
    async with service.importing:
        data = bytearray()
        async for part in request.stream():
            data += part
        source = Imported(data, trusts=not owner, exact=exact)  # without an owner, all sessions are one client's
        entry = await service.sessions.open(_new_id(OpenBody(session_id=session_id), owner), owner, source)
    state = _state(entry)
    inexact = "" if state.inexact is None else f", not exactly: {state.inexact}"
    entry.history.happened(f"goes on from an export{inexact}")
    return state


@router.post("/sessions/{session_id:path}/reset")
async def reset_session(entry: OfSession, service: ReadyService) -> SessionState:
    """Drop the history; a tick in flight ends with session_ended."""
    await service.sessions.reset(entry.session_id, entry.owner)
    return _state(entry)


@router.post("/sessions/{session_id:path}/park")
async def park_session(entry: OfSession, service: ReadyService) -> SessionState:
    """Move the K/V to host memory until the next tick. Waits for the tick in flight."""
    await service.sessions.ask(entry, entry.session.begin_park)
    entry.history.happened("was parked")
    return _state(entry)


@router.post("/sessions/{session_id:path}/resume")
async def resume_session(entry: OfSession, service: ReadyService) -> SessionState:
    """Bring a parked session's K/V back now, so that its next tick does not wait for it."""
    await service.sessions.ask(entry, entry.session.begin_resume)
    entry.history.happened("was resumed")
    return _state(entry)


@router.post("/sessions/{session_id:path}/imagine")
async def imagine(entry: OfSession, service: ReadyService, body: ImagineBody | None = None) -> SessionState:
    """A tick without a client: what the last one predicted is taken for observed. For forks, to see a future.

    Waits for the tick in flight; a robot's next one waits for this one.
    """
    seed = body.noise_seed if body is not None else None
    with service.sessions.kept(entry):
        future = asyncio.wrap_future(entry.session.imagine(seed))
        try:
            reply = await asyncio.wait_for(future, service.config.request_timeout_s)
        except TimeoutError:
            raise RequestTimedOut(f"no answer within {service.config.request_timeout_s:g} s") from None
    service.ticked(entry, reply)
    return _state(entry)


@router.post("/sessions/{session_id:path}/snapshot", status_code=201)
async def snapshot_session(entry: OfSession, service: ReadyService) -> SnapshotState:
    """Freeze the session between two ticks. Waits for the tick in flight."""
    service.snapshots.require_room(entry.owner)
    snapshot = await service.sessions.ask(entry, entry.session.begin_snapshot)
    entry.history.happened("a snapshot was taken")
    return _snapshot_state(service.snapshots.add(entry.owner, entry.public_id, snapshot))


@router.post("/sessions/{session_id:path}/restore")
async def restore_session(entry: OfSession, service: ReadyService, body: RestoreBody) -> SessionState:
    """Go back, or over, to a snapshot of this or another session. Waits for the tick in flight."""
    held = service.snapshots.get(body.snapshot_id, entry.owner)
    entry.has_history = True  # from now on, for a reset that is asked for meanwhile
    await service.sessions.ask(entry, entry.session.begin_restore, held.snapshot)
    entry.history.happened(f"went back to a snapshot of {held.session_id}")
    return _state(entry)


@router.post("/sessions/{session_id:path}/fork", status_code=201)
async def fork_session(entry: OfSession, service: ReadyService, body: ForkBody | None = None) -> SessionState:
    """A new session that goes on from here, or from a snapshot. Waits for the tick in flight."""
    snapshot_id = body.snapshot_id if body is not None else None
    held = None if snapshot_id is None else service.snapshots.get(snapshot_id, entry.owner)
    source = entry.session if held is None else held.snapshot
    with service.sessions.kept(entry):
        fork = await service.sessions.open(_new_id(body, entry.owner), entry.owner, source)
    fork.history.parent = entry.public_id
    entry.history.happened(f"was forked to {fork.public_id}")
    fork.history.happened(f"goes on from {entry.public_id}" + ("" if held is None else ", from a snapshot"))
    return _state(fork)


@router.get("/sessions/{session_id:path}/export", response_class=StreamingResponse)
async def export_session(
    entry: OfSession, service: ReadyService, kind: Literal["pages", "compact"] = "pages"
) -> StreamingResponse:
    """The session in bytes, for an import here or elsewhere. Waits for the tick in flight; the session goes on. A
    compact one is small, and its history is computed anew."""
    begin = partial(entry.session.begin_export, compact=kind == "compact")
    export = await service.sessions.ask(entry, begin)
    entry.history.happened("was exported")
    headers = {
        "content-length": str(export.num_bytes),
        "content-disposition": 'attachment; filename="session.safetensors"',
    }
    parts = map(bytes, export.parts())
    return StreamingResponse(parts, media_type="application/octet-stream", headers=headers)


@router.get("/sessions/{session_id:path}/recording", response_class=StreamingResponse)
async def download_recording(entry: OfSession) -> StreamingResponse:
    """What is recorded of it so far, as a tar file; for `worldkv replay --recording`."""
    record = entry.session.record
    folder = None if record is None else record.folder
    if folder is None:
        raise BadRequest("recording: nothing is recorded of this session; start the server with --record")
    headers = {"content-disposition": f'attachment; filename="{folder.name}.tar"'}
    return StreamingResponse(tar_parts(folder), media_type="application/x-tar", headers=headers)


@router.get("/sessions/{session_id:path}/stream", response_class=StreamingResponse)
async def stream_session(entry: OfSession, service: ReadyService) -> StreamingResponse:
    """What its cameras saw, a JPEG a tick, as multipart/x-mixed-replace: browsers and players show it as it is."""
    require_encoder()
    return StreamingResponse(parts(service, entry), media_type=f"multipart/x-mixed-replace; boundary={BOUNDARY}")


@router.get("/sessions/{session_id:path}")
async def read_session(entry: OfSession) -> SessionState:
    return _state(entry)


@router.delete("/sessions/{session_id:path}")
async def delete_session(entry: OfSession, service: Served) -> Ended:
    """Close the session; its next request, if any, is told once."""
    await service.sessions.end(entry, EndReason.DELETED, "it was deleted")
    return Ended(ended=EndReason.DELETED.value)


@router.get("/snapshots")
async def list_snapshots(owner: Owner, service: Served) -> Snapshots:
    """This key's snapshots, the oldest first."""
    return Snapshots(snapshots=[_snapshot_state(held) for held in service.snapshots.of(owner)])


@router.delete("/snapshots/{snapshot_id}")
async def release_snapshot(snapshot_id: str, owner: Owner, service: Served) -> Ended:
    service.snapshots.release(service.snapshots.get(snapshot_id, owner), "its client said so")
    return Ended(ended="released")


@router.get("/capacity")
async def read_capacity(_: Owner, service: Served) -> Books:
    """What a session costs, and how many more fit."""
    capacity: Capacity = service.app.engine.capacity()
    return Books(**dataclasses.asdict(capacity), explanation=capacity.explain())


def _new_id(body: OpenBody | ForkBody | None, owner: str) -> str:
    given = body.session_id if body is not None else None
    return owned(uuid.uuid4().hex if given is None else normalise_session_id(given), owner)


def _state(entry: Entry) -> SessionState:
    return SessionState(
        session_id=entry.public_id,
        named=entry.named,
        connections=len(entry.connections),
        idle_s=round(asyncio.get_running_loop().time() - entry.last_used, 3),
        **entry.session.describe(),
    )


def _snapshot_state(held: HeldSnapshot) -> SnapshotState:
    return SnapshotState(
        snapshot_id=held.snapshot_id,
        session_id=held.session_id,
        frames_seen=held.snapshot.num_chunks,
        blocks_charged=held.snapshot.num_blocks_charged,
    )
