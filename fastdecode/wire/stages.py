"""Messages between the stages of a pipeline: S-workers (or groups of them) that
each have some of the layers, and R-workers of their own.

=============  ===========  ====================================================
message        direction    meaning, and the answer
=============  ===========  ====================================================
``StageHello`` first → p    what the stage is to be; it has loaded its layers, and
                            greets its R-workers → ``StageWelcome``
relayed        first → p    what the stage sends its R-worker of a column
                            (``Relayed``); the stage relays answers, as
                            ``StageAnswer`` and ``ColumnTakenOver``, and reports
``StagePass``  p → p + 1    a lane's step, as far as stage p has computed it; of
                            every stage behind the first one ``StageDone`` is due
``PlaceColumn``  first → p  another R-worker of the stage keeps a column; no answer
``ColumnLost`` first → p    the first stage gives an R-worker up: a column's, or the
                            one of this number; no answer
``GreetColumn``  first → p  the stage greets its R-worker of a column again, or the
                            replacement → ``ColumnWelcome``, or ``ColumnLost``
``Shutdown``   first → p    the stage ends; no answer
``StageDone``  p → first    the stage has done its part of a step; the last one
                            has the rows that a token is drawn from
``ColumnLost`` p → first    an R-worker of this number is lost: its own, or one that
                            a prompt stage writes to; it comes unasked, and before
                            ``StageDone`` of any step that has missed it
``ColumnReady``  p → first  a replacement of a lost R-worker waits; it comes unasked
``ColumnVacant`` p → first  no R-worker is left to replace a lost one; it comes unasked
reports        p → first    of an R-worker's tiers, imports and replicas (``Moved``,
                            ``Stocked``, ``Pulled``, ``Replicated``, ``Unprotected``,
                            ``Dropped``); before ``StageDone`` of any step that they
                            matter to
``Failed``     p → first    the stage can't go on; it comes unasked
=============  ===========  ====================================================

R-workers of one number form a **column**, one in every stage: a sequence that
is on column w is on R-worker w of every stage, which keeps its K and V of that
stage's layers. To the first stage, which schedules, a column is a cache group
(``fastdecode.engine.fleet.groups``), and every R-worker of it a member.
Stages that run prompts only have the highest numbers, and no columns of their
own: the first one passes steps of prompts to the first of them, as to stage 1
the steps that decode, and each sends K and V to the R-workers of the stages that keep
its layers (``fastdecode.wire.kv.attending``). They hear nothing of reservations.

Columns are independent, and so are lanes, so a stage answers in any order.

Rows of columns that are lost anywhere on a step's way mean nothing: the step
carries their numbers (``lost``), so that whoever has its result knows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Annotated, Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fastdecode.core.dtype import DType
from fastdecode.core.errors import ProtocolError
from fastdecode.core.version import VERSION
from fastdecode.wire.kv.exporting import Pulled
from fastdecode.wire.kv.replicating import ReplicationNews
from fastdecode.wire.kv.reserving import MAX_BLOCKS
from fastdecode.wire.kv.tiers import Moved, Stocked
from fastdecode.wire.traits import S_WORKERS, Asking, Worded, compare_versions

Activations: TypeAlias = NDArray[np.float32] | NDArray[np.uint16]
"""As in ``fastdecode.wire.messages``."""
FIRST_STAGE: Final = 0
"""The number of the stage that schedules."""
CLOSED_FIELDS: Final = ("column", "part", "num_tokens", "num_beyond", "first_row", "num_rows")
"""Of a closed part in ``StagePass``: where it is, which of its sequence's it is, what
it has, tokens of the sequence behind it, and the rows whose queries attend it."""
MAX_R_WORKERS: Final = 1 << 16
"""Of a stage."""
MAX_SECONDS: Final = 1e9
"""That anything may be said to have taken."""


DRAWS: Final = 1
ASKS: Final = 2
"""Of a step's sequence: a token is drawn after its last row; the last stage's output of
all its rows is wanted."""


def stage_name(number: int, first_prompt_stage: int) -> str:
    """What people call a stage; those from a number on run prompts only."""
    if number >= first_prompt_stage:
        return f"prompt stage {number - first_prompt_stage}"
    return f"stage {number}" if number else "the first stage"


class OfColumns:
    """A stage's words about columns."""

    def check(self, stage: int, num_columns: int) -> None:
        """
        Args:
            stage: whose they are.
            num_columns: so many there are.

        Raises:
            ProtocolError: that can't be; to be said behind the stage's name.
        """
        column: int = getattr(self, "column", 0)
        if not 0 <= column < num_columns:
            raise ProtocolError(f"speaks of column {column}, and there are {num_columns}")


