"""Offline batch generation: a file of requests in, a file of completions out (JSON Lines).

An input line is ``{"id": …, "prompt": "…"}`` or ``{"id": …, "prompt_token_ids": […]}``, with any sampling parameter
beside it. An output line is ``{"id", "text", "token_ids", "finish_reason", "usage"}`` (``"completions"`` instead of
the middle three when n > 1, ``"logprobs"`` when asked for), or ``{"id", "error": {"code", "message"}}``; lines that
can't be read as a request at all have ``"id": null`` and their ``"line"`` number. Output lines stand in the order of
the input; a bad line costs nobody else anything.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from fastdecode.core.errors import ConfigError, FastDecodeError, RequestError, WorkerError
from fastdecode.core.sequence import PromptRequest, RequestOutput, SamplingParams
from fastdecode.engine.llm import LLM
from fastdecode.jobs.held_back import HeldBack
from fastdecode.jobs.line_format import LineId
from fastdecode.jobs.lines import LineReader, too_long
from fastdecode.jobs.simple_lines import BadLine, SimpleRequest, error_object, output_fields, parse_line
from fastdecode.jobs.survey import no_tokenizer
from fastdecode.text.codec import lacks_tokenizer


@dataclass(frozen=True)
class BatchResult:
    """How a batch went."""

    num_requests: int
    num_failed: int
    num_prompt_tokens: int
    """Of the requests that were answered."""
    lost: FastDecodeError | None = None
    """The worker failure that ended the batch early, if one did."""


def check_paths(input_path: Path, **outputs: Path | None) -> None:
    """Find out about bad paths before a model is loaded.

    Args:
        outputs: what for → the file; None: not wanted.

    Raises:
        ConfigError: the input can't be read, or isn't a file; an output can't be written; two are the same file.
    """
    try:
        with input_path.open("rb"):
            pass
    except OSError as error:
        raise ConfigError(f"can't read the input file {input_path}: {error.strerror}") from None
    if not input_path.is_file():
        raise ConfigError(f"the input {input_path} is not a file: write the requests to one")
    taken = {input_path.resolve(): "input"}
    for what, path in outputs.items():
        if path is None:
            continue
        check_writable(path, what)
        other = taken.setdefault(path.resolve(), what)
        if other != what:
            raise ConfigError(f"{other} and {what} are the same file, {path}: choose another --{what}")


def check_writable(path: Path, what: str) -> None:
    """Raises ConfigError if the file can't be opened for writing. An existing file's content isn't touched."""
    path = path.resolve()  # what a link points to is what is written, and taken away again
    existed = path.exists()
    if path.is_dir():
        raise ConfigError(f"can't write the {what} file {path}: it is a directory; name a file in it")
    try:
        if not existed or path.is_file():
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
    with (
        input_path.open("rb") as lines,
        output_path.open("w", encoding="utf-8") as out,
        HeldBack(output_path.resolve().parent) as held_back,
    ):
        writer = _OrderedWriter(out, held_back, on_output)
        try:
            for output in llm.stream(writer.requests(_read(lines, defaults))):
                writer.add(output)
        finally:
            # Also when interrupted: what is done is on disk, in order, and nothing is half a line.
            writer.flush()
        return writer.result()


class _OrderedWriter:
    """Writes output lines in the order of the input; those that are done early are held back.

    Requests get their place in the file as internal id, so that duplicate or odd ids can't confuse the engine.
    """

    def __init__(self, out: IO[str], early: HeldBack, on_output: Callable[[str | None, dict[str, Any]], None]) -> None:
        self._out = out
        self._early = early
        self._on_output = on_output
        self._ids: dict[int, LineId] = {}
        self._next = 0
        self._num_failed = 0
        self._num_prompt_tokens = 0
        self._lost: FastDecodeError | None = None

    def requests(self, lines: Iterator[tuple[int, SimpleRequest | BadLine]]) -> Iterator[PromptRequest]:
        """The good lines, with internal ids; the bad ones are answered here. Lines come with their number."""
        seen: set[str] = set()
        for place, (number, item) in enumerate(lines):
            if isinstance(item, SimpleRequest) and str(item.line_id) in seen:
                text = f"the id {item.line_id!r} was used by an earlier line: give each line an id of its own"
                item = BadLine(item.line_id, RequestError(text, code="duplicate_id"))
            if isinstance(item, BadLine):
                self._num_failed += 1
                line = {"id": item.line_id, "line": number, "error": error_object(item.error)}
                self._put(place, None, line)
            else:
                seen.add(str(item.line_id))
                self._ids[place] = item.line_id
                yield PromptRequest(str(place), item.prompt, item.params)

    def add(self, output: RequestOutput) -> None:
        place = int(output.request_id)
        line_id = self._ids.pop(place)
        if output.error is not None:
            self._num_failed += 1
            if isinstance(output.error, WorkerError):
                self._lost = output.error
            line: dict[str, Any] = {"id": line_id, "error": error_object(output.error)}
        else:
            self._num_prompt_tokens += len(output.prompt_token_ids)
            line = {"id": line_id, **output_fields(output)}
        self._put(place, output.prompt, line)

    def flush(self) -> None:
        """Write what is still held back, in order, though lines before it are missing."""
        for place in self._early.places():
            self._write(*self._early.pop(place))

    def result(self) -> BatchResult:
        return BatchResult(self._next, self._num_failed, self._num_prompt_tokens, self._lost)

    def _put(self, place: int, prompt: str | None, line: dict[str, Any]) -> None:
        if place != self._next:
            try:
                self._early.put(place, (prompt, line))
            except OSError as error:
                raise ConfigError(f"can't hold back an answer beside the output file: {error.strerror}") from None
            return
        self._write(prompt, line)
        self._next += 1
        while self._next in self._early:
            self._write(*self._early.pop(self._next))
            self._next += 1

    def _write(self, prompt: str | None, line: dict[str, Any]) -> None:
        try:
            self._out.write(json.dumps(line, ensure_ascii=False) + "\n")
            self._out.flush()
        except OSError as error:
            raise ConfigError(f"can't write the output file: {error.strerror}") from None
        self._on_output(prompt, line)


def _read(lines: IO[bytes], defaults: SamplingParams) -> Iterator[tuple[int, SimpleRequest | BadLine]]:
    for number, raw in LineReader(lines):
        yield number, BadLine(None, too_long(number)) if raw is None else parse_line(raw, number, defaults)


def check_texts(path: Path, defaults: SamplingParams, model_dir: Path) -> None:
    """Find out before a model is loaded that it can answer no line of a file.

    Raises:
        ConfigError: (code ``no_tokenizer``) all requests are texts, and the model has no tokenizer.
    """
    if not lacks_tokenizer(model_dir):
        return
    num_texts = 0
    with path.open("rb") as lines:
        for _, item in _read(lines, defaults):
            if isinstance(item, SimpleRequest):
                if not isinstance(item.prompt, str):
                    return
                num_texts += 1
    if num_texts:
        raise no_tokenizer(path, num_texts)


def count_lines(path: Path) -> int:
    """Lines of a file that aren't blank: how many requests it seems to hold."""
    with path.open("rb") as file:
        return sum(1 for _ in LineReader(file))


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write a small JSON file: whole, or not at all, if it is a file.

    Raises:
        ConfigError: it can't be written.
    """
    target = path.resolve()
    text = json.dumps(value, indent=2) + "\n"
    try:
        if target.exists() and not target.is_file():
            target.write_text(text, encoding="utf-8")
            return
        temporary = target.with_name(target.name + ".tmp")
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, target)
    except OSError as error:
        raise ConfigError(f"can't write {path}: {error.strerror}") from None
