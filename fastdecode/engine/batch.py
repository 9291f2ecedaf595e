"""Offline batch generation: a file of requests in, a file of completions out (JSON Lines).

An input line is ``{"id": …, "prompt": "…"}`` or ``{"id": …, "prompt_token_ids": […]}``, with any sampling parameter
beside it. An output line is ``{"id", "text", "token_ids", "finish_reason", "usage"}`` (``"completions"`` instead of
the middle three when n > 1, ``"logprobs"`` when asked for), or ``{"id", "error": {"code", "message"}}``; lines that
can't be read as a request at all have ``"id": null`` and their ``"line"`` number. Output lines stand in the order of
the input; a bad line costs nobody else anything.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import IO, Any

from fastdecode.core.errors import ConfigError, FastDecodeError, RequestError, WorkerError
from fastdecode.core.sequence import Completion, RequestOutput, SamplingParams
from fastdecode.engine.llm import LLM, Prompt, PromptRequest

MAX_LINE_BYTES = 64 * 1024 * 1024
SAMPLING_FIELDS = tuple(f.name for f in fields(SamplingParams))
LINE_FIELDS = ("id", "prompt", "prompt_token_ids", *SAMPLING_FIELDS)


@dataclass(frozen=True)
class BatchResult:
    """How a batch went."""

    num_requests: int
    num_failed: int
    num_prompt_tokens: int
    """Of the requests that were answered."""
    lost: FastDecodeError | None = None
    """The worker failure that ended the batch early, if one did."""


@dataclass(frozen=True)
class _Bad:
    """A line that is no request."""

    request_id: str | None
    error: RequestError


def check_paths(input_path: Path, output_path: Path) -> None:
    """Find out about bad paths before a model is loaded.

    Raises:
        ConfigError: the input can't be read, or the output can't be written, or they are the same file.
    """
    try:
        with input_path.open("rb"):
            pass
    except OSError as error:
        raise ConfigError(f"can't read the input file {input_path}: {error.strerror}") from None
    if output_path.exists() and output_path.samefile(input_path):
        raise ConfigError(f"output and input are the same file, {input_path}: choose another --output")
    check_writable(output_path, "output")


def check_writable(path: Path, what: str) -> None:
    """Raises ConfigError if the file can't be opened for writing. An existing file's content isn't touched."""
    existed = path.exists()
    try:
        with path.open("ab"):
            pass
    except OSError as error:
        raise ConfigError(f"can't write the {what} file {path}: {error.strerror}") from None
    if not existed:
        path.unlink()


def run_batch(
    llm: LLM,
    input_path: Path,
    output_path: Path,
    defaults: SamplingParams,
    on_output: Callable[[str | None, dict[str, Any]], None] = lambda prompt, line: None,
) -> BatchResult:
    """Answer every line of a file.

    Args:
        defaults: what a line doesn't say itself.
        on_output: told every output line as it is written, with its prompt if that is text.
    """
    with input_path.open("rb") as lines, output_path.open("w", encoding="utf-8") as out:
        writer = _OrderedWriter(out, on_output)
        try:
            for output in llm.stream(writer.requests(_read(lines, defaults))):
                writer.add(output)
        finally:
            # Also when interrupted: what is done is on disk, in order, and nothing is half a line.
            writer.flush()
        return writer.result()


class _OrderedWriter:
    """Writes output lines in the order of the input, holding back those that are done early.

    Requests get their place in the file as internal id, so that duplicate or odd ids can't confuse the engine.
    """

    def __init__(self, out: IO[str], on_output: Callable[[str | None, dict[str, Any]], None]) -> None:
        self._out = out
        self._on_output = on_output
        self._ids: dict[int, str] = {}
        self._early: dict[int, tuple[str | None, dict[str, Any]]] = {}
        self._next = 0
        self._num_failed = 0
        self._num_prompt_tokens = 0
        self._lost: FastDecodeError | None = None

    def requests(self, lines: Iterator[tuple[int, PromptRequest | _Bad]]) -> Iterator[PromptRequest]:
        """The good lines, with internal ids; the bad ones are answered here. Lines come with their number."""
        seen: set[str] = set()
        for place, (number, item) in enumerate(lines):
            if isinstance(item, PromptRequest) and item.request_id in seen:
                text = f"the id {item.request_id!r} was used by an earlier line: give each line an id of its own"
                item = _Bad(item.request_id, RequestError(text, code="duplicate_id"))
            if isinstance(item, _Bad):
                self._num_failed += 1
                line = {"id": item.request_id, "line": number, "error": _error_object(item.error)}
                self._put(place, None, line)
            else:
                seen.add(item.request_id)
                self._ids[place] = item.request_id
                yield replace(item, request_id=str(place))

    def add(self, output: RequestOutput) -> None:
        place = int(output.request_id)
        request_id = self._ids.pop(place)
        if output.error is not None:
            self._num_failed += 1
            if isinstance(output.error, WorkerError):
                self._lost = output.error
            line: dict[str, Any] = {"id": request_id, "error": _error_object(output.error)}
        else:
            self._num_prompt_tokens += len(output.prompt_token_ids)
            line = {"id": request_id, **output_fields(output)}
        self._put(place, output.prompt, line)

    def flush(self) -> None:
        """Write what is still held back, in order, though lines before it are missing."""
        for place in sorted(self._early):
            self._write(*self._early.pop(place))

    def result(self) -> BatchResult:
        return BatchResult(self._next, self._num_failed, self._num_prompt_tokens, self._lost)

    def _put(self, place: int, prompt: str | None, line: dict[str, Any]) -> None:
        self._early[place] = (prompt, line)
        while self._next in self._early:
            self._write(*self._early.pop(self._next))
            self._next += 1

    def _write(self, prompt: str | None, line: dict[str, Any]) -> None:
        self._out.write(json.dumps(line, ensure_ascii=False) + "\n")
        self._out.flush()
        self._on_output(prompt, line)


