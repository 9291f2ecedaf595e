"""``/tokenize`` and ``/detokenize``, in vLLM's form."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from fastdecode.core.errors import RequestError
from fastdecode.openai.body_errors import BodyError, refuse, refuse_unknown
from fastdecode.openai.requests import CHAT_URL
from fastdecode.server.front import Front
from fastdecode.server.http.bodies import read_body
from fastdecode.server.http.preparing import Preparation, typed

_TEXT_FIELDS = ("model", "prompt", "add_special_tokens", "return_token_strs")
_CHAT_FIELDS = (
    "model", "messages", "add_generation_prompt", "chat_template_kwargs", "return_token_strs",
)  # fmt: skip
_TOKENS_FIELDS = ("model", "tokens")


async def tokenize(front: Front, request: Request) -> Response:
    """A text's or a conversation's token ids."""
    with _prepared(front) as preparation:
        raw = await read_body(request, front.options.max_body_bytes)
        body = await preparation.read(raw, _checked)
        with typed():
            front.reader.model_of(body)
            tokens = await _tokens_of(preparation, front, body)
        write = partial(_tokenized, front, body, tokens)
        answer = await preparation.beside(front.threads.bodies, write)
    return Response(answer, media_type="application/json")


async def detokenize(front: Front, request: Request) -> Response:
    """Token ids' text."""
    with _prepared(front) as preparation:
        raw = await read_body(request, front.options.max_body_bytes)
        body = await preparation.read(raw, _checked_tokens)
        with typed():
            front.reader.model_of(body)
            text = await preparation.queued(front.threads.bodies, partial(_text, front, body))
    return JSONResponse({"prompt": text})


@contextlib.contextmanager
def _prepared(front: Front) -> Iterator[Preparation]:
    """A preparation; at the end its place in the queue is free."""
    number = front.next_number()
    try:
        yield Preparation(front, number)
    finally:
        front.admission.gone(number)


def _checked(body: dict[str, Any]) -> dict[str, Any]:
    """A body of ``/tokenize``. Raises RequestError."""
    is_chat = "messages" in body
    refuse_unknown(body, _CHAT_FIELDS if is_chat else _TEXT_FIELDS, (), "the body")
    for name in ("add_special_tokens", "return_token_strs", "add_generation_prompt"):
        if not isinstance(body.get(name), (bool, type(None))):
            refuse(name, "must be true or false")
    if not is_chat and not isinstance(body.get("prompt"), str):
        refuse("prompt", "must be a string", "invalid_prompt")
    return body


async def _tokens_of(
    preparation: Preparation, front: Front, body: dict[str, Any]
) -> tuple[int, ...]:
    if "messages" not in body:
        special = body.get("add_special_tokens") is not False
        return await preparation.encoded(body["prompt"], add_special_tokens=special)
    asked = {name: body[name] for name in _CHAT_FIELDS[:4] if name in body}
    return await preparation.tokens_of(front.reader.read(CHAT_URL, asked).prompts[0])


def _tokenized(front: Front, body: dict[str, Any], tokens: Sequence[int]) -> bytes:
    answer: dict[str, Any] = {
        "count": len(tokens),
        "max_model_len": front.opening.max_model_len,
        "tokens": tokens,
        "token_strs": None,
    }
    if body.get("return_token_strs"):
        vocabulary = front.codec.vocabulary
        answer["token_strs"] = [
            str(token) if vocabulary is None else vocabulary.tokenizer.id_to_token(token)
            for token in tokens
        ]
    return json.dumps(answer).encode()


def _checked_tokens(body: dict[str, Any]) -> dict[str, Any]:
    """A body of ``/detokenize``. Raises RequestError."""
    refuse_unknown(body, _TOKENS_FIELDS, (), "the body")
    return body


def _text(front: Front, body: dict[str, Any]) -> str:
    tokens = _token_list(body.get("tokens"))
    try:
        return front.codec.decode(front.checker.tokenise(tokens))
    except RequestError as error:
        raise BodyError(str(error), code=error.code, param="tokens") from None


def _token_list(tokens: object) -> list[int]:
    if not isinstance(tokens, list):
        refuse("tokens", "must be a list of token ids")
    return tokens
