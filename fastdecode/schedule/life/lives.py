"""The books of a lifecycle: every sequence that isn't over, where it is in its
life, and what was asked for it."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from enum import Enum

from fastdecode.core.holders import HolderId, KVSource, Part, PartId, SequenceId
from fastdecode.core.sequence import NOTHING, Request, Sequence
from fastdecode.schedule.plan import Chunk, Start

_STORY_LENGTH = 1 << 13


class Status(Enum):
    """Where a sequence is in its life."""

    WAITING = "waiting"
    """It has never run."""
    OPENING = "opening"
    """It starts, and not all of its room is granted yet."""
    RUNNING = "running"
    PARKED = "parked"
    """It is handed over: nothing of it runs, and what is cached is kept."""
    INTERRUPTED = "interrupted"
    """It waits to be recomputed."""
    FINISHED = "finished"
    """Nothing of it is left; but its last token may be coming."""


class Fate(Enum):
    """What becomes of a sequence when it is at rest."""

    REQUEUE = "requeue"
    RESUME = "resume"
    """It goes on with what a replica has of it, when that is known."""
    DROP = "drop"


@dataclass(eq=False)
class Life:
    """Of one sequence."""

    sequence: Sequence
    longest: int
    """Tokens that it may come to."""
    lane: int = 0
    """In which it starts."""
    status: Status = Status.WAITING
    fate: Fate | None = None
    opened: dict[PartId, Part] = field(default_factory=dict)
    unanswered: set[PartId] = field(default_factory=set)
    fetching: Start | None = None
    """As which it starts, or has started, while blocks are coming with which it
    does."""
    awaits: set[int] = field(default_factory=set)
    """Jobs that fetch them."""
    has_joined: bool = False
    """It steps before all of them are there."""
    sources: tuple[KVSource, ...] = ()
    """From where its first tokens are to be fetched, once all parts are open."""
    pulling: set[PartId] = field(default_factory=set)
    """Parts that are being fetched."""

    @property
    def is_parked(self) -> bool:
        """Whether it waits for blocks, and nothing was asked for it yet."""
        return self.fetching is not None and not self.has_joined

    def stop_awaiting(self) -> None:
        """No blocks are coming for it any more."""
        self.fetching, self.has_joined = None, False
        self.awaits.clear()


class Stories:
    """What has happened to sequences, as far as that is remembered."""

    def __init__(self) -> None:
        self._told: deque[tuple[SequenceId, str]] = deque(maxlen=_STORY_LENGTH)

    def add(self, sequence_id: SequenceId, what: str) -> None:
        self._told.append((sequence_id, what))

    def __getitem__(self, sequence_id: SequenceId) -> list[str]:
        """Of a sequence, in order; also of one that is over."""
        return [what for i, what in self._told if i == sequence_id]


class Lives:
    """All sequences that aren't over."""

    def __init__(self) -> None:
        self.num_cached_tokens = 0
        """The load W: of all sequences."""
        self.by_sequence: dict[SequenceId, Life] = {}
        self.by_request: dict[str, list[Life]] = {}
        """Of requests that aren't over."""
        self.flying: dict[int, frozenset[SequenceId]] = {}
        """By lane: those whose step is in flight."""
        self.num_fates = 0
        """Sequences of which it isn't carried out yet what becomes of them."""
        self._sequence_ids = map(SequenceId, itertools.count())
        self.stories = Stories()

    def make(self, request: Request) -> list[Sequence]:
        """A request's sequences, which are no part of the books yet."""
        return [
            Sequence.of(next(self._sequence_ids), request, index)
            for index in range(request.params.n)
        ]

    def add(self, request: Request, sequences: Iterable[Sequence]) -> None:
        """A request has been queued."""
        assert request.request_id not in self.by_request, (
            "request ids are unique among the unfinished"
        )
        lives = [Life(sequence, sequence.max_cached_tokens + 1) for sequence in sequences]
        self.by_request[request.request_id] = lives
        for life in lives:
            self.by_sequence[life.sequence.sequence_id] = life
            self.tell(life, f"submitted, {life.sequence.num_prompt_tokens} tokens")

    def is_at_rest(self, life: Life) -> bool:
        """Whether no step of it is in flight, and all that was asked for it is answered."""
        flies = any(life.sequence.sequence_id in flying for flying in self.flying.values())
        return not flies and not life.unanswered

    def doom(self, life: Life, fate: Fate) -> None:
        """That becomes of it."""
        self.num_fates += life.fate is None
        life.fate = fate

    def absolve(self, life: Life) -> None:
        """What was to become of it has."""
        self.num_fates -= 1
        life.fate = None

    def place(
        self, life: Life, status: Status, num_cached: int, behind_gap: range = NOTHING
    ) -> None:
        """So many of the sequence's leading tokens are cached from now on, and
        these, which have a gap before them."""
        sequence = life.sequence
        self.num_cached_tokens -= sequence.num_present
        sequence.num_cached, sequence.behind_gap = num_cached, behind_gap
        self.num_cached_tokens += sequence.num_present
        life.status = status

    def tell(self, life: Life, what: str) -> None:
        """Remember what has happened."""
        self.stories.add(life.sequence.sequence_id, what)

    def status(self, sequence_id: SequenceId) -> Status:
        """Where a sequence is in its life; also one that is over."""
        life = self.by_sequence.get(sequence_id)
        return Status.FINISHED if life is None else life.status

    def wanted(self, chunks: Seq[Chunk]) -> Seq[Chunk]:
        """Of a step's chunks those that count: their sequences weren't
        cancelled, nor did they lose a part."""
        if not self.num_fates:
            return chunks
        return [
            chunk for chunk in chunks if self.by_sequence[chunk.sequence.sequence_id].fate is None
        ]

    def awaiting(self, chunks: Seq[Chunk]) -> Seq[Chunk]:
        """Of a step that is over, those whose tokens are coming, and wanted."""
        return [
            chunk
            for chunk in chunks
            if chunk.sequence.is_coming
            and (life := self.by_sequence.get(chunk.sequence.sequence_id)) is not None
            and life.fate is not Fate.DROP
        ]

    def is_on(self, holder: HolderId) -> bool:
        """Whether any sequence still remembers the holder."""
        residences = (life.sequence.residence for life in self.by_sequence.values())
        return any(residence is not None and residence.is_on(holder) for residence in residences)

    def sequences(self, request_id: str) -> list[Sequence]:
        """Those of a request that aren't over."""
        return [life.sequence for life in self.by_request.get(request_id, ())]

    def untouched_requests(self) -> list[str]:
        """Those of which nothing runs, and nothing was drawn yet."""
        return [
            request_id
            for request_id, lives in self.by_request.items()
            if len(lives) == lives[0].sequence.request.params.n
            and all(
                life.sequence.residence is None
                and (life.status is Status.WAITING or not life.sequence.num_generated)
                for life in lives
            )
        ]

    def check_invariants(self, waiting: set[SequenceId]) -> None:
        """Recount everything. ``waiting``: those that are in the queue."""
        every = self.by_sequence.values()
        assert self.num_cached_tokens == sum(life.sequence.num_present for life in every), (
            "the load is wrong"
        )
        assert self.num_fates == sum(life.fate is not None for life in every)
        flying = [sequence_id for ids in self.flying.values() for sequence_id in ids]
        assert len(flying) == len(set(flying)) and set(flying) <= set(self.by_sequence), (
            "it steps twice"
        )
        for life in every:
            _check_life(life, life.sequence.sequence_id in waiting, self.is_at_rest(life))


