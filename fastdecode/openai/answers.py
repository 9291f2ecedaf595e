"""From outputs to the bodies that OpenAI's API answers with: choices, logprobs, usage, errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastdecode.core.errors import CHILD_DIED, CapacityError, FastDecodeError
from fastdecode.core.sequence import Completion, RequestOutput, TokenLogprob
from fastdecode.openai.requests import BodyRequest
from fastdecode.text.chat_format import ParsedAnswer
from fastdecode.text.codec import TextCodec
from fastdecode.text.detokenizer import TokenText


def answer_body(
    request: BodyRequest,
    outputs: Sequence[RequestOutput],
    codec: TextCodec,
    *,
    answer_id: str,
    created_s: int,
    model: str,
) -> dict[str, Any]:
    """Return a ``text_completion`` or ``chat.completion`` object. ``outputs`` are one for each of
    the request's prompts, none of them an error. ``created_s`` is Unix time."""
    writer = ChoiceWriter(request, codec, answer_id)
    body = {
        **writer.head("chat.completion", created_s, model),
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

    def __init__(self, request: BodyRequest, codec: TextCodec, answer_id: str) -> None:
        self.request = request
        self.answer_id = answer_id
        self.with_token_ids = request.want_token_ids or codec.vocabulary is None
        self.tokens = TokenText(codec.vocabulary_of(request.params))
        self._codec = codec

    def head(self, kind: str, created_s: int, model: str) -> dict[str, Any]:
        """Return an answer's first fields. ``kind`` is the ``object`` of a chat's."""
        prefix, kind = ("chatcmpl", kind) if self.request.is_chat else ("cmpl", "text_completion")
        answer_id = f"{prefix}-{self.answer_id}"
        return {"id": answer_id, "object": kind, "created": created_s, "model": model}

    def choice_id(self, number: int) -> str:
        """Return a choice's name, for the ids of its calls."""
        return f"{self.answer_id}/{number}"

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
        """Return those of consecutive tokens. ``offsets`` are the places in the text where each
        begins, which chats don't have."""
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
