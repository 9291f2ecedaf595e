"""Bodies that OpenAI's API answers with, whole and in chunks: choices, logprobs, usage, errors."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastdecode.core.delta import Delta
from fastdecode.core.errors import CHILD_DIED, CapacityError, FastDecodeError
from fastdecode.core.sequence import Completion, RequestOutput, TokenLogprob
from fastdecode.openai.requests import BodyRequest
from fastdecode.text.calls import Part, Reasoning
from fastdecode.text.chat_format import ParsedAnswer, PartsParser
from fastdecode.text.codec import TextCodec
from fastdecode.text.detokenizer import TokenText


@dataclass(frozen=True)
class AnswerHead:
    answer_id: str
    created_s: int
    """Unix time."""
    model: str


def answer_body(
    request: BodyRequest, outputs: Sequence[RequestOutput], codec: TextCodec, head: AnswerHead
) -> dict[str, Any]:
    """Return a completion's or a chat's body. ``outputs`` are one per prompt, none an error."""
    writer = ChoiceWriter(request, codec, head)
    body = {
        **writer.head("chat.completion"),
        "choices": [
            writer.choice(place, output, completion)
            for place, output in enumerate(outputs)
            for completion in output.completions
        ],
        "usage": usage(outputs),
    }
    if request.is_chat and outputs[0].prompt_logprobs is not None:
        body["prompt_logprobs"] = writer.of_prompt(outputs[0].prompt_logprobs)
    return body


def usage(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """Return the tokens that all outputs together took."""
    num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
    num_output = sum(len(each.token_ids) for output in outputs for each in output.completions)
    return usage_of(num_prompt, num_output, sum(output.num_cached_tokens for output in outputs))


def usage_of(num_prompt: int, num_output: int, num_cached: int) -> dict[str, Any]:
    """Return counts as OpenAI's API has them. ``num_cached`` tokens of prompts were reused."""
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }


def error_body(error: FastDecodeError) -> dict[str, Any]:
    """Return an error as OpenAI's API has it. ``param`` is the field to blame."""
    _, kind = status(error)
    param = getattr(error, "param", None)
    return {"error": {"message": str(error), "type": kind, "param": param, "code": error.code}}


def status(error: FastDecodeError) -> tuple[int, str]:
    """Return the HTTP status and OpenAI's type of an error."""
    if isinstance(error, CapacityError):
        return 503, "server_error"
    if error.code in ("non_finite_logits", CHILD_DIED):
        return 500, "server_error"
    return 400, "invalid_request_error"


def finish_reason(reason: str, *, has_calls: bool) -> str:
    return "tool_calls" if has_calls and reason == "stop" else reason


