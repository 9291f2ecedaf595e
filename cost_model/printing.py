"""The one printer of answers: labelled lines and tables for people, JSON for machines.

Every plan, simulation and comparison prints with these, so that all of them look alike.
"""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from enum import Enum
from typing import Any

WIDTH = 110
"""Columns of a terminal that lines are wrapped to."""


def labelled(rows: Iterable[tuple[str, str]], *, label_width: int = 12) -> list[str]:
    """``  Verdict      offload: ...``: a label, then its text, wrapped and indented under it.

    Args:
        rows: label and text; an empty label continues the one above.
    """
    indent = " " * (label_width + 3)
    lines: list[str] = []
    for label, text in rows:
        first = f"  {label:<{label_width}} "
        lines += _wrapped(text, first, indent)
    return lines


def paragraph(text: str, *, indent: int = 0, bullet: str = "") -> list[str]:
    """One paragraph, wrapped; ``bullet`` stands before its first line."""
    rest = " " * (indent + len(bullet))
    first = " " * indent + bullet
    return _wrapped(text, first, rest)


def _wrapped(text: str, first: str, rest: str) -> list[str]:
    return textwrap.wrap(
        text, WIDTH, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False
    )


def table(
    header: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    left: Sequence[int] = (0,),
    indent: int = 2,
) -> list[str]:
    """Columns as wide as their widest cell. A short row ends early.

    Args:
        left: columns that start at the left; all others end at the right.
    """
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
    """These fields and properties of ``value``; ``names`` are separated by spaces."""
    return {name: getattr(value, name) for name in names.split()}


def json_tree(value: Any) -> Any:
    """Dataclasses as objects, enums as their values; an infinite or
    undefined number is null, which JSON has no word for."""
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
