"""Requests and events at random, for schedulers under a harness."""

from __future__ import annotations

import itertools
from typing import Any, TypeAlias

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from remembering_store import BLOCK_SIZE, Store
from schedule_choices import options
from traffic import SHARED, Harness

from examples import examples
from fastdecode.core.sequence import CacheUse
from fastdecode.schedule.cache.retention import LeastRecent, Policy, Retention
from fastdecode.schedule.modes import make_scheduler
from fastdecode.wire.blocks import Inventory, no_keys

POLICIES: dict[str, Policy] = {"retention": Retention(BLOCK_SIZE), "lru": LeastRecent()}
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


def keeping(
    blocks: tuple[int, ...] = (12, 20),
    mode: str = "greedy",
    lanes: int = 1,
    *,
    policy: str | Policy = "retention",
    keeps_blocks: bool = True,
    slots: int = 0,
    made: dict[str, Any] | None = None,
    **more: object,
) -> Harness:
    """Make a harness that keeps blocks, on a clock that shows how often it was read.

    Args:
        slots: Blocks of each R-worker's disk.
        made: Arguments of ``make_scheduler``.
        more: Options of the schedule.
    """
    ticks = itertools.count()
    scheduler = make_scheduler(
        options(mode, lanes, **more),
        blocks,
        BLOCK_SIZE,
        keeps_blocks=keeps_blocks,
        cache_policy=POLICIES[policy] if isinstance(policy, str) else policy,
        clock=lambda: float(next(ticks)),
        **(made or {}),
    )
    harness = Harness(scheduler, [Store(count) for count in blocks], lanes)
    for holder in range(len(blocks) if slots else 0):
        harness._tell(Inventory(holder, slots, no_keys(), np.zeros(0, np.int32), True))
    return harness


def turn(
    chat: Harness, prompt: tuple[int, ...], length: int = 3, cache: CacheUse = SHARED
) -> tuple[tuple[int, ...], int]:
    """Run a request alone. Return its tokens, and how many of them it was spared."""
    before, name = chat.num_resumed_tokens, chat.num_arrived
    assert chat.arrive(0, (length,), length, prompt=prompt, cache=cache)
    chat.run_out()
    return prompt + tuple(chat.finished[name]), chat.num_resumed_tokens - before


relaxed = settings(
    max_examples=examples(400, share=8), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
