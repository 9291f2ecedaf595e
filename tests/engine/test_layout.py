"""The layout of a step's rows: every worker gets slices, and every row is attended by whom the table says."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
from hypothesis import given

from fastdecode.core.sequence import Request, SamplingParams, Sequence
from fastdecode.engine.layout import StepBatch
from fastdecode.schedule.scheduler import Chunk

MEMBER = st.tuples(st.integers(0, 3), st.integers(0, 50), st.integers(1, 20))  # worker, cached, new


def chunk_of(sequence_id: int, worker: int, num_cached: int, num_new: int) -> Chunk:
    tokens = tuple(1000 * sequence_id + i for i in range(num_cached + num_new))
    request = Request(str(sequence_id), tokens, SamplingParams(), max_tokens=1, seed=0)
    sequence = Sequence.of(sequence_id, request, 0)
    sequence.num_cached, sequence.worker = num_cached, worker
    return Chunk(sequence, num_new)


@given(st.lists(MEMBER, min_size=1, max_size=12))
def test_rows_are_slices_and_nothing_is_lost(members: list[tuple[int, int, int]]) -> None:
    chunks = [chunk_of(i, *member) for i, member in enumerate(members)]
    batch = StepBatch.build(chunks, step=5, lane=1)
    rows_of_worker = []
    for span in batch.spans:
        begin, row = span.begin, span.rows.start
        assert (begin.step, begin.lane) == (5, 1)
        seen_store_only = False
        for i, sequence_id in enumerate(begin.sequence_ids.tolist()):
            worker, num_cached, num_new = members[sequence_id]
            assert worker == span.worker
            rows = slice(row, row + num_new)
            expected = [1000 * sequence_id + num_cached + j for j in range(num_new)]
            assert batch.token_ids[rows].tolist() == expected
            assert batch.positions[rows].tolist() == list(range(num_cached, num_cached + num_new))
            assert (begin.num_past[i], begin.num_new[i]) == (num_cached, num_new)
            if num_new == 1:
                due = (1, num_cached + 1)  # queries, visible
            elif num_cached:
                due = (num_new, num_cached)
            else:
                due = (0, 0)
            assert (begin.num_queries[i], begin.num_visible[i]) == due
            seen_store_only |= due[0] == 0
            assert (rows.stop <= span.query_rows.stop) == (not seen_store_only)
            row = rows.stop
        assert row == span.rows.stop
        rows_of_worker.append((span.rows.start, span.rows.stop))
    assert rows_of_worker[0][0] == 0
    assert [a[1] for a in rows_of_worker[:-1]] == [b[0] for b in rows_of_worker[1:]]
    assert rows_of_worker[-1][1] == len(batch.token_ids) == sum(member[2] for member in members)
    assert sorted(c.sequence.sequence_id for c in batch.chunks) == list(range(len(members)))
    for chunk, last in zip(batch.chunks, batch.last_rows, strict=True):
        sequence_id = chunk.sequence.sequence_id
        _, num_cached, num_new = members[sequence_id]
        assert batch.token_ids[last] == 1000 * sequence_id + num_cached + num_new - 1


@given(st.lists(MEMBER, min_size=1, max_size=12))
def test_local_spans_are_the_prompt_chunks(members: list[tuple[int, int, int]]) -> None:
    batch = StepBatch.build([chunk_of(i, *member) for i, member in enumerate(members)], step=0)
    local_rows: list[int] = []
    for local in batch.local:
        local_rows += range(local.rows.start, local.rows.stop)
        assert local.starts[0] == 0
        assert local.starts[-1] == local.rows.stop - local.rows.start
        for first, last in zip(local.starts, local.starts[1:], strict=False):
            positions = batch.positions[local.rows][first:last]
            assert np.array_equal(np.diff(positions), np.ones(len(positions) - 1))
            assert (positions[0] > 0) == local.merge
    assert len(local_rows) == len(set(local_rows)) == sum(new for _, _, new in members if new > 1)


@given(st.lists(MEMBER, min_size=1, max_size=12))
def test_r_workers_attend_everything_where_they_attend_prompts(members: list[tuple[int, int, int]]) -> None:
    batch = StepBatch.build([chunk_of(i, *member) for i, member in enumerate(members)], step=0, prompts_on_r=True)
    assert not batch.local
    for span in batch.spans:
        assert span.query_rows == span.rows
        assert np.array_equal(span.begin.num_queries, span.begin.num_new)
        assert np.array_equal(span.begin.num_visible, span.begin.num_past + span.begin.num_new)
        assert not span.begin.want_lse
