"""The one printer of answers: lines, tables and quantities for people, JSON for machines."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from enum import Enum
from typing import Any

WIDTH = 110  # columns of a terminal that lines are wrapped to


def labelled(rows: Iterable[tuple[str, str]], *, label_width: int = 12) -> list[str]:
    """Return lines of labels and their texts, wrapped and indented. An empty label continues the
    one above."""
    indent = " " * (label_width + 3)
    wrapped = (paragraph(text, f"  {label:<{label_width}} ", indent) for label, text in rows)
    return [line for lines in wrapped for line in lines]


def paragraph(text: str, first: str = "", rest: str | None = None) -> list[str]:
    """Return one paragraph, wrapped, with ``first`` before the first line and ``rest`` before the
    others. None repeats ``first``."""
    rest = first if rest is None else rest
    return textwrap.wrap(
        text, WIDTH, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False
    )


def table(
    header: Sequence[str],
    rows: Iterable[Sequence[str]],
    left: Sequence[int] = (0,),
    indent: int = 2,
) -> list[str]:
    """Return columns as wide as their widest cell. Those of ``left`` start at the left, all others
    end at the right. A short row ends early."""
    every = [list(header), *map(list, rows)]
    every = [[*row, *[""] * (len(header) - len(row))] for row in every]
    widths = [max(map(len, column)) for column in zip(*every, strict=True)]
    lines = []
    for row in every:
        cells = (
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        lines.append((" " * indent + "  ".join(cells)).rstrip())
    return lines


def json_text(answer: Any) -> str:
    return json.dumps(json_tree(answer), indent=2)


def picked(value: Any, names: str) -> dict[str, Any]:
    """Return these fields and properties of ``value``. ``names`` are separated by spaces."""
    return {name: getattr(value, name) for name in names.split()}


def json_tree(value: Any) -> Any:
    """Return dataclasses as objects, enums as values, and infinite or undefined numbers as null."""
    if is_dataclass(value) and not isinstance(value, type):
        return json_tree(asdict(value))
    if isinstance(value, Mapping):
        return {str(key): json_tree(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_tree(each) for each in value]
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def seconds_text(seconds: float) -> str:
    """Return ``1.23 ms`` for 0.00123."""
    return _scaled(seconds, ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns")))


def times_text(times: Sequence[float | None], separator: str = "/") -> str:
    """Return seconds in one unit: ``12/15.3/98 ms``, from 1 s on ``0.8/1.2/3.4 s``. None is
    ``-``."""
    longest = max((each for each in times if each is not None), default=0.0)
    size, unit = (1.0, "s") if longest >= 1.0 else (1e-3, "ms")
    shown = ("-" if each is None else f"{round_to(each / size, 3):g}" for each in times)
    return f"{separator.join(shown)} {unit}"


def bytes_text(num_bytes: float) -> str:
    """Return ``1.2 GB`` for 1.2e9."""
    return _scaled(num_bytes, ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "KB"), (1.0, "B")))


def rate_text(per_s: float) -> str:
    """Return ``8,120`` for 8123.4: three digits are more than any prediction has."""
    return f"{round_to(per_s, 3):,.0f}" if per_s >= 100 else f"{round_to(per_s, 3):g}"


def counted(count: int, noun: str) -> str:
    """Return ``1 socket`` or ``1,200 sockets``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def round_to(value: float, digits: int) -> float:
    if value == 0 or not math.isfinite(value):
        return value
    return round(value, digits - 1 - math.floor(math.log10(abs(value))))


def _scaled(value: float, units: tuple[tuple[float, str], ...]) -> str:
    if not math.isfinite(value):
        return "unlimited"
    size, name = next((unit for unit in units if abs(value) >= unit[0] * 0.9995), units[-1])
    return f"{round_to(value / size, 3):g} {name}"
