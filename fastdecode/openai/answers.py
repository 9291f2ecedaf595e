"""From outputs to the bodies that OpenAI's API answers with: choices, logprobs, usage, errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastdecode.core.errors import CHILD_DIED, CapacityError, FastDecodeError
from fastdecode.core.sequence import Completion, RequestOutput, TokenLogprob
from fastdecode.openai.requests import BodyRequest
from fastdecode.text.chat_format import AnswerFormat, ParsedAnswer
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
    """A ``text_completion`` or ``chat.completion`` object.

    Args:
        outputs: one for each of the request's prompts, all of them without an
            error.
        answer_id: comes after ``chatcmpl-`` or ``cmpl-``.
        created_s: Unix time.
        model: the name that the answer tells.
    """
    with_token_ids = request.want_token_ids or codec.vocabulary is None
    writer = ChoiceWriter(
        TokenText(codec.vocabulary_of(request.params)),
        request.is_chat,
        with_token_ids,
        request.params.n,
        AnswerReader(codec, request.answer_format, answer_id),
    )
    of_prompt = outputs[0].prompt_logprobs if request.is_chat else None
    return {
        "id": f"{'chatcmpl' if request.is_chat else 'cmpl'}-{answer_id}",
        "object": "chat.completion" if request.is_chat else "text_completion",
        "created": created_s,
        "model": model,
        "choices": [
            writer.choice(place, output, completion)
            for place, output in enumerate(outputs)
            for completion in output.completions
        ],
        "usage": usage(outputs),
        **({} if of_prompt is None else {"prompt_logprobs": writer.of_prompt(of_prompt)}),
    }


def usage(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """Return the tokens that all outputs together took, and how many of the prompts' were
    reused."""
    num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
    num_output = sum(
        len(completion.token_ids) for output in outputs for completion in output.completions
    )
    num_cached = sum(output.num_cached_tokens for output in outputs)
    return usage_of(num_prompt, num_output, num_cached)


def usage_of(num_prompt: int, num_output: int, num_cached: int = 0) -> dict[str, Any]:
    """Return these counts as OpenAI's API has them."""
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }


def error_body(error: FastDecodeError) -> dict[str, Any]:
    """``{"error": {"message", "type", "param", "code"}}``; the field to blame
    is the error's ``param``."""
    _, kind = status(error)
    param = getattr(error, "param", None)
    return {"error": {"message": str(error), "type": kind, "param": param, "code": error.code}}


def status(error: FastDecodeError) -> tuple[int, str]:
    """The HTTP status and OpenAI's type of an error."""
    if isinstance(error, CapacityError):
        return 503, "server_error"
    if error.code in ("non_finite_logits", CHILD_DIED):
        return 500, "server_error"
    return 400, "invalid_request_error"


def finish_reason(reason: str, *, has_calls: bool) -> str:
    """OpenAI's, of a chat's answer."""
    return "tool_calls" if has_calls and reason == "stop" else reason


@dataclass(frozen=True)
class AnswerReader:
    """Reads the texts of one body's answers.

    Args:
        codec: the model's.
        answer_format: of a chat's answers; None: they are plain text.
        answer_id: of the body's answer.
    """

    codec: TextCodec
    answer_format: AnswerFormat | None
    answer_id: str

    def read(self, output: RequestOutput, completion: Completion, number: int) -> ParsedAnswer:
        """One continuation, the choice of this number."""
        if self.answer_format is None:
            return ParsedAnswer(completion.text)
        parser = self.answer_format.parser(self.codec, output.prompt_token_ids)
        return ParsedAnswer.of(completion.text, parser, self.answer_format, self.choice_id(number))

    def choice_id(self, number: int) -> str:
        """Of a choice, for the ids of its calls."""
        return f"{self.answer_id}/{number}"


@dataclass(frozen=True)
class ChoiceWriter:
    """Writes completions as choices.

    Args:
        tokens: names tokens.
        is_chat: choices of chats have another shape.
        with_token_ids: give the tokens' ids, too.
        n: completions of each prompt.
        reader: reads the texts of chats.
    """

    tokens: TokenText
    is_chat: bool
    with_token_ids: bool
    n: int
    reader: AnswerReader

    def choice(self, place: int, output: RequestOutput, completion: Completion) -> dict[str, Any]:
        """One continuation of the prompt at ``place`` in the request."""
        number = place * self.n + completion.index
        choice: dict[str, Any] = {"index": number}
        reason: str = completion.finish_reason
        if self.is_chat:
            parsed = self.reader.read(output, completion, number)
            choice["message"] = parsed.to_json()
            reason = finish_reason(reason, has_calls=bool(parsed.calls))
        else:
            choice["text"] = completion.text
        choice["logprobs"] = self._logprobs(output, completion)
        choice["finish_reason"] = reason
        choice["stop_reason"] = completion.stop_reason
        if output.prompt_logprobs is not None and not self.is_chat:
            choice["prompt_logprobs"] = self.of_prompt(output.prompt_logprobs)
        if self.with_token_ids:
            choice["token_ids"] = list(completion.token_ids)
        return choice

    def of_prompt(self, steps: Sequence[TokenLogprob | None]) -> list[dict[str, Any] | None]:
        """vLLM's shape: of each token but the first a mapping of token id to
        logprob, rank and text."""
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
        if not self.is_chat:
            begins = self.tokens.offsets_after(output.prompt_token_ids)
            length = len(completion.text)
            offsets = [min(begins.next(token_id), length) for token_id in completion.token_ids]
        return self.logprobs(completion.logprobs, offsets)

    def logprobs(
        self, steps: Sequence[TokenLogprob], offsets: Sequence[int]
    ) -> Mapping[str, Any] | None:
        """Those of consecutive tokens. ``offsets``: where in the text each
        begins; chats tell none."""
        if self.is_chat:
            return {"content": [self._chat_step(step) for step in steps], "refusal": None}
        return {
            "tokens": [self.tokens.text_of(step.token_id) for step in steps],
            "token_logprobs": [step.logprob for step in steps],
            "top_logprobs": [self._top(step) for step in steps],
            "text_offset": list(offsets),
        }

    def _top(self, step: TokenLogprob) -> dict[str, float]:
        """OpenAI's shape: by text. The drawn token is there even if it isn't
        among the likeliest."""
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
