"""What must hold of a step, whoever scheduled it."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq

from remembering_store import Store
from schedule_choices import MAX_SEQUENCES, MAX_STEP_TOKENS, PREFILL_CHUNK

from fastdecode.core.holders import Part
from fastdecode.core.sequence import Sequence
from fastdecode.core.spec import first_seen
from fastdecode.schedule.life.events import Run
from fastdecode.schedule.plan import Chunk


def contexts_of(sequence: Sequence) -> list[int]:
    """Of each of a sequence's tokens, what tells its salt and all tokens up to it."""
    context = hash(sequence.request.cache.salt)
    contexts = []
    for token in sequence.token_ids:
        context = hash((context, token))
        contexts.append(context)
    return contexts


def last_part(sequence: Sequence) -> Part:
    """The one that grows."""
    assert sequence.residence is not None
    return sequence.residence.parts[sequence.residence.index_of(sequence.num_cached)]


def check_memory(
    chunk: Chunk, contexts: Seq[int], stores: Mapping[int, Store], window: int | None
) -> None:
    """Whatever it attends to is there and was written for it, and nothing was
    that is said to be missing.

    Args:
        contexts: of its sequence's tokens.
        stores: of the R-workers that aren't lost.
    """
    sequence, last = chunk.sequence, chunk.first + chunk.num_tokens
    assert sequence.residence is not None
    assert sequence.residence.parts[0].first_token <= first_seen(chunk.first, window)
    for part in sequence.residence.parts:
        if part.holder in stores:
            there = stores[part.holder].contexts(part.part_id)
            assert None not in there[: max(0, last - part.first_token)]
            assert all(
                context in (None, expected)
                for context, expected in zip(there, contexts[part.first_token :], strict=False)
            )


def check_sizes(run: Run) -> None:
    """Of a step, and of each sequence's share in it."""
    assert sum(chunk.num_tokens for chunk in run.chunks) <= MAX_STEP_TOKENS
    sequences = {chunk.sequence.sequence_id: chunk.sequence for chunk in run.chunks}
    assert len(sequences) <= MAX_SEQUENCES
    for sequence in sequences.values():
        count = sum(chunk.num_tokens for chunk in run.chunks if chunk.sequence is sequence)
        assert 1 <= count <= max(1, min(PREFILL_CHUNK, sequence.num_uncached))


def check_loads(run: Run, limits: Seq[int]) -> None:
    """No R-worker attends more of a lane than it may, unless it is for one sequence."""
    loads = [0] * len(limits)
    here = [0] * len(limits)  # of each R-worker: sequences that have a part there
    for chunk in {chunk.sequence.sequence_id: chunk for chunk in run.chunks}.values():
        assert chunk.sequence.residence is not None
        for part in chunk.sequence.residence.parts:
            num_cached = chunk.sequence.num_cached + chunk.num_tokens  # at least
            loads[part.holder] += max(0, min(num_cached - part.first_token, part.num_tokens))
        for worker in set(chunk.sequence.residence.holders):
            here[worker] += 1
    for load, members_here, limit in zip(loads, here, limits, strict=True):
        assert load <= limit or members_here == 1, "no start above the limit"
