"""The ASGI app around an `App`: its sockets, `/v1` for sessions, `/healthz`, `/metrics`, `/openapi.json`, and `/` for
people.

Does not know which web server runs it. That must let messages of twice `max_message_bytes` through, so that
one too long is refused with a reason, and must run lifespan events.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from worldkv.errors import WorldKVError
from worldkv.server.config import ServerConfig
from worldkv.server.console.socket import console_routes
from worldkv.server.http import HEALTH_PATH, Door, error_response, in_our_words
from worldkv.server.metrics import CONTENT_TYPE
from worldkv.server.rest import API_VERSION, router
from worldkv.server.robots import add_robots
from worldkv.server.service import Service
from worldkv.server.videos import add_videos

if TYPE_CHECKING:
    from worldkv.app import AnyApp

_DRAIN_S = 5.0


# What an app speaks -> what adds its sockets and operations to the server's own.
WIRES: Mapping[str, Callable[[FastAPI, Service], None]] = {"robots": add_robots, "videos": add_videos}


def create_app(app: AnyApp, config: ServerConfig) -> FastAPI:
    """Serves `app`, which the caller keeps owning. `state.service` of what it returns is its Service."""
    service = Service(app, config)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.start()
        try:
            yield
        finally:
            await service.drain(_DRAIN_S)
            await service.stop()

    async def healthz(_: Request) -> Response:
        reason = await service.why_not_ready()
        if reason is None:
            return JSONResponse({"status": "ready"})
        return JSONResponse({"status": "unready", "reason": reason}, status_code=503)

    async def metrics(_: Request) -> Response:
        return Response(service.metrics.exposition(), headers={"content-type": CONTENT_TYPE})

    async def failed(request: Request, error: Exception) -> Response:
        return error_response(service, request, in_our_words(error))

    routes = [Route(HEALTH_PATH, healthz), Route("/metrics", metrics), *console_routes(service)]
    api = FastAPI(title="worldkv", version=API_VERSION, routes=routes, lifespan=lifespan, docs_url=None, redoc_url=None)
    api.state.service = service
    for kind in (WorldKVError, RequestValidationError, HTTPException, Exception):
        api.add_exception_handler(kind, failed)
    api.add_middleware(Door, service=service)
    api.include_router(router)
    if app.speaks in WIRES:
        WIRES[app.speaks](api, service)
    return api
