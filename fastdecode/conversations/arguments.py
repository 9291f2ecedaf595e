"""Checks of the arguments of ``LLM.chat`` and ``LLM.generate``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from datetime import datetime
from secrets import token_hex
from typing import Any, TypeAlias

from fastdecode.conversations.turns import check_id
from fastdecode.core.errors import RequestError
from fastdecode.core.sequence import CacheUse, Prompt, RequestOutput, SamplingParams
from fastdecode.text.chat_format import AnswerFormat
from fastdecode.text.chat_template import ChatTemplate
from fastdecode.text.chats import Message, Rendering, check_content
from fastdecode.text.codec import TextCodec


def as_chats(messages: object) -> list[Sequence[Message]]:
    """Return one conversation, or several, as several. Raises RequestError: If they are neither, a
    message's calls aren't a list of objects, or a part isn't text."""
    chats: list[Any] = list(messages) if isinstance(messages, Sequence) else [messages]
    is_one = bool(chats) and all(isinstance(message, Mapping) for message in chats)
    chats = [chats] if is_one else chats
    if not all(isinstance(chat, Sequence) and chat for chat in chats) or not all(
        isinstance(message, Mapping) and isinstance(message.get("role"), str)
        for chat in chats
        for message in chat
    ):
        must = "messages must be a conversation or a list of them: each a list of "
        raise RequestError(must + '{"role": "…", "content": "…"}', code="invalid_messages")
    for place, chat in enumerate(chats):
        for at, message in enumerate(chat):
            _check_message(message, f"messages[{at}]" if is_one else f"messages[{place}][{at}]")
    return chats


def _check_message(message: Message, where: str) -> None:
    calls = message.get("tool_calls") or []
    is_list = isinstance(calls, Sequence) and not isinstance(calls, str)
    if not is_list or not all(isinstance(call, Mapping) for call in calls):
        raise RequestError(
            f"{where}.tool_calls must be a list of calls, each "
            '{"id": "…", "type": "function", "function": {"name": "…", "arguments": "…"}}',
            code="invalid_messages",
        )
    check_content(message, where, is_strict=False)


def as_ids(conversation_id: object, count: int) -> list[str] | None:
    """Return an id for each of ``count`` prompts or chats. None if none is given."""
    if conversation_id is None:
        return None
    ids = [conversation_id] if isinstance(conversation_id, str) else conversation_id
    if not isinstance(ids, Sequence) or len(ids) != count:
        must = f"conversation_id must be one for each of the {count} prompts or chats"
        raise RequestError(must, code="invalid_conversation")
    return [check_id(each) for each in ids]


def chat_prompts(
    chats: Sequence[Sequence[Message]], template: ChatTemplate, codec: TextCodec, how: Rendering
) -> tuple[dict[int, tuple[str, Prompt]], dict[int, RequestOutput]]:
    """Return the chats' texts and tokens, and errors of the template, by place."""
    now = datetime.now()
    prompts: dict[int, tuple[str, Prompt]] = {}
    refused: dict[int, RequestOutput] = {}
    for place, chat in enumerate(chats):
        try:
            text = template.render(chat, now, how)
            prompts[place] = text, codec.encode(text, add_special_tokens=False)
        except RequestError as error:
            refused[place] = RequestOutput(str(place), None, (), error=error)
    return prompts, refused


def parsed(
    output: RequestOutput, answer_format: AnswerFormat | None, codec: TextCodec
) -> RequestOutput:
    """Return a chat's output with its calls and reasoning apart, unless answers are plain text."""
    if answer_format is None:
        return output
    completions = []
    for one in output.completions:
        answer = answer_format.parsed(one.text, codec, output.prompt_token_ids, token_hex(8))
        one = replace(one, content=answer.content, tool_calls=tuple(answer.calls))
        completions.append(replace(one, reasoning_content=answer.reasoning))
    return replace(output, completions=tuple(completions))


PromptGiven: TypeAlias = "Prompt | Mapping[str, Any]"
"""Text, token ids, or a dict with either as ``prompt`` or ``prompt_token_ids``."""
_PROMPT_FIELDS = ("prompt", "prompt_token_ids", "cache_salt")


def as_batch(prompts: object, cache: CacheUse) -> tuple[list[Prompt], list[CacheUse]]:
    """Return one prompt or several, each with its use of the cache."""
    if isinstance(prompts, (str, Mapping)):
        prompts = [prompts]
    if not isinstance(prompts, Sequence):
        must = f"prompts must be a string or a list, not {type(prompts).__name__}"
        raise RequestError(must, code="invalid_prompt")
    batch = list(prompts)
    if batch and all(isinstance(item, int) and not isinstance(item, bool) for item in batch):
        batch = [batch]
    pairs = [_of_mapping(x, cache) if isinstance(x, Mapping) else (x, cache) for x in batch]
    return [prompt for prompt, _ in pairs], [use for _, use in pairs]


def _of_mapping(given: Mapping[str, Any], cache: CacheUse) -> tuple[Prompt, CacheUse]:
    """Return the prompt of a dict. Raises: RequestError: If it has something else in it."""
    said = {name: value for name, value in given.items() if value is not None}
    unknown = [name for name in said if name not in _PROMPT_FIELDS]
    if unknown:
        what = f"a prompt has no {unknown[0]!r}: it has {', '.join(_PROMPT_FIELDS)}; prompts are"
        raise RequestError(f"{what} text or token ids", code="invalid_prompt")
    if "prompt_token_ids" not in said and "prompt" not in said:
        why = "a prompt that is a dict needs prompt or prompt_token_ids"
        raise RequestError(why, code="invalid_prompt")
    salt = said.get("cache_salt")
    use = cache if salt is None else CacheUse.of(None, salt)
    return said["prompt_token_ids" if "prompt_token_ids" in said else "prompt"], use


def one_of(name: str, value: Any, alias: str, other: Any) -> Any:
    """Return an argument that has two names. Raises: RequestError: If it is given by both."""
    if value is not None and other is not None:
        why = f"{alias} is another name of {name}, which is given too: give one of them"
        raise RequestError(why, code="invalid_argument")
    return value if other is None else other


def as_params(params: object, num_prompts: int, default: SamplingParams) -> list[SamplingParams]:
    """Return a copy for each prompt, which no caller can change."""
    if params is None or isinstance(params, SamplingParams):
        return [copy(params or default)] * num_prompts
    each: list[SamplingParams] = []
    for item in params if isinstance(params, Sequence) else [params]:
        if not isinstance(item, SamplingParams):
            must = "params must be SamplingParams, one for all or a list of one each, not"
            raise RequestError(f"{must} {type(item).__name__}", code="invalid_sampling_params")
        each.append(copy(item))
    if len(each) != num_prompts:
        what = f"{num_prompts} prompts but {len(each)} sampling params"
        raise RequestError(f"{what}: give one for all, or one each")
    return each


def check_cache(cache: object) -> None:
    """Raises: RequestError: If it isn't a ``CacheUse``."""
    if not isinstance(cache, CacheUse):
        must = f"cache must be a fastdecode.CacheUse, not {type(cache).__name__}"
        how = 'CacheUse(is_off=True) shares nothing, CacheUse(salt="...") with the same salt only'
        raise RequestError(f"{must}: {how}", code="invalid_cache")
