"""From deltas to the chunks of a stream, as OpenAI's API sends them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fastdecode.core.delta import Delta
from fastdecode.core.sequence import TokenLogprob
from fastdecode.openai.answers import ChoiceWriter, usage_of
from fastdecode.openai.requests import BodyRequest
from fastdecode.text.codec import TextCodec
from fastdecode.text.token_text import TokenOffsets, TokenText


@dataclass
class _Choice:
    """What of one choice has been told."""

    offsets: TokenOffsets
    num_chars: int = 0
    num_tokens: int = 0
    held: list[tuple[TokenLogprob, int]] = field(default_factory=list)
    """Steps whose tokens begin in text that hasn't been told, with where: a
    stop string may yet cut it off."""


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
        self._with_token_ids = request.want_token_ids or not codec.has_tokenizer
        tokens = TokenText(codec.vocabulary_of(request.params))
        self._writer = ChoiceWriter(tokens, self._is_chat, self._with_token_ids, self._n)
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

    def chunk(self, place: int, delta: Delta) -> str | None:
        """One delta of the prompt at ``place``; None if there is nothing to say
        of it: its text is held back."""
        number = place * self._n + delta.index
        before = self._choices.get(number)
        choice = before or _Choice(self._tokens.offsets_after(self._prompts[place]))
        self._choices[number] = choice
        choice.num_tokens += len(delta.token_ids)
        choice.num_chars += len(delta.text)
        self._num_cached[place] = max(self._num_cached[place], delta.num_cached_tokens)
        logprobs = self._logprobs(choice, delta)
        is_silent = not (delta.text or logprobs or delta.finish_reason or self._with_token_ids)
        if is_silent and before is not None and not self._options.continuous_usage:
            return None
        said = self._said(delta.text, is_first=before is None)
        reason = "null" if delta.finish_reason is None else f'"{delta.finish_reason}"'
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

    def _said(self, text: str, *, is_first: bool) -> str:
        """A choice's text as its chunk says it. Put together by hand: this is
        done for every token."""
        if not self._is_chat:
            return f'"text": {json.dumps(text)}'
        if is_first:
            return f'"delta": {{"role": "assistant", "content": {json.dumps(text)}}}'
        return f'"delta": {{"content": {json.dumps(text)}}}' if text else '"delta": {}'

    def _logprobs(self, choice: _Choice, delta: Delta) -> Any:
        """Of the tokens that may be told of by now."""
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
