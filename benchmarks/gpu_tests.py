"""The project's own tests of a GPU (tests/gpu) as checks of gpu_first.py --more:
each has a line of its own, and behind one that fails a new process goes on. Those
of test_right.py are the part "right", and not made again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gpu_setup import Check, Found, Setup, UnavailableError

ROOT = Path(__file__).parents[1]
# The project's own options name plugins that may not be there.
_OPTIONS = (
    "-q",
    "-p",
    "no:cacheprovider",
    "-o",
    "addopts=--import-mode=importlib",
    "-o",
    "timeout=",
)


def tests(setup: Setup) -> list[Check]:
    """All of them."""
    return [Check(name, lambda name=name: _run(name)) for name in _names(ROOT / "tests" / "gpu")]


class _Collected:
    """What pytest finds."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.names = [item.nodeid for item in session.items]


class _Outcome:
    """How one test ended."""

    def __init__(self) -> None:
        self.failure = self.skipped = ""

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.failure = self.failure or str(report.longrepr).strip().splitlines()[-1]
        elif report.skipped:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else ""
            self.skipped = str(reason)


def _names(directory: Path) -> list[str]:
    found = _Collected()
    others = ("--ignore", str(directory / "test_right.py"))
    options = [*_OPTIONS, "--collect-only", "-m", "gpu", *others, str(directory)]
    pytest.main(options, plugins=[found])
    return found.names


def _run(name: str) -> Found:
    outcome = _Outcome()
    code = pytest.main([*_OPTIONS, str(ROOT / name)], plugins=[outcome])
    if outcome.failure or code not in (0, 5):
        raise RuntimeError(outcome.failure or f"pytest ended with exit code {code}")
    if outcome.skipped:
        raise UnavailableError(outcome.skipped)
    return Found(0.0, 0.0)
