"""Messages about KV blocks that outlive their sequences.

A kept block has a **key**, which says what tokens it and all before it hold. To
a holder it is a number of 128 bits, and no two of its kept blocks have the
same. The cache refers to a block as a sequence does that never appends, so a
kept block is never written: a sequence that is resumed with all of its last
block but one token, say, gets a copy of it when it appends.

Only full blocks are kept of sequences that go on. The last block of one that is
closed may be kept as it is (``EndSequence``); who resumes it says how many of
its tokens there are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fastdecode.wire.kv.reserving import CloseSequence, Reserving
from fastdecode.wire.traits import THE_ONLY, ForHolder

KEY_WORDS: Final = 2
"""Of 64 bits, in a block's key."""

Keys: TypeAlias = NDArray[np.int64]
"""Of blocks, [N, KEY_WORDS]."""


@dataclass(frozen=True, eq=False)
class KeepBlocks(ForHolder):
    """Full blocks of a sequence are the cache's, too, by these keys."""

    sequence_id: int
    first_block: int
    """Of the sequence's block table: the first of those that the keys are for."""
    keys: Annotated[NDArray[np.int64], "N W"]
    holder: int = THE_ONLY


@dataclass(frozen=True, eq=False)
class ResumeSequence(Reserving):
    """A new sequence that starts with kept blocks."""

    sequence_id: int
    num_reserved_tokens: int
    """In all, the kept tokens included."""
    num_tokens: int
    """Of those in the kept blocks, the first so many are the sequence's: all
    but some of the last block's, if not all."""
    keys: Annotated[NDArray[np.int64], "N W"]
    holder: int = THE_ONLY

    def undo(self) -> CloseSequence:
        return CloseSequence(self.sequence_id, self.holder)


@dataclass(frozen=True, eq=False)
class EndSequence(ForHolder):
    """As ``CloseSequence``; but the sequence's last block, which isn't full, is
    the cache's from now on, by this key."""

    sequence_id: int
    key: Annotated[NDArray[np.int64], "1 W"]
    holder: int = THE_ONLY


@dataclass(frozen=True, eq=False)
class ForgetBlocks(ForHolder):
    """The cache gives up the blocks of these keys."""

    keys: Annotated[NDArray[np.int64], "N W"]
    holder: int = THE_ONLY


KeptToRWorker: TypeAlias = KeepBlocks | ResumeSequence | EndSequence | ForgetBlocks

KEPT_OPCODES: Mapping[type[Any], int] = {
    KeepBlocks: 16,
    ResumeSequence: 17,
    ForgetBlocks: 18,
    EndSequence: 19,
}
