"""OpenAI batch lines as a batch job's format.

An answer is ``{"id", "custom_id", "response": {"status_code", "request_id", "body"}, "error": null}``. The body is a
``text_completion`` or ``chat.completion`` object, or with a status of 400 and above ``{"error": {"message", "type",
"param", "code"}}``. ``id`` is ``batch_req_<run>_<line number>``: opaque to its reader, and what a resumed run finds its
place by.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from fastdecode.core.errors import CapacityError, FastDecodeError
from fastdecode.core.sequence import Completion, RequestOutput, TokenLogprob
from fastdecode.jobs.line_format import Chat, LineError, LineId, LineRequest
from fastdecode.openai.requests import RequestReader
from fastdecode.text.codec import TextCodec
from fastdecode.text.token_text import TokenText

ID_PREFIX = "batch_req"


@dataclass(frozen=True)
class OpenAILines:
    """Reads requests and writes answers.

    Args:
        reader: reads the requests.
        run_id: of the run, in every id.
        clock: Unix time, for ``created``.
    """

    reader: RequestReader
    run_id: str
    clock: Callable[[], float] = time.time

    name: ClassVar[str] = "openai"
    id_field: ClassVar[str] = "custom_id"
    duplicate_code: ClassVar[str] = "duplicate_custom_id"

    def parse(self, raw: bytes, number: int) -> LineRequest:
        return self.reader.read(raw, number)

    def answer(
        self, number: int, request: LineRequest, outputs: Sequence[RequestOutput], codec: TextCodec
    ) -> dict[str, Any]:
        is_chat = isinstance(request.prompts[0], Chat)
        writer = _ChoiceWriter(
            TokenText(codec.vocabulary), is_chat, request.want_token_ids or not codec.has_tokenizer, request.params.n
        )
        num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
        num_output = sum(len(completion.token_ids) for output in outputs for completion in output.completions)
        body = {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{self.run_id}-{number}",
            "object": "chat.completion" if is_chat else "text_completion",
            "created": int(self.clock()),
            "model": request.model or self.reader.served_model_names[0],
            "choices": [
                writer.choice(place, output, completion)
                for place, output in enumerate(outputs)
                for completion in output.completions
            ],
            "usage": {
                "prompt_tokens": num_prompt,
                "completion_tokens": num_output,
                "total_tokens": num_prompt + num_output,
            },
        }
        return self._line(number, request.line_id, 200, body)

    def refusal(self, number: int, line_id: LineId | None, error: FastDecodeError) -> dict[str, Any]:
        status, kind = _status(error)
        param = error.param if isinstance(error, LineError) else None
        shown = {"message": str(error), "type": kind, "param": param, "code": error.code}
        return self._line(number, line_id, status, {"error": shown})

    def identify(self, answer: dict[str, Any]) -> tuple[int, bool]:
        prefix, number = str(answer["id"]).rsplit("_", 1)
        if prefix != f"{ID_PREFIX}_{self.run_id}":
            raise ValueError("an answer of another run")
        return int(number), int(answer["response"]["status_code"]) >= 400

    def _line(self, number: int, line_id: LineId | None, status: int, body: dict[str, Any]) -> dict[str, Any]:
        response = {"status_code": status, "request_id": f"req_{self.run_id}_{number}", "body": body}
        return {
            "id": f"{ID_PREFIX}_{self.run_id}_{number}",
            "custom_id": line_id,
            "response": response,
            "error": None,
        }


def _status(error: FastDecodeError) -> tuple[int, str]:
    """The HTTP status and OpenAI's type of an error."""
    if isinstance(error, CapacityError):
        return 503, "server_error"
    if error.code == "non_finite_logits":
        return 500, "server_error"
    return 400, "invalid_request_error"


@dataclass(frozen=True)
class _ChoiceWriter:
    tokens: TokenText
    is_chat: bool
    with_token_ids: bool
    n: int

    def choice(self, place: int, output: RequestOutput, completion: Completion) -> dict[str, Any]:
        """One continuation of the prompt at ``place`` in the line."""
        choice: dict[str, Any] = {"index": place * self.n + completion.index}
        if self.is_chat:
            choice["message"] = {"role": "assistant", "content": completion.text, "refusal": None}
        else:
            choice["text"] = completion.text
        choice["logprobs"] = self._logprobs(output, completion)
        choice["finish_reason"] = completion.finish_reason
        if self.with_token_ids:
            choice["token_ids"] = list(completion.token_ids)
        return choice

    def _logprobs(self, output: RequestOutput, completion: Completion) -> Mapping[str, Any] | None:
        if completion.logprobs is None:
            return None
        if self.is_chat:
            return {"content": [self._chat_step(step) for step in completion.logprobs], "refusal": None}
        return {
            "tokens": [self.tokens.text_of(step.token_id) for step in completion.logprobs],
            "token_logprobs": [step.logprob for step in completion.logprobs],
            "top_logprobs": [self._top(step) for step in completion.logprobs],
            "text_offset": self.tokens.offsets(completion.token_ids, output.prompt_token_ids, len(completion.text)),
        }

    def _top(self, step: TokenLogprob) -> dict[str, float]:
        """OpenAI's shape: by text. The drawn token is there even if it isn't among the likeliest."""
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
