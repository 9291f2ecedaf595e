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

from enum import IntEnum
from typing import Any, Final, TypeAlias

import numpy as np
from msgspec import field

from fastdecode.core.dtype import DType
from fastdecode.core.errors import ProtocolError
from fastdecode.core.version import VERSION
from fastdecode.wire.kv.exporting import Pulled
from fastdecode.wire.kv.replicating import ReplicationNews
from fastdecode.wire.kv.reserving import MAX_BLOCKS
from fastdecode.wire.kv.tiers import Moved, Stocked
from fastdecode.wire.traits import (
    F32,
    I32,
    I64,
    S_WORKERS,
    U8,
    Asking,
    I32Rows,
    Int,
    Message,
    Rows,
    Text,
    Worded,
    compare_versions,
)

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


class OfColumns(Message, frozen=True):
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


class StageWelcome(Worded, frozen=True, tag=104, eq=False):
    stage: Int
    num_blocks: tuple[Int, ...]
    """KV blocks of each column's R-worker; 0: it is lost. A prompt stage has no
    R-workers of its own: as many as there may be."""
    session: Int = 0
    """Of its R-workers' caches; 0: they take no prompts, and keep no replicas."""
    addresses: tuple[Text, ...] = ()
    """What its R-workers call each other, where they can reach one another."""
    members: I32Rows = field(default_factory=lambda: NO_MEMBERS)
    """Which of its R-workers keep the columns; see ``StagePass.members``."""
    version: Text = VERSION
    """Version of FastDecode at the stage."""


class StageDone(OfColumns, Message, frozen=True, tag=105, eq=False):
    stage: Int
    step: Int
    lane: Int
    s_part_s: float
    """What the stage's S-part has computed for this step."""
    round_trip_s: float
    """For all of its layers, on the way to R-workers and back."""
    r_compute_s: F32
    """What each column's R-worker has computed for it."""
    lost: I32
    """Columns whose rows mean nothing, by now."""
    x: Rows | None = None
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


class StageAnswer(Worded, OfColumns, frozen=True, tag=106):
    column: Int
    sequence_id: Int
    code: Text
    """Empty: the room is there; else as in ``Refused``, or ``column_lost``."""
    message: Text


class ColumnLost(Worded, OfColumns, frozen=True, tag=107):
    column: Int
    code: Text
    message: Text
    stage: Int = -1
    """Whose R-worker it is, and ``column`` its number there; -1: the column's R-worker of
    the stage that says it, or that it is said to."""
    num_replaced: Int = 0
    """Of an R-worker by its number; see ``MemberField``."""

    def check(self, stage: int, num_columns: int) -> None:
        """See ``OfColumns``."""
        super().check(stage, num_columns if self.stage < 0 else MAX_R_WORKERS)


class ColumnTakenOver(OfColumns, Message, frozen=True, tag=109, eq=False):
    column: Int
    num_tokens: I32
    """As in ``TakenOver``."""
    is_kept: U8


class ColumnReady(OfColumns, Message, frozen=True, tag=110):
    column: Int


class ColumnVacant(OfColumns, Message, frozen=True, tag=112):
    column: Int


class ColumnWelcome(Worded, OfColumns, frozen=True, tag=111, eq=False):
    """What the column's R-worker has answered to a new greeting; see ``Welcome``."""

    column: Int
    number: Int
    """Of the greeting."""
    num_blocks: Int
    block_size: Int
    has_tier: bool
    members: I32Rows = field(default_factory=lambda: NO_MEMBERS)
    """Which of the stage's R-workers keep the column now."""
    address: Text = ""
    """What other R-workers call the one that keeps it; empty: several do, or they do not
    reach each other."""
    newcomers: tuple[Text, ...] = ()
    """The names of the stage's R-workers that have replaced lost ones since its last report."""


class GreetColumn(Asking, frozen=True, tag=47):
    column: Int
    number: Int
    """How often the column was greeted: only the last greeting is answered."""

    said_by = S_WORKERS


class PlaceColumn(Asking, frozen=True, tag=46):
    column: Int
    worker: Int
    """The number of the R-worker that keeps it from now on."""

    said_by = S_WORKERS


class StageHello(Asking, frozen=True, tag=44):
    protocol_version: Int
    model_hash: Text
    stage: Int
    """Which it is, counted from 0."""
    num_columns: Int
    num_lanes: Int
    """Most that there may be."""
    first_layer: Int
    num_layers: Int
    hidden_size: Int
    block_size: Int
    activation_dtype: DType
    kv_dtype: DType
    sessions: tuple[Int, ...] = ()
    """Of a prompt stage: in whose names R-workers take prompts, by token stage."""
    session: Int = 0
    """In which the caches of its R-workers outlive it; 0: they do not."""
    resumes: bool = False
    """Its R-workers go on with such caches, if they have any."""
    num_keepers: Int = 0
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


class StagePass(Asking, frozen=True, tag=45, eq=False):
    step: Int
    lane: Int
    x: Rows
    """The output of the sender's last layer."""
    sequence_ids: I64
    """In the order of their rows."""
    columns: I32
    num_past: I32
    num_new: I32
    draws: U8
    """``DRAWS`` and ``ASKS`` of each sequence."""
    lost: I32
    """Columns whose rows mean nothing."""
    first_tokens: I32 | None = None
    """Tokens of each sequence before the part that grows, of which ``num_past`` counts
    its own; None: no sequence is split."""
    closed_ids: I64 | None = None
    """Closed parts that rows attend, by holder and part."""
    closed: I32Rows | None = None
    """Of each, the fields ``CLOSED_FIELDS``."""
    members: I32Rows = field(default_factory=lambda: NO_MEMBERS)
    """For prompt stages: who keeps the columns, a row a member (``MemberField``)."""

    answers = (StageDone,)
    said_by = S_WORKERS

    def __post_init__(self) -> None:
        sequences = self.columns, self.num_past, self.num_new, self.draws, self.first_tokens
        for each, ids in (
            *((x, self.sequence_ids) for x in sequences),
            (self.closed, self.closed_ids),
        ):
            if each is not None and (ids is None or len(each) != len(ids)):
                raise ProtocolError("a step whose arrays do not have a row for each sequence")


StageMessage: TypeAlias = StageHello | StagePass | PlaceColumn | GreetColumn
OfMember: TypeAlias = (
    StageAnswer | ColumnTakenOver | ColumnWelcome | Moved | Stocked | Pulled | ReplicationNews
)
"""What a stage relays of an R-worker."""
FromStage: TypeAlias = StageWelcome | StageDone | ColumnLost | ColumnReady | ColumnVacant | OfMember
