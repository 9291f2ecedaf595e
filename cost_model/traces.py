"""Traces of requests: own JSON Lines (``OwnLine``), or lines of ``fastdecode serve --request-log``.

All own lines that say when they arrive have the same of ``arrival_s`` and ``arrival_step``.
Requests of a log without a prompt or without an answer are left out, and counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from fastdecode.core.errors import ConfigError
from fastdecode.schedule.simulation.trace import RequestTrace, TracedRequest

T = TypeVar("T")
Located: TypeAlias = tuple[str, bytes]
"""Where a line is, for errors, and the line."""
Count: TypeAlias = Annotated[int, Meta(ge=1, le=1 << 24)]
Seconds: TypeAlias = Annotated[float, Meta(ge=0, lt=1e15)]

MAX_REQUESTS = 10_000_000
MAX_LINE_BYTES = 1 << 16


class OwnLine(msgspec.Struct, forbid_unknown_fields=True):
    num_prompt_tokens: Count
    num_output_tokens: Count
    max_tokens: Count | None = None
    """All that the scheduler knows of the output's length. None if it knows the length."""
    arrival_s: Seconds | None = None
    """When it arrives, or ``arrival_step``. 0 without both."""
    arrival_step: Seconds | None = None


class LoggedLine(msgspec.Struct):
    """A request of a log. One that failed has no answer."""

    time: Seconds
    prompt_tokens: Annotated[int, Meta(ge=0, le=1 << 24)] | None = None
    output_tokens: Annotated[int, Meta(ge=0, le=1 << 24)] | None = None
    prompts: Count = 1
    n: Count = 1
    """Choices of each prompt."""


def located(path: Path, name: str) -> Iterator[Located]:
    """Yield lines of a file that aren't blank, which errors call ``name``. Raises ConfigError: If
    it can't be read, has too many lines, or one is too long."""
    try:
        with path.open("rb") as lines:
            for place, line in enumerate(lines, 1):
                where = f"{name}, line {place}"
                if len(line) > MAX_LINE_BYTES or place > MAX_REQUESTS:
                    most = f"at most {MAX_REQUESTS} lines of {MAX_LINE_BYTES} bytes"
                    raise ConfigError(f"{where}: a trace has {most}")
                if line.strip():
                    yield where, line
    except OSError as error:
        raise ConfigError(f"{name}: can't read it: {error.strerror}") from None


def decoded(lines: Iterable[Located], kind: type[T]) -> Iterator[T]:
    """Decode JSON lines. Raises ConfigError: If one is not of ``kind``."""
    decoder = msgspec.json.Decoder(kind)
    for where, line in lines:
        try:
            yield decoder.decode(line)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{where}: {error}") from None


def read_trace(path: Path) -> RequestTrace:
    """Read a trace in our format. Raises ConfigError: If it can't be read, or a line is broken."""
    return _own_trace(located(path, str(path)), str(path))


def _own_trace(own: Iterable[Located], name: str) -> RequestTrace:
    lines = list(decoded(own, OwnLine))
    if not lines:
        raise ConfigError(f"{name} holds no requests")
    in_steps = any(line.arrival_step is not None for line in lines)
    if in_steps and any(line.arrival_s is not None for line in lines):
        both = "arrival_s in some lines and arrival_step in others"
        raise ConfigError(f"{name} says {both}: choose one")
    requests = []
    for line in lines:
        most, output = line.max_tokens or line.num_output_tokens, line.num_output_tokens
        if most < output:
            raise ConfigError(f"{name}: max_tokens={most} of a line with {output} output tokens")
        arrival = line.arrival_s or line.arrival_step or 0.0
        requests.append(TracedRequest(line.num_prompt_tokens, output, most, arrival))
    ordered = sorted(requests, key=lambda request: request.arrival)
    return RequestTrace(tuple(ordered), "step" if in_steps else "s")


@dataclass(frozen=True)
class ReadTrace:
    trace: RequestTrace
    """By arrival; the first arrives at 0."""
    form: str
    num_left_out: int


def read_any_trace(path: Path) -> ReadTrace:
    """Read a trace in our format, or a server's log. Raises ConfigError: If the file can't be read,
    is neither, or a line is broken."""
    name = f"--trace {path}"
    lines = located(path, name)
    first = next(lines, None)
    if first is None:
        raise ConfigError(f"{name} holds no requests")
    (names,) = decoded([first], dict[str, Any])
    if "num_prompt_tokens" in names:
        trace = _own_trace(chain([first], lines), name)
        if trace.unit != "s":
            raise ConfigError(f"{name}: arrivals are steps; a plan needs arrival_s")
        return ReadTrace(_from_zero(trace.requests), "own", 0)
    if "time" not in names or not names.keys() & {"status", "prompt_tokens"}:
        raise ConfigError(
            f"{first[0]}: neither a server's log nor a trace, whose lines are like "
            '{"num_prompt_tokens": 512, "num_output_tokens": 128, "arrival_s": 0.5}'
        )
    logged = list(decoded(chain([first], lines), LoggedLine))
    requests = [
        TracedRequest(line.prompt_tokens, line.output_tokens, line.output_tokens, line.time)
        for line in logged
        if line.prompt_tokens and line.output_tokens
    ]
    if not requests:
        raise ConfigError(f"{name} holds no request with a prompt and an answer")
    return ReadTrace(_from_zero(requests), "server", len(logged) - len(requests))


def _from_zero(requests: Iterable[TracedRequest]) -> RequestTrace:
    found = sorted(requests, key=lambda each: each.arrival)
    start = found[0].arrival
    return RequestTrace(tuple(replace(each, arrival=each.arrival - start) for each in found))
