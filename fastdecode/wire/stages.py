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
``ColumnLost`` first → p    the first stage gives a column's R-worker up; no answer
``GreetColumn``  first → p  the stage greets its R-worker of a column again, or the
                            replacement → ``ColumnWelcome``, or ``ColumnLost``
``Shutdown``   first → p    the stage ends; no answer
``StageDone``  p → first    the stage has done its part of a step; the last one
                            has the rows that a token is drawn from
``ColumnLost`` p → first    an R-worker of this number is lost; it comes unasked, and
                            before ``StageDone`` of any step that has missed it
``ColumnReady``  p → first  a replacement of a lost R-worker waits; it comes unasked
``ColumnVacant`` p → first  no R-worker is left to replace a lost one; it comes unasked
reports        p → first    of an R-worker's tiers, imports and replicas (``Done``,
                            ``Inventory``, ``Replicated``,
                            ``Dropped``); before ``StageDone`` of any step that they
                            matter to
``Failed``     p → first    the stage can't continue; it comes unasked
=============  ===========  ====================================================

R-workers of one number form a **column**, one in every stage: a sequence that
is on column w is on R-worker w of every stage, which keeps its K and V of that
stage's layers. To the first stage, which schedules, a column is a cache group
(``fastdecode.engine.fleet.groups``), and every R-worker of it a member.

Columns are independent, and so are lanes, so a stage answers in any order.

Rows of columns that are lost anywhere on a step's way mean nothing: the step
carries their numbers (``lost``) with its result.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, TypeAlias

from msgspec import Meta

from fastdecode.core.dtype import DType
from fastdecode.core.errors import ProtocolError
from fastdecode.core.version import VERSION
from fastdecode.wire.blocks import Done, Inventory, ReplicationNews
from fastdecode.wire.traits import (
    F32,
    I32,
    I64,
    MAX_LANES,
    S_WORKERS,
    U8,
    Asking,
    Block,
    Count,
    Holder,
    I32Rows,
    Lane,
    Layer,
    Message,
    Rows,
    Seconds,
    Text,
    Worded,
    check_rows,
    compare_versions,
)

FIRST_STAGE: Final = 0
"""The number of the stage that schedules."""
CLOSED_FIELDS: Final = ("column", "part", "num_tokens", "num_beyond", "first_row", "num_rows")
"""Columns of ``StagePass.closed``: holder and number of the part, its tokens, tokens of the
sequence behind it, and the rows whose queries attend it."""
MAX_SECONDS: Final = 1e9
"""Bound of every reported duration."""


DRAWS: Final = 1
ASKS: Final = 2
"""Flags of a step's sequence: sample a token after its last row; return the last stage's output of
all its rows."""


def stage_name(number: int) -> str:
    """What people call a stage."""
    return f"stage {number}" if number else "the first stage"


class OfColumns(Message, frozen=True):
    """A stage's report about columns."""

    def check(self, stage: int, num_columns: int) -> None:
        """Raise ProtocolError if this stage, with ``num_columns``, can't report that. Its text goes
        behind the stage's name."""
        column: int = getattr(self, "column", 0)
        if not 0 <= column < num_columns:
            raise ProtocolError(f"speaks of column {column}, and there are {num_columns}")


class StageWelcome(Worded, frozen=True, tag=104, eq=False):
    stage: Holder
    num_blocks: tuple[Block, ...]
    """KV blocks of each column's R-worker, 0 if it is lost."""
    session: Count = 0
    """Session of its R-workers' caches. 0 if they keep no replicas."""
    addresses: tuple[Text, ...] = ()
    """Addresses under which its R-workers reach one another, if they can."""
    version: Text = VERSION
    """Version of FastDecode at the stage."""


class StageDone(OfColumns, Message, frozen=True, tag=105, eq=False):
    stage: Holder
    step: Count
    lane: Lane
    s_part_s: Seconds
    """What the stage's S-part has computed for this step."""
    round_trip_s: Seconds
    """Time on the way to R-workers and back, over all of its layers."""
    r_compute_s: F32
    """What each column's R-worker has computed for it."""
    lost: I32
    """Columns whose rows mean nothing."""
    x: Rows | None = None
    """Last layer's output, from the last stage: a row for each sequence that samples a token, in
    their order; then all rows of sequences that ask for them."""

    def check(self, stage: int, num_columns: int) -> None:
        seconds, lost = self.r_compute_s, self.lost
        is_time = bool(((seconds >= 0) & (seconds < MAX_SECONDS)).all())  # False for NaN
        is_known = bool(((lost >= 0) & (lost < num_columns)).all())
        if self.stage != stage or not is_time or not is_known or len(lost) > num_columns:
            raise ProtocolError(
                f"reports, as stage {self.stage}, {seconds.tolist()[:9]} s, and "
                f"{lost.tolist()[:9]} of {num_columns} columns lost"
            )


