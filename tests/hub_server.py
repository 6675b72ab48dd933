"""A small hub on loopback, for tests: it speaks what `huggingface_hub` asks of the real one, and counts the bytes.

Repositories are folders. Weights answer as the real hub's large files do: with a redirection to another address. A path
in `cuts` is sent up to that many bytes, and then the connection is gone, so many times as it says.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """What is published, and what was asked for."""

    repositories: dict[str, Path]
    gated: set[str] = field(default_factory=set)
    cuts: dict[str, list[int]] = field(default_factory=dict)  # path -> at which byte, one entry a request
    stops: dict[str, int] = field(default_factory=dict)  # path -> after how many bytes it is sent no further
    sent: list[tuple[str, int, int]] = field(default_factory=list)  # path, first byte, bytes
    stopped: threading.Event = field(default_factory=threading.Event)
    url: str = ""

    def num_sent(self, name: str) -> int:
        return sum(count for path, _, count in self.sent if path.endswith(name))

    def asked(self, name: str) -> list[int]:
        """The first byte of every request for a file."""
        return [first for path, first, _ in self.sent if path.endswith(name)]


@contextmanager
def hub(**repositories: Path) -> Iterator[Hub]:
    """Serves folders as repositories: `owner__name=folder` is `owner/name`."""
    state = Hub({name.replace("__", "/"): path for name, path in repositories.items()})
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": state}))
    server.daemon_threads = True
    state.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield state
    finally:
        state.stopped.set()
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None: ...

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, with_body: bool) -> None:
        path = unquote(urlsplit(self.path).path).strip("/")
        parts = path.split("/")
        if parts[:2] == ["api", "models"]:
            return self._api("/".join(parts[2:4]), parts[4:])
        if parts[0] == "cdn":
            return self._file("/".join(parts[1:3]), "/".join(parts[3:]), with_body)
        if len(parts) > 4 and parts[2] == "resolve":
            return self._resolve("/".join(parts[:2]), parts[3], "/".join(parts[4:]), with_body)
        return self._error(404, "EntryNotFound")

    def _api(self, repository: str, rest: list[str]) -> None:
        folder = self.hub.repositories.get(repository)
        if folder is None:
            return self._error(401, "RepoNotFound")
        if len(rest) > 1 and rest[1] not in ("main", "v1", COMMIT):
            return self._error(404, "RevisionNotFound")
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        entries = [_entry(path, str(path.relative_to(folder))) for path in files]
        if rest[:1] == ["tree"]:
            return self._json(entries)
        siblings = [{"rfilename": entry["path"], "size": entry["size"], "blobId": entry["oid"]} for entry in entries]
        self._json({"id": repository, "modelId": repository, "sha": COMMIT, "private": False, "siblings": siblings})

    def _resolve(self, repository: str, revision: str, name: str, with_body: bool) -> None:
        folder = self.hub.repositories.get(repository)
        if folder is None:
            return self._error(401, "RepoNotFound")
        if repository in self.hub.gated and self.headers.get("Authorization") != "Bearer hf_admitted":
            return self._error(401 if "Authorization" not in self.headers else 403, "GatedRepo")
        if revision not in ("main", "v1", COMMIT):
            return self._error(404, "RevisionNotFound")
        if not (folder / name).is_file():
            return self._error(404, "EntryNotFound")
        if not name.endswith(".safetensors"):
            return self._file(repository, name, with_body)
        self.send_response(302)
        self._describe(folder / name)
        self.send_header("Location", f"{self.hub.url}/cdn/{repository}/{name}")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _file(self, repository: str, name: str, with_body: bool) -> None:
        path = self.hub.repositories[repository] / name
        data, first = path.read_bytes(), 0
        asked = self.headers.get("Range")
        if asked is not None:
            first = int(asked.removeprefix("bytes=").split("-")[0])
        self.send_response(206 if asked else 200)
        self._describe(path)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(data) - first))
        if asked:
            self.send_header("Content-Range", f"bytes {first}-{len(data) - 1}/{len(data)}")
        self.end_headers()
        if with_body:
            self._send(f"{repository}/{name}", data[first:], first)

    def _send(self, path: str, data: bytes, first: int) -> None:
        cuts, stop = self.hub.cuts.get(path, []), self.hub.stops.get(path)
        end = cuts.pop(0) - first if cuts else len(data) if stop is None else stop
        self.hub.sent.append((path, first, min(end, len(data))))
        try:
            self.wfile.write(data[:end])
            self.wfile.flush()
        except OSError:  # whoever asked is gone
            return
        if end < len(data):
            if not cuts and stop is not None:
                self.hub.stopped.wait(60)
            self.close_connection = True

    def _describe(self, path: Path) -> None:
        digest, size = _digest(path), path.stat().st_size
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{digest}"')
        self.send_header("X-Linked-Etag", f'"{digest}"')
        self.send_header("X-Linked-Size", str(size))

    def _json(self, value: object) -> None:
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _error(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", code)
        self.send_header("Content-Length", "0")
        self.end_headers()


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _entry(path: Path, name: str) -> dict[str, Any]:
    size, digest = path.stat().st_size, _digest(path)
    entry: dict[str, Any] = {"type": "file", "oid": digest[:40], "size": size, "path": name}
    if name.endswith(".safetensors"):
        entry["lfs"] = {"oid": digest, "size": size, "pointerSize": 134}
    return entry
