"""From deltas to the chunks of a stream, as OpenAI's API sends them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fastdecode.core.delta import Delta
from fastdecode.core.sequence import TokenLogprob
from fastdecode.openai.answers import AnswerReader, ChoiceWriter, finish_reason, usage_of
from fastdecode.openai.requests import BodyRequest
from fastdecode.text.calls import Call, Part, Reasoning
from fastdecode.text.chat_format import PartsParser
from fastdecode.text.codec import TextCodec
from fastdecode.text.detokenizer import TokenOffsets, TokenText

_NO_TEXT = '""'


@dataclass
class _Choice:
    """What of one choice has been told."""

    offsets: TokenOffsets
    num_chars: int = 0
    num_tokens: int = 0
    held: list[tuple[TokenLogprob, int]] = field(default_factory=list)
    """Steps whose tokens begin in text that was not sent yet, with where: a
    stop string may still cut it off."""
    parser: PartsParser | None = None
    """Of a chat's text; None: it is plain."""


class ChunkWriter:
    """Writes one request's deltas as chunks, each a JSON object in a text.

    A choice's first chunk comes with its first token, and only then says the
    role: clients take it for the first token.

    Args:
        request: what was asked.
        prompts: the tokens of each of its prompts.
        answer_id: comes after ``chatcmpl-`` or ``cmpl-``.
        created_s: Unix time.
        model: the name that the chunks tell.
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
        assert request.stream is not None, "nobody asked for a stream"
        self._is_chat = request.is_chat
        self._options = request.stream
        self._n = request.params.n
        self._has_text = request.params.detokenize
        self._with_token_ids = request.want_token_ids or codec.vocabulary is None
        tokens = TokenText(codec.vocabulary_of(request.params))
        self._reader = AnswerReader(codec, request.answer_format, answer_id)
        self._writer = ChoiceWriter(
            tokens, self._is_chat, self._with_token_ids, self._n, self._reader
        )
        self._tokens = tokens
        self._prompts = prompts
        self._choices: dict[int, _Choice] = {}
        self._num_cached = [0] * len(prompts)
        head = {
            "id": f"{'chatcmpl' if self._is_chat else 'cmpl'}-{answer_id}",
            "object": "chat.completion.chunk" if self._is_chat else "text_completion",
            "created": created_s,
            "model": model,
        }
        self._head = json.dumps(head)[:-1] + ', "choices": ['
        self._tail = '], "usage": null}' if self._options.include_usage else "]}"

    @property
    def num_tokens(self) -> int:
        """Generated tokens that were told."""
        return sum(choice.num_tokens for choice in self._choices.values())

    def events(self, place: int, delta: Delta) -> str:
        """A delta's chunk, as a stream sends it; empty: it has none."""
        chunk = self.chunk(place, delta)
        return "" if chunk is None else f"data: {chunk}\n\n"

    def end(self) -> str:
        """What ends the stream."""
        usage = self.usage_chunk()
        last = "" if usage is None else f"data: {usage}\n\n"
        return f"{last}data: [DONE]\n\n"

    def chunk(self, place: int, delta: Delta) -> str | None:
        """One delta of the prompt at ``place``; None if there is nothing to say
        of it: its text is held back."""
        number = place * self._n + delta.index
        before = self._choices.get(number)
        choice = before or self._new_choice(place)
        self._choices[number] = choice
        choice.num_tokens += len(delta.token_ids)
        choice.num_chars += len(delta.text)
        self._num_cached[place] = max(self._num_cached[place], delta.num_cached_tokens)
        logprobs = self._logprobs(choice, delta)
        text = self._text_json(choice, delta, number)
        is_silent = not (text or logprobs or delta.finish_reason or self._with_token_ids)
        if is_silent and before is not None and not self._options.continuous_usage:
            return None
        said = self._said(text, is_first=before is None)
        reason = "null"
        if delta.finish_reason is not None:
            has_calls = choice.parser is not None and choice.parser.has_calls
            reason = f'"{finish_reason(delta.finish_reason, has_calls=has_calls)}"'
            reason += f', "stop_reason": {json.dumps(delta.stop_reason)}'
        steps = "null" if logprobs is None else json.dumps(logprobs)
        ids = f', "token_ids": {list(delta.token_ids)}' if self._with_token_ids else ""
        return (
            f'{self._head}{{"index": {number}, {said}, "logprobs": {steps}, '
            f'"finish_reason": {reason}{ids}}}{self._end()}'
        )

    def usage_chunk(self) -> str | None:
        """The last one, if the body asked for it."""
        if not self._options.include_usage:
            return None
        return f'{self._head}], "usage": {json.dumps(self._usage())}}}'

    def _new_choice(self, place: int) -> _Choice:
        prompt, answer_format = self._prompts[place], self._reader.answer_format
        parser = None if answer_format is None else answer_format.parser(self._reader.codec, prompt)
        return _Choice(self._tokens.offsets_after(prompt), parser=parser)

    def _text_json(self, choice: _Choice, delta: Delta, number: int) -> str:
        """What a delta's text adds: the fields of a chat's ``delta``, or the text, as
        JSON; empty: nothing. Put together by hand: this is done for every token."""
        if choice.parser is not None:
            parts = choice.parser.feed(delta.text)
            if delta.finish_reason is not None:
                parts += choice.parser.finish()
            fields = self._fields(parts, number)
            return json.dumps(fields)[1:-1] if fields else ""
        if not delta.text:
            return ""
        text = json.dumps(delta.text)
        return f'"content": {text}' if self._is_chat else text

    def _fields(self, parts: Sequence[Part], number: int) -> dict[str, Any]:
        """Of a ``delta``."""
        fields: dict[str, Any] = {}
        for part in parts:
            if isinstance(part, str):
                fields["content"] = fields.get("content", "") + part
            elif isinstance(part, Reasoning):
                fields["reasoning_content"] = fields.get("reasoning_content", "") + part.text
            else:
                fields.setdefault("tool_calls", []).append(self._call(part, number))
        return fields

    def _call(self, call: Call, number: int) -> dict[str, Any]:
        answer_format = self._reader.answer_format
        assert answer_format is not None
        call_id = answer_format.call_id(self._reader.choice_id(number), call.index)
        function = {"name": call.name, "arguments": call.arguments}
        return {"index": call.index, "id": call_id, "type": "function", "function": function}

    def _said(self, text: str, *, is_first: bool) -> str:
        """A choice's text as its chunk has it."""
        if not self._is_chat:
            return f'"text": {text or _NO_TEXT}'
        if not is_first:
            return f'"delta": {{{text}}}'
        if not text.startswith('"content"'):
            text = f'"content": "", {text}' if text else '"content": ""'
        return f'"delta": {{"role": "assistant", {text}}}'

    def _logprobs(self, choice: _Choice, delta: Delta) -> Any:
        """Of the tokens whose text has been sent."""
        if delta.logprobs is None:
            return None
        if self._is_chat:
            return self._writer.logprobs(delta.logprobs, ()) if delta.logprobs else None
        for step in delta.logprobs:
            choice.held.append((step, choice.offsets.next(step.token_id)))
        free = [
            held
            for held in choice.held
            if not self._has_text or held[1] <= choice.num_chars or delta.finish_reason is not None
        ]
        choice.held = choice.held[len(free) :]
        if not free:
            return None
        offsets = [min(offset, choice.num_chars) for _, offset in free]
        return self._writer.logprobs([step for step, _ in free], offsets)

    def _end(self) -> str:
        if not self._options.continuous_usage:
            return self._tail
        return f'], "usage": {json.dumps(self._usage())}}}'

    def _usage(self) -> dict[str, Any]:
        num_prompt = sum(map(len, self._prompts))
        return usage_of(num_prompt, self.num_tokens, sum(self._num_cached))
