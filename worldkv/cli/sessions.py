"""`worldkv sessions`: a server's open sessions; one in a file, and one from a file. Imports no torch."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, TypedDict
from urllib.parse import quote, urlencode

from worldkv.cli.common import add_server_address
from worldkv.cli.errors import OK, UsageError
from worldkv.cli.places import add_output, check_place
from worldkv.errors import ConnectionLost, RemoteError
from worldkv.show.terminal import Step, progress, size_text
from worldkv.words import count
from worldkv_client import ServerAddress
from worldkv_client.dialling import Route

if TYPE_CHECKING:
    from worldkv_client.dialling import Answer

_ACTIONS = ("list", "export", "import")
_PAGE = "/v1/sessions"
_PIECE = 1 << 20
_PATIENCE_S = 630.0  # a server waits up to ten minutes for the tick in flight


class _State(TypedDict):
    """What is read of a server's SessionState."""

    session_id: str
    state: str
    busy: bool
    frames_seen: int
    idle_s: float
    inexact: str | None


MORE = (
    "Without more, or with list: which are open. `export ID` writes a session to a file, as its last tick left it,\n"
    "and it goes on; `import FILE` opens one that goes on from there, in this or another server of the same model.\n"
    "docs/sessions.md says what a file holds, and when a compact one goes on exactly."
)
EXAMPLE = "worldkv sessions export arm --url ws://gpu-box:8000 --output arm.session"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", nargs="?", choices=_ACTIONS, default="list", help="what to do (list)")
    parser.add_argument("what", nargs="?", metavar="ID|FILE", help="session to export, or file to import")
    add_server_address(parser)
    add_output(parser, "file", "the exported session (ID.session)")
    text = "export the state only; the history is computed anew where it is imported"
    parser.add_argument("--compact", action="store_true", help=text)
    parser.add_argument("--as", dest="name", metavar="ID", help="of the imported session (the server chooses one)")
    parser.add_argument("--exact", action="store_true", help="refuse an import that would not go on bit for bit")


def run(arguments: argparse.Namespace) -> int:
    _check_combination(arguments)
    route = Route.to(ServerAddress.parse(arguments.url), arguments.proxy)
    {"list": _list, "export": _export, "import": _import}[arguments.action](route, arguments)
    return OK


def _check_combination(arguments: argparse.Namespace) -> None:
    """No option is taken and then ignored. Raises UsageError."""
    action, needs = arguments.action, {"export": "a session's ID", "import": "a FILE"}
    if action in needs and arguments.what is None:
        raise UsageError(f"{action}: {needs[action]} is needed")
    if action == "list" and arguments.what is not None:
        raise UsageError(f"list: takes nothing more, got {arguments.what!r}")
    for field, owner in (("output", "export"), ("compact", "export"), ("name", "import"), ("exact", "import")):
        if getattr(arguments, field) and action != owner:
            raise UsageError(f"{arguments.options[field]}: is for {owner}; leave it out")


def _list(route: Route, arguments: argparse.Namespace) -> None:
    with _answered(route, arguments, _PAGE) as answer:
        found: list[_State] = json.loads(answer.read())["sessions"]
    print(count(len(found), "open session"))
    for each in found:
        note = "" if each["inexact"] is None else f"; not exact: {each['inexact']}"
        frames, state = count(each["frames_seen"], "frame"), "busy" if each["busy"] else each["state"]
        print(f"  {each['session_id']:<24} {state:<7} {frames:>12}, idle for {each['idle_s']:.0f} s{note}")


def _export(route: Route, arguments: argparse.Namespace) -> None:
    path = arguments.output or Path(f"{quote(arguments.what, safe='')}.session")
    check_place("--output", path, "file")
    kind = "compact" if arguments.compact else "pages"
    page = f"{_PAGE}/{quote(arguments.what, safe='')}/export?kind={kind}"
    with _answered(route, arguments, page) as answer, progress(f"fetching {arguments.what}", is_bytes=True) as step:
        num_bytes = _write_whole(path, answer, step)
    print(f"{path}: session {arguments.what}, {size_text(num_bytes)}; bring it back with `worldkv sessions import`")


def _write_whole(path: Path, answer: Answer, step: Step) -> int:
    """Under another name until all of it is there: a file of that name is never half of one. Returns its bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    done, total = 0, answer.num_bytes or 0
    try:
        with part.open("wb") as file:
            while piece := answer.read(_PIECE):
                file.write(piece)
                done += len(piece)
                step(done, total)
        if done != total:
            raise OSError(f"the connection ended after {done} of {total} bytes; nothing was written")
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
    return done


def _import(route: Route, arguments: argparse.Namespace) -> None:
    path = Path(arguments.what)
    wanted = {"session_id": arguments.name, "exact": "true" if arguments.exact else None}
    query = urlencode({name: value for name, value in wanted.items() if value is not None})
    with path.open("rb") as file, progress(f"sending {path.name}", is_bytes=True) as step:
        body = _Sent(file, path.stat().st_size, step)
        page = f"{_PAGE}/import?{query}"
        with _answered(route, arguments, page, "POST", body) as answer:
            state: _State = json.loads(answer.read())
    exactly = "bit for bit" if state["inexact"] is None else f"not exactly: {state['inexact']}"
    print(f"session {state['session_id']}: goes on after {count(state['frames_seen'], 'frame')}, {exactly}")


class _Sent:
    """A file that tells how much of it is read."""

    def __init__(self, file: BinaryIO, num_bytes: int, step: Step) -> None:
        self._file, self.num_bytes, self._step = file, num_bytes, step

    def read(self, size: int = -1, /) -> bytes:
        piece = self._file.read(max(size, _PIECE) if size > 0 else size)
        self._step(self._file.tell(), self.num_bytes)
        return piece


@contextmanager
def _answered(
    route: Route, arguments: argparse.Namespace, page: str, method: str = "GET", body: _Sent | None = None
) -> Iterator[Answer]:
    """Raises ConnectionLost where nothing answers, RemoteError with what a server says that refuses."""
    num_bytes = 0 if body is None else body.num_bytes
    ask = {"api_key": arguments.api_key, "method": method, "timeout": _PATIENCE_S}
    with ExitStack() as stack:
        try:
            answer = stack.enter_context(route.exchange(page, body=body, num_bytes=num_bytes, **ask))
        except OSError as error:
            where = f"{route.address.http()}: {error}"
            raise ConnectionLost(f"{where}; check the address, and that the server runs") from error
        if answer.status >= 300:
            raise RemoteError(_reason(answer))
        yield answer


def _reason(answer: Answer) -> str:
    text = answer.read()
    try:
        told = json.loads(text)
        return f"{told['code']}: {told['message']} [error {told['error_id']}]"
    except (ValueError, KeyError, TypeError):
        return f"the server answered {answer.status}, and not as worldkv does: check the address"
