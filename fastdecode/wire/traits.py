"""Messages: their base class, the types of their fields, and what stands with a message's
class beside its fields: who may send it, how it is answered, and how it is cut and joined for
the members of a cache group.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence, Sized
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal, TypeAlias, TypeVar

import numpy as np
from msgspec import Meta, Struct, convert
from msgspec.structs import replace
from numpy.typing import NDArray

from fastdecode.core.errors import (
    CapacityError,
    ConfigError,
    FastDecodeError,
    ModelError,
    ProtocolError,
    RequestError,
    WorkerError,
)
from fastdecode.core.spec import MAX_HEADS, MAX_LAYERS, MAX_SEQUENCE_TOKENS, Shard
from fastdecode.core.version import VERSION
from fastdecode.core.words import make_printable

logger = logging.getLogger(__name__)


class Role(Enum):
    """What a peer of an R-worker is."""

    S_WORKER = "S-worker"
    NEIGHBOUR = "neighbour"
    READER = "reader"
    CONTROLLER = "controller"

    __hash__ = object.__hash__  # of members there is one each; an Enum's own is a call in Python


MOST_PEERS: Final = {Role.S_WORKER: 8, Role.NEIGHBOUR: 4, Role.READER: 128}
"""Most peers of each role that an R-worker has at a time."""
ANYBODY: Final = frozenset(Role)
OWNERS: Final = frozenset({Role.S_WORKER, Role.NEIGHBOUR})
S_WORKERS: Final = frozenset({Role.S_WORKER})
THE_ONLY: Final = -1
"""In the place of a holder: the only one that the peer has."""

AnyT = TypeVar("AnyT")

ERRORS: Final[dict[str, type[FastDecodeError]]] = {
    kind.__name__: kind
    for kind in (
        RequestError, CapacityError, WorkerError, ModelError, ConfigError, FastDecodeError
    )
}  # fmt: skip

MAX_TEXT_CHARS: Final = 1 << 14
MAX_ID: Final = (1 << 63) - 1
MAX_LANES: Final = 256
MAX_HOLDERS: Final = 1 << 16
"""Caches of one R-worker, and R-workers of one stage."""
MAX_BLOCKS: Final = (1 << 31) - 1
"""Blocks of one cache."""
KEY_WORDS: Final = 2
"""Words of 64 bits in the key of a cached block."""

# Fields of messages. Decoding refuses what is out of bounds, and constructors do not.
Count: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_ID)]
Lane: TypeAlias = Annotated[int, Meta(ge=0, lt=MAX_LANES)]
Layer: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_LAYERS)]
Head: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_HEADS)]
Block: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_BLOCKS)]
Tokens: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_SEQUENCE_TOKENS)]
SomeTokens: TypeAlias = Annotated[int, Meta(ge=1, le=MAX_SEQUENCE_TOKENS)]
Holder: TypeAlias = Annotated[int, Meta(ge=0, lt=MAX_HOLDERS)]
CacheId: TypeAlias = Annotated[int, Meta(ge=THE_ONLY, lt=MAX_HOLDERS)]
Seconds: TypeAlias = Annotated[float, Meta(ge=0, lt=1e9)]
Wait: TypeAlias = Annotated[float, Meta(gt=0, le=1e6)]
Text: TypeAlias = Annotated[str, Meta(max_length=MAX_TEXT_CHARS)]

# Arrays of messages. The codec reads dtype and number of dims from these types; type checkers
# see NumPy's own.
if TYPE_CHECKING:
    U8: TypeAlias = NDArray[np.uint8]
    I32: TypeAlias = NDArray[np.int32]
    I32Rows: TypeAlias = NDArray[np.int32]
    I64: TypeAlias = NDArray[np.int64]
    Keys: TypeAlias = NDArray[np.int64]
    F32: TypeAlias = NDArray[np.float32]
    F32Rows: TypeAlias = NDArray[np.float32]
    Rows: TypeAlias = NDArray[np.float32] | NDArray[np.uint16]
    Activations: TypeAlias = NDArray[np.float32] | NDArray[np.uint16]
else:
    _Row, _Table, _Cube = tuple[int], tuple[int, int], tuple[int, int, int]
    U8 = np.ndarray[_Row, np.dtype[np.uint8]]
    I32 = np.ndarray[_Row, np.dtype[np.int32]]
    I32Rows = np.ndarray[_Table, np.dtype[np.int32]]
    I64 = np.ndarray[_Row, np.dtype[np.int64]]
    Keys = np.ndarray[tuple[int, Literal[KEY_WORDS]], np.dtype[np.int64]]
    F32 = np.ndarray[_Row, np.dtype[np.float32]]
    F32Rows = np.ndarray[_Table, np.dtype[np.float32]]
    Rows = np.ndarray[_Table, np.dtype[np.float32 | np.uint16]]
    Activations = np.ndarray[_Cube, np.dtype[np.float32 | np.uint16]]
    """uint16 has the bits of a 16-bit float: the dtype is agreed in ``Hello``."""


def error_fields(error: object) -> tuple[str, str, str]:
    """Return kind, message and code of an error, as they travel: a subclass becomes the closest
    kind of ``ERRORS``. Raises TypeError: If it is another error."""
    if not isinstance(error, FastDecodeError):
        raise TypeError(f"{type(error).__name__} has no place in a message")
    kind = next(each.__name__ for each in type(error).__mro__ if each.__name__ in ERRORS)
    # UTF-8 has no lone surrogates, which a client's text may have.
    return kind, error.message.encode("utf-8", "replace").decode(), error.code


def error_of(fields: Any) -> FastDecodeError:
    """Return the error that has these fields. Raises ValidationError: If a field is wrong."""
    kind, message, code = convert(fields, tuple[Literal[tuple(ERRORS)], str, str])  # type: ignore[misc]
    return ERRORS[kind](message, code=code)


def check_rows(first: Sized, **others: NDArray[Any] | None) -> None:
    """Raise ProtocolError unless each array has as many rows as ``first``."""
    for name, array in others.items():
        if array is not None and len(array) != len(first):
            raise ProtocolError(f"{name} has {len(array)} rows, where {len(first)} belong")


def unasked(message: object) -> str:
    """Return what is wrong with a message that was not due, to stand behind its sender's name."""
    return f"sent {type(message).__name__}, which was not asked for"


