"""What happens to sequences, and what is to be done about it: a ``Lifecycle``
takes the events of this module and gives its instructions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from fastdecode.core.errors import FastDecodeError
from fastdecode.core.holders import HolderId, Part, PartId
from fastdecode.core.sequence import FinishReason, Request, Sequence
from fastdecode.schedule.plan import Chunk, Send
from fastdecode.wire.blocks import Close, Extend, MoveNews, Open, Truncate


@dataclass(frozen=True)
class Submitted:
    """A request has arrived. No unfinished request has its id."""

    request: Request


@dataclass(frozen=True)
class LaneIdle:
    """No step of the lane is in flight. Next: ``Send``, ``Ask``."""

    lane: int


@dataclass(frozen=True)
class LaneReady:
    """All answers that are there have been taken. Next: ``Run``, or nothing yet."""

    lane: int


@dataclass(frozen=True)
class Opened:
    """The holder has opened, enlarged or cut a part."""

    part_id: PartId


@dataclass(frozen=True)
class Refused:
    """The holder has no room for a part, or for more of it."""

    part_id: PartId
    peer: str
    """Name of the holder's worker, for logs and errors."""
    code: str
    message: str


class Drawn(NamedTuple):
    """A token drawn for a sequence, or the error that it met. A tuple: a step has many."""

    sequence: Sequence
    token_id: int = -1
    finish_reason: FinishReason | None = None
    """Why it ends, if its text ends it. At its greatest length a sequence ends anyway."""
    error: FastDecodeError | None = None


@dataclass(frozen=True)
class StepDone:
    """The lane's step is over. ``coming``: sequences whose tokens follow with ``Came``. Until then
    they may step, with ``COMING`` in the token's place."""

    lane: int
    drawn: tuple[Drawn, ...]
    coming: tuple[Sequence, ...] = ()


@dataclass(frozen=True)
class Came:
    """Tokens are known that were coming, before the next step of their sequences is over."""

    drawn: tuple[Drawn, ...]


@dataclass(frozen=True)
class Lost:
    """A holder is gone, with all that it had. ``Joined`` may follow."""

    holder: HolderId
    returns: bool = False
    """``Joined`` is sure to follow: what is left of it becomes a holder again."""


@dataclass(frozen=True)
class Interrupted:
    """A holder is gone, and its sequences continue from a replica. Next: ``TakeOver``, once no step
    is in flight."""

    holder: HolderId


@dataclass(frozen=True)
class Leaving:
    """A holder that a neighbour took over is to return to a replacement, which has a copy of it.
    Next: ``TakeOver``, once no step is in flight."""

    holder: HolderId


@dataclass(frozen=True)
class TakenOver:
    """The R-worker with the replica serves the holder."""

    holder: HolderId
    num_tokens: tuple[int | None, ...]
    """Tokens of each part that was asked for. None if the part is missing."""
    lost: tuple[bytes, ...] = ()
    """Keys of cached blocks that were asked for, and are missing."""
    is_home: bool = False
    """It is a replacement: other sequences may start there, too."""


@dataclass(frozen=True)
class Reopened:
    """Sequences may start on a holder that a neighbour took over, since no other is left."""

    holder: HolderId


@dataclass(frozen=True)
class Joined:
    """An empty holder replaces a lost one, on which no sequence has a part."""

    holder: HolderId
    num_blocks: int


@dataclass(frozen=True)
class Cancelled:
    """The client of a request has cancelled it."""

    request_id: str


@dataclass(frozen=True)
class Ended:
    """A conversation is over. The last of its tokens was never run."""

    token_ids: tuple[int, ...]
    salt: str


@dataclass(frozen=True)
class Regrouped:
    """The number of lanes changes. No step is in flight."""

    num_lanes: int


BetweenSteps: TypeAlias = (
    "Submitted | Opened | Refused | Lost | Interrupted | Leaving | TakenOver | Reopened | Joined | "
    "Cancelled | Ended | Regrouped | MoveNews"
)
"""Events that are not part of a lane's step."""
Event: TypeAlias = "LaneIdle | LaneReady | StepDone | Came | BetweenSteps"


@dataclass(frozen=True)
class Ask:
    """Send a part's holder a message, to which a part is a sequence. ``Opened`` or ``Refused``
    answers all but ``Close``."""

    part: Part
    message: Open | Extend | Truncate | Close

    @property
    def holder(self) -> HolderId:
        return self.part.holder


@dataclass(frozen=True)
class TakeOver:
    """Let a copy take over a holder that is lost or leaves, with at most these tokens of each part.
    Answered by ``TakenOver`` or ``Lost``."""

    holder: HolderId
    parts: tuple[Part, ...]
    num_tokens: tuple[int, ...]
    keys: tuple[bytes, ...] = ()
    """Keys of the blocks that it had cached."""


@dataclass(frozen=True)
class HandOver:
    """Offer a request's prompt, whose first tokens are drawn. It may be read at one of its
    sequences until it is cancelled."""

    sequence: Sequence
    num_tokens: int
    """First tokens of it whose blocks can be read."""


@dataclass(frozen=True)
class HasFetched:
    """Report that a request's prompt was fetched, or can't be."""

    sequence: Sequence
    failed: bool
    """It is run again."""


@dataclass(frozen=True)
class Run:
    """Run the lane's next step. Answered by ``StepDone``."""

    lane: int
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class Finish:
    """End a sequence."""

    sequence: Sequence
    reason: FinishReason
    kept: tuple[Part, ...] = ()
    """Its parts, with the tokens whose blocks stay for others."""


@dataclass(frozen=True)
class Fail:
    """End a request, and all of its sequences, with an error."""

    request_id: str
    error: FastDecodeError


Instruction: TypeAlias = "Ask | Send | TakeOver | HandOver | HasFetched | Run | Finish | Fail"
