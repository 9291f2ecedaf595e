"""The words of the project: sentences that users meet, and rules for docstrings, comments and
pages.

``python tests/language.py`` prints each fault with its place. ``--write`` lowers the numbers in
``data/style_debt.txt``, the faults that each file may still have."""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
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


TREES = (*PACKAGES, "tests", "benchmarks", "examples", "docs")
DEBT = ROOT / "tests" / "data" / "style_debt.txt"
"""``count path`` per line: most faults by ``RULES`` in a file. A file without a line has none."""
EXEMPT = "# style: ok"
"""Marks a line that may break a rule; the reason follows it."""
_OPENS = r'^\s*r?"""'
_UNIT = "layer|token|sequence|request|lane|step|row|prompt|line|stage|process|holder|worker|block"
RULES = {
    "fragment": _OPENS
    + r"(Of (?!course)|That (?!is |\w+ is )|Those |Whose |Likewise|None: |By (its|their|the) "
    r"|One an? |To which|In which)",
    "bare See": _OPENS + r'See ``[^`]+``\.?"""$',
    "shorthand": r"[;.] (None|0|-1|empty|infinite|infinity|inf): ",
    "person": r"\b([Nn]obody|[Ss]omebody|[Aa]nybody|[Ww]hoever|[Ww]homever)\b",
    "so many": r"\b[Ss]o (many|few|long|much|often)\b(?! (as|that)\b)(?!\.$)",
    "go on": r"\b([Gg]o|[Gg]oes|[Ww]ent|[Gg]one) on\b",
    "told": r"\b(is|are|was|were|be|been|has|have) (told|said|heard)\b",
    "is there": r"\b(is|are|was|were|isn't|aren't|wasn't|weren't) there"
    r"(?=[.,;:)]| (still|already|yet|now|again)\b)",
    "from now on": r"\b[Ff]rom (now|then) on\b",
    "is no": r"(?<![Tt]here )\b(is|are) (no|none)\b(?! (longer|more|less|other|need|such))",
    "one a": rf"\b([Oo]ne|two) an? ({_UNIT})\b",
    "archaism": r"\b(anew|mend|mends|to be had|can be had|of ours|of late|for want of"
    r"|hasn't got|comes to nothing)\b",
    "place": r"\bin (whose|a lost one's|the lost one's) places?\b",
    "have do": _OPENS + r"Have (?!been)",
    "Whether": r"(?<=[.;] )Whether\b",
}
"""Name -> regular expression, for each line of a docstring, comment or page."""
_RULES = {name: re.compile(rule) for name, rule in RULES.items()}
_EVENT = re.compile(
    _OPENS + r"(An?|Another|It|Its|Some|One|Nobody|Somebody|Nothing)\b"
    r"((?!\b(that|which|who|whose|where|as|if)\b)[^.:;,()\"]){0,45}?"
    r" (is|are|has|have|was|goes|comes|waits|begins|joins|leaves|says) "
)
"""A function's docstring that tells an event in place of what the call does."""
_RAISES = re.compile(
    r"^\s+([A-Z]\w*(Error|Refused|QueueFull|Disconnected)(, [A-Z]\w*)*): "
    r"(?!If |if |when |\(code ``\w+``\) (if|when) )[a-z]"
)
_STRING = re.compile(r'^\s*r?""".*?"""', re.MULTILINE | re.DOTALL)
_COMMENT = re.compile(r"(?:^|\s)(# .*)$")


def faults_of_style(path: Path) -> Iterator[str]:
    """Yield ``line: rule: text`` for every fault of a Python file or a page."""
    text = path.read_text("utf-8")
    lines = _prose(text) if path.suffix == ".py" else enumerate(_without_code(text), 1)
    shown = text.splitlines()
    for number, line in lines:
        if EXEMPT in shown[number - 1]:
            continue
        is_of_function = (
            number > 1
            and shown[number - 2].rstrip().endswith(":")
            and (_is_signature(shown, number - 2))
        )
        for name, rule in _RULES.items():
            if rule.search(line):
                yield f"{number}: {name}: {line.strip()}"
        if is_of_function and _EVENT.search(line):
            yield f"{number}: event: {line.strip()}"
        if _RAISES.search(line):
            yield f"{number}: Raises: {line.strip()}"


def _prose(text: str) -> Iterator[tuple[int, str]]:
    """Lines of docstrings and comments, with their numbers."""
    inside: set[int] = set()
    for found in _STRING.finditer(text):
        first = text.count("\n", 0, found.start()) + 1
        inside.update(range(first, first + found[0].count("\n") + 1))
    for number, line in enumerate(text.splitlines(), 1):
        comment = _COMMENT.search(line)
        if number in inside:
            yield number, line
        elif comment:
            yield number, comment[1]


def _is_signature(lines: list[str], index: int) -> bool:
    """True if the statement that ends at ``lines[index]`` is a function's signature."""
    for line in reversed(lines[max(index - 12, 0) : index + 1]):
        if re.match(r"\s*(async )?def ", line):
            return True
        if re.match(r"\s*class ", line):
            return False
    return False


def _without_code(text: str) -> Iterator[str]:
    is_code = False
    for line in text.splitlines():
        if line.startswith("```"):
            is_code = not is_code
        yield "" if is_code else re.sub(r"`[^`]*`", "X", line)


def files_of_style() -> Iterator[Path]:
    for tree in TREES:
        for suffix in ("*.py", "*.md"):
            yield from sorted((ROOT / tree).rglob(suffix))
    yield from sorted(ROOT.glob("*.md"))


def debt() -> Counter[str]:
    lines = DEBT.read_text("utf-8").splitlines()
    return Counter({path: int(count) for count, path in (line.split() for line in lines)})


def counted() -> Counter[str]:
    """Return the number of faults of each file that has some, by its path."""
    counts: Counter[str] = Counter()
    for path in files_of_style():
        number = sum(1 for _ in faults_of_style(path))
        if number and path.name != "CHANGELOG.md" and path.name != Path(__file__).name:
            counts[path.relative_to(ROOT).as_posix()] = number
    return counts


def main() -> None:
    if "--write" in sys.argv:
        before = debt() if DEBT.exists() else None
        found = counted()
        kept = found if before is None else {k: min(n, before[k]) for k, n in found.items()}
        DEBT.write_text("".join(f"{n} {k}\n" for k, n in sorted(kept.items()) if n))
        return
    for name in sys.argv[1:] or sorted(counted()):
        for fault in faults_of_style(ROOT / name):
            print(f"{name}:{fault}")


if __name__ == "__main__":
    main()