class Message(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A message of the protocol. Its tag is its number on the wire: below 65 those to R-workers
    and stages, from 65 on their answers, from 129 on those to instances, from 193 on theirs. A
    retired number is not used again."""

    lends: ClassVar[bool] = False
    """Its arrays are left alone until the answer is here, so that a transport may send them from
    where they lie."""
    is_long: ClassVar[bool] = False
    """Its fields may need more than the head of a frame."""


class Long(Message, frozen=True, tag=64, eq=False):
    """Stands for a message that ``is_long``, whose msgpack fills more than a head."""

    fields: U8


class Worded(Message, frozen=True):
    """A message with texts of a peer, which may be logged."""

    def __post_init__(self) -> None:
        make_printable(self, MAX_TEXT_CHARS)


def compare_versions(peer: str, version: str) -> None:
    """Log a warning if a peer with the same protocol runs another version of FastDecode."""
    if version != VERSION:
        logger.warning(
            "%s runs fastdecode %s, this process %s: install the same version on every host",
            peer, version or "of an unknown version", VERSION,
        )  # fmt: skip


class Asking(Message, frozen=True):
    """A message to an R-worker, a stage or an instance."""

    answers: ClassVar[tuple[type[Any], ...]] = ()
    """Kinds of answer, of which it gets one. Empty if it is not answered."""
    said_by: ClassVar[frozenset[Role]] = S_WORKERS
    is_transfer: ClassVar[bool] = False
    """Reports on it come until it is over."""
    repeated: ClassVar[tuple[str, ...]] = ()
    """Fields that an answer repeats."""
    in_every_stage: ClassVar[bool] = False
    """It goes to a cache group's members in all stages, not in the first alone."""

    def check(self, answer: Any) -> None:
        """Raise ProtocolError if ``answer`` is not an answer to this. Its text goes behind the
        peer's name."""
        if not isinstance(answer, self.answers):
            raise ProtocolError(f"{unasked(answer)}: are all of the same version?")
        for name in self.repeated:
            asked, found = getattr(self, name), getattr(answer, name)
            if found != asked:
                raise ProtocolError(
                    f"answered {type(self).__name__} for {name}={found}, where {asked} was due"
                )

    def for_holder(self: AnyT, holder: int) -> AnyT:
        """Return it for this holder, if it is for one."""
        return self

    def part(self: AnyT, shard: Shard) -> AnyT:
        """Return what one member of a cache group is sent: all of it, or its heads' arrays."""
        return self

    def join(self, answers: Sequence[Any]) -> Any:
        """Return a cache group's answer. Its members' are in the order of heads, and checked."""
        return answers[0]

    def undo(self) -> Any:
        """Return what members that accepted it are sent when another one refused. None if what was
        accepted may stay."""
        return None


class ForHolder(Asking, frozen=True):
    """A message about one holder's cache."""

    said_by = OWNERS

    def for_holder(self: AnyT, holder: int) -> AnyT:
        made: AnyT = replace(self, holder=holder)  # type: ignore[type-var]
        return made
