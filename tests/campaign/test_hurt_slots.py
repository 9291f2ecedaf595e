"""A share of what the campaign does to kept blocks on disk."""

from __future__ import annotations

import random

from hurt_slots import flips, kills


def test_what_a_killed_r_worker_leaves_is_right_or_not_there() -> None:
    counts = kills(3, random.Random(7))
    assert counts["kills"] == 3 and counts["right"] > 0
    assert not counts["changed"] and not counts["failed"]


def test_flipped_bytes_are_misses_and_never_wrong_blocks() -> None:
    counts = flips(60, random.Random(3))
    assert counts["right"] > 60 and counts["missed"] > 0
    assert not counts["changed"]
