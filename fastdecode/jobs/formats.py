"""Formats of a job's lines: a request out of a line, an answer into one.

A **simple** line is ``{"id": …, "prompt": "…"}`` or ``{"id": …, "prompt_token_ids": […]}``, with
any sampling parameter beside it, ``"cache"``, ``"cache_salt"`` and ``"conversation_id"``. Its
answer is ``{"id", "text", "token_ids", "finish_reason", "usage"}``, with ``"completions"`` in
place of the middle three when n > 1, or ``{"id", "line", "error": {"code", "message"}}``.

An **OpenAI** line is ``{"custom_id", "method": "POST", "url", "body"}``. Its answer is ``{"id",
"custom_id", "response": {"status_code", "request_id", "body"}, "error": null}``. ``id`` is
``batch_req_<run>_<line number>``: a resumed run finds the line by it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Final, TypeAlias

import msgspec

from fastdecode.conversations.turns import MAX_ID_CHARS, check_turn
from fastdecode.core.errors import FastDecodeError, RequestError
from fastdecode.core.sequence import (
    CacheUse,
    Completion,
    Prompt,
    RequestOutput,
    SamplingParams,
    TokenLogprob,
)
from fastdecode.jobs.lines import MAX_LINE_BYTES, Identify, LineId
from fastdecode.openai.answers import AnswerHead, answer_body, error_body, status, usage
from fastdecode.openai.body_errors import BodyError, refuse, refuse_unknown
from fastdecode.openai.requests import CHAT_URL, COMPLETIONS_URL, LABELS, BodyRequest, RequestReader
from fastdecode.openai.response_bodies import RESPONSES_URL
from fastdecode.openai.responses import response_body
from fastdecode.text.codec import TextCodec

ID_PREFIX: Final = "batch_req"
OPENAI_FIELDS: Final = ("custom_id", "method", "url", "body")
_URLS: Final = (COMPLETIONS_URL, CHAT_URL, RESPONSES_URL)
_SAMPLING_FIELDS: Final = tuple(
    f.name for f in fields(SamplingParams) if f.name not in ("logits_processors", "reasoning_marks")
)
_SIMPLE_FIELDS: Final = (
    "id", "prompt", "prompt_token_ids", *_SAMPLING_FIELDS, "cache", "cache_salt", "conversation_id",
)  # fmt: skip
_FREE: Final = frozenset(
    ("id", "custom_id", "prompt", "prompt_token_ids", "seed", "conversation_id", "user")
)
"""Fields of a line or a body whose content no check reads."""
_TEXT, _LONG_TEXT, _WHOLE, _WHOLES = map(msgspec.Raw, (b"T", b"L", b"W", b"S"))
"""What a shape has in place of such content. JSON has none of these values."""
_LEAST_LONG: Final = 10**18  # whole numbers from here on are checked


class LineError(BodyError):
    """A line that can't be answered."""

    line_id: LineId | None = None
    conversation_id: str | None = None
    """The conversation that the line names."""


class _Lines:
    name: ClassVar[str]
    id_field: ClassVar[str]
    json_code: ClassVar[str] = "invalid_json"
    _id_of: Callable[[dict[str, Any], int], LineId]
    _request_of: Callable[[dict[str, Any], int], BodyRequest]

    def parse(self, raw: bytes | None, number: int) -> BodyRequest:
        """Return what a line asks. Raises: LineError: If it can't be answered."""
        line_id: LineId | None = None
        line: dict[str, Any] = {}
        try:
            line = load_object(raw, number, self.json_code)
            line_id = self._id_of(line, number)
            return replace(self._request_of(line, number), line_id=line_id)
        except RequestError as error:
            refused = LineError(str(error), code=error.code, param=getattr(error, "param", None))
            refused.line_id, body = line_id, line.get("body", line)
            named = body.get("conversation_id") if isinstance(body, dict) else None
            refused.conversation_id = named if isinstance(named, str) else None
            raise refused from None


