"""Answers written in the order of their lines, and what stops that."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from full_disk import files_of_at_most

from fastdecode.core.errors import FastDecodeError
from fastdecode.jobs.journal import OrderedOutput


def test_answers_wait_for_their_turn(tmp_path: Path) -> None:
    output = OrderedOutput(tmp_path / "out.jsonl", max_bytes_in_memory=1)
    output.begin()
    for place in (2, 1, 4, 0):
        output.append(place, None, {"id": place})
    output.close()
    lines = (tmp_path / "out.jsonl").read_text().splitlines()
    assert [json.loads(line)["id"] for line in lines] == [0, 1, 2, 4]


def test_an_answer_that_can_t_be_kept_beside_has_a_type_of_ours(tmp_path: Path) -> None:
    output = OrderedOutput(tmp_path / "out.jsonl", max_bytes_in_memory=1)
    output.begin()
    with files_of_at_most(100):
        with pytest.raises(FastDecodeError, match=r"out\.jsonl: File too large") as caught:
            output.append(1, None, {"text": "x" * 1000})
        output.close()
    assert caught.value.code == "output_failed"
    assert (tmp_path / "out.jsonl").read_text() == ""
