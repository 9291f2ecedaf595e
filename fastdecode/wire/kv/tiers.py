"""Messages about kept blocks in a holder's lower tier, its disk.

==================  =========  ======================================================
message             direction  meaning, and the answer
==================  =========  ======================================================
``UseTier``         S → R      open the lower tier → ``Stocked``, out of order
``StoreBlocks``     S → R      copy kept blocks down, in the background → ``Moved``
``FetchBlocks``     S → R      make room for blocks that the lower tier has, and copy
                               them up, in the background → ``Moved``
``DropBlocks``      S → R      the lower tier gives blocks up, if it has them; no
                               answer
``Fetching``        R → S      how far a fetch has come that isn't over; out of order
``Moved``           R → S      a job is over, and what of it has failed; out of order
``Stocked``         R → S      what the lower tier has; several, if it is much
==================  =========  ======================================================

A block that is moved stays what it is until the job is over: it may not be
forgotten before. One that is fetched is kept by its key from the beginning.
Whoever is resumed with it before it is there attends a layer when that has
come; and if the block has failed, ``Moved`` comes before the answer to the
step's last layer, and nothing of that step is to be believed. Afterwards all
that may be done with such a block is to forget it.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Final, TypeAlias

from msgspec.structs import replace

from fastdecode.core.errors import ProtocolError
from fastdecode.core.spec import MAX_LAYERS, Shard
from fastdecode.wire.kv.kept import KEY_WORDS
from fastdecode.wire.traits import I32, S_WORKERS, THE_ONLY, ForHolder, Int, Keys, Message, Text

MOST_MOVED: Final = 1 << 12
"""Blocks of one job, and of one page of what there is."""
MAX_SLOTS: Final = 1 << 24
"""Of one holder's lower tier."""
_MOST_FAULTS: Final = 1 << 40


class UseTier(ForHolder, frozen=True, tag=40):
    identity: Text
    """What kept blocks hold beside tokens, to the bit, in 64 characters of hex:
    blocks of another one aren't used."""
    holder: Int = THE_ONLY

    said_by = S_WORKERS
    is_transfer = True
    in_every_stage = True

    def part(self, shard: Shard) -> UseTier:
        heads, kept = shard.heads, self
        if heads is not None:
            kept = kept._of(f"{heads.kv.start}:{heads.kv.stop}")
        first = 0 if shard.layers is None else shard.layers.start
        return kept._of(f"layers from {first}") if first else kept

    def of_column(self, column: int) -> UseTier:
        """For a group of several. Blocks are there if all members have theirs, so each
        has to find its own group's file again."""
        return self._of(f"column {column}")

    def _of(self, part: str) -> UseTier:
        name = f"{self.identity}/{part}".encode()
        return replace(self, identity=blake2b(name, digest_size=32).hexdigest())


class StoreBlocks(ForHolder, frozen=True, tag=41, eq=False):
    job: Int
    keys: Keys
    num_tokens: I32
    """Up to each block's end; a number that is told again by ``Stocked``."""
    holder: Int = THE_ONLY

    said_by = S_WORKERS
    is_transfer = True
    in_every_stage = True


class FetchBlocks(ForHolder, frozen=True, tag=42, eq=False):
    job: Int
    keys: Keys
    holder: Int = THE_ONLY

    said_by = S_WORKERS
    is_transfer = True
    in_every_stage = True


class DropBlocks(ForHolder, frozen=True, tag=43, eq=False):
    keys: Keys
    holder: Int = THE_ONLY

    said_by = S_WORKERS
    in_every_stage = True


class Fetching(Message, frozen=True, tag=102):
    holder: Int
    job: Int
    num_there: Int
    """Of all of its blocks the first so many layers are there, or have failed."""
    num_layers: Int
    """Of the cache."""
    seconds: float
    """Since it was begun, until they were."""

    def check(self) -> None:
        """Raises ProtocolError: no fetch comes to that."""
        is_bounded = 1 <= self.num_there < self.num_layers <= MAX_LAYERS
        if not is_bounded or not 0 <= self.seconds < 1e9:
            raise ProtocolError(
                f"says that {self.num_there} layers of {self.num_layers} were fetched in "
                f"{self.seconds} s"
            )


class Moved(Message, frozen=True, tag=100, eq=False):
    holder: Int
    job: Int
    failed: Keys
    num_bytes: Int
    """That were moved."""
    seconds: float
    num_unread: Int = 0
    """Of blocks of any job, since that was told last: those that the disk
    didn't give."""
    num_damaged: Int = 0
    """That weren't as they had been written."""
    num_unwritten: Int = 0
    """That the disk didn't take."""
    num_late: Int = 0
    """That a step couldn't wait for any longer."""

    def check(self) -> None:
        """Raises ProtocolError: no move comes to that."""
        if not 0 <= self.num_bytes < 1 << 62 or not 0 <= self.seconds < 1e9:
            raise ProtocolError(f"says that {self.num_bytes} bytes moved in {self.seconds} s")
        if min(self.faults) < 0 or max(self.faults) > _MOST_FAULTS:
            raise ProtocolError(f"says that of what was moved {self.faults} blocks had faults")
        _check_width(self.failed)

    @property
    def faults(self) -> tuple[int, int, int, int]:
        """Unread, damaged, unwritten and late ones."""
        return self.num_unread, self.num_damaged, self.num_unwritten, self.num_late


class Stocked(Message, frozen=True, tag=101, eq=False):
    holder: Int
    num_slots: Int
    """Blocks that it can have; 0: there is no lower tier."""
    keys: Keys
    """What was stored first comes first."""
    num_tokens: I32
    is_last: bool
    """All has been told."""

    def check(self) -> None:
        """Raises ProtocolError: no lower tier has that."""
        if not 0 <= self.num_slots <= MAX_SLOTS or len(self.keys) > self.num_slots:
            raise ProtocolError(f"says that {len(self.keys)} of {self.num_slots} slots are taken")
        if len(self.num_tokens) != len(self.keys) or (self.num_tokens < 1).any():
            raise ProtocolError("says of a block on disk that it has no tokens")
        _check_width(self.keys)


def _check_width(keys: Keys) -> None:
    if len(keys) and keys.shape[1] != KEY_WORDS:
        raise ProtocolError(
            f"names blocks by {keys.shape[1]} words, where {KEY_WORDS} are one name"
        )


TierToRWorker: TypeAlias = UseTier | StoreBlocks | FetchBlocks | DropBlocks
TierNews: TypeAlias = Fetching | Moved | Stocked
