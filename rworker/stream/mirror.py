"""What to send a neighbour so that its replica of a cache keeps up.

State changes (opened, forked, enlarged, truncated, closed) are sent in the order
in which the cache accepted them, always. K and V follow as chunks read out of
the cache: one a step while there is credit, all layers of it together. Without
credit nothing is kept for later but numbers; what has gathered by the time it
returns leaves then. So a replica may be behind, and is never anything but a
prefix of every sequence.

Blocks that the cache keeps beyond their sequences are kept by the replica, too
(``kept_log``): some may be missing there, and none is ever another's.

A cache that holds something already is mirrored in the same way: its sequences
are opened and forked as they share blocks, and everything is behind.

A cached block of which a sequence has a part is stored twice in the replica. If the cache is full,
the neighbour may refuse that: the replica ends, and another one may begin.

Nothing here does I/O: the link's owner sends ``next`` for as long as it gives
something, and hands in what the neighbour answers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, TypeAlias

from msgspec.structs import replace

from fastdecode.core.errors import ProtocolError
from fastdecode.core.holders import HolderId
from fastdecode.wire.blocks import NO_PARENT, Forget, KeptToRWorker, Name, StoreChunk, words_of
from fastdecode.wire.messages import Accepted, Close, FromRWorker, Hello, Open
from fastdecode.wire.traits import THE_ONLY, Role
from rworker.cache_state import CacheState
from rworker.stream.memory import ChunkMemory
from rworker.stream.replica_log import ReplicaLog, ToNeighbour

LINK_BYTES: Final = 64 << 20  # most K and V in flight on one link, unanswered
UNANSWERED: Final = (Close, Name, Forget)
"""Messages to the neighbour that it doesn't answer."""

Steps: TypeAlias = dict[int, int]
"""Lane → the last of its steps."""


@dataclass(frozen=True)
class _Due:
    """An answer of the neighbour's."""

    answer: Accepted
    num_bytes: int
    """Bytes of K and V that it answers for."""
    steps: Steps
    """Steps that are there with it, in every layer."""


