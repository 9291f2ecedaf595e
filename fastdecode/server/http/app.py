"""The routes."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

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


async def completions(front: Front, exchange: Exchange) -> None:
    """Continue prompts."""
    await CompletionExchange(front, exchange, COMPLETIONS_URL).run()


async def chat_completions(front: Front, exchange: Exchange) -> None:
    """Continue a conversation."""
    await CompletionExchange(front, exchange, CHAT_URL).run()


async def responses(front: Front, exchange: Exchange) -> None:
    """Continue a conversation of items."""
    await CompletionExchange(front, exchange, RESPONSES_URL).run()


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
    "/": info.page,
    "/page.css": info.page,
    "/page.js": info.page,
    "/icon.svg": info.page,
}
_POST: dict[str, Handler] = {
    COMPLETIONS_URL: completions,
    CHAT_URL: chat_completions,
    RESPONSES_URL: responses,
    "/tokenize": tokens.tokenize,
    "/detokenize": tokens.detokenize,
}
_DELETE: dict[str, Handler] = {"/v1/conversations/{conversation_id:path}": forget}


def make_app(front: Front) -> Starlette:
    """The routes as an ASGI application; the guard goes around it."""
    tables = {"GET": _GET, "POST": _POST, "DELETE": _DELETE}
    every = [
        (method, path, handler)
        for method, table in tables.items()
        for path, handler in table.items()
    ]
    routes = [
        Route(path, _Endpoint(front, handler), methods=[method]) for method, path, handler in every
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
    known = {404: ("there is nothing at this path", "not_found")}
    text, code = known.get(error.status_code, ("this method isn't for this path", "bad_method"))
    refused = HttpRefusal(error.status_code, text, code)
    request.scope[REFUSED] = code
    return JSONResponse(refused.body, error.status_code, headers=error.headers)
