"""Sentences that users meet are plain: no private dialect, none above 30 words."""

from __future__ import annotations

import pytest
from language import Said, said_in_code, said_in_docs


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


def test_a_plain_sentence_has_no_fault() -> None:
    assert not list(Said("x.py:1", "The R-worker is lost. Start another one.").faults())
