"""The layout of a step's rows: every worker gets slices, and every row is
attended by whom the table says."""

from __future__ import annotations

from collections import Counter

import hypothesis.strategies as st
from hypothesis import given

from fastdecode.core.holders import Holder, HolderKind, Part, Residence
from fastdecode.core.sequence import Request, SamplingParams, Sequence
from fastdecode.engine.step.layout import StepBatch
from fastdecode.schedule.plan import Chunk

ON_S = (Holder(HolderKind.R_WORKER, False, False, 1),) * 4
ON_R = (Holder(HolderKind.R_WORKER, True, False, 1),) * 4
STRIDE = 100  # between the part ids of two sequences


def chunk_of(sequence_id: int, worker: int, num_cached: int, num_new: int) -> Chunk:
    tokens = tuple(1000 * sequence_id + i for i in range(num_cached + num_new))
    request = Request(str(sequence_id), tokens, SamplingParams(), max_tokens=1, seed=0)
    sequence = Sequence.of(sequence_id, request, 0)
    sequence.num_cached = num_cached
    sequence.residence = Residence((Part(STRIDE * sequence_id, worker, 0, num_cached + num_new),))
    return Chunk(sequence, num_new)


PART = 8
SPLIT = st.tuples(
    st.lists(st.integers(0, 3), min_size=1, max_size=5), st.integers(0, 39), st.integers(1, PART)
)


def split_chunk(sequence_id: int, workers: list[int], num_cached: int, num_new: int) -> Chunk:
    """Cut down to what a part holds."""
    num_cached %= PART * len(workers)
    chunk = chunk_of(sequence_id, workers[0], num_cached, min(num_new, PART - num_cached % PART))
    if len(workers) > 1:
        places = enumerate(workers)
        chunk.sequence.residence = Residence(
            tuple(Part(STRIDE * sequence_id + i, worker, PART * i, PART) for i, worker in places)
        )
    return chunk


@given(st.lists(SPLIT, min_size=1, max_size=8), st.booleans(), st.none() | st.integers(1, 3 * PART))
def test_every_key_is_attended_once(
    members: list[tuple[list[int], int, int]], prompts_on_r: bool, window: int | None
) -> None:
    """By the R-worker that has it or by the S-worker, from the place where the
    query stands, whatever is split; of keys outside the window, only those
    whose part is seen."""
    chunks = [split_chunk(i, *member) for i, member in enumerate(members)]
    batch = StepBatch.build(chunks, ON_R if prompts_on_r else ON_S, step=0, window=window)
    attended: dict[int, Counter[int]] = {row: Counter() for row in range(len(batch.token_ids))}
    for span in batch.spans:
        begin = span.begin
        assert len(set(begin.sequence_ids.tolist())) == len(begin.sequence_ids)
        rows = [*range(span.query_rows.start, span.query_rows.stop)]
        for closed in span.closed:
            assert len(set(closed.rows.tolist())) == len(closed.rows)
            rows += closed.rows.tolist()
        assert len(rows) == begin.num_queries.sum() and begin.want_lse >= bool(span.closed)
        assert span.rows.stop - span.rows.start == begin.num_new.sum()
        assert (begin.num_beyond is not None) == bool(span.closed)
        beyond = [0] * len(begin.num_new) if begin.num_beyond is None else begin.num_beyond.tolist()
        columns = (
            begin.sequence_ids,
            begin.num_past,
            begin.num_new,
            begin.num_queries,
            begin.num_visible,
        )
        for held, past, new, queries, visible, further in zip(
            *(x.tolist() for x in columns), beyond, strict=True
        ):
            sequence_id, part = divmod(held, STRIDE)
            sequence = chunks[sequence_id].sequence
            assert sequence.residence.parts[part].holder == span.holder
            if further and window is not None:
                first = sequence.num_cached
                assert first - window < (part + 1) * PART - 1, (
                    "nobody is asked for a part that isn't seen"
                )
            for i in range(queries):
                row, position = rows.pop(0), past + new + further - queries + i
                assert batch.positions[row] == part * PART + position
                assert batch.token_ids[row] == 1000 * sequence_id + part * PART + position
                attended[row].update(part * PART + key for key in range(min(visible, position + 1)))
        assert not rows
    for local in batch.local:
        for first, last in zip(local.starts, local.starts[1:], strict=False):
            for row in range(local.rows.start + first, local.rows.start + last):
                start = batch.positions[local.rows.start + first]
                attended[row].update(range(start, batch.positions[row] + 1))
    for row, keys in attended.items():
        position = int(batch.positions[row])
        assert keys <= Counter(range(position + 1))
        assert keys >= Counter(
            range(0 if window is None else max(0, position + 1 - window), position + 1)
        )


def test_a_step_of_whole_sequences_has_no_rows_of_closed_parts() -> None:
    batch = StepBatch.build([chunk_of(0, 1, 9, 1), split_chunk(1, [1, 0, 2], 5, 1)], ON_S, step=0)
    assert all(span.closed == () and span.begin.num_beyond is None for span in batch.spans)
    assert len(batch.spans) == 1, "parts that nothing is in yet attend nothing"
