"""``docs/claims.md``: what it names exists, it names every test file, and no campaign that
is on record changed a token."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
TESTS, RESULTS = ROOT / "tests", ROOT / "benchmarks" / "results"
CLAIMS = (ROOT / "docs" / "claims.md").read_text("utf-8")
ROWS = re.findall(r"^\| (?!claim |---)(.+?) \| (.+?) \|$", CLAIMS, re.M)
NAMED = [name for _, proofs in ROWS for name in re.findall(r"`([^`]+)`", proofs)]
NOTHING_CHANGED = {"right", "too late", "hung", "ended by MPI", "other exit code"}
"""Verdicts on a job. Not every job came to its end; each answer that came was right."""
CAMPAIGNS = sorted(RESULTS.glob("campaign*.json"))
KEPT = CLAIMS.split("## Kept at any price")[1].split("\n## ")[0]


def _functions(path: Path) -> set[str]:
    tree = ast.parse(path.read_text("utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def _found(value: Any) -> Iterator[int | str]:
    """Every count of changed answers and every verdict in a result, however deep."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if name in ("num_changed", "changed", "verdict"):
                yield inner
            yield from _found(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _found(inner)


def test_each_claim_has_a_proof() -> None:
    assert len(ROWS) == CLAIMS.count("\n| ") - CLAIMS.count("\n| claim |")
    assert not [claim for claim, proofs in ROWS if not re.search(r"`[^`]+`", proofs)]
    claims = [claim for claim, _ in ROWS]
    assert len(set(claims)) == len(claims)


def test_what_is_named_exists() -> None:
    for name in NAMED:
        path, _, function = name.partition("::")
        if path.startswith("results/"):
            assert (RESULTS / path.removeprefix("results/")).exists(), name
            continue
        assert (TESTS / path).exists(), f"{name}: move its claim, or bring the test back"
        assert not function or function in _functions(TESTS / path), name


def test_every_test_file_proves_a_claim() -> None:
    named = {name.partition("::")[0] for name in NAMED}
    files = {path.relative_to(TESTS).as_posix() for path in TESTS.rglob("test_*.py")}
    missing = sorted(files - named)
    assert not missing, f"say in docs/claims.md what these prove: {missing}"


def test_every_campaign_is_kept() -> None:
    assert {f"results/{path.name}" for path in CAMPAIGNS} <= set(re.findall(r"`([^`]+)`", KEPT))


@pytest.mark.parametrize("path", CAMPAIGNS, ids=lambda path: path.stem)
def test_no_campaign_changed_a_token(path: Path) -> None:
    found = set(_found(json.loads(path.read_text("utf-8"))))
    assert found and found <= {0, *NOTHING_CHANGED}
