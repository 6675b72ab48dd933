"""The languages in which viewers speak to a stream, as texts and bytes. Each translates; none knows a socket.

A stream understands `worldkv.videos.messages` and tells events: plain fields with a `type`, of which a block's come
with its pictures. `Native` is what `/v1/video` speaks.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import ClassVar, Protocol

from worldkv.videos.messages import Fields, Message, parse, read_message

Told = list[str | bytes]


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
