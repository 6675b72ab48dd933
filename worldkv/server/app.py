"""The ASGI app: any path upgrades to a robot's websocket; `/v1` for sessions, `/healthz`, `/metrics`, `/openapi.json`,
and `/` for people.

Does not know which web server runs it. That must let messages of twice `max_message_bytes` through, so that
one too long is refused with a reason, and must run lifespan events.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket

from worldkv.errors import WorldKVError
from worldkv.server.config import ServerConfig
from worldkv.server.console.socket import console_routes
from worldkv.server.http import BodyLimit, error_response, in_our_words
from worldkv.server.metrics import CONTENT_TYPE
from worldkv.server.rest import API_VERSION, router
from worldkv.server.robots import Connection
from worldkv.server.service import PolicyService

if TYPE_CHECKING:
    from worldkv.robots.policy import Policy

_DRAIN_S = 5.0


def create_app(policy: Policy, config: ServerConfig) -> FastAPI:
    """Serves `policy`, which the caller keeps owning. `app.state.service` is the app's PolicyService."""
    service = PolicyService(policy, config)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.start()
        try:
            yield
        finally:
            await service.drain(_DRAIN_S)
            await service.stop()

    async def robot(websocket: WebSocket) -> None:
        task = asyncio.current_task()
        assert task is not None
        service.connections.add(task)
        try:
            await Connection(websocket, service).run()
        finally:
            service.connections.discard(task)

    async def healthz(_: Request) -> Response:
        reason = await service.why_not_ready()
        if reason is None:
            return JSONResponse({"status": "ready"})
        return JSONResponse({"status": "unready", "reason": reason}, status_code=503)

    async def metrics(_: Request) -> Response:
        return Response(service.metrics.exposition(), headers={"content-type": CONTENT_TYPE})

    async def failed(request: Request, error: Exception) -> Response:
        return error_response(service, request, in_our_words(error))

    routes = [Route("/healthz", healthz), Route("/metrics", metrics), *console_routes(service)]
    routes.append(WebSocketRoute("/{path:path}", robot))
    app = FastAPI(title="worldkv", version=API_VERSION, routes=routes, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.service = service
    for kind in (WorldKVError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, failed)
    app.add_middleware(BodyLimit)
    app.include_router(router)
    return app
