"""Traces of requests: own JSON Lines ``{"num_prompt_tokens": 512, "num_output_tokens": 128}``, or
lines of ``fastdecode serve --request-log``.

Own lines may have ``max_tokens``, all that the scheduler knows of the output's length (if
absent, it knows the length), and ``arrival_s`` or ``arrival_step``, when the request arrives (0
if absent; all lines have the same of the two). Requests of a log without a prompt or without an
answer are left out, and counted.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from cost_model.numbers import check_known, count, number
from fastdecode.core.errors import ConfigError
from fastdecode.schedule.simulation.trace import ArrivalUnit, RequestTrace, TracedRequest

T = TypeVar("T")
Fields: TypeAlias = Mapping[str, Any]
Located: TypeAlias = tuple[str, bytes]
"""Where a line is, for errors, and the line."""

MAX_REQUESTS = 10_000_000
MAX_LINE_BYTES = 1 << 16
_FIELDS = ("num_prompt_tokens", "num_output_tokens", "max_tokens", "arrival_s", "arrival_step")


def read_trace(path: Path) -> RequestTrace:
    """Read a file of own lines.

    Raises:
        ConfigError: If it can't be read, or a line is broken.
    """
    return read_file(path, parse_trace, str(path))


def parse_trace(lines: Iterable[bytes], name: str) -> RequestTrace:
    return _own(bounded(lines, name), name)


def _own(lines: Iterable[Located], name: str) -> RequestTrace:
    units: set[ArrivalUnit] = set()
    found = ((known_fields(line, where, _FIELDS), where) for where, line in lines)
    requests = [_own_request(fields, where, units) for fields, where in found]
    if not requests:
        raise ConfigError(f"{name} holds no requests")
    if len(units) > 1:
        raise ConfigError(
            f"{name} says arrival_s in some lines and arrival_step in others: choose one"
        )
    return RequestTrace(tuple(sorted(requests, key=lambda request: request.arrival)), *units)


def _own_request(fields: Fields, where: str, units: set[ArrivalUnit]) -> TracedRequest:
    num_prompt_tokens = count(fields, "num_prompt_tokens", where)
    num_output_tokens = count(fields, "num_output_tokens", where)
    max_tokens = num_output_tokens
    if "max_tokens" in fields:
        max_tokens = count(fields, "max_tokens", where, num_output_tokens)
    arrival = 0.0
    named: tuple[tuple[str, ArrivalUnit], ...] = (("arrival_s", "s"), ("arrival_step", "step"))
    for name, unit in named:
        if name in fields:
            units.add(unit)
            arrival = number(fields, name, where, may_be_0=True)
    return TracedRequest(num_prompt_tokens, num_output_tokens, max_tokens, arrival)


def read_file(path: Path, parse: Callable[[Iterable[bytes], str], T], name: str) -> T:
    """Parse a trace file, which errors call ``name``."""
    try:
        with path.open("rb") as lines:
            return parse(lines, name)
    except OSError as error:
        raise ConfigError(f"can't read the trace {path}: {error.strerror}") from None


def bounded(lines: Iterable[bytes], name: str) -> Iterator[Located]:
    """Yield lines that aren't blank, and where each is.

    Raises:
        ConfigError: If there are too many, or one is too long.
    """
    for place, line in enumerate(lines, 1):
        where = f"{name}, line {place}"
        if len(line) > MAX_LINE_BYTES or place > MAX_REQUESTS:
            raise ConfigError(
                f"{where}: a trace has at most {MAX_REQUESTS} lines of {MAX_LINE_BYTES} bytes"
            )
        if line.strip():
            yield where, line


def known_fields(line: bytes, where: str, known: Sequence[str]) -> dict[str, Any]:
    fields = json_object(line, where)
    check_known(fields, known, where)
    return fields


def json_object(line: bytes, where: str) -> dict[str, Any]:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} isn't JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ConfigError(f"{where} isn't a JSON object")
    return fields


@dataclass(frozen=True)
class ReadTrace:
    trace: RequestTrace
    """By arrival; the first arrives at 0."""
    form: str
    num_left_out: int


def read_any_trace(path: Path) -> ReadTrace:
    """Read a file of own lines, or a server's log.

    Raises:
        ConfigError: If it can't be read, is neither, or a line is broken.
    """
    return read_file(path, _read, f"--trace {path}")


def _read(file: Iterable[bytes], name: str) -> ReadTrace:
    lines = bounded(file, name)
    first = next(lines, None)
    if first is None:
        raise ConfigError(f"{name} holds no requests")
    names = set(json_object(first[1], first[0]))
    if "num_prompt_tokens" in names:
        trace = _own(chain([first], lines), name)
        if trace.unit != "s":
            raise ConfigError(f"{name}: arrivals are steps; a plan needs arrival_s")
        return ReadTrace(_from_zero(list(trace.requests)), "own", 0)
    if not {"time", "status"} <= names and not {"time", "prompt_tokens"} <= names:
        raise ConfigError(
            f"{first[0]}: neither a server's log nor a trace, whose lines are like "
            '{"num_prompt_tokens": 512, "num_output_tokens": 128, "arrival_s": 0.5}'
        )
    found = [_logged(json_object(line, where), where) for where, line in chain([first], lines)]
    requests = [request for request in found if request is not None]
    if not requests:
        raise ConfigError(f"{name} holds no request with a prompt and an answer")
    return ReadTrace(_from_zero(requests), "server", len(found) - len(requests))


def _logged(record: Fields, where: str) -> TracedRequest | None:
    # A request that failed has no answer.
    prompt, output = (
        0 if record.get(name) is None else count(record, name, where, low=0)
        for name in ("prompt_tokens", "output_tokens")
    )
    time = number(record, "time", where, may_be_0=True)
    return TracedRequest(prompt, output, output, time) if prompt and output else None


def _from_zero(requests: list[TracedRequest]) -> RequestTrace:
    start = min(each.arrival for each in requests)
    moved = (replace(each, arrival=each.arrival - start) for each in requests)
    return RequestTrace(tuple(sorted(moved, key=lambda each: each.arrival)))
