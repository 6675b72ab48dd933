"""HTTP's side of things that websockets have of their own: who asks, how long a body may be, errors as JSON."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from worldkv.errors import AdmissionRefused, BadRequest, MessageTooLarge, Unauthorised, WorldKVError
from worldkv.server.turns import Turns
from worldkv.wire import public_error

if TYPE_CHECKING:
    from worldkv.server.service import Service

MAX_BODY_BYTES = 64 * 1024
HEALTH_PATH = "/healthz"  # says one word, and is asked by probes under any name: the only one without a check of `Host`
KNOWN_SENDER = "worldkv.known_sender"  # ASGI extension of a websocket: a function without arguments
SERVE_FIRST = "worldkv.serve_first"  # likewise
LONG_BODY = "worldkv.long_body"  # ASGI extension of a request: a function of how many bytes are read of its body
IMPORT_PATH = "/v1/sessions/import"
_KEYED = "/v1/"


class NotFound(WorldKVError):
    code = "not_found"


_STATUS: Mapping[str, int] = {
    "bad_request": 400,
    "unauthorised": 401,
    "session_not_found": 404,
    "snapshot_not_found": 404,
    "not_found": 404,
    "session_busy": 409,
    "session_ended": 409,
    "message_too_large": 413,
    "admission_refused": 429,
    "engine_stopped": 503,
    "request_timed_out": 504,
}

logger = logging.getLogger(__name__)


def owner_of(connection: HTTPConnection, service: Service) -> str:
    """Whose request this is. Raises Unauthorised without a key of this server; where it has none, for a page of
    another site; and under a name that is not the server's."""
    require_own_name(connection, service)
    if service.config.api_key is None:
        require_own_page(connection, service)
    owner = service.config.owner_of(connection.headers.get("authorization"))
    sender_is_known(connection)
    return owner


def require_own_name(connection: HTTPConnection, service: Service) -> None:
    """Raises Unauthorised under a name that is not the server's."""
    refusal = service.config.refusal_of_host(connection.headers.get("host"))
    if refusal is not None:
        raise Unauthorised(refusal)


def require_own_page(connection: HTTPConnection, service: Service) -> None:
    """Raises Unauthorised for a page of another site. Not for those who show a key: no foreign page has it."""
    headers = connection.headers
    refusal = service.config.refusal_of_origin(headers.get("origin"), headers.get("host", ""))
    if refusal is not None:
        raise Unauthorised(refusal)


def sender_is_known(connection: HTTPConnection) -> None:
    """From now on a websocket may send long messages, where the web server keeps strangers' short."""
    _tell(connection, KNOWN_SENDER)


def serve_first(connection: HTTPConnection) -> None:
    """From now on, where the web server can: a robot's websocket is read before others."""
    _tell(connection, SERVE_FIRST)


def _tell(connection: HTTPConnection, extension: str) -> None:
    tell = connection.scope.get("extensions", {}).get(extension)
    if tell is not None:
        tell()


def error_response(service: Service, request: Request, error: Exception) -> Response:
    """The same code and message as a websocket's client gets, and an id that finds the traceback in the log."""
    code, message = public_error(error)
    error_id, status = uuid.uuid4().hex[:8], _STATUS.get(code, 500)
    service.metrics.errors.labels(code).inc()
    level = logging.ERROR if status == 500 else logging.WARNING
    fields = {"event": "error", "code": code, "error_id": error_id}
    where = (request.method, request.scope["path"])
    logger.log(level, "error %s told to %s %s: %s", error_id, *where, error, exc_info=error, extra=fields)
    body: dict[str, Any] = {"code": code, "message": message, "error_id": error_id}
    headers = {}
    retry_after_ms = getattr(error, "retry_after_ms", None)
    if retry_after_ms is not None:
        body["retry_after_ms"] = retry_after_ms
        headers["retry-after"] = str(-(-retry_after_ms // 1000))
    return JSONResponse(body, status, headers)


def in_our_words(error: Exception) -> Exception:
    """A library's error as one of ours."""
    if isinstance(error, RequestValidationError):
        return BadRequest("; ".join(_explain(problem) for problem in error.errors()))
    if isinstance(error, _BodyTooLarge):
        return MessageTooLarge(f"body: expected at most {error.limit} bytes, got more")
    if isinstance(error, HTTPException):
        unknown = error.status_code in (404, 405)
        return NotFound("no such operation; /openapi.json lists all") if unknown else BadRequest(str(error.detail))
    return error


def _explain(problem: Mapping[str, Any]) -> str:
    field = ".".join(str(part) for part in problem["loc"] if part != "body") or "body"
    came = repr(problem.get("input"))
    return f"{field}: {problem['msg']}, got {came if len(came) <= 80 else came[:80] + '...'}"


class Door:
    """ASGI middleware: of an HTTP request nothing is read before its sender is known. Says whose it is, counts it, and
    does not read a body over MAX_BODY_BYTES (an import: over `max_import_bytes`) to its end. Websockets come later to
    know who sends: see `owner_of`."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service
        self._turns = Turns()  # robots and /healthz do not take one

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] == HEALTH_PATH:
            await self._app(scope, receive, send)
            return
        await self._turns.begin()
        request = Request(scope)
        try:
            if scope["path"].startswith(_KEYED):
                owner = owner_of(request, self._service)
                self._service.requests.add(request, owner)
            else:
                require_own_name(request, self._service)
        except (Unauthorised, AdmissionRefused) as refused:
            await error_response(self._service, request, refused)(scope, receive, send)
            return
        limit = MAX_BODY_BYTES
        if scope["path"] == IMPORT_PATH and scope["method"] == "POST":  # its sender is known by now
            limit = max(limit, self._service.config.max_import_bytes)
            allow = scope.get("extensions", {}).get(LONG_BODY)
            if allow is not None:
                allow(limit)
        try:
            await self._app(scope, _limited(receive, limit), send)
        finally:
            self._service.requests.forget(request)


def _limited(receive: Receive, limit: int) -> Receive:
    received = 0

    async def limited() -> Message:
        nonlocal received
        message = await receive()
        received += len(message.get("body", b""))
        if received > limit:
            raise _BodyTooLarge(limit)
        return message

    return limited


class _BodyTooLarge(HTTPException):  # the only kind of exception that the framework lets through here
    def __init__(self, limit: int) -> None:
        super().__init__(413)
        self.limit = limit