class StageAnswer(Worded, OfColumns, frozen=True, tag=106):
    column: Holder
    sequence_id: Count
    code: Text
    """Empty if it has room. Else as in ``Refused``, or ``column_lost``."""
    message: Text


class ColumnLost(Worded, OfColumns, frozen=True, tag=107):
    column: Holder
    code: Text
    message: Text


class ColumnTakenOver(OfColumns, Message, frozen=True, tag=109, eq=False):
    column: Holder
    num_tokens: I32
    """As in ``TakenOver``."""
    is_kept: U8


class ColumnReady(OfColumns, Message, frozen=True, tag=110):
    column: Holder


class ColumnVacant(OfColumns, Message, frozen=True, tag=112):
    column: Holder


class ColumnWelcome(Worded, OfColumns, frozen=True, tag=111, eq=False):
    """The answer of the column's R-worker to another greeting; see ``Welcome``."""

    column: Holder
    number: Count
    """Number of the greeting."""
    num_blocks: Block
    block_size: Count
    has_tier: bool
    address: Text = ""
    """Address of the one that keeps it, for other R-workers. Empty if several do, or if they do
    not reach each other."""
    newcomers: tuple[Text, ...] = ()
    """Names of the stage's R-workers that have replaced lost ones since its last report."""


class GreetColumn(Asking, frozen=True, tag=47):
    column: Holder
    number: Count
    """How often the column was greeted: only the last greeting is answered."""

    said_by = S_WORKERS


class PlaceColumn(Asking, frozen=True, tag=46):
    column: Holder
    worker: Holder
    """Number of the R-worker that keeps it."""

    said_by = S_WORKERS


class StageHello(Asking, frozen=True, tag=44):
    model_hash: Text
    stage: Holder
    """Number of the stage, counted from 0."""
    num_columns: Holder
    num_lanes: Annotated[int, Meta(ge=1, le=MAX_LANES)]
    """Most lanes that there may be."""
    first_layer: Layer
    num_layers: Layer
    hidden_size: Count
    block_size: Count
    activation_dtype: DType
    kv_dtype: DType
    session: Count = 0
    """Session in which the caches of its R-workers outlive it. 0 if they do not."""
    resumes: bool = False
    """Its R-workers resume such caches, if they have any."""
    num_keepers: Holder = 0
    """R-workers that only keep its columns' replicas."""
    reading: Count = 0
    """``Hello.reading`` of its R-workers."""

    answers = (StageWelcome,)

    def check(self, answer: Any) -> None:
        super().check(answer)
        welcome: StageWelcome = answer
        compare_versions(f"the S-worker of stage {welcome.stage}", welcome.version)
        if welcome.stage != self.stage or len(welcome.num_blocks) != self.num_columns:
            raise ProtocolError(
                f"answered as stage {welcome.stage} with {len(welcome.num_blocks)} R-workers, "
                f"where stage {self.stage} has {self.num_columns}"
            )
        if len(welcome.addresses) not in (0, self.num_columns + self.num_keepers):
            raise ProtocolError(f"has {len(welcome.addresses)} addresses of its R-workers")


class StagePass(Asking, frozen=True, tag=45, eq=False):
    step: Count
    lane: Lane
    x: Rows
    """Output of the sender's last layer."""
    sequence_ids: I64
    """Sequences in the order of their rows."""
    columns: I32
    num_past: I32
    num_new: I32
    draws: U8
    """``DRAWS`` and ``ASKS`` of each sequence."""
    lost: I32
    """Columns whose rows mean nothing."""
    first_tokens: I32 | None = None
    """Tokens of each sequence before the part that grows, of which ``num_past`` counts its own.
    None if no sequence is split."""
    closed_ids: I64 | None = None
    """Closed parts that rows attend, by holder and part."""
    closed: I32Rows | None = None
    """The fields ``CLOSED_FIELDS`` of each closed part."""

    answers = (StageDone,)
    said_by = S_WORKERS

    def __post_init__(self) -> None:
        check_rows(
            self.sequence_ids,
            columns=self.columns,
            num_past=self.num_past,
            num_new=self.num_new,
            draws=self.draws,
            first_tokens=self.first_tokens,
        )
        check_rows(() if self.closed_ids is None else self.closed_ids, closed=self.closed)


class Meeting(Message, frozen=True, tag=48):
    """S-workers of a stage that act as one meet: the others send their host to the first, which
    answers with a path. An empty one means that they are on several hosts."""

    text: Text


StageMessage: TypeAlias = Meeting | StageHello | StagePass | PlaceColumn | GreetColumn
OfMember: TypeAlias = (
    StageAnswer | ColumnTakenOver | ColumnWelcome | Done | Inventory | ReplicationNews
)
"""What a stage relays of an R-worker."""
FromStage: TypeAlias = StageWelcome | StageDone | ColumnLost | ColumnReady | ColumnVacant | OfMember