@dataclass(frozen=True)
class SimpleLines(_Lines):
    """Simple lines, with parameters of the job."""

    defaults: SamplingParams
    """Parameters of lines that don't give them."""
    greedy: SamplingParams | None = None
    """The same for lines that give ``temperature`` 0. None for ``defaults``."""
    numbers: bool = True
    """Every answer has the ``line`` that it is for. Otherwise errors have."""

    name, id_field = "simple", "id"

    def _id_of(self, line: dict[str, Any], number: int) -> LineId:
        line_id = line.get("id")
        if isinstance(line_id, bool) or not isinstance(line_id, (str, int)) or line_id == "":
            why = f'line {number} has no "id" that is a string or a whole number'
            raise RequestError(why, code="invalid_id")
        return _utf8(line_id, "id") if isinstance(line_id, str) else line_id

    def _request_of(self, line: dict[str, Any], number: int) -> BodyRequest:
        refuse_unknown(line, _SIMPLE_FIELDS, (), f"line {number}")
        # null is the same as not given
        given = {name: line[name] for name in _SAMPLING_FIELDS if line.get(name) is not None}
        greedy = self.greedy if given.get("temperature") == 0 else None
        params = replace(greedy or self.defaults, **given)
        cache = CacheUse.of(line.get("cache"), line.get("cache_salt"))
        conversation_id = check_turn(line.get("conversation_id"), params, 1)
        return BodyRequest(
            (_prompt_of(line),), params, False, cache=cache, conversation_id=conversation_id
        )

    def answer(
        self, number: int, request: BodyRequest, outputs: Sequence[RequestOutput], codec: TextCodec
    ) -> dict[str, Any]:
        (output,) = outputs
        place = {"line": number} if self.numbers else {}
        return {"id": request.line_id, **place, **output_fields(output)}

    def refusal(
        self, number: int, line_id: LineId | None, error: FastDecodeError
    ) -> dict[str, Any]:
        return {"id": line_id, "line": number, "error": {"code": error.code, "message": str(error)}}


@dataclass(frozen=True)
class OpenAILines(_Lines):
    """OpenAI batch lines. ``run_id`` stands in every answer's id."""

    reader: RequestReader
    run_id: str
    clock: Callable[[], float] = time.time

    name, id_field, json_code = "openai", "custom_id", "invalid_json_line"

    def _id_of(self, line: dict[str, Any], number: int) -> LineId:
        custom_id = line.get("custom_id")
        if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= MAX_ID_CHARS:
            must = f"has no custom_id that is a string of 1 to {MAX_ID_CHARS} characters"
            raise BodyError(f"line {number} {must}", code="invalid_custom_id", param="custom_id")
        return _utf8(custom_id, "custom_id")

    def _request_of(self, line: dict[str, Any], number: int) -> BodyRequest:
        refuse_unknown(line, OPENAI_FIELDS, LABELS, f"line {number}")
        if line.get("method") != "POST":
            refuse("method", f'must be "POST", not {line.get("method")!r}', "invalid_method")
        url, body = line.get("url"), line.get("body")
        if url not in _URLS:
            refuse("url", f"must be one of {', '.join(_URLS)}, not {url!r:.80}", "url_mismatch")
        if not isinstance(body, dict):
            refuse("body", f"must be an object, not {type(body).__name__}", "invalid_body")
        return self.reader.read(url, body)

    def answer(
        self, number: int, request: BodyRequest, outputs: Sequence[RequestOutput], codec: TextCodec
    ) -> dict[str, Any]:
        write = answer_body if request.echo is None else response_body
        model = request.model or self.reader.served_model_names[0]
        head = AnswerHead(f"{self.run_id}-{number}", int(self.clock()), model)
        return self._line(number, request.line_id, 200, write(request, outputs, codec, head))

    def refusal(
        self, number: int, line_id: LineId | None, error: FastDecodeError
    ) -> dict[str, Any]:
        return self._line(number, line_id, status(error)[0], error_body(error))

    def _line(
        self, number: int, line_id: LineId | None, status_code: int, body: dict[str, Any]
    ) -> dict[str, Any]:
        request_id = f"req_{self.run_id}_{number}"
        return {
            "id": f"{ID_PREFIX}_{self.run_id}_{number}",
            "custom_id": line_id,
            "response": {"status_code": status_code, "request_id": request_id, "body": body},
            "error": None,
        }


LineFormat: TypeAlias = "SimpleLines | OpenAILines"
"""Answers name lines by their numbers, from 1."""


