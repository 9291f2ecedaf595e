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
import math
from collections.abc import Iterable
from pathlib import Path

from fastdecode.core.errors import ConfigError
from fastdecode.schedule.simulation.trace import ArrivalUnit, RequestTrace, TracedRequest

MAX_TOKENS = 1 << 24
MAX_REQUESTS = 10_000_000
MAX_LINE_BYTES = 4096
_FIELDS = ("num_prompt_tokens", "num_output_tokens", "max_tokens", "arrival_s", "arrival_step")


def read_trace(path: Path) -> RequestTrace:
    """Read a trace file.

    Raises:
        ConfigError: it can't be read, or a line is no request; names the line
            and the field.
    """
    try:
        with path.open("rb") as lines:
            return parse_trace(lines, str(path))
    except OSError as error:
        raise ConfigError(f"can't read the trace {path}: {error.strerror}") from None


def parse_trace(lines: Iterable[bytes], name: str) -> RequestTrace:
    """See ``read_trace``. ``name`` is what errors call the file."""
    requests: list[TracedRequest] = []
    units: set[ArrivalUnit] = set()
    for number, line in enumerate(lines, 1):
        where = f"{name}, line {number}"
        if len(line) > MAX_LINE_BYTES or len(requests) == MAX_REQUESTS:
            raise ConfigError(
                f"{where}: a trace has at most {MAX_REQUESTS} lines of {MAX_LINE_BYTES} bytes"
            )
        if line.strip():
            requests.append(_parse_line(line, where, units))
    if not requests:
        raise ConfigError(f"{name} holds no requests")
    if len(units) > 1:
        raise ConfigError(
            f"{name} says arrival_s in some lines and arrival_step in others: choose one"
        )
    return RequestTrace(tuple(sorted(requests, key=lambda request: request.arrival)), *units)


def _parse_line(line: bytes, where: str, units: set[ArrivalUnit]) -> TracedRequest:
    try:
        fields = json.loads(line)
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ConfigError(f"{where} isn't JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ConfigError(f"{where} isn't a JSON object")
    unknown = sorted(set(fields) - set(_FIELDS))
    if unknown:
        raise ConfigError(f"{where}: unknown field {unknown[0]!r}; there are {', '.join(_FIELDS)}")
    num_prompt_tokens = _tokens(fields, "num_prompt_tokens", 1, where)
    num_output_tokens = _tokens(fields, "num_output_tokens", 1, where)
    max_tokens = num_output_tokens
    if "max_tokens" in fields:
        max_tokens = _tokens(fields, "max_tokens", num_output_tokens, where)
    return TracedRequest(
        num_prompt_tokens, num_output_tokens, max_tokens, _arrival(fields, where, units)
    )


def _tokens(fields: dict[str, object], name: str, low: int, where: str) -> int:
    value = fields.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= MAX_TOKENS:
        raise ConfigError(
            f"{where}: {name}={value!r} is not a whole number from {low} to {MAX_TOKENS}"
        )
    return value


def _arrival(fields: dict[str, object], where: str, units: set[ArrivalUnit]) -> float:
    arrival = 0.0
    for name, unit in (("arrival_s", "s"), ("arrival_step", "step")):
        if name not in fields:
            continue
        value = fields[name]
        if (
            isinstance(value, bool)
            or not isinstance(value, (int, float))
            or not math.isfinite(value)
            or value < 0
        ):
            raise ConfigError(f"{where}: {name}={value!r} is not a number of at least 0")
        units.add("s" if unit == "s" else "step")
        arrival = float(value)
    return arrival