class Mirror:
    """Keeps one replica up to date.

    Args:
        holder: name of the cache and of its replica.
        books: books of the cache.
        memory: memory of the cache.
        link_bytes: most bytes of K and V that are in flight. One chunk may always be.
    """

    def __init__(
        self, holder: HolderId, books: CacheState, memory: ChunkMemory, link_bytes: int = LINK_BYTES
    ) -> None:
        self._link_bytes = link_bytes
        hello = books.hello
        self.hello: Final[Hello] = replace(
            hello,
            role=Role.NEIGHBOUR,
            holder=holder,
            max_blocks=books.store.num_blocks,
            outlives=False,
            resumes=False,
        )
        """What opens the replica."""
        self._told = ReplicaLog(holder, books, memory)
        self._changes: deque[KeptToRWorker] = deque(_as_changes(books))
        self._ready: deque[ToNeighbour] = deque()
        self._due: deque[_Due] = deque()
        self._ended: Steps = {}  # that aren't all read
        self._read: Steps = {}  # that are there with the last that is ready
        self._held: Steps = {}  # that the neighbour has, and not yet taken (``take_held``)
        self.num_unacknowledged = 0
        """Bytes of K and V that the neighbour hasn't answered for."""
        self._has_caught_up = False  # once, all kept blocks that were there before are sent
        self._carried_last = False

    def follow(self, change: KeptToRWorker) -> None:
        """Let the replica follow a change that the cache has accepted."""
        self._told.expect(change)
        self._changes.append(replace(change, holder=THE_ONLY))

    def end_step(self, lane: int, step: int) -> None:
        """Note that the cache has all of a lane's step in every layer."""
        self._ended[lane] = step

    def next(self) -> ToNeighbour | None:
        """Return what to send now. None if there is nothing until something happens."""
        while not self._ready:
            if not (self._make_changes() if self._changes else self._read_on()):
                return None
        message = self._ready[0]
        num_bytes = len(message.data) if isinstance(message, StoreChunk) else 0
        if num_bytes and not self._has_credit(num_bytes):
            return None  # several were read at once
        self._ready.popleft()
        self.num_unacknowledged += num_bytes
        if not isinstance(message, UNANSWERED):
            steps: Steps = {}
            if num_bytes and not any(isinstance(later, StoreChunk) for later in self._ready):
                steps, self._read = self._read, steps
            self._due.append(_Due(Accepted(message.sequence_id), num_bytes, steps))
        if self._ended and not self._ready and not self._changes and self._is_up_to_date:
            self._mark_ended()
        return message

    def take_held(self) -> Steps:
        """Return the steps that the neighbour has got since the last call."""
        if self._ended and self.is_whole and self._is_up_to_date:
            self._mark_ended()
        held, self._held = self._held, {}
        return held

    def take(self, answer: FromRWorker) -> None:
        """Take in an answer. Raises ProtocolError: If the replica is not what the cache is: then it
        must not be used."""
        due = self._due[0].answer if self._due else None
        if due is None or answer != due:
            raise ProtocolError(
                f"the replica is no copy any more: {answer} came where {due or 'nothing'} was due"
            )
        answered = self._due.popleft()
        self._held |= answered.steps
        self.num_unacknowledged -= answered.num_bytes

    @property
    def is_whole(self) -> bool:
        """True if the neighbour has all that the cache has in every layer."""
        return not (self._changes or self._ready or self._due or self.num_behind)

    @property
    def lacking(self) -> list[bytes]:
        """Keys of cached blocks that are to be sent by themselves."""
        return self._told.lacking

    @property
    def num_behind(self) -> int:
        """Tokens that are in every layer of the cache and haven't been sent."""
        return sum(self._told.behind().values())

    @property
    def _is_up_to_date(self) -> bool:
        """True if all tokens are sent, and the cached blocks that were there before."""
        self._has_caught_up = self._has_caught_up or not self.lacking
        return self._has_caught_up and not self.num_behind

    def _mark_ended(self) -> None:
        """Let the last answer that is due stand for all of the steps that have ended."""
        marked = self._due[-1].steps if self._due else self._held
        marked.update(self._ended)
        self._ended.clear()

    def _has_credit(self, num_bytes: int) -> bool:
        """Return True if ``num_bytes`` more may be in flight."""
        under_way = self.num_unacknowledged
        return not under_way or under_way + num_bytes <= self._link_bytes

    def _make_changes(self) -> bool:
        """Send the next change, or what it needs before. Return False if it has to wait."""
        needed = self._told.needed(self._changes[0])
        if needed is None:
            return False
        tokens, keys = needed
        if tokens:
            return bool(self._send(tokens))
        if keys:
            return self._carry(keys)
        self._ready.extend(self._told.change(self._changes.popleft()))
        return True

    def _send(self, behind: dict[int, int]) -> dict[int, int]:
        """Send as many of these numbers of sequences' next tokens as one chunk takes. Return them:
        none without credit."""
        tokens = self._told.fitting(behind)
        if not self._has_credit(self._told.num_bytes(sum(tokens.values()))):
            return {}
        self._ready.extend(self._told.send(tokens))
        return tokens

    def _carry(self, keys: list[bytes]) -> bool:
        """Send the first of these cached blocks. Return False if there is no credit."""
        keys = keys[: self._told.most_carried]
        num_tokens = len(keys) * self.hello.kv.block_size
        if not self._has_credit(self._told.num_bytes(num_tokens)):
            return False
        self._ready.extend(self._told.carry(keys))
        return True

    def _read_on(self) -> bool:
        """Read the next chunk once all changes are made. Tokens and cached blocks take turns.
        Return False if there is nothing to read, or no credit."""
        if not self._has_credit(1):
            return False
        behind = self._told.behind()
        if not (behind and self._carried_last) and (lacking := self.lacking):
            self._carried_last = True
            return self._carry(lacking)
        self._carried_last = False
        tokens = self._send(behind) if behind else {}
        if tokens and tokens == behind and self._has_caught_up:
            self._read, self._ended = self._ended, {}
        return bool(tokens)


def _as_changes(books: CacheState) -> Iterator[KeptToRWorker]:
    """Return the changes that make an empty cache's sequences share blocks as these do, as far as
    they begin with the same ones."""
    tables, size = books.store.tables, books.store.block_size
    # The first sequence that begins with the first blocks of another one, and continues with this.
    first_with: dict[tuple[int, int, int], int] = {}
    key_of = books.store.cached.key_of()
    for sequence, row in tables.row_of.items():
        if row in tables.gaps:
            continue
        blocks = tables.of_row(row).tolist()[: int(tables.lengths[row]) // size]
        parent = same = NO_PARENT
        num_shared, names = 0, list[Name]()
        for place, block in enumerate(blocks):
            same = first_with.setdefault((same, place, block), sequence)
            if same != sequence:
                parent, num_shared = same, place + 1
            elif block in key_of:
                names.append(Name(sequence, place, words_of([key_of[block]])))
        yield Open(sequence, int(tables.reserved[row]), num_shared * size, parent_id=parent)
        yield from names
