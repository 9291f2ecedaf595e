"""The lines of ``fastdecode generate``: a request a line in, an answer a line
out.

An input line is ``{"id": …, "prompt": "…"}`` or
``{"id": …, "prompt_token_ids": […]}``, with any sampling parameter beside it.
``"cache": "off"`` keeps a line's KV blocks from others, ``"cache_salt"`` from
lines with another one. Lines of one ``"conversation_id"`` are its turns, in
their order: each has what is new as its prompt.

An output line is ``{"id", "text", "token_ids", "finish_reason", "usage"}``
(``"completions"`` instead of the middle three when n > 1, ``"logprobs"`` and
``"prompt_logprobs"`` when asked for, ``"stop_reason"`` where a stop string or a stop
token ended it), or ``{"id", "error": {"code", "message"}}``. Its usage tells
``"cached_tokens"`` where prompt tokens weren't run, but reused.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, ClassVar

from fastdecode.conversations.turns import check_turn
from fastdecode.core.errors import FastDecodeError, RequestError
from fastdecode.core.sequence import (
    CacheUse,
    Completion,
    Prompt,
    RequestOutput,
    SamplingParams,
    TokenLogprob,
)
from fastdecode.jobs.line_format import LineError, LineId, LineRequest
from fastdecode.jobs.lines import load_object, utf8
from fastdecode.text.codec import TextCodec

SAMPLING_FIELDS = tuple(
    f.name for f in fields(SamplingParams) if f.name not in ("logits_processors", "reasoning_marks")
)
LINE_FIELDS = (
    "id", "prompt", "prompt_token_ids", *SAMPLING_FIELDS, "cache", "cache_salt", "conversation_id",
)  # fmt: skip


def _refuse_unknown_fields(line: dict[str, Any]) -> None:
    for name in line:
        if name not in LINE_FIELDS:
            shown = name if len(name) <= 60 else name[:57] + "..."
            near = difflib.get_close_matches(shown, LINE_FIELDS, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(LINE_FIELDS)}"
            raise RequestError(f"unknown field {shown!r}: {hint}", code="unknown_field")


def _prompt_of(line: dict[str, Any]) -> Prompt:
    if ("prompt" in line) == ("prompt_token_ids" in line):
        raise RequestError('give either "prompt" or "prompt_token_ids"', code="invalid_prompt")
    if "prompt" in line:
        if not isinstance(line["prompt"], str):
            raise RequestError(
                f'"prompt" must be a string, not {type(line["prompt"]).__name__} '
                '(token ids go in "prompt_token_ids")',
                code="invalid_prompt",
            )
        return utf8(line["prompt"], "prompt")
    if not isinstance(line["prompt_token_ids"], list):
        raise RequestError('"prompt_token_ids" must be a list of token ids', code="invalid_prompt")
    token_ids: list[int] = line["prompt_token_ids"]
    return token_ids


def output_fields(output: RequestOutput) -> dict[str, Any]:
    """The fields of an answered request's output line, but its id."""
    completions = [_completion_fields(completion) for completion in output.completions]
    num_output = sum(len(completion.token_ids) for completion in output.completions)
    usage = {
        "prompt_tokens": len(output.prompt_token_ids),
        "completion_tokens": num_output,
        "total_tokens": len(output.prompt_token_ids) + num_output,
    }
    if output.num_cached_tokens:
        usage["cached_tokens"] = output.num_cached_tokens
    body: dict[str, Any] = completions[0] if len(completions) == 1 else {"completions": completions}
    if output.prompt_logprobs is not None:
        body["prompt_logprobs"] = [step and _step(step) for step in output.prompt_logprobs]
    return {**body, "usage": usage}


def _completion_fields(completion: Completion) -> dict[str, Any]:
    line: dict[str, Any] = {
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason,
    }
    if completion.stop_reason is not None:
        line["stop_reason"] = completion.stop_reason
    if completion.logprobs is not None:
        line["logprobs"] = [_step(step) for step in completion.logprobs]
    return line


def _step(step: TokenLogprob) -> dict[str, Any]:
    return {
        "token_id": step.token_id,
        "logprob": step.logprob,
        "top": [list(pair) for pair in step.top],
    }


class SimpleLines:
    """The lines above as a batch job's format.

    Args:
        defaults: what lines don't say themselves.
        greedy: the same for lines that say ``temperature`` 0; None: as others.
        numbers: every answer also tells the ``line`` that it is for, since
            answers come in the order in which they finish. Without it only
            errors do.
    """

    name: ClassVar[str] = "simple"
    id_field: ClassVar[str] = "id"
    duplicate_code: ClassVar[str] = "duplicate_id"

    def __init__(
        self,
        defaults: SamplingParams,
        greedy: SamplingParams | None = None,
        *,
        numbers: bool = True,
    ) -> None:
        self._defaults = defaults
        self._greedy = greedy or defaults
        self._numbers = numbers

    def parse(self, raw: bytes, number: int) -> LineRequest:
        line_id: LineId | None = None
        line: dict[str, Any] = {}
        try:
            line = load_object(raw, number)
            line_id = _id_of(line, number)
            _refuse_unknown_fields(line)
            # null is the same as not given
            overrides = {name: line[name] for name in SAMPLING_FIELDS if line.get(name) is not None}
            is_greedy = overrides.get("temperature") == 0
            params = replace(self._greedy if is_greedy else self._defaults, **overrides)
            cache = CacheUse.of(line.get("cache"), line.get("cache_salt"))
            whose = check_turn(line.get("conversation_id"), params, 1)
            prompts = (_prompt_of(line),)
            return LineRequest(line_id, prompts, params, cache=cache, conversation_id=whose)
        except RequestError as error:
            whose = line.get("conversation_id")
            raise LineError(
                str(error), code=error.code, line_id=line_id, conversation_id=whose
            ) from None

    def answer(
        self, number: int, request: LineRequest, outputs: Sequence[RequestOutput], codec: TextCodec
    ) -> dict[str, Any]:
        (output,) = outputs
        place = {"line": number} if self._numbers else {}
        return {"id": request.line_id, **place, **output_fields(output)}

    def refusal(
        self, number: int, line_id: LineId | None, error: FastDecodeError
    ) -> dict[str, Any]:
        return {"id": line_id, "line": number, "error": {"code": error.code, "message": str(error)}}

    def identify(self, answer: dict[str, Any]) -> tuple[int, bool]:
        return int(answer["line"]), "error" in answer


def _id_of(line: dict[str, Any], number: int) -> LineId:
    line_id = line.get("id")
    if isinstance(line_id, bool) or not isinstance(line_id, (str, int)) or line_id == "":
        raise RequestError(
            f'line {number} has no "id" that is a string or a whole number', code="invalid_id"
        )
    return utf8(line_id, "id") if isinstance(line_id, str) else line_id
