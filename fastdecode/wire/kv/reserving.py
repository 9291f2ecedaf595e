"""Room at a holder: what whoever asks for it is told, and how it is given back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from fastdecode.wire.traits import THE_ONLY, ForHolder, Worded

MAX_BLOCKS: Final = (1 << 31) - 1
"""Of one cache."""


@dataclass(frozen=True)
class Accepted:
    sequence_id: int


@dataclass(frozen=True)
class Refused(Worded):
    sequence_id: int
    code: str
    """``out_of_capacity``: there is no room now; ``exceeds_capacity``: there
    would be none in an empty R-worker."""
    message: str


class Reserving(ForHolder):
    """Whoever asks for room is told whether there is some."""

    answers = (Accepted, Refused)
    repeated = ("sequence_id",)
    in_every_stage = True
    sequence_id: int

    def join(self, answers: Sequence[Any]) -> Accepted | Refused:
        told: Sequence[Accepted | Refused] = answers
        return next((answer for answer in told if isinstance(answer, Refused)), told[0])


@dataclass(frozen=True)
class CloseSequence(ForHolder):
    sequence_id: int
    holder: int = THE_ONLY

    in_every_stage = True
