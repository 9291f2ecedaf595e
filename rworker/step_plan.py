"""A step as instructions: what is copied first, what all layers have in common, and its layers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from fastdecode.wire.messages import Attend, BeginStep
from rworker.blocks.appending import Appended
from rworker.caches import HolderCache
from rworker.instructions import Compute, CopyBlocks, EndStep, Instruction


@dataclass(frozen=True, eq=False)
class AwaitedBlocks:
    """Blocks of a step that are fetched. Each layer waits for its own, and then copies what would
    have been copied before the step."""

    jobs: tuple[int, ...]
    copy_sources: NDArray[np.int64]  # [C]
    copy_targets: NDArray[np.int64]  # [C]


@dataclass(frozen=True, eq=False)
class QueryGroup:
    """Sequences of a step that are attended together, the same in every layer."""

    rows: slice
    """Rows of their queries."""
    block_tables: NDArray[np.int32]  # [G, max_blocks]
    query_starts: NDArray[np.int32]  # [G + 1] within these rows
    query_positions: NDArray[np.int32]  # [G]
    context_lens: NDArray[np.int32]  # [G]
    brings_last: bool
    """True if attention writes their last tokens."""


@dataclass(frozen=True, eq=False)
class StepPlan:
    """Where a step's tokens go and what its queries see, the same in every layer. N sequences have
    queries."""

    step: int
    lane: int
    slots: NDArray[np.int64]  # [T_kv]
    block_tables: NDArray[np.int32]  # [N, max_blocks]
    query_starts: NDArray[np.int32]  # [N + 1]
    query_positions: NDArray[np.int32]  # [N] of each sequence's first query
    context_lens: NDArray[np.int32]  # [N] keys visible at most
    want_lse: bool
    num_single: int
    """Sequences in front that have one query each."""
    coming: AwaitedBlocks | None = None
    """None if it waits for no fetched block."""
    num_last: int = 0
    """Sequences in front whose new token is the last that they see, and has the same place in
    ``slots``: attention itself writes it. All that have one query, or none."""

    @cached_property
    def groups(self) -> tuple[QueryGroup, ...]:
        """The sequences in front that have one query each, then the others. Kernels for one query
        are their own, so tokens do not depend on prompts in the same step."""
        groups = []
        for first, end in ((0, self.num_single), (self.num_single, len(self.context_lens))):
            if first < end:
                starts = self.query_starts[first : end + 1]
                group = QueryGroup(
                    slice(int(starts[0]), int(starts[-1])),
                    self.block_tables[first:end],
                    starts - starts[0],
                    self.query_positions[first:end],
                    self.context_lens[first:end],
                    brings_last=self.num_last > 0 and not first,
                )
                groups.append(group)
        return tuple(groups)


def begin_step(cache: HolderCache, begin: BeginStep) -> tuple[Instruction, ...]:
    """Open a lane's step. Nothing of the peer's arrays is kept."""
    books = cache.books
    appended = books.begin_step(begin)
    with_queries = begin.num_queries > 0
    num_queries = begin.num_queries[with_queries]
    query_ends = begin.num_past + begin.num_new
    if begin.num_beyond is not None:
        query_ends += begin.num_beyond
    single = num_queries == 1
    num_single = len(single) if single.all() else int(single.argmin())
    first = slice(num_single)
    bring_one = (begin.num_new[first] == 1) & (begin.num_queries[first] == 1)
    bring_last = bring_one & (begin.num_visible[first] == query_ends[first])
    # A sequence may bring two tokens apart from each other, each with a query, of which the later
    # one sees the earlier. Then all tokens are written before any is read.
    are_different = len(set(begin.sequence_ids[first].tolist())) == num_single
    plan = StepPlan(
        step=begin.step,
        lane=begin.lane,
        slots=appended.slots,
        block_tables=books.store.block_tables(begin.sequence_ids[with_queries]),
        query_starts=np.concatenate(([0], np.cumsum(num_queries))).astype(np.int32),
        query_positions=query_ends[with_queries] - num_queries,
        context_lens=begin.num_visible[with_queries],
        want_lse=begin.want_lse,
        num_single=num_single,
        num_last=num_single if are_different and bring_last.all() else 0,
    )
    if books.store.cached.jobs:
        plan, appended = _with_coming(plan, appended, cache)
    cache.plans[begin.lane] = plan
    return copies(cache, appended)


def copies(cache: HolderCache, appended: Appended) -> tuple[Instruction, ...]:
    """Return the copies that precede all writes."""
    if not appended.copy_sources.size:
        return ()
    return (CopyBlocks(cache.holder, appended.copy_sources, appended.copy_targets),)


def _with_coming(
    plan: StepPlan, appended: Appended, cache: HolderCache
) -> tuple[StepPlan, Appended]:
    """Return the plan of a step that may read fetched blocks, and the copies to make now."""
    size = cache.books.store.block_size
    first_tokens = np.arange(plan.block_tables.shape[1]) * size
    seen = plan.block_tables[first_tokens < plan.context_lens[:, None]]
    sources = appended.copy_sources
    moves = cache.books.store.cached.fetching(np.concatenate((seen, sources)))
    if not moves:
        return plan, appended
    is_late = np.isin(sources, [block for move in moves for block in move.blocks])
    late = AwaitedBlocks(
        tuple([move.number for move in moves]), sources[is_late], appended.copy_targets[is_late]
    )
    now = replace(
        appended, copy_sources=sources[~is_late], copy_targets=appended.copy_targets[~is_late]
    )
    return replace(plan, coming=late), now


def attend(number: int, cache: HolderCache, message: Attend) -> tuple[Instruction, ...]:
    """Attend a layer of a step that peer ``number`` has begun.

    Raises:
        ProtocolError: If it is not a layer of an open step.
    """
    was_last = cache.books.attend(message)
    lane = message.lane
    plan = cache.plans.pop(lane) if was_last else cache.plans[lane]
    compute = Compute(number, cache.holder, plan, message.layer, message.q, message.k, message.v)
    if was_last and cache.is_replicated:
        return compute, EndStep(cache.holder, lane, message.step)
    return (compute,)
