"""What stands with a message's class, beside its fields: who may say it, how it
is answered, and how it is cut and joined for the members of a cache group.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from enum import Enum
from typing import Any, ClassVar, Final, TypeVar, cast

from fastdecode.core.errors import ProtocolError
from fastdecode.core.spec import Shard
from fastdecode.core.version import VERSION
from fastdecode.core.words import make_printable

logger = logging.getLogger(__name__)


class Role(Enum):
    """What a peer of an R-worker is."""

    S_WORKER = "S-worker"
    NEIGHBOUR = "neighbour"
    READER = "reader"
    FEEDER = "prompt stage"
    CONTROLLER = "controller"

    __hash__ = object.__hash__  # of members there is one each; an Enum's own is a call in Python


MAX_FEEDERS: Final = 64
"""Prompt stages that write to one cache."""
MOST_PEERS: Final = {
    Role.S_WORKER: 8, Role.NEIGHBOUR: 4, Role.READER: 128, Role.FEEDER: MAX_FEEDERS
}  # fmt: skip
"""That an R-worker has at a time. Whose caches it serves is its own business."""
ANYBODY: Final = frozenset(Role)
OWNERS: Final = frozenset({Role.S_WORKER, Role.NEIGHBOUR})
S_WORKERS: Final = frozenset({Role.S_WORKER})
THE_ONLY: Final = -1
"""In the place of a holder: the only one that the peer has."""

AnyT = TypeVar("AnyT")


class Worded:
    """An R-worker's own words are in it: whoever builds or receives it may log them."""

    def __post_init__(self) -> None:
        make_printable(self)


def compare_versions(peer: str, version: str) -> None:
    """Log a warning if a peer with the same protocol runs another version of FastDecode."""
    if version != VERSION:
        logger.warning(
            "%s runs fastdecode %s, this process %s: install the same version on every host",
            peer, version or "of an unknown version", VERSION,
        )  # fmt: skip


class Asking:
    """Traits of a message to an R-worker, beside what it says."""

    answers: ClassVar[tuple[type[Any], ...]] = ()
    """The kinds of answer that it gets, one of them and one each time; none: it isn't answered."""
    said_by: ClassVar[frozenset[Role]] = S_WORKERS
    is_transfer: ClassVar[bool] = False
    """Reports tell of it, unasked, until it is over."""
    repeated: ClassVar[tuple[str, ...]] = ()
    """Its fields that an answer repeats."""
    in_every_stage: ClassVar[bool] = False
    """With several pipeline stages: it goes to the members of a cache group in each
    of them, not in the first alone."""

    def check(self, answer: Any) -> None:
        """
        Raises:
            ProtocolError: that can't be an answer to this; what is wrong, to be
                said behind the name of whoever gave it.
        """
        if not isinstance(answer, self.answers):
            raise ProtocolError(
                f"sent {type(answer).__name__}, which nobody asked for: are all of the same "
                "version?"
            )
        for name in self.repeated:
            asked, found = getattr(self, name), getattr(answer, name)
            if found != asked:
                raise ProtocolError(
                    f"answered {type(self).__name__} for {name}={found}, where {asked} was due"
                )

    def for_holder(self: AnyT, holder: int) -> AnyT:
        """The same, naming the holder that it is for, if it is for one."""
        return self

    def part(self: AnyT, shard: Shard) -> AnyT:
        """What one member of a cache group is sent: all of it, or its heads' arrays."""
        return self

    def join(self, answers: Sequence[Any]) -> Any:
        """The answer of a cache group, from its members', in the order of heads; all
        have been checked."""
        return answers[0]

    def undo(self) -> Any:
        """What the members are sent that accepted it when another one refused;
        None: what was accepted may stay."""
        return None


class ForHolder(Asking):
    """About one holder's cache."""

    said_by = OWNERS

    def for_holder(self: AnyT, holder: int) -> AnyT:
        return cast(AnyT, replace(cast(Any, self), holder=holder))
