"""``/tokenize`` and ``/detokenize``, in vLLM's form."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from fastdecode.openai.body_errors import blaming, refuse, refuse_unknown
from fastdecode.openai.requests import CHAT_URL
from fastdecode.server.front import Front
from fastdecode.server.http.preparing import Preparation, read_body

_TEXT_FIELDS = ("model", "prompt", "add_special_tokens", "return_token_strs")
_CHAT_FIELDS = (
    "model", "messages", "add_generation_prompt", "chat_template_kwargs", "return_token_strs",
)  # fmt: skip
_TOKENS_FIELDS = ("model", "tokens")


async def tokenize(front: Front, request: Request) -> Response:
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


async def detokenize(front: Front, request: Request) -> Response:
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
    """A preparation whose place in the queue is free at the end."""
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
