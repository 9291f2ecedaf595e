"""A step as instructions: what is copied first, what all layers have in common, and its layers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from fastdecode.wire.messages import Attend, BeginStep
from rworker.blocks.appending import Appended
from rworker.blocks.kv_store import KVStore
from rworker.caches import HolderCache
from rworker.instructions import AwaitedBlocks, Compute, CopyBlocks, EndStep, Instruction, StepPlan


def begin_step(cache: HolderCache, begin: BeginStep) -> tuple[Instruction, ...]:
    """Open a lane's step."""
    appended = cache.books.begin_step(begin)
    plan = _plan(begin, appended, cache.books.store)
    if cache.books.store.cached.jobs:
        plan, appended = _with_coming(plan, appended, cache)
    cache.plans[begin.lane] = plan
    return copies(cache, appended)


def copies(cache: HolderCache, appended: Appended) -> tuple[Instruction, ...]:
    """Return the copies that precede all writes."""
    if not appended.copy_sources.size:
        return ()
    return (CopyBlocks(cache.holder, appended.copy_sources, appended.copy_targets),)


def _plan(begin: BeginStep, appended: Appended, store: KVStore) -> StepPlan:
    """Return what every layer of a step has in common. Nothing of the peer's arrays is kept."""
    with_queries = begin.num_queries > 0
    num_queries = begin.num_queries[with_queries]
    query_ends = begin.num_past + begin.num_new
    if begin.num_beyond is not None:
        query_ends += begin.num_beyond
    single = num_queries == 1
    num_single = len(single) if single.all() else int(single.argmin())
    return StepPlan(
        step=begin.step,
        lane=begin.lane,
        slots=appended.slots,
        block_tables=store.block_tables(begin.sequence_ids[with_queries]),
        query_starts=np.concatenate(([0], np.cumsum(num_queries))).astype(np.int32),
        query_positions=query_ends[with_queries] - num_queries,
        context_lens=begin.num_visible[with_queries],
        want_lse=begin.want_lse,
        num_single=num_single,
        num_last=_num_last(begin, query_ends, num_single),
    )


def _num_last(begin: BeginStep, query_ends: NDArray[np.int32], num_single: int) -> int:
    """Return ``StepPlan.num_last``: all sequences that have one query, or none.

    A sequence may bring two tokens apart from each other, each with a query, of which the later one
    sees the earlier. Then all tokens are written before any is read.
    """
    first = slice(num_single)
    brings_one = (begin.num_new[first] == 1) & (begin.num_queries[first] == 1)
    sees_it_last = begin.num_visible[first] == query_ends[first]
    are_different = len(set(begin.sequence_ids[first].tolist())) == num_single
    return num_single if are_different and (brings_one & sees_it_last).all() else 0


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
