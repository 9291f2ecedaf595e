"""What is given to ``LLM.chat`` and ``LLM.generate``, checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from fastdecode.conversations.turns import ChatTurn, Turn, check_id
from fastdecode.core.errors import RequestError
from fastdecode.core.sequence import CacheUse, Prompt, RequestOutput, SamplingParams
from fastdecode.text.chat_template import ChatTemplate
from fastdecode.text.chats import Message
from fastdecode.text.codec import TextCodec


def as_ids(conversation_id: object, count: int) -> list[str] | None:
    """An id for each of so many prompts or chats; None: none is given."""
    if conversation_id is None:
        return None
    ids = [conversation_id] if isinstance(conversation_id, str) else conversation_id
    if not isinstance(ids, Sequence) or len(ids) != count:
        raise RequestError(
            f"conversation_id must be one for each of the {count} prompts or chats",
            code="invalid_conversation",
        )
    return [check_id(each) for each in ids]


def chat_prompts(
    chats: Sequence[Sequence[Message]],
    template: ChatTemplate,
    codec: TextCodec,
    add_generation_prompt: bool,
    variables: Mapping[str, Any] | None,
) -> tuple[dict[int, Prompt], dict[int, RequestOutput]]:
    """By their places: the conversations' tokens, and what those come to that
    the template refuses."""
    now = datetime.now()
    prompts: dict[int, Prompt] = {}
    refused: dict[int, RequestOutput] = {}
    for place, chat in enumerate(chats):
        try:
            text = template.render(
                chat, now, add_generation_prompt=add_generation_prompt, variables=variables
            )
            prompts[place] = codec.encode(text, add_special_tokens=False)
        except RequestError as error:
            refused[place] = RequestOutput(str(place), None, (), error=error)
    return prompts, refused


def chat_turns(
    ids: Sequence[str],
    chats: Sequence[Sequence[Message]],
    params: Sequence[SamplingParams],
    codec: TextCodec,
    template: ChatTemplate,
    add_generation_prompt: bool,
    variables: Mapping[str, Any] | None,
    cache: CacheUse,
) -> list[Turn]:
    """New messages as turns of these conversations."""
    more = codec, template, add_generation_prompt, variables or {}
    return [
        Turn(str(place), whose, ChatTurn(tuple(new), *more), its, cache)
        for place, (whose, new, its) in enumerate(zip(ids, chats, params, strict=True))
    ]


def as_batch(prompts: object) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise RequestError(
            f"prompts must be a string or a list, not {type(prompts).__name__}",
            code="invalid_prompt",
        )
    batch = list(prompts)
    if batch and all(isinstance(item, int) and not isinstance(item, bool) for item in batch):
        return [batch]
    return batch


def as_params(params: object, num_prompts: int) -> list[SamplingParams]:
    """One for each prompt."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * num_prompts
    each: list[SamplingParams] = []
    for item in params if isinstance(params, Sequence) else [params]:
        if not isinstance(item, SamplingParams):
            raise RequestError(
                "params must be SamplingParams, one for all or a list of one each, not "
                f"{type(item).__name__}",
                code="invalid_sampling_params",
            )
        each.append(item)
    if len(each) != num_prompts:
        raise RequestError(
            f"{num_prompts} prompts but {len(each)} sampling params: give one for all, or one each"
        )
    return each


def check_cache(cache: object) -> None:
    """Say what it has to be, before any request is made of it."""
    if not isinstance(cache, CacheUse):
        raise RequestError(
            f"cache must be a fastdecode.CacheUse, not {type(cache).__name__}: "
            'CacheUse(is_off=True) shares nothing, CacheUse(salt="...") with the same salt only',
            code="invalid_cache",
        )
