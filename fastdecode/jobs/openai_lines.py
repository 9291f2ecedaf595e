"""OpenAI batch lines as a batch job's format.

A line is ``{"custom_id", "method": "POST", "url", "body"}``.

An answer is ``{"id", "custom_id", "response": {"status_code", "request_id",
"body"}, "error": null}``. The body is a ``text_completion`` or
``chat.completion`` object, a ``response``, or with a status of 400 and above
``{"error": {"message", "type", "param", "code"}}``. ``id`` is
``batch_req_<run>_<line number>``: opaque to its reader, and what a resumed run
finds its place by.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from fastdecode.conversations.turns import MAX_ID_CHARS
from fastdecode.core.errors import FastDecodeError, RequestError
from fastdecode.core.sequence import RequestOutput
from fastdecode.jobs.line_format import LineError, LineId, LineRequest
from fastdecode.jobs.lines import load_object, utf8
from fastdecode.openai.answers import answer_body, error_body, status
from fastdecode.openai.body_errors import BodyError, refuse, refuse_unknown
from fastdecode.openai.requests import CHAT_URL, COMPLETIONS_URL, LABELS, RequestReader
from fastdecode.openai.response_bodies import RESPONSES_URL
from fastdecode.openai.responses import response_body
from fastdecode.text.codec import TextCodec

URLS = (COMPLETIONS_URL, CHAT_URL, RESPONSES_URL)
LINE_FIELDS = ("custom_id", "method", "url", "body")
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
        custom_id: str | None = None
        line: dict[str, Any] = {}
        try:
            line = load_object(raw, number, code="invalid_json_line")
            custom_id = _custom_id(line, number)
            url, body = _envelope(line, number)
            asked = self.reader.read(url, body)
        except RequestError as error:
            param, its_body = getattr(error, "param", None), line.get("body")
            whose = its_body.get("conversation_id") if isinstance(its_body, dict) else None
            raise LineError(
                str(error),
                code=error.code,
                line_id=custom_id,
                param=param,
                conversation_id=whose,
            ) from None
        return LineRequest(
            custom_id, asked.prompts, asked.params, asked, asked.cache, asked.conversation_id
        )

    def answer(
        self, number: int, request: LineRequest, outputs: Sequence[RequestOutput], codec: TextCodec
    ) -> dict[str, Any]:
        assert request.body is not None, "not a request of this format"
        write = answer_body if request.body.echo is None else response_body
        body = write(
            request.body, outputs, codec, answer_id=f"{self.run_id}-{number}",
            created_s=int(self.clock()),
            model=request.body.model or self.reader.served_model_names[0],
        )  # fmt: skip
        return self._line(number, request.line_id, 200, body)

    def refusal(
        self, number: int, line_id: LineId | None, error: FastDecodeError
    ) -> dict[str, Any]:
        code, _ = status(error)
        return self._line(number, line_id, code, error_body(error))

    def identify(self, answer: dict[str, Any]) -> tuple[int, bool]:
        prefix, number = str(answer["id"]).rsplit("_", 1)
        if prefix != f"{ID_PREFIX}_{self.run_id}":
            raise ValueError("an answer of another run")
        return int(number), int(answer["response"]["status_code"]) >= 400

    def _line(
        self, number: int, line_id: LineId | None, status_code: int, body: dict[str, Any]
    ) -> dict[str, Any]:
        response = {
            "status_code": status_code,
            "request_id": f"req_{self.run_id}_{number}",
            "body": body,
        }
        return {
            "id": f"{ID_PREFIX}_{self.run_id}_{number}",
            "custom_id": line_id,
            "response": response,
            "error": None,
        }


def _envelope(line: dict[str, Any], number: int) -> tuple[str, dict[str, Any]]:
    """A line's url and body. Raises BodyError."""
    refuse_unknown(line, LINE_FIELDS, LABELS, f"line {number}")
    if line.get("method") != "POST":
        refuse("method", f'must be "POST", not {line.get("method")!r}', "invalid_method")
    url = line.get("url")
    if url not in URLS:
        refuse("url", f"must be one of {', '.join(URLS)}, not {url!r:.80}", "url_mismatch")
    body = line.get("body")
    if not isinstance(body, dict):
        refuse("body", f"must be an object, not {type(body).__name__}", "invalid_body")
    return url, body


def _custom_id(line: dict[str, Any], number: int) -> str:
    custom_id = line.get("custom_id")
    if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= MAX_ID_CHARS:
        text = f"line {number} has no custom_id that is a string of 1 to {MAX_ID_CHARS} characters"
        raise BodyError(text, code="invalid_custom_id", param="custom_id")
    return utf8(custom_id, "custom_id")
