"""What the console's page is told: plain values, made when somebody looks and never otherwise."""

from __future__ import annotations

import base64
import json
import struct
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from worldkv import __version__
from worldkv.errors import SessionNotFound
from worldkv.server.sessions import Entry

if TYPE_CHECKING:
    from worldkv.engine.stats import BlockMap
    from worldkv.server.console.history import Latest, TickRow
    from worldkv.server.service import Service
    from worldkv.server.snapshots import HeldSnapshot

_SPARKLINE = 40  # ticks
_MAX_WIDTH = 320  # pixels of an imagined frame that is sent
FREE, CONDITIONING, SNAPSHOT, OTHERS, FIRST_SESSION = range(5)  # what the map's cells are; sessions follow


def hello(service: Service) -> dict[str, Any]:
    """What does not change while the server runs."""
    app, engine = service.app, service.app.engine
    card, cache = engine.card, engine.cache_card
    return {
        "type": "hello",
        "version": __version__,
        "model": card.sizes,
        "device": cache.device,
        "dtype": cache.dtype,
        "attention": cache.attention,
        "branches": list(cache.branches),
        "window_frames": card.window_chunks,
        "block_size": cache.block_size,
        "random_weights": app.random_weights,
        "weight_bytes": card.num_weight_bytes,
        "records": app.recorder is not None,
        "keys": service.config.api_key is not None,
        "app": app.speaks,
        "beside": [{"serves": each.serves, "port": each.port} for each in service.config.beside],
        "name": app.name,
        "about": app.describe(),
    }


def overview(service: Service, owner: str, blocks: BlockMap) -> dict[str, Any]:
    """The page's first view, for one key: its own sessions by name, those of others as blocks."""
    engine = service.app.engine
    stats, capacity = engine.stats(), engine.capacity()
    mine = service.sessions.of(owner)
    shown = [told for entry in mine if (told := _session(service, entry)) is not None]
    errors = service.metrics.error_counts()
    return {
        "type": "overview",
        "now": time.time(),
        "sessions": shown,
        "num_other_sessions": max(0, stats.num_sessions - len(shown)),
        "snapshots": [_snapshot(held) for held in service.snapshots.of(owner)],
        "ended": [
            {"id": end.public_id, "why": end.text, "at": end.at, "ticks": end.num_ticks}
            for end in service.sessions.ends.recent(owner)
        ],
        "blocks": _cells(blocks, [entry.session_id for entry in mine]),
        "memory": {
            "bytes_per_block": capacity.bytes_per_block,
            "used": capacity.num_used,
            "charged": capacity.num_charged,
            "total": capacity.num_blocks,
            "parked_bytes": stats.bytes_parked,
        },
        "more_sessions": capacity.num_more_sessions,
        "num_parked": stats.num_parked,
        "in_flight": stats.num_ticks_in_flight,
        "forwards": sum(stats.rows_per_forward.values()),
        "rows": sum(rows * count for rows, count in stats.rows_per_forward.items()),
        "refused": errors.get("admission_refused", 0),
        "errors": errors,
    }


def detail(entry: Entry, period_s: float) -> dict[str, Any]:
    """Of one session that is looked at."""
    history, latest = entry.history, entry.history.latest
    return {
        "type": "detail",
        "id": entry.public_id,
        "tick": history.num_ticks - 1,
        "parent": history.parent,
        "connections": len(entry.connections),
        "ticks": [_row(row, period_s) for row in history.ticks],
        "events": [{"at": event.at, "text": event.text} for event in history.events],
        **({} if latest is None else latest.reply.shown),
    }


def frames(entry: Entry) -> bytes | None:
    """The newest frames of what its tick was shown, as one binary message; None where there are none."""
    latest = entry.history.latest
    if latest is None or latest.reply.seen is None:
        return None
    images = {name: np.ascontiguousarray(stack[-1]) for name, stack in latest.reply.seen.items()}
    header = {
        "type": "observed",
        "id": entry.public_id,
        "tick": latest.row.number,
        "images": [{"name": name, "shape": image.shape} for name, image in images.items()],
    }
    return packed(header, *images.values())


def imagined(public_id: str, latest: Latest) -> bytes:
    """The imagined video as one binary message, no wider than _MAX_WIDTH. Runs the decoder: not for the event loop."""
    video = latest.reply.decode_video()
    stride = -(-video.shape[2] // _MAX_WIDTH)
    small = np.ascontiguousarray(video[:, ::stride, ::stride])
    return packed({"type": "imagined", "id": public_id, "tick": latest.row.number, "shape": small.shape}, small)


def packed(header: Mapping[str, Any], *arrays: np.ndarray) -> bytes:
    """Header length (4 bytes, little-endian), header (JSON), the arrays' bytes one after the other."""
    text = json.dumps(header).encode()
    return b"".join([struct.pack("<I", len(text)), text, *(array.tobytes() for array in arrays)])


def _session(service: Service, entry: Entry) -> dict[str, Any] | None:
    """None: the engine has ended it, and its client is still to be told."""
    try:
        said = entry.session.describe()
    except SessionNotFound:
        return None
    history = entry.history
    rows = list(history.ticks)[-_SPARKLINE:]
    last = rows[-1].timings["total"] / 1e3 if rows else None
    return {
        "id": entry.public_id,
        "parent": history.parent,
        "ticks": history.num_ticks,
        "latency_ms": [round(row.timings["total"], 1) for row in rows],
        "latency_span_s": rows[-1].at - rows[0].at if rows else 0.0,
        "margin_s": None if last is None else service.app.period_s - last,
        "idle_s": max(0.0, time.time() - rows[-1].at) if rows else None,
        "age_s": max(0.0, time.time() - history.opened_at),
        "connections": len(entry.connections),
        "named": entry.named,
        **said,
    }


def _snapshot(held: HeldSnapshot) -> dict[str, Any]:
    frames = held.snapshot.num_chunks
    return {"id": held.snapshot_id, "session": held.session_id, "frames": frames}


def _row(row: TickRow, period_s: float) -> dict[str, Any]:
    timings = {stage: round(value, 2) for stage, value in row.timings.items()}
    return {
        "tick": row.number,
        "at": row.at,
        "timings": timings,
        "facts": dict(row.facts),
        "imagined": row.imagined,
        "margin_s": round(period_s - row.timings["total"] / 1e3, 3),
    }


def _cells(blocks: BlockMap, mine: Sequence[str]) -> dict[str, Any]:
    """One byte a block each: whose, which branch, whether shared; as base64."""
    owner, branch, shared = (np.zeros(blocks.num_blocks, np.uint8) for _ in range(3))
    owner[blocks.conditioning] = CONDITIONING
    owner[blocks.snapshots] = SNAPSHOT
    index = {name: FIRST_SESSION + min(number, 250) for number, name in enumerate(mine)}
    for name, branches in blocks.sessions.items():
        for number, held in enumerate(branches.values()):
            owner[held] = index.get(name, OTHERS)
            branch[held] = number
    shared[blocks.shared] = 1
    arrays = {"owner": owner, "branch": branch, "shared": shared}
    return {"num": blocks.num_blocks, **{k: base64.b64encode(v.tobytes()).decode() for k, v in arrays.items()}}
