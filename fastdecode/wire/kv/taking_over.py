"""Messages by which a cache goes on without the process that used it.

=====================  =========  ===================================================
message                direction  meaning, and the answer
=====================  =========  ===================================================
``TruncateSequence``   S/R → R    forget a sequence's last tokens → ``Accepted`` or
                                  ``Refused``
``TakeOver``           S → R      the cache is mine now, with these sequences, at most
                                  so many tokens of each, and these kept blocks →
                                  ``TakenOver``
``DropCache``          S → R      a replica is over, whoever uses it; ``Dropped`` says
                                  when
=====================  =========  ===================================================

**Sessions.** ``Hello.session`` is a secret of one engine's run. A cache that a
neighbour opened under it, a replica, stays when that neighbour is lost, until
the last S-worker of the session has gone; an S-worker of the same session may
take it over, as it may its own. From then on whoever used it before has no cache
here: what it says is refused, and ends its connection.

A cache whose ``Hello`` said ``outlives`` stays, too, when its S-worker is lost
and hasn't taken its leave (``Shutdown``), for as long as its R-worker keeps it.
An S-worker of the same session that greets with ``resumes`` has it from then on,
and says ``TakeOver`` next. Whoever used it before is hung up on, be it gone or
not: two S-workers of one session never use a cache in turns. Its replica and
the blocks kept beyond their sequences are forgotten. To an S-worker of another
session it is memory in use.

Taking over rolls back what is half done: open steps end, tokens that aren't
there in every layer are forgotten, sequences that aren't named are closed, and
kept blocks that aren't named are forgotten.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, TypeAlias

import numpy as np
from msgspec import field

from fastdecode.core.errors import ProtocolError
from fastdecode.wire.kv.kept import no_keys
from fastdecode.wire.kv.reserving import Reserving
from fastdecode.wire.traits import I32, I64, S_WORKERS, THE_ONLY, U8, ForHolder, Int, Keys, Message

SESSION_RESUMED: Final = "session_resumed"
"""Code of what an S-worker is told whose cache another one has resumed."""
MISSING: Final = -1
"""In the place of a number of tokens: the cache hasn't the sequence."""


def _no_flags() -> U8:
    return np.zeros(0, np.uint8)


class TakenOver(Message, frozen=True, tag=73, eq=False):
    num_tokens: I32
    """That each sequence has in every layer, at most as many as were asked for;
    or ``MISSING``."""
    is_kept: U8 = field(default_factory=_no_flags)
    """Of each kept block that was named, whether it is there: 1 or 0."""


class TruncateSequence(Reserving, frozen=True, tag=13):
    sequence_id: Int
    num_tokens: Int
    """That it keeps, at most as many as it has."""
    holder: Int = THE_ONLY


class TakeOver(ForHolder, frozen=True, tag=14, eq=False):
    session: Int
    sequence_ids: I64
    num_tokens: I32
    holder: Int = THE_ONLY
    keys: Keys = field(default_factory=no_keys)
    """Of kept blocks."""

    answers = (TakenOver,)
    said_by = S_WORKERS
    in_every_stage = True

    def check(self, answer: Any) -> None:
        """See ``Asking``."""
        super().check(answer)
        found = answer.num_tokens
        if found.shape != self.num_tokens.shape:
            raise ProtocolError(
                f"answered TakeOver for {len(found)} sequences, where {len(self.num_tokens)} were "
                "named"
            )
        if (found < MISSING).any() or (found > self.num_tokens).any():
            raise ProtocolError("answered TakeOver with more tokens than were asked for")
        if answer.is_kept.shape != (len(self.keys),) or (answer.is_kept > 1).any():
            raise ProtocolError(
                f"answered TakeOver for {answer.is_kept.shape} kept blocks, where "
                f"{len(self.keys)} were named"
            )

    def join(self, answers: Sequence[Any]) -> TakenOver:
        return TakenOver(
            np.minimum.reduce([answer.num_tokens for answer in answers]),
            np.minimum.reduce([answer.is_kept for answer in answers]),
        )


class DropCache(ForHolder, frozen=True, tag=20):
    session: Int
    cache: Int
    """The holder whose it is: a replica of this session, or a cache of the
    peer's. There needn't be one."""
    holder: Int = THE_ONLY
    """Another of the R-worker's, for the answer."""
    link: Int = 0
    """Files of replicas that were made over links up to this one are over, too."""

    said_by = S_WORKERS


TakingOverToRWorker: TypeAlias = TruncateSequence | TakeOver | DropCache