class MemberField(IntEnum):
    """What is in a row of ``StagePass.members``."""

    COLUMN = 0
    STAGE = 1
    NAME = 2
    """What its cache is called there."""
    WORKER = 3
    """The number of the stage's R-worker that keeps it."""
    NUM_REPLACED = 4
    """How often another process has replaced that R-worker, under its number."""
    FIRST_HEAD = 5
    NUM_HEADS = 6
    """Of KV; 0: all."""


NO_MEMBERS: Final = np.zeros((0, len(MemberField)), np.int32)


@dataclass(frozen=True, eq=False)
class StageWelcome(Worded):
    stage: int
    num_blocks: tuple[int, ...]
    """KV blocks of each column's R-worker; 0: it is lost. A prompt stage has no
    R-workers of its own: as many as there may be."""
    session: int = 0
    """Of its R-workers' caches; 0: they take no prompts, and keep no replicas."""
    addresses: tuple[str, ...] = ()
    """What its R-workers call each other, where they can reach one another."""
    members: Annotated[NDArray[np.int32], "M G"] = field(default_factory=lambda: NO_MEMBERS)
    """Which of its R-workers keep the columns; see ``StagePass.members``."""
    version: str = VERSION
    """Version of FastDecode at the stage."""


@dataclass(frozen=True, eq=False)
class StageDone(OfColumns):
    stage: int
    step: int
    lane: int
    s_part_s: float
    """What the stage's S-part has computed for this step."""
    round_trip_s: float
    """For all of its layers, on the way to R-workers and back."""
    r_compute_s: Annotated[NDArray[np.float32], "C"]
    """What each column's R-worker has computed for it."""
    lost: Annotated[NDArray[np.int32], "L"]
    """Columns whose rows mean nothing, by now."""
    x: Annotated[Activations | None, "R H"] = None
    """Of the last stage: its last layer's output, one row a sequence that draws
    a token, in their order; then all rows of sequences that ask for them."""

    def check(self, stage: int, num_columns: int) -> None:
        """See ``OfColumns``."""
        seconds = np.array([self.s_part_s, self.round_trip_s, *self.r_compute_s.tolist()])
        is_time = bool(((seconds >= 0) & (seconds < MAX_SECONDS)).all())  # not so of NaN
        is_there = bool(((self.lost >= 0) & (self.lost < num_columns)).all())
        if self.stage != stage or not is_time or not is_there or len(self.lost) > num_columns:
            raise ProtocolError(
                f"reports, as stage {self.stage}, {self.s_part_s:g}, {self.round_trip_s:g} and "
                f"{self.r_compute_s.tolist()[:9]} s, and {self.lost.tolist()[:9]} of {num_columns} "
                "columns lost"
            )


@dataclass(frozen=True)
class StageAnswer(Worded, OfColumns):
    column: int
    sequence_id: int
    code: str
    """Empty: the room is there; else as in ``Refused``, or ``column_lost``."""
    message: str


@dataclass(frozen=True)
class ColumnLost(Worded, OfColumns):
    column: int
    code: str
    message: str
    stage: int = -1
    """Whose R-worker it is, and ``column`` its number there; -1: the column's R-worker of
    the stage that says it, or that it is said to."""
    num_replaced: int = 0
    """Of an R-worker by its number; see ``MemberField``."""

    def check(self, stage: int, num_columns: int) -> None:
        """See ``OfColumns``."""
        super().check(stage, num_columns if self.stage < 0 else MAX_R_WORKERS)


@dataclass(frozen=True, eq=False)
class ColumnTakenOver(OfColumns):
    column: int
    num_tokens: Annotated[NDArray[np.int32], "N"]
    """As in ``TakenOver``."""
    is_kept: Annotated[NDArray[np.uint8], "K"]


@dataclass(frozen=True)
class ColumnReady(OfColumns):
    column: int


@dataclass(frozen=True)
class ColumnVacant(OfColumns):
    column: int


@dataclass(frozen=True, eq=False)
class ColumnWelcome(Worded, OfColumns):
    """What the column's R-worker has answered to a new greeting; see ``Welcome``."""

    column: int
    number: int
    """Of the greeting."""
    num_blocks: int
    block_size: int
    has_tier: bool
    members: Annotated[NDArray[np.int32], "M G"] = field(default_factory=lambda: NO_MEMBERS)
    """Which of the stage's R-workers keep the column now."""
    address: str = ""
    """What other R-workers call the one that keeps it; empty: several do, or they do not
    reach each other."""
    newcomers: tuple[str, ...] = ()
    """The names of the stage's R-workers that have replaced lost ones since its last report."""


