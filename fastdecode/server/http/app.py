"""The routes."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from http import HTTPStatus
from typing import Any, Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from fastdecode.conversations.turns import check_id
from fastdecode.openai.requests import CHAT_URL, COMPLETIONS_URL
from fastdecode.openai.response_bodies import RESPONSES_URL
from fastdecode.server.front import Front
from fastdecode.server.http import info, tokens
from fastdecode.server.http.bodies import Disconnected
from fastdecode.server.http.errors import SERVER, HttpRefusal
from fastdecode.server.http.exchange import REFUSED, Exchange, Receive, Send, WriteTimeout
from fastdecode.server.http.generate import CompletionExchange
from fastdecode.server.http.preparing import typed

logger = logging.getLogger(__name__)

Handler = Callable[[Front, Exchange], Awaitable[None]]


async def generate(front: Front, exchange: Exchange) -> None:
    """Continue prompts, a conversation, or one of items."""
    await CompletionExchange(front, exchange, exchange.scope["path"]).run()


async def forget(front: Front, exchange: Exchange) -> None:
    """End a conversation, and keep nothing of it."""
    with typed():
        whose = check_id(exchange.scope["path_params"]["conversation_id"])
        if not await front.turns.forget(whose):
            text = "there is no such conversation, or it is over"
            raise HttpRefusal(404, text, "conversation_not_found", param="conversation_id")
    said = {"id": whose, "object": "conversation.deleted", "deleted": True}
    await exchange.answer_json(said)


_GET: dict[str, Handler] = {
    "/v1/models": info.models,
    "/v1/models/{model:path}": info.model,
    "/version": info.version,
    "/live": info.live,
    "/health": info.health,
    "/metrics": info.metrics,
    "/status.json": info.status,
    "/history.json": info.history,
    **dict.fromkeys(info.PAGE, info.page),
}
_POST: dict[str, Handler] = {
    **dict.fromkeys((COMPLETIONS_URL, CHAT_URL, RESPONSES_URL), generate),
    "/tokenize": tokens.tokenize,
    "/detokenize": tokens.detokenize,
}
_DELETE: dict[str, Handler] = {"/v1/conversations/{conversation_id:path}": forget}


_TABLES: Final = {"GET": _GET, "POST": _POST, "DELETE": _DELETE}
METHODS: Final = tuple(_TABLES)
_ABSENT: Final[Mapping[str, str]] = {
    path: instead
    for instead, paths in (
        ("models generate text, and there is no pooling",
         "/v1/embeddings /embeddings /embed /v2/embed /api/embed /api/embeddings /pooling "
         "/classify /score /v1/score /rerank /v1/rerank /v2/rerank"),
        ("prompts and answers are text", "/v1/images /v1/audio /v1/videos /v1/realtime"),
        ("nothing is stored, and a request brings all of its conversation",
         "/v1/responses /v1/chat/completions /v1/conversations /v1/assistants /v1/threads "
         "/v1/vector_stores"),
        ("fastdecode run-batch answers files of requests", "/v1/files /v1/uploads /v1/batches"),
        (f"use {CHAT_URL} or {COMPLETIONS_URL}",
         "/v1/messages /v1/complete /v1/edits /api/generate /api/chat /generate /completion "
         "/generate_stream /infill /invocations /inference"),
        ("there is no training, and no adapters are applied",
         "/v1/fine_tuning /v1/load_lora_adapter /v1/unload_lora_adapter"),
        ("there is no moderation", "/v1/moderations"),
        ("use /v1/models", "/api/tags /api/show"),
        ("use /health", "/ping /healthz /readyz /livez /ready"),
        ("docs/guides/serving.md lists all paths", "/docs /redoc /openapi.json"),
    )
    for path in paths.split()
}  # fmt: skip
"""Paths of other servers, or how they begin, and what is there instead."""


def make_app(front: Front) -> Starlette:
    """The routes as an ASGI application; the guard goes around it."""
    routes = [
        Route(path, _Endpoint(front, handler), methods=[method])
        for method, table in _TABLES.items()
        for path, handler in table.items()
    ]
    app = Starlette(routes=routes, exception_handlers={HTTPException: _not_a_route})
    app.router.redirect_slashes = False
    return app


class _Endpoint:
    """A handler as an ASGI application that ends in an answer, or cuts the connection."""

    def __init__(self, front: Front, handler: Handler) -> None:
        self._front = front
        self._handler = handler

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send, self._front.options.write_timeout_s)
        try:
            await self._handler(self._front, exchange)
        except HttpRefusal as error:
            await exchange.refuse(error)
        except (Disconnected, WriteTimeout):
            pass
        except Exception as error:
            # Without its traceback's values, which may hold a prompt.
            logger.error("%r failed: %s", scope["path"][:100], type(error).__name__)
            logger.debug("", exc_info=True)
            if exchange.status is not None:
                exchange.abort()
                return
            text = "the server has made a mistake"
            await exchange.refuse(HttpRefusal(500, text, "internal_error", kind=SERVER))


async def _not_a_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.scope["path"]
    text, code = f"there is nothing at this path: {_instead(path)}", "not_found"
    if error.status_code != HTTPStatus.NOT_FOUND:
        methods = (error.headers or {}).get("Allow", "")
        text, code = f"this method isn't for this path, which takes {methods}", "bad_method"
    refused = HttpRefusal(error.status_code, text, code)
    request.scope[REFUSED] = code
    return JSONResponse(refused.body, error.status_code, headers=error.headers)


def _instead(path: str) -> str:
    """Return what to do in place of asking at a path that doesn't exist."""
    for begin, instead in _ABSENT.items():
        if f"{path}/".startswith(f"{begin}/"):
            return f"{begin} is not supported: {instead}"
    near = "/v1/" + path.strip("/").removeprefix("v1/").removeprefix("v1/")
    if near in _POST or near in _GET:
        return f"use {near}"
    return f"paths are {', '.join([*_POST, '/v1/models', '/health'])}"
