"""What remains of a cache when another S-worker takes it over."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from fastdecode.core.errors import CapacityError, ProtocolError
from fastdecode.wire.blocks import (
    MISSING,
    Forget,
    KeptToRWorker,
    TakenOver,
    TakeOver,
    Truncate,
    keys_of,
    words_of,
)
from fastdecode.wire.messages import Accepted, Close, Refused
from rworker.cache_state import CacheState


def truncate(books: CacheState, message: Truncate) -> Accepted | Refused:
    """Forget the last tokens of a sequence that is at rest."""
    sequence, num_tokens = message.sequence_id, message.num_tokens
    books.steps.check_at_rest(sequence)
    try:
        books.store.truncate(sequence, num_tokens)
    except CapacityError as error:
        return Refused(sequence, error.code, error.message)
    return Accepted(sequence)


def take_over(
    books: CacheState, wanted: Mapping[int, int], keys: Sequence[bytes] = ()
) -> tuple[TakenOver, Sequence[KeptToRWorker]]:
    """End the open steps, close sequences that aren't wanted, and cut the others. A sequence that
    can't be cut is closed, too.

    Args:
        wanted: The most tokens of each sequence that is wanted.
        keys: Keys of the kept blocks that are wanted.

    Returns:
        What the cache has now, and the changes to what every layer had.
    """
    before = {sequence: books.num_settled(sequence) for sequence in books.store.tables.row_of}
    books.steps.give_up()
    for sequence in before.keys() - wanted.keys():
        books.close(Close(sequence))
    counts = {
        sequence: _cut(books, sequence, min(most, before.get(sequence, MISSING)))
        for sequence, most in wanted.items()
    }
    cached = books.store.cached
    is_kept = np.array([cached.is_there(key) for key in keys], np.uint8)
    changes = [*_changes(before, counts), *_forget(books, keys)]
    return TakenOver(np.array(list(counts.values()), np.int32), is_kept), changes


def nothing_of(wanted: Mapping[int, int], keys: Sequence[bytes]) -> TakenOver:
    """Return the answer of an R-worker without such a cache."""
    return TakenOver(np.full(len(wanted), MISSING, np.int32), np.zeros(len(keys), np.uint8))


def _forget(books: CacheState, keys: Sequence[bytes]) -> Iterator[Forget]:
    """Forget kept blocks that aren't wanted, or haven't come."""
    cached, wanted = books.store.cached, set(keys)
    unwanted = [key for key in cached if key not in wanted or not cached.is_there(key)]
    if unwanted:
        cached.abandon(unwanted)
        yield Forget(words_of(unwanted))


def _changes(before: Mapping[int, int], after: Mapping[int, int]) -> Iterator[KeptToRWorker]:
    """Return the changes of sequences, from their numbers of tokens before and after."""
    gone = [sequence for sequence in before if after.get(sequence, MISSING) == MISSING]
    yield from map(Close, gone)  # first, since others may need their room
    for sequence, num_tokens in after.items():
        if MISSING != num_tokens < before.get(sequence, 0):
            yield Truncate(sequence, num_tokens)


def wanted_of(message: TakeOver) -> tuple[dict[int, int], list[bytes]]:
    """Return the most tokens of each sequence, and keys of kept blocks, checked."""
    ids = message.sequence_ids.tolist()
    wanted = dict(zip(ids, message.num_tokens.tolist(), strict=True))
    if len(wanted) < len(ids) or min(ids, default=0) < 0 or min(wanted.values(), default=0) < 0:
        raise ProtocolError("each sequence is named once, with at least 0 tokens")
    keys = keys_of(message.keys)
    if len(set(keys)) < len(keys):
        raise ProtocolError("each kept block is named once")
    return wanted, keys


def _cut(books: CacheState, sequence: int, num_tokens: int) -> int:
    """Cut a sequence, or close it. Return the number of its tokens that are left."""
    if num_tokens == MISSING:
        return MISSING
    try:
        books.store.truncate(sequence, num_tokens)
    except CapacityError:
        books.close(Close(sequence))
        return MISSING
    return num_tokens
