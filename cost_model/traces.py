"""Traces of requests, in the forms in which they are published or logged:

========== ================================================================
own        JSON Lines ``{"num_prompt_tokens": 512, "num_output_tokens": 128}``
server     JSON Lines of ``fastdecode serve --request-log``
azure      CSV ``TIMESTAMP,ContextTokens,GeneratedTokens``: dates and times
mooncake   JSON Lines with ``timestamp`` (ms), ``input_length``,
           ``output_length``
burstgpt   CSV ``Timestamp,…,Request tokens,Response tokens,…`` (seconds)
splitwise  CSV ``…,arrival_timestamp,…,prompt_size,token_size`` (seconds)
========== ================================================================

Own lines may have ``max_tokens``, all that the scheduler knows of the output's length (if
absent, it knows the length), and ``arrival_s`` or ``arrival_step``, when the request arrives (0
if absent; all lines have the same of the two). Requests without a prompt or without an answer
are left out of the others, and counted: failed requests in a server's log, and the failures that
other traces record.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from cost_model.numbers import MAX_TOKENS, check_known, count, number
from fastdecode.core.errors import ConfigError
from fastdecode.schedule.simulation.trace import ArrivalUnit, RequestTrace, TracedRequest

T = TypeVar("T")
Fields: TypeAlias = Mapping[str, Any]
Located: TypeAlias = tuple[str, bytes]
"""Where a line is, for errors, and the line."""

MAX_REQUESTS = 10_000_000
MAX_LINE_BYTES = 4096
_FIELDS = ("num_prompt_tokens", "num_output_tokens", "max_tokens", "arrival_s", "arrival_step")
MAX_PUBLISHED_BYTES = 1 << 20
"""Mooncake's lines name every block of a prompt."""


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
    requests = [_own_request(fields, where, units) for where, fields in records(lines, _FIELDS)]
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


@dataclass(frozen=True)
class Format:
    """Where a record has its time and its lengths."""

    name: str
    is_csv: bool
    time: str
    prompt: str
    output: str
    seconds: Callable[[Any], float]
    """Of its time. Raises ValueError, TypeError."""


@dataclass(frozen=True)
class ReadTrace:
    trace: RequestTrace
    """By arrival; the first arrives at 0."""
    form: str
    num_left_out: int


def _date_s(text: Any) -> float:
    """``2023-11-16 18:15:46.6805900``, perhaps with an offset; else UTC."""
    head, dot, rest = str(text).strip().partition(".")
    digits = rest[: len(rest) - len(rest.lstrip("0123456789"))] if dot else ""
    moment = datetime.fromisoformat((head + rest[len(digits) :]).replace("Z", "+00:00"))
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=timezone.utc)
    return moment.timestamp() + float(f"0.{digits or 0}")


FORMATS = (
    Format("server", False, "time", "prompt_tokens", "output_tokens", float),
    Format("mooncake", False, "timestamp", "input_length", "output_length",
           lambda ms: float(ms) / 1000),
    Format("azure", True, "TIMESTAMP", "ContextTokens", "GeneratedTokens", _date_s),
    Format("burstgpt", True, "Timestamp", "Request tokens", "Response tokens", float),
    Format("splitwise", True, "arrival_timestamp", "prompt_size", "token_size", float),
)  # fmt: skip
_OWN = "num_prompt_tokens"


def read_any_trace(path: Path) -> ReadTrace:
    """Read a file of any of the forms; its first line says which.

    Raises:
        ConfigError: it can't be read, is of no known form, or a line is broken;
            names the line and the field.
    """
    return read_file(path, _read, f"--trace {path}")


def _read(file: Iterable[bytes], name: str) -> ReadTrace:
    lines = bounded(file, name, MAX_PUBLISHED_BYTES)
    first = next(lines, None)
    if first is None:
        raise ConfigError(f"{name} holds no requests")
    form = _form(first[1])
    if form is None and _OWN.encode() in first[1]:
        trace = trace_of(chain([first], lines), name)
        if trace.unit != "s":
            raise ConfigError(f"{name}: arrivals are steps; a plan needs arrival_s")
        return ReadTrace(_from_zero(list(trace.requests)), "own", 0)
    if form is None:
        known = ", ".join(["own", *(each.name for each in FORMATS)])
        raise ConfigError(
            f"{first[0]}: a trace of no known form ({known}); own lines are like "
            '{"num_prompt_tokens": 512, "num_output_tokens": 128, "arrival_s": 0.5}'
        )
    records = _csv(first[1], lines) if form.is_csv else _json(chain([first], lines))
    found = [_request(record, form, where) for where, record in records]
    requests = [request for request in found if request is not None]
    if not requests:
        raise ConfigError(f"{name} holds no request with a prompt and an answer")
    return ReadTrace(_from_zero(requests), form.name, len(found) - len(requests))


def _form(line: bytes) -> Format | None:
    """What a file is that begins so."""
    if line.lstrip().startswith(b"{"):
        try:
            names = set(json.loads(line))
        except (ValueError, RecursionError):
            return None
    else:
        names = set(_cells(line))
    for form in FORMATS:
        if {form.time, form.prompt, form.output} <= names:
            return form
    if {FORMATS[0].time, "status"} <= names:
        return FORMATS[0]  # its first request was refused, and has no lengths
    return None


def _cells(line: bytes) -> list[str]:
    text = line.decode("utf-8-sig", "replace").strip()
    return [cell.strip() for cell in next(csv.reader([text]), [])]


def _csv(head: bytes, lines: Iterable[Located]) -> Iterator[tuple[str, Fields]]:
    names = _cells(head)
    for where, line in lines:
        cells = _cells(line)
        if len(cells) != len(names):
            raise ConfigError(
                f"{where}: {len(cells)} columns, but the first line names {len(names)}"
            )
        yield where, dict(zip(names, cells, strict=True))


def _json(lines: Iterable[Located]) -> Iterator[tuple[str, Fields]]:
    for where, line in lines:
        yield where, json_object(line, where)


def _request(record: Fields, form: Format, where: str) -> TracedRequest | None:
    """None: it has no prompt or no answer."""
    prompt, output = (_count(record, each, where) for each in (form.prompt, form.output))
    value = record.get(form.time)
    try:
        arrival = math.nan if isinstance(value, bool) else form.seconds(value)
    except (ValueError, TypeError, OverflowError):
        arrival = math.nan
    if not math.isfinite(arrival):
        raise ConfigError(f"{where}: {form.time}={value!r} is no time")
    return TracedRequest(prompt, output, output, arrival) if prompt and output else None


def _count(record: Fields, name: str, where: str) -> int:
    value = record.get(name)
    if value is None:
        return 0  # a request that failed has no answer
    try:
        count = math.nan if isinstance(value, bool) else float(value)
    except (ValueError, TypeError):
        count = math.nan
    if not (0 <= count <= MAX_TOKENS and count == int(count)):
        raise ConfigError(f"{where}: {name}={value!r} is not a whole number up to {MAX_TOKENS}")
    return int(count)


def _from_zero(requests: list[TracedRequest]) -> RequestTrace:
    requests.sort(key=lambda request: request.arrival)
    start = requests[0].arrival
    return RequestTrace(
        tuple(
            TracedRequest(
                each.num_prompt_tokens, each.num_output_tokens, each.max_tokens,
                each.arrival - start,
            )
            for each in requests
        )
    )  # fmt: skip
