"""Routes, and the answers without generated text: the server's state, models, tokens."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from importlib import resources
from typing import Any, Final

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from fastdecode import __version__
from fastdecode.conversations.turns import check_id
from fastdecode.openai.body_errors import blaming, refuse, refuse_unknown
from fastdecode.openai.requests import CHAT_URL, COMPLETIONS_URL
from fastdecode.openai.response_bodies import RESPONSES_URL
from fastdecode.server.front import Front
from fastdecode.server.http.errors import HttpRefusal
from fastdecode.server.http.generate import Completion
from fastdecode.server.http.preparing import Preparation, read_body
from fastdecode.server.link import StatusReport

PAGE: Mapping[str, tuple[str, str]] = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
_NOT_KEPT = {"cache-control": "no-store"}
_MODEL, _CONVERSATION = "/v1/models/", "/v1/conversations/"
_TEXT_FIELDS = ("model", "prompt", "add_special_tokens", "return_token_strs")
_CHAT_FIELDS = (
    "model", "messages", "add_generation_prompt", "chat_template_kwargs", "return_token_strs",
)  # fmt: skip
_TOKENS_FIELDS = ("model", "tokens")

Handler = Callable[[Front, Request], ASGIApp | Awaitable[ASGIApp]]


async def _forget(front: Front, request: Request) -> Response:
    name = check_id(request.path_params["name"])
    # A turn under way is answered, but not kept.
    if not await asyncio.wrap_future(front.turns.act(front.conversations.forget, name)):
        text = "there is no such conversation, or it is over"
        raise HttpRefusal(404, text, "conversation_not_found", param="conversation_id")
    return JSONResponse({"id": name, "object": "conversation.deleted", "deleted": True})


def _models(front: Front, request: Request) -> Response:
    return JSONResponse({"object": "list", "data": [_entry(front, name) for name in front.names]})


def _model(front: Front, request: Request) -> Response:
    name = request.path_params["name"]
    if name not in front.names:
        raise HttpRefusal(404, f"the model {name[:256]!r} isn't served here", "model_not_found")
    return JSONResponse(_entry(front, name))


def _entry(front: Front, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": front.started_s,
        "owned_by": "fastdecode",
        "root": front.opening.model,
        "parent": None,
        "max_model_len": front.opening.max_model_len,
    }


def _health(front: Front, request: Request) -> Response:
    """Answer 200 only if a token could come out."""
    trouble, seen = front.trouble(), front.outlook.seen
    body: dict[str, Any] = {"status": "ok" if trouble is None else "unavailable"}
    if trouble is not None:
        body["reason"] = trouble
    elif seen is not None and seen.num_live_r_workers < seen.num_r_workers:
        body["degraded"] = f"{seen.num_live_r_workers} of {seen.num_r_workers} R-workers are there"
    return JSONResponse(body, 200 if trouble is None else 503, _NOT_KEPT)


def _metrics(front: Front, request: Request) -> Response:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(front.metrics)
    return Response(generate_latest(registry), headers={"content-type": CONTENT_TYPE_LATEST})


def _history(front: Front, request: Request) -> Response:
    return JSONResponse(front.metrics.history.columns(time.monotonic()), headers=_NOT_KEPT)


def _status(front: Front, request: Request) -> Response:
    seen, observed, now_s = front.outlook.seen, front.metrics, time.monotonic()
    body = {
        "model": front.names[0],
        "version": __version__,
        "state": front.trouble() or "ready",
        "time_s": now_s,
        "uptime_s": now_s - front.began_s,
        "num_tasks": len(asyncio.all_tasks()),
        "num_open": front.client.num_open,
        "num_queued": front.admission.num_requests,
        **(seen or StatusReport()).fields,
        "generation_tokens": observed.generation_tokens,
        "num_succeeded": observed.num_succeeded,
        "num_failed": observed.ended["error"],
        "num_aborted": observed.ended["abort"],
        "num_rejected": observed.rejected.total(),
        "prompt_tokens": observed.prompt_tokens,
        "cached_tokens": observed.cached_tokens,
        "ttft_s": observed.lately_ttft.quantiles(now_s, 0.5, 0.99),
        "tpot_s": observed.lately_tpot.quantiles(now_s, 0.5, 0.99),
    }
    return JSONResponse(body, headers=_NOT_KEPT)


def _page(front: Front, request: Request) -> Response:
    name, kind = PAGE[request.url.path]
    content = resources.files(f"{__package__}.page").joinpath(name).read_bytes()
    return Response(content, media_type=kind, headers={"cache-control": "no-cache"})


async def _tokenize(front: Front, request: Request) -> Response:
    raw = await read_body(request, front.options)
    with _prepared(front) as preparation:
        body = await preparation.read(raw, _checked)
        front.reader.model_of(body)
        if "messages" in body:
            asked = {name: body[name] for name in _CHAT_FIELDS[:4] if name in body}
            chat = front.reader.read(CHAT_URL, asked).prompts[0]
            tokens = await preparation.tokens_of(chat)
        else:
            special = body.get("add_special_tokens") is not False
            tokens = await preparation.encoded(body["prompt"], add_special_tokens=special)

        def write() -> bytes:
            vocabulary, strings = front.codec.vocabulary, None
            if body.get("return_token_strs"):
                named: Any = str if vocabulary is None else vocabulary.tokenizer.id_to_token
                strings = [named(token) for token in tokens]
            answer = {
                "count": len(tokens),
                "max_model_len": front.opening.max_model_len,
                "tokens": tokens,
                "token_strs": strings,
            }
            return json.dumps(answer).encode()

        answer = await preparation.queued(front.body_threads, write)
    return Response(answer, media_type="application/json")


async def _detokenize(front: Front, request: Request) -> Response:
    raw = await read_body(request, front.options)
    with _prepared(front) as preparation:
        body = await preparation.read(raw, lambda body: body)
        refuse_unknown(body, _TOKENS_FIELDS, (), "the body")
        if not isinstance(body.get("tokens"), list):
            refuse("tokens", "must be a list of token ids")
        front.reader.model_of(body)

        def text() -> str:
            with blaming(otherwise="tokens"):
                return front.codec.decode(front.checker.tokenise(body["tokens"]))

        decoded = await preparation.queued(front.body_threads, text)
    return JSONResponse({"prompt": decoded})


@contextlib.contextmanager
def _prepared(front: Front) -> Iterator[Preparation]:
    """Yield a preparation, and free its place in the queue afterwards."""
    number = front.next_number()
    try:
        yield Preparation(front, number)
    finally:
        front.admission.remove(number)


def _checked(body: dict[str, Any]) -> dict[str, Any]:
    """Return a body of ``/tokenize``. Raises: RequestError: If it is invalid."""
    is_chat = "messages" in body
    refuse_unknown(body, _CHAT_FIELDS if is_chat else _TEXT_FIELDS, (), "the body")
    for name in ("add_special_tokens", "return_token_strs", "add_generation_prompt"):
        if not isinstance(body.get(name), (bool, type(None))):
            refuse(name, "must be true or false")
    if not is_chat and not isinstance(body.get("prompt"), str):
        refuse("prompt", "must be a string", "invalid_prompt")
    return body


_GET, _POST = ("GET", "HEAD"), ("POST",)
ROUTES: Final[Mapping[str, tuple[tuple[str, ...], Handler]]] = {
    **dict.fromkeys((COMPLETIONS_URL, CHAT_URL, RESPONSES_URL), (_POST, Completion)),
    "/tokenize": (_POST, _tokenize),
    "/detokenize": (_POST, _detokenize),
    "/v1/models": (_GET, _models),
    _MODEL: (_GET, _model),
    _CONVERSATION: (("DELETE",), _forget),
    "/version": (_GET, lambda front, request: JSONResponse({"version": __version__})),
    "/live": (_GET, lambda front, request: JSONResponse({"status": "ok"})),
    "/health": (_GET, _health),
    "/metrics": (_GET, _metrics),
    "/status.json": (_GET, _status),
    "/history.json": (_GET, _history),
    **dict.fromkeys(PAGE, (_GET, _page)),
}
"""Paths, or how they begin, with their methods."""
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


class Routes:
    """The routes as an ASGI application. The guard goes around it, and answers its errors."""

    def __init__(self, front: Front) -> None:
        self._front = front

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, method = scope["path"], scope["method"]
        route = path
        for prefix in (_MODEL, _CONVERSATION):
            if path.startswith(prefix):
                route, scope["path_params"] = prefix, {"name": path[len(prefix) :]}
        if route not in ROUTES:
            text = f"there is nothing at this path: {_instead(path)}"
            raise HttpRefusal(404, text, "not_found")
        allowed, handler = ROUTES[route]
        if method not in allowed:
            methods = ", ".join(allowed)
            text = f"this method isn't for this path, which takes {methods}"
            raise HttpRefusal(405, text, "bad_method", headers={"allow": methods})
        response = handler(self._front, Request(scope, receive, send))
        if isinstance(response, Awaitable):
            response = await response
        await response(scope, receive, send)


def _instead(path: str) -> str:
    """Return what there is instead of a path that doesn't exist."""
    near = "/v1/" + path.strip("/").removeprefix("v1/").removeprefix("v1/")
    if near != path and near in ROUTES:
        return f"use {near}"
    for begin, instead in _ABSENT.items():
        if f"{path}/".startswith(f"{begin}/"):
            return f"{begin} is not supported: {instead}"
    posted = [path for path, (methods, _) in ROUTES.items() if methods is _POST]
    return f"paths are {', '.join([*posted, '/v1/models', '/health'])}"
