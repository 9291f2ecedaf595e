"""Sentences that users meet, found in the product's source and in its docs."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("fastdecode", "rworker", "sworker", "cpu_kernels", "cost_model")
MOST_WORDS = 30
DIALECT = re.compile(
    r"\b(who(m)?ever|what becomes of|whose place|in (its|their) place|(is|are) to be had"
    r"|those that|those who|(is|are|was|were) told|comes? in the place|as it is"
    r"|(is|are|was|were)n't there|leave one of the two|beside (it|them)|by hand of|so long as?"
    r"|said so)\b",
    re.IGNORECASE,
)
"""Words of a private dialect, which a reader elsewhere stumbles over."""
SPEAKERS = re.compile(
    r"(Error|Refused|Refusal|Warning)$|^(refuse|warn|warning|error|info|tell|Finding)$"
)
"""Functions and classes whose texts a user reads."""


@dataclass(frozen=True)
class Said:
    """A sentence, or a piece of one, and where it stands."""

    place: str
    text: str

    def faults(self) -> Iterator[str]:
        """What a reader would stumble over."""
        for found in DIALECT.finditer(self.text):
            yield f"{self.place}: {found[0]!r} in {self.text!r}"
        for sentence in re.split(r"(?<=[.;:!?])\s+|\n\n+", self.text):
            if len(sentence.split()) > MOST_WORDS:
                yield f"{self.place}: {len(sentence.split())} words: {sentence!r}"


def said_in_code() -> Iterator[Said]:
    """Help texts, errors, warnings and lines of progress."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            tree = ast.parse(path.read_text("utf-8"))
            place = path.relative_to(ROOT).as_posix()
            for node in ast.walk(tree):
                if isinstance(node, ast.Call):
                    for text in _texts(node):
                        yield Said(f"{place}:{node.lineno}", text)


def _texts(call: ast.Call) -> Iterator[str]:
    name = _name(call.func)
    if name == "option":
        yield from map(_text, call.args[1:2])
    elif SPEAKERS.search(name):
        yield " ".join(_text(argument) for argument in call.args).strip()
    for keyword in call.keywords:
        if keyword.arg in ("help", "description", "epilog"):
            yield _text(keyword.value)


def _name(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _text(node: ast.expr) -> str:
    """The literal text of an expression; values that are put in are a word each."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return "X"
    if isinstance(node, ast.BinOp):
        return _text(node.left) + _text(node.right)
    if isinstance(node, ast.Call) and _name(node.func) == "Given":
        return "X"
    return ""


def said_in_docs() -> Iterator[Said]:
    """Paragraphs, list items and table rows; no code."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    for path in pages:
        text = re.sub(r"^```.*?^```$", "", path.read_text("utf-8"), flags=re.M | re.S)
        text = re.sub(r"<!--.*?-->|`[^`]*`|\]\([^)]*\)", " X ", text, flags=re.S)
        for part in re.split(r"\n\s*\n|\n(?=[*|#-])", text):
            for cell in part.split("|") if part.lstrip().startswith("|") else [part]:
                plain = " ".join(cell.replace("*", " ").split())
                if plain:
                    yield Said(path.relative_to(ROOT).as_posix(), plain)
