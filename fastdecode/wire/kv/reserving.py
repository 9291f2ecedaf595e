"""Room at a holder: what whoever asks for it is told, and how it is given back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from fastdecode.wire.traits import THE_ONLY, ForHolder, Int, Message, Text, Worded

MAX_BLOCKS: Final = (1 << 31) - 1
"""Of one cache."""


class Accepted(Message, frozen=True, tag=66):
    sequence_id: Int


class Refused(Worded, frozen=True, tag=67):
    sequence_id: Int
    code: Text
    """``out_of_capacity``: there is no room now; ``exceeds_capacity``: there
    would be none in an empty R-worker."""
    message: Text


class Reserving(ForHolder, frozen=True):
    """Whoever asks for room is told whether there is some."""

    answers = (Accepted, Refused)
    repeated = ("sequence_id",)
    in_every_stage = True

    def join(self, answers: Sequence[Any]) -> Accepted | Refused:
        told: Sequence[Accepted | Refused] = answers
        return next((answer for answer in told if isinstance(answer, Refused)), told[0])


class CloseSequence(ForHolder, frozen=True, tag=4):
    sequence_id: Int
    holder: Int = THE_ONLY

    in_every_stage = True
