"""Instructions of the state machine to its loop. Everything is resolved and checked: carrying it
out decides nothing. Peers are the numbers that the loop's hub has for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from cpu_kernels import BlockLayout
from fastdecode.core.dtype import DType
from fastdecode.core.holders import HolderId
from fastdecode.core.spec import AttentionSpec
from fastdecode.wire.blocks import Done, Fetch, KeptToRWorker, Retain, TakeOver, words_of
from fastdecode.wire.messages import Activations, FromRWorker
from rworker.stream.chunks import ChunkShape
from rworker.tiers.tier import MoveJob

if TYPE_CHECKING:
    from rworker.cache_state import CacheState
    from rworker.step_plan import StepPlan

RESTORER: Final = -2  # stands for the peer whose messages are read from a replica's file
OVER: Final = -1  # stands for a link's number: the link ends


@dataclass(frozen=True)
class Send:
    """Answer a peer."""

    to: int
    message: FromRWorker


@dataclass(frozen=True)
class TellAboutHost:
    """Answer with a ``Report`` of these and the host."""

    to: int
    num_threads: int
    kv_bytes: int
    model_hash: str


@dataclass(frozen=True)
class Prepare:
    """Make a holder's KV cache in place of any former one, and get the kernels ready."""

    holder: HolderId
    layout: BlockLayout
    num_blocks: int
    attention: tuple[AttentionSpec, ...]
    """``AttentionSpec`` of each layer."""
    activation_dtype: DType
    is_on_disk: bool = False
    """True if its memory is a file, as other caches have all the memory."""


@dataclass(frozen=True, eq=False)
class CopyBlocks:
    """Copy blocks of a holder's cache, in every layer, before any later instruction."""

    holder: HolderId
    source_ids: NDArray[np.int64]  # [C]
    target_ids: NDArray[np.int64]  # [C]


@dataclass(frozen=True, eq=False)
class Compute:
    """Append k and v, attend q, and answer a peer with the result."""

    to: int
    holder: HolderId
    plan: StepPlan
    layer: int
    q: Activations  # act [T_q, Hq, D]
    k: Activations  # act [T_kv, Hkv, D]
    v: Activations  # act [T_kv, Hkv, D]


@dataclass(frozen=True, eq=False)
class PlaceChunk:
    """Write a chunk into a holder's blocks."""

    holder: HolderId
    shape: ChunkShape
    places: NDArray[np.int64]
    """Slots of its tokens, [T]. Of whole blocks their ids, [B]."""
    data: NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class ReadChunk:
    """Read a chunk out of a holder's blocks."""

    holder: HolderId
    shape: ChunkShape
    places: NDArray[np.int64]
    """As in ``PlaceChunk``."""


@dataclass(frozen=True, eq=False)
class SendBlocks:
    """Answer a peer with cached blocks."""

    to: int
    is_there: NDArray[np.uint8]
    """1 for each block that it asked for and that is cached, else 0."""
    read: ReadChunk
    """Reads the cached ones."""


@dataclass(frozen=True, eq=False)
class LinkReplica:
    """Keep a replica of a holder's cache at a neighbour, in place of the neighbour that had it."""

    to: int
    """The peer that gets reports of how far the replica has come."""
    holder: HolderId
    books: CacheState
    keeper: str
    """The neighbour's address, or ``ON_DISK``. Empty to end the replica."""
    link_bytes: int
    number: int
    timeout_s: float
    """Longest silence of a neighbour that owes an answer."""


@dataclass(frozen=True, eq=False)
class ReadReplica:
    """Read a lost holder's replica from its file, as the peer ``RESTORER``, for a peer that takes
    it over."""

    to: int
    message: TakeOver


@dataclass(frozen=True)
class RemoveReplica:
    """Remove the files of a holder's replica, up to those of this link."""

    holder: HolderId
    session: int
    link: int


@dataclass(frozen=True)
class Follow:
    """Let a holder's replica follow a change of its cache."""

    holder: HolderId
    change: KeptToRWorker


@dataclass(frozen=True)
class EndStep:
    """A step of a holder that has a replica has ended: K and V of it may follow."""

    holder: HolderId
    lane: int
    step: int


@dataclass(frozen=True)
class OpenTier:
    """Open a holder's lower tier, if there is one, and report its blocks to a peer."""

    to: int
    holder: HolderId
    identity: str


@dataclass(frozen=True)
class MoveBlocks:
    """Copy blocks in the background, and report to a peer."""

    to: int
    holder: HolderId
    books: CacheState
    move: MoveJob
    message: Retain | Fetch

    def end(
        self,
        num_bytes: int = 0,
        seconds: float = 0.0,
        faults: tuple[int, int, int, int] = (0, 0, 0, 0),
        reason: str = "",
    ) -> Done:
        """End the job, and return the report. ``reason``: why all of it has failed, if it has."""
        keys, number = self.move.keys, self.move.number
        failed = set(range(len(keys))) if reason else self.move.failed
        self.books.store.cached.end(number, failed)
        missing = words_of([keys[place] for place in sorted(failed)])
        return Done(self.holder, number, missing, num_bytes, seconds, *faults, reason=reason)


@dataclass(frozen=True)
class DropStored:
    """Drop blocks from a holder's lower tier."""

    holder: HolderId
    keys: tuple[bytes, ...]


@dataclass(frozen=True)
class Unlink:
    """End all transfers of a holder's cache without a report, and close its lower tier."""

    holder: HolderId


@dataclass(frozen=True)
class Drop:
    """Free a holder's KV cache."""

    holder: HolderId


@dataclass(frozen=True)
class HangUp:
    """Close the connection to a peer, which is lost then."""

    peer: int
    may_return: bool = False
    """It did not send ``Shutdown``: it may have been stopped, or out of reach."""
    is_torn: bool = False
    """Its last message was not carried out to its end: its caches lack what their books have."""


@dataclass(frozen=True)
class Stop:
    """Leave the loop."""


Occasional: TypeAlias = (
    TellAboutHost
    | Prepare
    | CopyBlocks
    | PlaceChunk
    | SendBlocks
    | LinkReplica
    | ReadReplica
    | RemoveReplica
    | Follow
    | EndStep
    | OpenTier
    | MoveBlocks
    | DropStored
    | Unlink
    | Drop
    | HangUp
    | Stop
)
"""What no plain decode step needs."""
Instruction: TypeAlias = Compute | Send | Occasional
