"""Traces of requests, read from JSON Lines.

A line is ``{"num_prompt_tokens": 512, "num_output_tokens": 128}`` and may say
more:

``max_tokens``
    all that the scheduler knows of the output's length; if absent, it knows the
    length
``arrival_s`` or ``arrival_step``
    when the request arrives, in seconds or in steps, the same for all lines; 0
    if absent
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from cost_model.fields import check_known, count, number
from fastdecode.core.errors import ConfigError
from fastdecode.schedule.simulation.trace import ArrivalUnit, RequestTrace, TracedRequest

T = TypeVar("T")
Located: TypeAlias = tuple[str, bytes]
"""Where a line is, for errors, and the line."""

MAX_REQUESTS = 10_000_000
MAX_LINE_BYTES = 4096
_FIELDS = ("num_prompt_tokens", "num_output_tokens", "max_tokens", "arrival_s", "arrival_step")


def read_trace(path: Path) -> RequestTrace:
    """Read a trace file.

    Raises:
        ConfigError: it can't be read, or a line is no request; names the line
            and the field.
    """
    return read_file(path, parse_trace, str(path))


def parse_trace(lines: Iterable[bytes], name: str) -> RequestTrace:
    """See ``read_trace``. ``name`` is what errors call the file."""
    return trace_of(bounded(lines, name), name)


def trace_of(lines: Iterable[Located], name: str) -> RequestTrace:
    """See ``read_trace``."""
    units: set[ArrivalUnit] = set()
    requests = [_request(fields, where, units) for where, fields in records(lines, _FIELDS)]
    if not requests:
        raise ConfigError(f"{name} holds no requests")
    if len(units) > 1:
        raise ConfigError(
            f"{name} says arrival_s in some lines and arrival_step in others: choose one"
        )
    return RequestTrace(tuple(sorted(requests, key=lambda request: request.arrival)), *units)


def _request(fields: Mapping[str, Any], where: str, units: set[ArrivalUnit]) -> TracedRequest:
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
    """Parse a trace file, which errors call ``name``. Raises ConfigError."""
    try:
        with path.open("rb") as lines:
            return parse(lines, name)
    except OSError as error:
        raise ConfigError(f"can't read the trace {path}: {error.strerror}") from None


def records(lines: Iterable[Located], known: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Where each line is, and its JSON object.

    Raises:
        ConfigError: a line is something else, or has a field that is not known.
    """
    for where, line in lines:
        fields = json_object(line, where)
        check_known(fields, known, where)
        yield where, fields


def bounded(
    lines: Iterable[bytes], name: str, most_bytes: int = MAX_LINE_BYTES
) -> Iterator[Located]:
    """Lines that aren't blank, and where each is. Raises ConfigError: there are too
    many, or one is too long."""
    for place, line in enumerate(lines, 1):
        where = f"{name}, line {place}"
        if len(line) > most_bytes or place > MAX_REQUESTS:
            raise ConfigError(
                f"{where}: a trace has at most {MAX_REQUESTS} lines of {most_bytes} bytes"
            )
        if line.strip():
            yield where, line


def json_object(line: bytes, where: str) -> dict[str, Any]:
    """Raises ConfigError: the line holds something else."""
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} isn't JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ConfigError(f"{where} isn't a JSON object")
    return fields