def identifier(lines: str, run_id: str) -> Identify:
    """Return the ``Identify`` of a run's answers. ``lines``: name of their format."""

    def openai(answer: dict[str, Any]) -> tuple[int, bool]:
        prefix, number = str(answer["id"]).rsplit("_", 1)
        if prefix != f"{ID_PREFIX}_{run_id}":
            raise ValueError("an answer of another run")
        return int(number), int(answer["response"]["status_code"]) >= 400

    if lines == OpenAILines.name:
        return openai
    return lambda answer: (int(answer["line"]), "error" in answer)


def shape_of(raw: bytes) -> tuple[LineId | None, bytes | None]:
    """Return a line's id, and its shape: what is left without contents that no check reads.

    Lines of one shape are all valid, or all bad. A line without an id has no shape.
    """
    try:
        line = msgspec.json.decode(raw)  # what it refuses is checked as a line of its own shape
        line_id = line.get("id", line.get("custom_id"))
        _blank(line, _FREE)
        body = line.get("body")
        if isinstance(body, dict):
            _blank(body, _FREE)
            for message in body.get("messages") or ():
                content = message.get("content")
                for part in content if isinstance(content, list) else ():
                    _blank(part, {"text"})
                _blank(message, {"content"})
        is_named = isinstance(line_id, (str, int))
        return (line_id, msgspec.json.encode(line)) if is_named else (None, None)
    except (msgspec.DecodeError, ValueError, RecursionError, AttributeError, TypeError):
        return None, None


def _blank(fields: dict[str, Any], names: Set[str]) -> None:
    """Replace texts and whole numbers of these names."""
    for name in fields.keys() & names:
        value = fields[name]
        kind = type(value)
        if kind is str and value:
            fields[name] = _TEXT if len(value) <= MAX_ID_CHARS else _LONG_TEXT
        elif kind is int and -_LEAST_LONG < value < _LEAST_LONG:
            fields[name] = _WHOLE
        elif kind is list and value and all(type(each) is int for each in value):
            fields[name] = _WHOLES


def load_object(raw: bytes | None, number: int, code: str = "invalid_json") -> dict[str, Any]:
    """Return a line's JSON object. Raises RequestError: If it has none, or is too long (None)."""
    if raw is None:
        why = f"line {number} is longer than {MAX_LINE_BYTES} bytes: split it"
        raise RequestError(why, code="line_too_long")
    try:
        line = json.loads(raw.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise RequestError(f"line {number} is not valid JSON: {error}", code=code) from None
    if not isinstance(line, dict):
        what = f"line {number} is not a JSON object but {type(line).__name__}"
        raise RequestError(what, code=code)
    return line


def _utf8(text: str, what: str) -> str:
    """Return the text. Raises: RequestError: If JSON escapes spell a lone surrogate in it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        why = f'"{what}" has a lone surrogate, which is not a character'
        raise RequestError(why, code="invalid_text") from None
    return text


def _prompt_of(line: dict[str, Any]) -> Prompt:
    if ("prompt" in line) == ("prompt_token_ids" in line):
        raise RequestError('give either "prompt" or "prompt_token_ids"', code="invalid_prompt")
    if "prompt" in line:
        if not isinstance(line["prompt"], str):
            what = f'"prompt" must be a string, not {type(line["prompt"]).__name__}'
            why = f'{what} (token ids go in "prompt_token_ids")'
            raise RequestError(why, code="invalid_prompt")
        return _utf8(line["prompt"], "prompt")
    token_ids = line["prompt_token_ids"]
    if not isinstance(token_ids, list):
        raise RequestError('"prompt_token_ids" must be a list of token ids', code="invalid_prompt")
    return token_ids


def output_fields(output: RequestOutput) -> dict[str, Any]:
    completions = [_completion_fields(completion) for completion in output.completions]
    counts = usage([output])
    details = counts.pop("prompt_tokens_details")
    counts |= details if output.num_cached_tokens else {}
    body: dict[str, Any] = completions[0] if len(completions) == 1 else {"completions": completions}
    if output.prompt_logprobs is not None:
        body["prompt_logprobs"] = [step and _step(step) for step in output.prompt_logprobs]
    return {**body, "usage": counts}


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
    top = [list(pair) for pair in step.top]
    return {"token_id": step.token_id, "logprob": step.logprob, "top": top}
