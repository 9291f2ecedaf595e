"""Write the reference pages from the declarations in the code.

python docs/reference.py            # write docs/reference/*.md
python docs/reference.py --check    # exit code 1 if one of them is not what it should be
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fastdecode.core.config.engine import GROUPS
from fastdecode.core.config.features import FEATURES, REFUSALS, refused_pairs
from fastdecode.core.config.options import Declared, declared

PAGES = Path(__file__).resolve().parent / "reference"
MADE = "<!-- Made by `python docs/reference.py`. Do not edit. -->"
TITLES = {
    "s_part": "S-part",
    "r_part": "R-part",
    "batching": "Batching",
    "cache": "Prefix cache",
    "cluster": "Cluster",
    "instances": "Instances",
}


def options_page() -> Iterator[str]:
    """Every option of an engine, by group."""
    yield from (
        "# Engine options",
        "",
        MADE,
        "",
        "`generate`, `run-batch`, `serve` and `instance` take these options. In Python they are",
        "keyword arguments of `LLM(model, ...)` with the names in the second column.",
    )
    for name, group in GROUPS.items():
        yield from ("", f"## {TITLES[name]}", "")
        yield from ("| option | in Python | default | |", "|---|---|---|---|")
        for each in declared(group):
            cells = f"`{each.flag}`", f"`{each.name}`", _default(each), _cell(each.option.help)
            yield f"| {' | '.join(cells)} |"


def _default(each: Declared) -> str:
    if each.default is None or each.default == ():
        return "–"
    return f"`{str(each.default).lower() if isinstance(each.default, bool) else each.default}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def features_page() -> Iterator[str]:
    """The matrix of features, and a reason for each refused pair."""
    built = [found for found in REFUSALS.values() if not found.is_contradiction]
    num_pairs = len(FEATURES) * (len(FEATURES) - 1) // 2
    yield from (
        "# Which features work together",
        "",
        MADE,
        "",
        f"{len(FEATURES)} features make {num_pairs} pairs:",
        f"{num_pairs - len(REFUSALS)} are accepted, {len(built)} are not built yet, and",
        f"{len(REFUSALS) - len(built)} contradict each other.",
        "`fastdecode doctor --features` prints the same. An engine refuses a pair at its start,",
        "before anything is loaded.",
        "",
        "✓ accepted · – not built yet · ✗ contradiction; columns have the rows' numbers",
        "",
    )
    numbers = [str(number + 1) for number in range(len(FEATURES))]
    yield f"| | | {' | '.join(numbers)} |"
    yield f"|---|---|{'---|' * len(FEATURES)}"
    for number, one in zip(numbers, FEATURES, strict=True):
        cells = ("" if one == other else _mark(one, other) for other in FEATURES)
        yield f"| {number} | {one} | {' | '.join(cells)} |"
    for title, is_contradiction in (("Not built yet", False), ("Contradictions", True)):
        yield from ("", f"## {title}", "", "| features | why |", "|---|---|")
        for one, other, reason in refused_pairs(is_contradiction=is_contradiction):
            yield f"| {one}, {other} | {reason} |"


def _mark(one: str, other: str) -> str:
    found = REFUSALS.get(frozenset((one, other)))
    return "✓" if found is None else "✗" if found.is_contradiction else "–"


PAGES_BY_NAME = {"options.md": options_page, "features.md": features_page}


def pages() -> dict[Path, str]:
    """What every page should be, by its path."""
    return {PAGES / name: "\n".join(make()) + "\n" for name, make in PAGES_BY_NAME.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="write nothing")
    is_check = parser.parse_args().check
    stale = [path for path, text in pages().items() if not _is(path, text)]
    for path in stale:
        print(f"{'stale' if is_check else 'written'}: {path.relative_to(PAGES.parents[1])}")
        if not is_check:
            path.parent.mkdir(exist_ok=True)
            path.write_text(pages()[path], "utf-8")
    return 1 if is_check and stale else 0


def _is(path: Path, text: str) -> bool:
    return path.is_file() and path.read_text("utf-8") == text


if __name__ == "__main__":
    sys.exit(main())
