"""Facts of a GPU and its host (benchmarks/gpu_facts.py), from an nvidia-smi that is
made up."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SMI = """#!/bin/bash
if [[ $1 == conf-compute ]]; then echo "CC status: {confidential}"; exit; fi
IFS=, read -ra fields <<< "${{1#--query-gpu=}}"
for field in "${{fields[@]}}"; do
    case $field in
        mig.mode.current) exit 2;;
        compute_mode) said+=({mode});;
        *) said+=("<$field>");;
    esac
done
IFS=,; echo "${{said[*]}}"
"""


@pytest.fixture
def facts(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import gpu_facts

    return gpu_facts


def found(facts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **said: str) -> Any:
    script = tmp_path / "nvidia-smi"
    script.write_text(SMI.format(**said))
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return {row["fact"]: row for row in facts.facts(True)}


def test_a_field_that_the_driver_does_not_know_costs_no_other(
    facts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = found(facts, tmp_path, monkeypatch, confidential="OFF", mode="Default")
    values = rows["GPU"]["value"]
    assert values["name"] == "<name>" and "mig.mode.current" not in values
    assert "note" not in rows["GPU"] and "note" not in rows["confidential computing"]


def test_what_explains_a_bad_figure_is_noted(
    facts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "1")
    rows = found(facts, tmp_path, monkeypatch, confidential="ON", mode="Exclusive_Process")
    assert "only one process" in rows["GPU"]["note"]
    assert "encrypted" in rows["confidential computing"]["note"]
    assert rows["environment"]["note"].startswith("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE")


def test_without_a_driver_the_other_facts_are_there(
    facts: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    rows = {row["fact"]: row for row in facts.facts(True)}
    assert rows["GPU"]["value"] is None and "nvidia-smi" in rows["GPU"]["why"]
    assert rows["host"]["value"] and rows["packages"]["value"]["torch"]