def _check_life(life: Life, is_waiting: bool, is_at_rest: bool) -> None:
    sequence, residence = life.sequence, life.sequence.residence
    assert life.status is not Status.FINISHED or (sequence.is_coming and not is_waiting)
    assert is_waiting == (life.status in (Status.WAITING, Status.INTERRUPTED))
    assert (is_waiting or life.status is Status.FINISHED) == (residence is None)
    assert life.fate in (None, Fate.RESUME) or not is_at_rest, (
        "its fate could have been carried out"
    )
    if residence is None:
        assert sequence.num_present == 0 and not life.opened and is_at_rest
        return
    assert 0 <= sequence.num_cached <= sequence.num_tokens <= sequence.max_cached_tokens + 1
    assert life.fate is not None or sequence.num_present < sequence.num_tokens
    assert sequence.num_cached <= residence.num_tokens
    if sequence.behind_gap:
        assert sequence.gap and len(residence.parts) == 1
        assert sequence.behind_gap.stop < sequence.num_tokens
    own = {part.part_id for part in residence.parts}
    assert own >= set(life.opened) | life.unanswered
    assert (life.fetching is not None) == bool(life.awaits)
    assert not life.has_joined or life.fetching is not None
    if life.fate is None and not life.is_parked:
        assert own == set(life.opened) | life.unanswered, "a part is neither open nor asked for"
        is_open = own <= set(life.opened) and not life.pulling
        assert (life.status is Status.OPENING) == (not is_open)
