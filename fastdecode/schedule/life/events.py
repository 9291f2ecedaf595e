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
    """A request has arrived; its id is none of the unfinished ones'."""

    request: Request


@dataclass(frozen=True)
class LaneIdle:
    """No step of the lane is in flight: what comes before its next one? →
    ``Send``, ``Ask``"""

    lane: int


@dataclass(frozen=True)
class LaneReady:
    """All answers have been told that are there by now: what runs? → ``Run``, or nothing yet"""

    lane: int


@dataclass(frozen=True)
class Opened:
    """The holder has opened or enlarged a part."""

    part_id: PartId


@dataclass(frozen=True)
class Refused:
    """The holder has no room for a part, or for more of it."""

    part_id: PartId
    peer: str
    """Who says so, for people."""
    code: str
    message: str


class Drawn(NamedTuple):
    """What was drawn for a sequence: a token, or the error that it met. A
    tuple, since there are many in every step."""

    sequence: Sequence
    token_id: int = -1
    finish_reason: FinishReason | None = None
    """Why it is over, if its text says so; a sequence of its greatest length is over anyway."""
    error: FastDecodeError | None = None


@dataclass(frozen=True)
class StepDone:
    """The lane's step is over. ``drawn``: for each of its sequences that awaited
    a token; ``coming``: those whose tokens will be told by ``Came``. They may
    step before, with ``COMING`` in the token's place."""

    lane: int
    drawn: tuple[Drawn, ...]
    coming: tuple[Sequence, ...] = ()


@dataclass(frozen=True)
class Came:
    """Tokens are known that were coming; before the next step of any of their
    sequences is over."""

    drawn: tuple[Drawn, ...]


@dataclass(frozen=True)
class Lost:
    """A holder is gone, and all that it had. → ``Joined``, later or never"""

    holder: HolderId
    returns: bool = False
    """It is sure to come: what is left of it is a holder again."""


@dataclass(frozen=True)
class Interrupted:
    """A holder is gone, and another keeps a replica of it, with which its
    sequences go on. → ``TakeOver``, once no step is in flight"""

    holder: HolderId


@dataclass(frozen=True)
class Leaving:
    """A holder that a neighbour has gone on for is to go on in its own place,
    where a copy of it is. → ``TakeOver``, once no step is in flight"""

    holder: HolderId


@dataclass(frozen=True)
class TakenOver:
    """Whoever keeps the replica goes on for the holder."""

    holder: HolderId
    num_tokens: tuple[int | None, ...]
    """That each of the parts which were asked for has; None: it isn't there."""
    lost: tuple[bytes, ...] = ()
    """Keys of kept blocks that were asked for, and aren't there."""
    is_home: bool = False
    """In the holder's own place, where others may start, too."""


@dataclass(frozen=True)
class Reopened:
    """Others may start on a holder that a neighbour goes on for: nowhere else
    can they."""

    holder: HolderId


@dataclass(frozen=True)
class Joined:
    """There is an empty holder in the place of a lost one, of which nothing remembers anything."""

    holder: HolderId
    num_blocks: int


@dataclass(frozen=True)
class Cancelled:
    """Nobody wants a request any more."""

    request_id: str


@dataclass(frozen=True)
class Ended:
    """A conversation is over that has come to these tokens, the last of which
    was never run."""

    token_ids: tuple[int, ...]
    salt: str


@dataclass(frozen=True)
class Regrouped:
    """From now on there are so many lanes. No step is in flight."""

    num_lanes: int


BetweenSteps: TypeAlias = (
    "Submitted | Opened | Refused | Lost | Interrupted | Leaving | TakenOver | Reopened | Joined | "
    "Cancelled | Ended | Regrouped | MoveNews"
)
"""Events that are no part of a lane's step."""
Event: TypeAlias = "LaneIdle | LaneReady | StepDone | Came | BetweenSteps"


@dataclass(frozen=True)
class Ask:
    """Send a part's holder a message, to which a part is a sequence. All but ``Close`` are to be
    answered by ``Opened`` or ``Refused``."""

    part: Part
    message: Open | Extend | Truncate | Close

    @property
    def holder(self) -> HolderId:
        return self.part.holder


@dataclass(frozen=True)
class TakeOver:
    """A holder that is lost, or leaves, goes on from its copy, with these parts
    and at most so many tokens of each. To be answered by ``TakenOver``; or
    ``Lost``."""

    holder: HolderId
    parts: tuple[Part, ...]
    num_tokens: tuple[int, ...]
    keys: tuple[bytes, ...] = ()
    """Of the blocks that it kept."""


@dataclass(frozen=True)
class HandOver:
    """A request's first tokens are drawn, and the prompt may be read where one
    of its sequences is, until it is cancelled."""

    sequence: Sequence
    num_tokens: int
    """First tokens of it whose blocks can be read."""


@dataclass(frozen=True)
class HasFetched:
    """What was offered of a request's prompt is here, or won't be."""

    sequence: Sequence
    failed: bool
    """It couldn't be fetched, and is run again."""


@dataclass(frozen=True)
class Run:
    """The lane's next step. To be answered by ``StepDone``."""

    lane: int
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class Finish:
    """A sequence is over."""

    sequence: Sequence
    reason: FinishReason
    kept: tuple[Part, ...] = ()
    """Its parts, with the tokens whose blocks stay for others."""


@dataclass(frozen=True)
class Fail:
    """A request ends with an error, all of its sequences with it."""

    request_id: str
    error: FastDecodeError


Instruction: TypeAlias = "Ask | Send | TakeOver | HandOver | HasFetched | Run | Finish | Fail"