def output_fields(output: RequestOutput) -> dict[str, Any]:
    """The fields of an answered request's output line, but its id."""
    completions = [_completion_fields(completion) for completion in output.completions]
    num_output = sum(len(completion.token_ids) for completion in output.completions)
    usage = {
        "prompt_tokens": len(output.prompt_token_ids),
        "completion_tokens": num_output,
        "total_tokens": len(output.prompt_token_ids) + num_output,
    }
    body = completions[0] if len(completions) == 1 else {"completions": completions}
    return {**body, "usage": usage}


def _completion_fields(completion: Completion) -> dict[str, Any]:
    line: dict[str, Any] = {
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason,
    }
    if completion.logprobs is not None:
        line["logprobs"] = [
            {"token_id": step.token_id, "logprob": step.logprob, "top": [list(pair) for pair in step.top]}
            for step in completion.logprobs
        ]
    return line


def _error_object(error: FastDecodeError) -> dict[str, str]:
    return {"code": error.code, "message": str(error)}


def _read(lines: IO[bytes], defaults: SamplingParams) -> Iterator[tuple[int, PromptRequest | _Bad]]:
    number = 0
    while raw := lines.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(raw) > MAX_LINE_BYTES:
            while raw and not raw.endswith(b"\n"):
                raw = lines.readline(MAX_LINE_BYTES)
            text = f"line {number} is longer than {MAX_LINE_BYTES} bytes: split it"
            yield number, _Bad(None, RequestError(text, code="line_too_long"))
        elif raw.strip():
            yield number, _parse(raw, number, defaults)


def _parse(raw: bytes, number: int, defaults: SamplingParams) -> PromptRequest | _Bad:
    request_id: str | None = None
    try:
        try:
            line = json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"line {number} is not valid JSON: {error}", code="invalid_json") from None
        if not isinstance(line, dict):
            text = f"line {number} is not a JSON object but {type(line).__name__}"
            raise RequestError(text, code="invalid_json")
        given_id = line.get("id")
        if isinstance(given_id, bool) or not isinstance(given_id, (str, int)) or given_id == "":
            raise RequestError(f'line {number} has no "id" that is a string or a whole number', code="invalid_id")
        request_id = _utf8(str(given_id), "id")
        _refuse_unknown_fields(line)
        # null is the same as not given
        overrides = {name: line[name] for name in SAMPLING_FIELDS if line.get(name) is not None}
        return PromptRequest(request_id, _prompt_of(line), replace(defaults, **overrides))
    except RequestError as error:
        return _Bad(request_id, error)


def _refuse_unknown_fields(line: dict[str, Any]) -> None:
    for name in line:
        if name not in LINE_FIELDS:
            near = difflib.get_close_matches(name, LINE_FIELDS, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(LINE_FIELDS)}"
            raise RequestError(f"unknown field {name!r}: {hint}", code="unknown_field")


def _prompt_of(line: dict[str, Any]) -> Prompt:
    if ("prompt" in line) == ("prompt_token_ids" in line):
        raise RequestError('give either "prompt" or "prompt_token_ids"', code="invalid_prompt")
    if "prompt" in line:
        if not isinstance(line["prompt"], str):
            text = (
                f'"prompt" must be a string, not {type(line["prompt"]).__name__} (token ids go in "prompt_token_ids")'
            )
            raise RequestError(text, code="invalid_prompt")
        return _utf8(line["prompt"], "prompt")
    if not isinstance(line["prompt_token_ids"], list):
        raise RequestError('"prompt_token_ids" must be a list of token ids', code="invalid_prompt")
    token_ids: list[int] = line["prompt_token_ids"]
    return token_ids


def _utf8(text: str, what: str) -> str:
    """The text, if it is one: JSON escapes can spell lone surrogates, which no tokenizer or UTF-8 file takes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RequestError(f'"{what}" has a lone surrogate, which is no character', code="invalid_text") from None
    return text


def count_lines(path: Path) -> int:
    """Lines of a file that aren't blank: how many requests it seems to hold."""
    with path.open("rb") as lines:
        return sum(1 for line in lines if line.strip())


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write a small JSON file whole, or not at all."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    os.replace(temporary, path)
