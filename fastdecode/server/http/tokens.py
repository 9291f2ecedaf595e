"""``/tokenize`` and ``/detokenize``, in vLLM's form."""

from __future__ import annotations

import asyncio
from typing import Any

from fastdecode.core.errors import RequestError
from fastdecode.openai.requests import CHAT_URL, refuse, refuse_unknown
from fastdecode.server.front import Front
from fastdecode.server.http.bodies import BodyLimits, read_object
from fastdecode.server.http.errors import refused
from fastdecode.server.http.exchange import Exchange

_TEXT_FIELDS = ("model", "prompt", "add_special_tokens", "return_token_strs")
_CHAT_FIELDS = (
    "model", "messages", "add_generation_prompt", "chat_template_kwargs", "return_token_strs",
)  # fmt: skip
_TOKENS_FIELDS = ("model", "tokens")


async def tokenize(front: Front, exchange: Exchange) -> None:
    """A text's or a conversation's token ids."""
    body = await _body(front, exchange)
    try:
        answer = await asyncio.to_thread(_tokenized, front, body)
    except RequestError as error:
        raise refused(error) from None
    await exchange.answer_json(answer)


async def detokenize(front: Front, exchange: Exchange) -> None:
    """Token ids' text."""
    body = await _body(front, exchange)
    try:
        text = await asyncio.to_thread(_text, front, body)
    except RequestError as error:
        raise refused(error) from None
    await exchange.answer_json({"prompt": text})


async def _body(front: Front, exchange: Exchange) -> dict[str, Any]:
    limits = BodyLimits(front.options.max_body_bytes, front.options.body_timeout_s)
    return await read_object(exchange.headers, exchange.receive, limits)


def _tokenized(front: Front, body: dict[str, Any]) -> dict[str, Any]:
    is_chat = "messages" in body
    refuse_unknown(body, _CHAT_FIELDS if is_chat else _TEXT_FIELDS, (), "the body")
    for name in ("add_special_tokens", "return_token_strs", "add_generation_prompt"):
        if not isinstance(body.get(name), (bool, type(None))):
            refuse(name, "must be true or false")
    if is_chat:
        asked = {name: body[name] for name in _CHAT_FIELDS[:4] if name in body}
        tokens = list(front.tokens_of(front.reader.read(CHAT_URL, asked).prompts[0]))
    else:
        prompt = body.get("prompt")
        if not isinstance(prompt, str):
            refuse("prompt", "must be a string", "invalid_prompt")
        special = body.get("add_special_tokens") is not False
        tokens = front.codec.encode(prompt, add_special_tokens=special)
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
    return answer


def _text(front: Front, body: dict[str, Any]) -> str:
    refuse_unknown(body, _TOKENS_FIELDS, (), "the body")
    return front.codec.decode(front.checker.tokenise(_token_list(body.get("tokens"))))


def _token_list(tokens: object) -> list[int]:
    if not isinstance(tokens, list):
        refuse("tokens", "must be a list of token ids")
    return tokens
