"""Requests and events at random, for schedulers under a harness."""

from __future__ import annotations

import itertools
from typing import TypeAlias

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from traffic import Harness

from examples import examples

Requests: TypeAlias = "list[tuple[int, tuple[int, ...], int]]"
"""Prompt tokens, generated tokens of each sequence, max_tokens."""


@st.composite
def traffic(draw: st.DrawFn, *, forks: bool) -> Requests:
    requests = []
    for _ in range(draw(st.integers(1, 12))):
        max_tokens = draw(st.integers(1, 24))
        n = draw(st.sampled_from((1, 1, 2, 3))) if forks else 1
        lengths = tuple(draw(st.integers(1, max_tokens)) for _ in range(n))
        requests.append((draw(st.integers(1, 24)), lengths, max_tokens))
    return requests


def play(data: st.DataObject, harness: Harness, requests: Requests, *, lose: bool) -> None:
    """Requests come in between turns of random lanes; sequences are cancelled
    and R-workers lost at random."""
    ahead = itertools.cycle(data.draw(st.sampled_from([(False,), (True,), (True, False, True)])))
    harness.goes_ahead = lambda: next(ahead)
    expected: dict[int, int] = {}
    cancelled: set[int] = set()
    for prompt, lengths, max_tokens in requests:
        first = harness.num_arrived
        if harness.arrive(prompt, lengths, max_tokens):
            expected.update(enumerate(lengths, first))
        for lane in data.draw(st.lists(st.integers(0, harness.num_lanes - 1), max_size=12)):
            harness.turn(lane)
        if harness.live and data.draw(st.integers(0, 7)) == 0:
            victim = data.draw(st.sampled_from(list(harness.live.values())))
            cancelled |= harness.cancel(victim)
        if lose and not harness.lost and data.draw(st.integers(0, 7)) == 0:
            harness.lose(0)
    harness.run_out()
    assert harness.scheduler.num_running == len(harness.scheduler.waiting) == 0
    for sequence_id, length in expected.items():
        if sequence_id in harness.finished:
            assert harness.finished[sequence_id] == [1000 * sequence_id + i for i in range(length)]
        else:
            assert sequence_id in cancelled or harness.lost


relaxed = settings(
    max_examples=examples(400, share=8), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
