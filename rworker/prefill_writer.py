"""K and V of prompts that prompt stages write into another S-worker's cache: what comes
is checked, and where it goes.

Like all that peers say of a cache, what breaks the protocol raises
``ProtocolError`` and changes nothing.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fastdecode.core.errors import ProtocolError
from fastdecode.core.spec import MAX_SEQUENCE_TOKENS, AttentionSpec
from fastdecode.wire.blocks import FetchChunk, FetchedChunk
from fastdecode.wire.messages import (
    MAX_STEP_TOKENS,
    AttendResult,
    StorePrompt,
)
from rworker.cache_state import CacheState
from rworker.caches import HolderCache
from rworker.checks import check_array
from rworker.instructions import Compute, EndStep, Instruction, StepPlan
from rworker.step_plan import copies


def store_prompt(number: int, cache: HolderCache, message: StorePrompt) -> tuple[Instruction, ...]:
    """A layer of prompts' next tokens is appended; ``number``: of the peer that
    brings it. The first layer of them that comes makes room for all.

    Raises:
        ProtocolError: they aren't what comes next, or don't fit.
        CapacityError: a sequence would grow past its reservation.
    """
    books = cache.books
    ids, past, new = _checked(books, message)
    layers, heads = slice(message.layer, message.layer + 1), slice(None)
    begins = _begins(books, message)
    for sequence, first, count, is_new in zip(
        ids.tolist(), past.tolist(), new.tolist(), begins.tolist(), strict=True
    ):
        if not is_new:
            books.arrivals.check(sequence, layers, heads, first, count)
    appended = None
    if begins.any():
        appended = books.store.append(ids[begins], new[begins])
        for sequence, first, count in zip(
            ids[begins].tolist(), past[begins].tolist(), new[begins].tolist(), strict=True
        ):
            books.arrivals.expect(sequence, first, count)
    for sequence, count in zip(ids.tolist(), new.tolist(), strict=True):
        books.arrivals.arrive(sequence, layers, heads, count)
    plan = _plan(message, books.store.slots(ids, past, new))
    q = np.empty((0, *_query_shape(books, message.layer)), message.k.dtype)
    stored = Compute(number, cache.holder, plan, message.layer, q, message.k, message.v)
    done: tuple[Instruction, ...] = (stored,)
    if cache.is_replicated and not any(sequence in books.arrivals for sequence in ids.tolist()):
        done = stored, EndStep(cache.holder, message.lane, message.step)
    return (*(() if appended is None else copies(cache, appended)), *done)


def answer_of_dropped(message: StorePrompt | FetchChunk) -> AttendResult | FetchedChunk:
    """The answer to a peer about a cache that was dropped: nothing is stored, or read."""
    if isinstance(message, FetchChunk):
        return FetchedChunk(np.empty(0, np.uint8))
    o = np.empty((0, *message.k.shape[1:]), message.k.dtype)
    return AttendResult(message.step, message.lane, message.layer, o, None, 0.0)


def _begins(books: CacheState, message: StorePrompt) -> NDArray[np.bool_]:
    """Which sequences' tokens haven't come in any layer yet, [N]."""
    ids = message.sequence_ids
    present, settled = books.store.num_tokens(ids), books.settled(ids)
    begins = present == message.num_past
    continues = present == message.num_past.astype(np.int64) + message.num_new
    for index, sequence in enumerate(ids.tolist()):
        if not (begins[index] or continues[index]) or settled[index] != message.num_past[index]:
            raise ProtocolError(
                f"tokens {message.num_past[index]} to "
                f"{int(message.num_past[index]) + int(message.num_new[index]) - 1} of sequence "
                f"{sequence} have come, which has {present[index]}, and {settled[index]} of them "
                "in every layer"
            )
    return begins


def _checked(
    books: CacheState, message: StorePrompt
) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.int32]]:
    """Sequences, tokens before and tokens that come, [N] each, as far as they
    make sense by themselves."""
    hello = books.hello
    if message.layer >= hello.kv.num_layers:
        raise ProtocolError(f"layer={message.layer} of {hello.kv.num_layers}")
    ids, past, new = message.sequence_ids, message.num_past, message.num_new
    if not len(ids):
        raise ProtocolError("sequence_ids has no entry")
    if (past < 0).any() or (new < 1).any() or (new > MAX_SEQUENCE_TOKENS).any():
        raise ProtocolError("num_past must be at least 0, and num_new at least 1")
    total = int(new.sum(dtype=np.int64))
    if total > MAX_STEP_TOKENS:
        raise ProtocolError(f"{total} tokens at a time; {MAX_STEP_TOKENS} is the most")
    sequences = ids.tolist()
    if len(set(sequences)) < len(sequences):
        raise ProtocolError("a sequence is there twice")
    for sequence in sequences:
        books.steps.check_at_rest(sequence)
    kv_shape = (total, hello.kv.num_kv_heads, hello.kv.head_dim)
    check_array("k", message.k, hello.activation_dtype.carrier, kv_shape)
    check_array("v", message.v, hello.activation_dtype.carrier, kv_shape)
    return ids, past, new


def _query_shape(books: CacheState, layer: int) -> tuple[int, int]:
    spec: AttentionSpec = books.hello.attention[layer]
    return spec.num_q_heads, spec.head_dim


def _plan(message: StorePrompt, slots: NDArray[np.int64]) -> StepPlan:
    """A step without queries."""
    none = np.empty(0, np.int32)
    return StepPlan(
        message.step,
        message.lane,
        slots,
        block_tables=np.empty((0, 0), np.int32),
        query_starts=np.zeros(1, np.int32),
        query_positions=none,
        context_lens=none,
        want_lse=False,
        num_single=0,
    )
