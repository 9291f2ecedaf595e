"""A share of what the campaign does to links."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("zmq")

from damaged_links import to_links


def test_damage_on_a_link_costs_the_replica_and_nothing_else() -> None:
    counts = to_links(120, random.Random(5))
    assert counts["links given up"] > 60
    assert not counts["changed"]
