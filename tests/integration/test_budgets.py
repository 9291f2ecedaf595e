"""Budgets of lines: a package may shrink and never grow.

A commit that shrinks a package lowers its number to the new size. No commit raises one: a feature
or a fix takes its lines from its own package."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
from reading import entered_by_a_decode_step, entered_by_a_loss

ROOT = Path(__file__).resolve().parents[2]
MODEL = str(ROOT / "examples" / "model" / "checkpoint")
MOST_LINES = {
    "fastdecode/cli": 3794,
    "fastdecode/conversations": 1318,
    "fastdecode/core": 9578,
    "fastdecode/engine": 15779,
    "fastdecode/jobs": 2398,
    "fastdecode/measure": 2315,
    "fastdecode/openai": 1320,
    "fastdecode/schedule": 8710,
    "fastdecode/server": 2930,
    "fastdecode/text": 3540,
    "fastdecode/wire": 4546,
    "rworker": 8113,
    "sworker": 11630,
    "cpu_kernels": 6465,
    "cost_model": 7138,
    "tests": 64266,
    "benchmarks": 4970,
    "examples": 481,
}
"""Lines of ``*.py`` files under each directory."""
MOST_DOCS = 4249  # lines of Markdown under ``docs/``

MOST_IN_A_STEP = (39, 2_149)
MOST_ON_THE_CONTROL_PATH = (28, 1_661)
MOST_IN_A_LOSS = (32, 430)
MOST_IN_A_TAKEOVER = (44, 1_050)
"""Files and function lines of a plain decode step, of its part that controls, of the loss of an
R-worker, and of one with a replica that takes over. A loss's moment decides about a few: 381 and
948 lines were measured."""
NO_CONTROL = re.compile("cpu_kernels/|sworker/(kernels|model|sampling)/|fastdecode/text/detok")
"""Kernels, math of layers and samples, and the detokenizer."""


def _num_lines(directory: str, pattern: str) -> int:
    return sum(_lines_of(path) for path in (ROOT / directory).rglob(pattern))


def _lines_of(path: Path) -> int:
    return path.read_bytes().count(b"\n")


@pytest.mark.parametrize("directory", MOST_LINES)
def test_package_is_within_its_budget(directory: str) -> None:
    num_lines = _num_lines(directory, "*.py")
    assert 0 < num_lines <= MOST_LINES[directory], f"shrink {directory}: {num_lines} lines"


def test_every_package_has_a_budget() -> None:
    packages = {path.parent for path in ROOT.glob("fastdecode/*/__init__.py")}
    packages |= {path.parent for path in ROOT.glob("*/__init__.py")} - {ROOT / "fastdecode"}
    assert {path.relative_to(ROOT).as_posix() for path in packages} <= MOST_LINES.keys()


def test_docs_are_within_their_budget() -> None:
    assert 0 < _num_lines("docs", "*.md") <= MOST_DOCS


needs_names = pytest.mark.skipif(
    sys.version_info < (3, 11), reason="qualified names of code objects are new in Python 3.11"
)


@needs_names
def test_decode_step_enters_no_more_code(monkeypatch: pytest.MonkeyPatch) -> None:
    # In float32 every CPU takes the same way.
    options = {"r_workers": 2, "prefix_cache": "off", "dtype": "float32"}
    entered = entered_by_a_decode_step(MODEL, monkeypatch, **options)
    _check(entered.functions, MOST_IN_A_STEP)
    control = {x: n for x, n in entered.functions.items() if not NO_CONTROL.match(x[0])}
    _check(control, MOST_ON_THE_CONTROL_PATH)


@needs_names
@pytest.mark.parametrize(("replicas", "most"), [(0, MOST_IN_A_LOSS), (1, MOST_IN_A_TAKEOVER)])
def test_loss_of_an_r_worker_enters_no_more_code(
    replicas: int, most: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"r_workers": 3, "prefix_cache": "off", "replicas": replicas}
    plain, loss = (_entered(monkeypatch, is_lost, options) for is_lost in (False, True))
    _check({name: loss[name] for name in loss.keys() - plain.keys()}, most)


def _entered(
    monkeypatch: pytest.MonkeyPatch, is_lost: bool, options: dict[str, Any]
) -> dict[tuple[str, str], int]:
    with monkeypatch.context() as patch:
        return entered_by_a_loss(MODEL, patch, is_lost=is_lost, **options).functions


def _check(functions: dict[tuple[str, str], int], most: tuple[int, int]) -> None:
    files = sorted({file for file, _ in functions})
    assert 0 < len(files) <= most[0], files
    assert sum(functions.values()) <= most[1]
