"""From deltas to the chunks of a stream, as OpenAI's API sends them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastdecode.core.delta import Delta
from fastdecode.core.sequence import TokenLogprob
from fastdecode.openai.answers import ChoiceWriter, finish_reason, usage_of
from fastdecode.openai.requests import BodyRequest
from fastdecode.text.calls import Part, Reasoning
from fastdecode.text.chat_format import PartsParser
from fastdecode.text.codec import TextCodec

_NO_TEXT = '""'


@dataclass
class _Choice:
    offset_of: Callable[[int], int]
    parser: PartsParser | None
    """None if the text is plain."""
    num_chars: int = 0
    num_tokens: int = 0
    held: list[tuple[TokenLogprob, int]] = field(default_factory=list)
    """Steps whose tokens begin, at this place, in text that was not sent yet: a stop string may
    still cut it off."""


class ChunkWriter:
    """Writes one request's deltas as chunks, each a JSON object in a text. ``prompts`` are the
    tokens of each of the request's prompts.

    A choice's first chunk comes with its first token, and only then has the role: clients take
    it for the first token.
    """

    def __init__(
        self,
        request: BodyRequest,
        prompts: Sequence[Sequence[int]],
        codec: TextCodec,
        *,
        answer_id: str,
        created_s: int,
        model: str,
    ) -> None:
        assert request.stream is not None, "the request is not for a stream"
        self._request, self._options = request, request.stream
        self._writer, self._codec = ChoiceWriter(request, codec, answer_id), codec
        self._prompts = prompts
        self._choices: dict[int, _Choice] = {}
        self._num_cached = [0] * len(prompts)
        head = self._writer.head("chat.completion.chunk", created_s, model)
        self._head = json.dumps(head)[:-1] + ', "choices": ['

    def events(self, place: int, delta: Delta) -> str:
        """Return the chunk of a delta of the prompt at ``place``. It is empty if all text is held
        back."""
        number = place * self._request.params.n + delta.index
        before = self._choices.get(number)
        choice = before or self._new_choice(place)
        self._choices[number] = choice
        choice.num_tokens += len(delta.token_ids)
        choice.num_chars += len(delta.text)
        self._num_cached[place] = max(self._num_cached[place], delta.num_cached_tokens)
        logprobs = self._logprobs(choice, delta)
        text = self._text_json(choice, delta, number)
        has_ids = self._writer.with_token_ids
        is_silent = not (text or logprobs or delta.finish_reason or has_ids)
        if is_silent and before is not None and not self._options.continuous_usage:
            return ""
        said = self._said(text, is_first=before is None)
        reason = "null"
        if delta.finish_reason is not None:
            has_calls = choice.parser is not None and choice.parser.has_calls
            reason = f'"{finish_reason(delta.finish_reason, has_calls=has_calls)}"'
            reason += f', "stop_reason": {json.dumps(delta.stop_reason)}'
        steps = "null" if logprobs is None else json.dumps(logprobs)
        ids = f', "token_ids": {list(delta.token_ids)}' if has_ids else ""
        end = "]}"
        if self._options.continuous_usage:
            end = self._usage_end()
        elif self._options.include_usage:
            end = '], "usage": null}'
        return (
            f'data: {self._head}{{"index": {number}, {said}, "logprobs": {steps}, '
            f'"finish_reason": {reason}{ids}}}{end}\n\n'
        )

    def end(self) -> str:
        """Return what ends the stream: the usage, if it was asked for, and a mark."""
        usage = f"data: {self._head}{self._usage_end()}\n\n" if self._options.include_usage else ""
        return f"{usage}data: [DONE]\n\n"

    def _usage_end(self) -> str:
        num_prompt = sum(map(len, self._prompts))
        num_tokens = sum(choice.num_tokens for choice in self._choices.values())
        usage = usage_of(num_prompt, num_tokens, sum(self._num_cached))
        return f'], "usage": {json.dumps(usage)}}}'

    def _new_choice(self, place: int) -> _Choice:
        prompt, answer_format = self._prompts[place], self._request.answer_format
        parser = None if answer_format is None else answer_format.parser(self._codec, prompt)
        return _Choice(self._writer.tokens.offsets_after(prompt), parser)

    def _text_json(self, choice: _Choice, delta: Delta, number: int) -> str:
        """Return what a delta's text adds: fields of a chat's ``delta``, or the text. It is put
        together by hand, because this is done for every token."""
        if choice.parser is not None:
            parts = choice.parser.feed(delta.text)
            if delta.finish_reason is not None:
                parts += choice.parser.finish()
            return json.dumps(self._fields(parts, number))[1:-1]
        if not delta.text:
            return ""
        text = json.dumps(delta.text)
        return f'"content": {text}' if self._request.is_chat else text

    def _fields(self, parts: Sequence[Part], number: int) -> dict[str, Any]:
        answer_format, fields = self._request.answer_format, dict[str, Any]()
        assert answer_format is not None
        for part in parts:
            if isinstance(part, str):
                fields["content"] = fields.get("content", "") + part
            elif isinstance(part, Reasoning):
                fields["reasoning_content"] = fields.get("reasoning_content", "") + part.text
            else:
                call = answer_format.call(part, self._writer.choice_id(number)).to_json()
                fields.setdefault("tool_calls", []).append({"index": part.index, **call})
        return fields

    def _said(self, text: str, *, is_first: bool) -> str:
        """Return a choice's text as its chunk has it."""
        if not self._request.is_chat:
            return f'"text": {text or _NO_TEXT}'
        if not is_first:
            return f'"delta": {{{text}}}'
        if not text.startswith('"content"'):
            text = f'"content": "", {text}' if text else '"content": ""'
        return f'"delta": {{"role": "assistant", {text}}}'

    def _logprobs(self, choice: _Choice, delta: Delta) -> Any:
        """Return those of the tokens whose text has been sent."""
        if delta.logprobs is None:
            return None
        if self._request.is_chat:
            return self._writer.logprobs(delta.logprobs, ()) if delta.logprobs else None
        choice.held += [(step, choice.offset_of(step.token_id)) for step in delta.logprobs]
        is_free = not self._request.params.detokenize or delta.finish_reason is not None
        free = [held for held in choice.held if is_free or held[1] <= choice.num_chars]
        choice.held = choice.held[len(free) :]
        if not free:
            return None
        offsets = [min(offset, choice.num_chars) for _, offset in free]
        return self._writer.logprobs([step for step, _ in free], offsets)
