"""Answers that wait for their turn, in memory and beside it."""

from __future__ import annotations

import os
import random
from pathlib import Path

from fastdecode.jobs.spill import Answer, Spill


def test_every_answer_comes_back_however_many_wait(tmp_path: Path) -> None:
    rng = random.Random(0)
    expected: dict[int, Answer] = {}
    with Spill(tmp_path, max_in_memory=5) as spill:
        for place in range(1900):
            answer = (
                None if place % 3 else f"prompt {place}\n\u2028",
                {"id": place, "text": "é\n" * (place % 7)},
            )
            spill.put(place, answer)
            expected[place] = answer
            while rng.random() < (0.2 if place % 500 < 400 else 0.9) and expected:
                taken = rng.choice(list(expected))
                assert taken in spill
                assert spill.pop(taken) == expected.pop(taken)
                assert taken not in spill
        assert len(expected) > 5
        assert spill.places() == sorted(expected)
        assert [spill.pop(place) for place in spill.places()] == [
            expected[p] for p in sorted(expected)
        ]
    assert list(tmp_path.iterdir()) == []


def test_the_file_is_as_large_as_what_waits(tmp_path: Path) -> None:
    with Spill(tmp_path, max_in_memory=0) as spill:
        for round_ in range(50):
            for place in range(4):
                spill.put(place, (None, {"id": round_, "text": "x" * 1000}))
            assert [spill.pop(place)[1]["id"] for place in range(4)] == [round_] * 4
        assert spill._file is not None and os.fstat(spill._file.fileno()).st_size < 8000