@dataclass(frozen=True)
class GreetColumn(Asking):
    column: int
    number: int
    """How often the column was greeted: only the last greeting is answered."""

    said_by = S_WORKERS


@dataclass(frozen=True)
class PlaceColumn(Asking):
    column: int
    worker: int
    """The number of the R-worker that keeps it from now on."""

    said_by = S_WORKERS


@dataclass(frozen=True)
class StageHello(Asking):
    protocol_version: int
    model_hash: str
    stage: int
    """Which it is, counted from 0."""
    num_columns: int
    num_lanes: int
    """Most that there may be."""
    first_layer: int
    num_layers: int
    hidden_size: int
    block_size: int
    activation_dtype: DType
    kv_dtype: DType
    sessions: tuple[int, ...] = ()
    """Of a prompt stage: in whose names R-workers take prompts, by token stage."""
    session: int = 0
    """In which the caches of its R-workers outlive it; 0: they do not."""
    resumes: bool = False
    """Its R-workers go on with such caches, if they have any."""
    num_keepers: int = 0
    """R-workers that only keep its columns' replicas."""

    answers = (StageWelcome,)

    def check(self, answer: Any) -> None:
        """See ``Asking``."""
        super().check(answer)
        welcome: StageWelcome = answer
        compare_versions(f"the S-worker of stage {welcome.stage}", welcome.version)
        if welcome.stage != self.stage or len(welcome.num_blocks) != self.num_columns:
            raise ProtocolError(
                f"answered as stage {welcome.stage} with {len(welcome.num_blocks)} R-workers, "
                f"where stage {self.stage} has {self.num_columns}"
            )
        if not all(0 <= num_blocks <= MAX_BLOCKS for num_blocks in welcome.num_blocks):
            raise ProtocolError(f"offers num_blocks={welcome.num_blocks[:9]}, which can't be")
        if len(welcome.addresses) not in (0, self.num_columns + self.num_keepers):
            raise ProtocolError(f"has {len(welcome.addresses)} addresses of its R-workers")


@dataclass(frozen=True, eq=False)
class StagePass(Asking):
    step: int
    lane: int
    x: Annotated[Activations, "T H"]
    """The output of the sender's last layer."""
    sequence_ids: Annotated[NDArray[np.int64], "N"]
    """In the order of their rows."""
    columns: Annotated[NDArray[np.int32], "N"]
    num_past: Annotated[NDArray[np.int32], "N"]
    num_new: Annotated[NDArray[np.int32], "N"]
    draws: Annotated[NDArray[np.uint8], "N"]
    """``DRAWS`` and ``ASKS`` of each sequence."""
    lost: Annotated[NDArray[np.int32], "L"]
    """Columns whose rows mean nothing."""
    first_tokens: Annotated[NDArray[np.int32] | None, "N"] = None
    """Tokens of each sequence before the part that grows, of which ``num_past`` counts
    its own; None: no sequence is split."""
    closed_ids: Annotated[NDArray[np.int64] | None, "P"] = None
    """Closed parts that rows attend, by holder and part."""
    closed: Annotated[NDArray[np.int32] | None, "P F"] = None
    """Of each, the fields ``CLOSED_FIELDS``."""
    members: Annotated[NDArray[np.int32], "M G"] = field(default_factory=lambda: NO_MEMBERS)
    """For prompt stages: who keeps the columns, a row a member (``MemberField``)."""

    answers = (StageDone,)
    said_by = S_WORKERS


StageMessage: TypeAlias = StageHello | StagePass | PlaceColumn | GreetColumn
OfMember: TypeAlias = (
    StageAnswer | ColumnTakenOver | ColumnWelcome | Moved | Stocked | Pulled | ReplicationNews
)
"""What a stage relays of an R-worker."""
FromStage: TypeAlias = StageWelcome | StageDone | ColumnLost | ColumnReady | ColumnVacant | OfMember

STAGE_OPCODES: Final[Mapping[type[Any], int]] = {
    StageHello: 44,
    StagePass: 45,
    PlaceColumn: 46,
    GreetColumn: 47,
    StageWelcome: 104,
    StageDone: 105,
    StageAnswer: 106,
    ColumnLost: 107,
    ColumnTakenOver: 109,
    ColumnReady: 110,
    ColumnWelcome: 111,
    ColumnVacant: 112,
}
"""See ``fastdecode.wire.opcodes.OPCODES``."""
