"""Sentences that users meet are plain, and no file gets more faults of style than it had."""

from __future__ import annotations

from pathlib import Path

import pytest
from language import ROOT, Said, counted, debt, faults_of_style, said_in_code, said_in_docs


def test_help_errors_and_warnings_are_plain() -> None:
    said = list(said_in_code())
    assert len(said) > 1000
    assert [fault for each in said for fault in each.faults()] == []


def test_docs_are_plain() -> None:
    said = list(said_in_docs())
    assert len({each.place for each in said}) > 20
    assert [fault for each in said for fault in each.faults()] == []


@pytest.mark.parametrize(
    "text",
    [
        "Whoever reads this is told what becomes of it",
        "prefill_instances=1 isn't there with kv_placement='gpu' yet",
        " ".join(["word"] * 31),
    ],
)
def test_a_fault_is_found(text: str) -> None:
    assert list(Said("x.py:1", text).faults())


def test_no_file_has_more_faults_of_style_than_its_debt() -> None:
    allowed = debt()
    grown = [path for path, number in counted().items() if number > allowed[path]]
    assert not grown, [fault for path in grown for fault in faults_of_style(ROOT / path)]


def test_debt_names_only_files_that_exist() -> None:
    assert not [path for path in debt() if not (ROOT / path).exists()]


@pytest.mark.parametrize(
    "source",
    [
        '"""Of all links."""\n',
        'def lose():\n    """A holder is lost."""\n',
        'def wait():\n    """Wait.\n\n    Raises:\n        ConfigError: it has none.\n    """\n',
        "x = 1  # nobody waits for this\n",
        '"""See ``other``."""\n',
    ],
)
def test_fault_of_style_is_found(source: str, tmp_path: Path) -> None:
    path = tmp_path / "x.py"
    path.write_text(source)
    assert len(list(faults_of_style(path))) == 1