class ChoiceWriter:
    """Writes the choices of one answer, and what chunks of a stream have of them."""

    def __init__(self, request: BodyRequest, codec: TextCodec, head: AnswerHead) -> None:
        self.request = request
        self._head = head
        self.with_token_ids = request.want_token_ids or codec.vocabulary is None
        self.tokens = TokenText(codec.vocabulary_of(request.params))
        self._codec = codec

    def head(self, kind: str) -> dict[str, Any]:
        """Return an answer's first fields. ``kind`` is the ``object`` of a chat's."""
        prefix, kind = ("chatcmpl", kind) if self.request.is_chat else ("cmpl", "text_completion")
        head, answer_id = self._head, f"{prefix}-{self._head.answer_id}"
        return {"id": answer_id, "object": kind, "created": head.created_s, "model": head.model}

    def choice_id(self, number: int) -> str:
        """Return a choice's name, for the ids of its calls."""
        return f"{self._head.answer_id}/{number}"

    def choice(self, place: int, output: RequestOutput, completion: Completion) -> dict[str, Any]:
        """Return one completion of the prompt at ``place`` in the request."""
        is_chat, answer_format = self.request.is_chat, self.request.answer_format
        number = place * self.request.params.n + completion.index
        choice: dict[str, Any] = {"index": number}
        reason: str = completion.finish_reason
        if is_chat:
            parsed = ParsedAnswer(completion.text)
            if answer_format is not None:
                where = self._codec, output.prompt_token_ids, self.choice_id(number)
                parsed = answer_format.parsed(completion.text, *where)
            choice["message"] = parsed.to_json()
            reason = finish_reason(reason, has_calls=bool(parsed.calls))
        else:
            choice["text"] = completion.text
        choice["logprobs"] = self._logprobs(output, completion)
        choice["finish_reason"] = reason
        choice["stop_reason"] = completion.stop_reason
        if output.prompt_logprobs is not None and not is_chat:
            choice["prompt_logprobs"] = self.of_prompt(output.prompt_logprobs)
        if self.with_token_ids:
            choice["token_ids"] = list(completion.token_ids)
        return choice

    def of_prompt(self, steps: Sequence[TokenLogprob | None]) -> list[dict[str, Any] | None]:
        """Return vLLM's shape: a mapping by token id, for each token but the first."""
        return [None if step is None else self._by_id(step) for step in steps]

    def _by_id(self, step: TokenLogprob) -> dict[str, Any]:
        return {
            str(token_id): {
                "logprob": one.logprob,
                "rank": one.rank,
                "decoded_token": self.tokens.text_of(token_id),
            }
            for token_id, one in step.items()
        }

    def _logprobs(self, output: RequestOutput, completion: Completion) -> Mapping[str, Any] | None:
        if completion.logprobs is None:
            return None
        offsets: Sequence[int] = ()
        if not self.request.is_chat:
            offset_of = self.tokens.offsets_after(output.prompt_token_ids)
            length = len(completion.text)
            offsets = [min(offset_of(token_id), length) for token_id in completion.token_ids]
        return self.logprobs(completion.logprobs, offsets)

    def logprobs(
        self, steps: Sequence[TokenLogprob], offsets: Sequence[int]
    ) -> Mapping[str, Any] | None:
        """Return the logprobs of consecutive tokens. Their texts begin at ``offsets``."""
        if self.request.is_chat:
            return {"content": [self._chat_step(step) for step in steps], "refusal": None}
        return {
            "tokens": [self.tokens.text_of(step.token_id) for step in steps],
            "token_logprobs": [step.logprob for step in steps],
            "top_logprobs": [self._top(step) for step in steps],
            "text_offset": list(offsets),
        }

    def _top(self, step: TokenLogprob) -> dict[str, float]:
        """Return a token's likeliest neighbours by text, and itself."""
        top: dict[str, float] = {}
        for token_id, logprob in (*step.top, (step.token_id, step.logprob)):
            top.setdefault(self.tokens.text_of(token_id), logprob)
        return top

    def _chat_step(self, step: TokenLogprob) -> dict[str, Any]:
        top = [self._chat_token(token_id, logprob) for token_id, logprob in step.top]
        return {**self._chat_token(step.token_id, step.logprob), "top_logprobs": top}

    def _chat_token(self, token_id: int, logprob: float) -> dict[str, Any]:
        raw = self.tokens.bytes_of(token_id)
        return {"token": self.tokens.text_of(token_id), "logprob": logprob, "bytes": list(raw)}


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
    """Writes one request's deltas as chunks. ``prompts`` are the prompts' tokens.

    A choice's role comes with its first token: clients take that chunk for the first token.
    """

    def __init__(
        self,
        request: BodyRequest,
        prompts: Sequence[Sequence[int]],
        codec: TextCodec,
        head: AnswerHead,
    ) -> None:
        assert request.stream is not None, "the request is not for a stream"
        self._request, self._options = request, request.stream
        self._writer, self._codec = ChoiceWriter(request, codec, head), codec
        self._prompts = prompts
        self._choices: dict[int, _Choice] = {}
        self._num_cached = [0] * len(prompts)
        self._head = json.dumps(self._writer.head("chat.completion.chunk"))[:-1] + ', "choices": ['

    def events(self, place: int, delta: Delta) -> str:
        """Return a delta's chunk. It is empty if all text is held back."""
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
        content = self._content(text, is_first=before is None)
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
            f'data: {self._head}{{"index": {number}, {content}, "logprobs": {steps}, '
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

    def _content(self, text: str, *, is_first: bool) -> str:
        """Return the field of a chunk that has a choice's text."""
        if not self._request.is_chat:
            return '"text": ' + (text or '""')
        if not is_first:
            return f'"delta": {{{text}}}'
        if not text.startswith('"content"'):
            text = f'"content": "", {text}' if text else '"content": ""'
        return f'"delta": {{"role": "assistant", {text}}}'

    def _logprobs(self, choice: _Choice, delta: Delta) -> Any:
        """Return the logprobs of tokens whose text has been sent."""
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
