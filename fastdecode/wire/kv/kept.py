"""Messages about KV blocks that outlive their sequences.

A kept block has a **key**, which says what tokens it and all before it hold. To
a holder it is a number of 128 bits, and no two of its kept blocks have the
same. The cache refers to a block as a sequence does that never appends, so a
kept block is never written: a sequence that is resumed with all of its last
block but one token, say, gets a copy of it when it appends.

A sequence that is resumed with a **gap** has all its kept tokens, and appends
first what fills the gap. See ``BeginStep``.

Only full blocks are kept of sequences that go on. The last block of one that is
closed may be kept as it is (``EndSequence``); who resumes it says how many of
its tokens there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeAlias

import numpy as np

from fastdecode.wire.kv.reserving import CloseSequence, Reserving
from fastdecode.wire.traits import THE_ONLY, ForHolder, Int
from fastdecode.wire.traits import Keys as Keys

KEY_WORDS: Final = 2
"""Of 64 bits, in a block's key."""


def no_keys() -> Keys:
    """Of no blocks."""
    return np.zeros((0, KEY_WORDS), np.int64)


def words_of(keys: Sequence[bytes]) -> Keys:
    """Keys as messages have them."""
    return np.frombuffer(b"".join(keys), np.int64).reshape(-1, KEY_WORDS)


def keys_of(words: Keys) -> list[bytes]:
    """Keys that came in a message."""
    return [row.tobytes() for row in words]


class KeepBlocks(ForHolder, frozen=True, tag=16, eq=False):
    """Full blocks of a sequence are the cache's, too, by these keys."""

    sequence_id: Int
    first_block: Int
    """Of the sequence's block table: the first of those that the keys are for."""
    keys: Keys
    holder: Int = THE_ONLY

    in_every_stage = True


class ResumeSequence(Reserving, frozen=True, tag=17, eq=False):
    """A new sequence that starts with kept blocks. Between them there may be a
    gap: whole blocks that it gets, and whose tokens it brings first."""

    sequence_id: Int
    num_reserved_tokens: Int
    """In all, the kept tokens included."""
    num_tokens: Int
    """Of those in the kept blocks and the gap, the first so many are the
    sequence's: all but some of the last block's, if not all."""
    keys: Keys
    """Of the kept blocks, in the order of their tokens."""
    gap_start: Int = 0
    gap_stop: Int = 0
    """The tokens from ``gap_start`` up to here are none of the kept blocks';
    equal: there is no gap."""
    holder: Int = THE_ONLY

    def undo(self) -> CloseSequence:
        return CloseSequence(self.sequence_id, self.holder)


class EndSequence(ForHolder, frozen=True, tag=19, eq=False):
    """As ``CloseSequence``; but the sequence's last block, which isn't full, is
    the cache's from now on, by this key."""

    sequence_id: Int
    key: Keys
    holder: Int = THE_ONLY

    in_every_stage = True


class ForgetBlocks(ForHolder, frozen=True, tag=18, eq=False):
    """The cache gives up the blocks of these keys."""

    keys: Keys
    holder: Int = THE_ONLY

    in_every_stage = True


KeptToRWorker: TypeAlias = KeepBlocks | ResumeSequence | EndSequence | ForgetBlocks
