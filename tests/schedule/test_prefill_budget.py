"""Prefill bookings: chunks are known from the start, and never falter."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from fastdecode.schedule.prefill import PrefillBudget


@settings(max_examples=500, deadline=None)
@given(
    st.integers(1, 40),
    st.integers(1, 30),
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 120)), min_size=1, max_size=15),
)
def test_prompts_keep_to_the_budget_and_get_on_in_every_step(
    max_step_tokens: int, max_chunk: int, prompts: list[tuple[int, int]]
) -> None:
    budget = PrefillBudget(max_step_tokens, max_chunk)
    booked: list[list[int]] = []  # each prompt's chunks that are still to come
    used = 0
    for num_steps, num_tokens in prompts:
        for _ in range(num_steps):
            used = sum(chunks.pop(0) for chunks in booked if chunks)
            assert used <= max_step_tokens
            budget.next_step()
        chunks = budget.chunks(num_tokens)
        now = sum(chunks[0] for chunks in booked if chunks)
        assert (chunks == ()) == (now == max_step_tokens)
        if chunks:
            assert sum(chunks) == num_tokens
            assert all(1 <= chunk <= max_chunk for chunk in chunks)
            # What load control counts on: never more cached than if the prompt
            # had grown by one token a step.
            cached = 0
            for step, chunk in enumerate(chunks):
                cached += chunk
                assert cached <= num_tokens - (len(chunks) - 1 - step)
            budget.book(chunks)
            booked.append(list(chunks))


@given(st.integers(1, 40), st.integers(1, 120), st.integers(0, 60), st.integers(1, 25))
def test_chunks_of_split_sequences_end_where_parts_do(
    chunk: int, num_tokens: int, first: int, part: int
) -> None:
    chunks = PrefillBudget(30, chunk, part_tokens=part).chunks(num_tokens, first, parts=())
    assert sum(chunks) == num_tokens
    for tokens in chunks:
        assert 1 <= tokens <= min(chunk, 30)
        assert first // part == (first + tokens - 1) // part
        first += tokens


@settings(max_examples=300, deadline=None)
@given(
    st.integers(1, 12),
    st.lists(st.tuples(st.integers(1, 120), st.integers(0, 60)), min_size=1, max_size=8),
    st.integers(1, 3),
)
def test_chunks_shrink_as_parts_get_more(
    part: int, prompts: list[tuple[int, int]], num_workers: int
) -> None:
    """In no step do prompts send an R-worker more queries for closed parts than
    there is room for in a message."""
    most_closed = max(num_tokens + first for num_tokens, first in prompts) // part
    most = -(-most_closed // num_workers) + 5
    budget = PrefillBudget(40, 20, most, part)
    parts = [i % num_workers for i in range(most_closed + 1)]
    num_rows: Counter[tuple[int, int]] = Counter()
    for num_tokens, first in prompts:
        chunks = budget.chunks(num_tokens, first, parts=parts)
        assert chunks or num_rows, "whoever is alone gets on"
        budget.book(chunks, first, parts=parts)
        assert sum(chunks) == (num_tokens if chunks else 0)
        for step, chunk in enumerate(chunks):
            for worker in parts[: first // part]:
                num_rows[step, worker] += chunk
            first += chunk
    assert max(num_rows.values(), default=0) <= most


def test_parts_on_several_r_workers_leave_longer_chunks() -> None:
    chunks = [
        PrefillBudget(40, 20, 6, 4).chunks(12, 12, parts=parts)
        for parts in ((0,) * 6, (0, 1, 2) * 2)
    ]
    assert chunks == [(2, 2, 1, 1, 1, 1, 1, 1, 1, 1), (4, 3, 1, 3, 1)]
