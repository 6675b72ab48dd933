"""The languages in which viewers speak to a stream, as texts and bytes. Each translates; none knows a socket.

A stream understands `worldkv.videos.messages` and tells events: plain fields with a `type`, of which a block's come
with its pictures. `Native` is what `/v1/video` speaks.
"""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol

from worldkv.errors import BadRequest
from worldkv.videos.messages import Fields, Message, Start, Stop, parse, read_message, shown

Told = list[str | bytes]
_MAX_TOLD = 32  # fields that nothing reads


@dataclass(frozen=True)
class Pictures:
    """One block's, encoded. `init`: what a stream of mp4 fragments begins with; empty for JPEGs."""

    data: bytes
    init: bytes = b""
    mime: str = ""


class Dialect(Protocol):
    """One socket's."""

    label: ClassVar[str]  # of metrics

    def greet(self, about: Fields) -> Told: ...

    def hear(self, text: str) -> tuple[list[Message], Told]:
        """What a client's text asks of the stream, and what it is answered at once. Raises BadRequest."""

    def tell(self, event: Fields) -> Told: ...
    def show(self, header: Fields, pictures: Pictures) -> Told: ...


class Native:
    """What `docs/video.md` describes."""

    label: ClassVar[str] = "video"

    def __init__(self) -> None:
        self._began = False

    def greet(self, about: Fields) -> Told:
        return [json.dumps(about)]

    def hear(self, text: str) -> tuple[list[Message], Told]:
        fields = parse(text)
        if fields.keys() == {"key"}:  # of a page that does not know whether the server wants one
            return [], []
        message = read_message(fields)
        return [message], []

    def tell(self, event: Fields) -> Told:
        if event["type"] == "started":
            self._began = False
        return [json.dumps(event)]

    def show(self, header: Fields, pictures: Pictures) -> Told:
        init = b"" if self._began else pictures.init
        self._began = True
        data = init + pictures.data
        more: dict[str, object] = {"bytes": len(data)}
        if pictures.mime:
            more |= {"init_bytes": len(init), "mime": pictures.mime}
        return [json.dumps({**header, **more}), data]


class Realtime:
    """The messages of vLLM-Omni's `/v1/realtime/video`, as its public description has them: words in, a file of mp4
    fragments out. What a sampler could be told beside words, seed and length is the server's own business here."""

    label: ClassVar[str] = "realtime_video"

    def __init__(self) -> None:
        self._about: Fields = {}
        self._request_id = ""
        self._config: dict[str, object] = {}
        self._num_chunks = 0

    def greet(self, about: Fields) -> Told:
        self._about = about
        return []

    def hear(self, text: str) -> tuple[list[Message], Told]:
        fields = parse(text)
        kind = fields.get("type")
        if fields.keys() == {"key"}:
            return [], []
        if kind == "session.start":
            return [self._start(fields)], []
        if kind == "session.interaction":
            return self._interaction(fields.get("interaction"), "session.interaction.queued")
        if kind == "session.prompt_update":  # its earlier name
            event = {"event": {"prompt": fields.get("prompt")}, "event_id": fields.get("event_id")}
            return self._interaction(event, "session.prompt_update.accepted")
        if kind == "session.stop":
            return [Stop()], []
        if kind == "session.ping":
            return [], [json.dumps({"type": "session.pong"})]
        known = "session.start, session.interaction, session.prompt_update, session.stop or session.ping"
        raise BadRequest(f"type: expected {known}, got {shown(kind)}")

    def tell(self, event: Fields) -> Told:
        kind = event["type"]
        if kind == "started":
            self._request_id, self._num_chunks = str(event["session_id"]), 0
            return [self._json("video.start", format="m4s", config=self._config)]
        if kind == "stopped":
            return [self._json("session.done", chunks=self._num_chunks, stopped=not event["done"])]
        if kind == "error":
            return [json.dumps({"type": "error", "message": event["message"], "code": event["code"]})]
        return []

    def show(self, header: Fields, pictures: Pictures) -> Told:
        data = (b"" if self._num_chunks else pictures.init) + pictures.data
        ids = header["applied"]
        about = self._json(
            "video.chunk_metadata",
            kind="media",
            transport_chunk_index=self._num_chunks,
            generation_chunk_index=header["block"],
            num_frames=header["num_frames"],
            byte_length=len(data),
            started_event_ids=ids,
            active_event_ids=[],
            completed_event_ids=ids,
        )
        self._num_chunks += 1
        return [about, data]

    def _start(self, fields: Fields) -> Start:
        """Raises BadRequest for a size or rate that is not the model's: it would be another video than was meant."""
        if fields.get("format", "m4s") != "m4s":
            raise BadRequest(f"format: expected 'm4s', got {shown(fields['format'])}")
        served = {"width": "width", "height": "height", "fps": "frames_per_second"}
        for name, ours in served.items():
            if fields.get(name) not in (None, self._about[ours]):
                raise BadRequest(f"{name}: this server makes {self._about[ours]}, got {shown(fields[name])}")
        num_frames = fields.get("num_frames")
        if num_frames is not None and (type(num_frames) is not int or num_frames < 1):
            raise BadRequest(f"num_frames: expected a whole number from 1, got {shown(num_frames)}")
        start = read_message({"type": "start", "prompt": fields.get("prompt"), "seed": fields.get("seed")})
        assert isinstance(start, Start)
        if start.prompt is None:
            raise BadRequest("prompt: expected words, got none")
        read = {"type", "key", "model", "prompt", "seed", "format", "num_frames", *served}
        self._config = {"prompt": start.prompt, "seed": start.seed, "num_frames": num_frames}
        self._config |= {name: self._about[ours] for name, ours in served.items()}
        self._config["ignored"] = [name[:80] for name in sorted(fields.keys() - read)][:_MAX_TOLD]
        return replace(start, format="mp4", pace="fast", num_frames=num_frames, acknowledges=False)

    def _interaction(self, said: object, answer: str) -> tuple[list[Message], Told]:
        inner = said.get("event") if isinstance(said, dict) else None
        prompt = inner.get("prompt") if isinstance(inner, dict) else None
        own = said.get("event_id") if isinstance(said, dict) else None
        event_id = uuid.uuid4().hex if own is None else own
        message = read_message({"type": "prompt", "prompt": prompt, "id": event_id})
        return [message], [self._json(answer, event_id=event_id)]

    def _json(self, kind: str, /, **fields: object) -> str:
        return json.dumps({"type": kind, "request_id": self._request_id, **fields})
