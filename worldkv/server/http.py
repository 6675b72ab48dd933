"""HTTP's side of things that websockets have of their own: who asks, how long a body may be, errors as JSON."""

from __future__ import annotations

import ipaddress
import logging
import uuid
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from worldkv.errors import BadRequest, MessageTooLarge, Unauthorised, WorldKVError
from worldkv.wire import public_error

if TYPE_CHECKING:
    from worldkv.server.service import Service

MAX_BODY_BYTES = 64 * 1024


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
    """Whose request this is. Raises Unauthorised without a key of this server, or for a page of another site."""
    require_own_page(connection, service)
    return service.config.owner_of(connection.headers.get("authorization"))


def require_own_page(connection: HTTPConnection, service: Service) -> None:
    """Raises Unauthorised for a page of another site."""
    origin, host = connection.headers.get("origin"), connection.headers.get("host", "")
    if origin is not None:  # a browser sends it, with whatever page it shows; robots do not
        without_key = service.config.api_key is None
        if _netloc(origin) != host or (without_key and not _names_loopback(host)):
            raise Unauthorised(f"origin: expected a page of this server, got {origin[:100]}")


def error_response(service: Service, request: Request, error: Exception) -> Response:
    """The same code and message as a websocket's client gets, and an id that finds the traceback in the log."""
    code, message = public_error(error)
    error_id, status = uuid.uuid4().hex[:8], _STATUS.get(code, 500)
    service.metrics.errors.labels(code).inc()
    level = logging.ERROR if status == 500 else logging.WARNING
    fields = {"event": "error", "code": code, "error_id": error_id}
    where = (request.method, request.url.path)
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
        return MessageTooLarge(f"body: expected at most {MAX_BODY_BYTES} bytes, got more")
    if isinstance(error, HTTPException):
        unknown = error.status_code in (404, 405)
        return NotFound("no such operation; /openapi.json lists all") if unknown else BadRequest(str(error.detail))
    return error


def _explain(problem: Mapping[str, Any]) -> str:
    field = ".".join(str(part) for part in problem["loc"] if part != "body") or "body"
    came = repr(problem.get("input"))
    return f"{field}: {problem['msg']}, got {came if len(came) <= 80 else came[:80] + '...'}"


def _netloc(url: str) -> str | None:
    try:
        return urlsplit(url).netloc
    except ValueError:
        return None


def _names_loopback(host: str) -> bool:
    name = urlsplit(f"//{host}").hostname or ""
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost"


class BodyLimit:
    """ASGI middleware: a request body over MAX_BODY_BYTES is not read to its end."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        received = 0

        async def limited() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > MAX_BODY_BYTES:
                raise _BodyTooLarge
            return message

        await self._app(scope, limited, send)


class _BodyTooLarge(HTTPException):  # the only kind of exception that the framework lets through here
    def __init__(self) -> None:
        super().__init__(413)
