"""The state of every sequence, and what is pending for it.

==========  ===============================================  ===================================
state       means                                            goes to
==========  ===============================================  ===================================
WAITING     queued; it has never run, and holds nothing      FETCHING, RESERVING, DONE
REQUEUED    queued again: preempted, refused, lost, doubted  FETCHING, RESERVING, DONE
FETCHING    it has a place, and waits for blocks from a      RESERVING, REQUEUED, DONE
            lower tier, or from another engine; nothing is
            open
RESERVING   holders were asked for its room                  RUNNING, REQUEUED, DONE
RUNNING     it may be in a step                              EXPORTED, RECOVERING, REQUEUED, DONE
EXPORTED    nothing of it runs; its blocks stay for another  REQUEUED, DONE
            engine
RECOVERING  a holder of it was lost or leaves; the holder's  RUNNING, REQUEUED, DONE
            replica is asked
DONE        nothing is left of it; its last token may be     REQUEUED
            coming
==========  ===============================================  ===================================

Each change of state goes through ``SequenceTable.move``, which refuses any other.

What happens to a sequence while a step of it is in flight, or while something
that was asked for it isn't answered, is **pending** (``PendingAction``): it is
carried out when the sequence is **at rest**. Only then is it known what has to be
closed, and no step writes to it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from fastdecode.core.holders import HolderId, Part, PartId, SequenceId
from fastdecode.core.sequence import NOTHING, Request, Sequence
from fastdecode.schedule.plan import Chunk, Start


class SequenceState(Enum):
    """See the module."""

    WAITING = "waiting"
    REQUEUED = "requeued"
    FETCHING = "fetching"
    RESERVING = "reserving"
    RUNNING = "running"
    EXPORTED = "exported"
    RECOVERING = "recovering"
    DONE = "done"


_S: Final = SequenceState
_STARTS: Final = frozenset({_S.FETCHING, _S.RESERVING, _S.DONE})
_ENDS: Final = frozenset({_S.REQUEUED, _S.DONE})
TRANSITIONS: Final[Mapping[SequenceState, frozenset[SequenceState]]] = {
    _S.WAITING: _STARTS,
    _S.REQUEUED: _STARTS,
    _S.FETCHING: _ENDS | {_S.RESERVING},
    _S.RESERVING: _ENDS | {_S.RUNNING},
    _S.RUNNING: _ENDS | {_S.EXPORTED, _S.RECOVERING},
    _S.EXPORTED: _ENDS,
    _S.RECOVERING: _ENDS | {_S.RUNNING},
    _S.DONE: frozenset({_S.REQUEUED}),
}
"""States that a sequence may enter from each."""


class PendingAction(Enum):
    """What is done with a sequence when it is at rest."""

    REQUEUE = "requeue"
    RECOVER = "recover"
    """Continue it with what a replica has of it, when that is known."""
    DROP = "drop"


@dataclass(eq=False)
class SequenceRecord:
    """State of one sequence."""

    sequence: Sequence
    longest: int
    """Most tokens that it may have."""
    lane: int = 0
    """The lane in which it starts."""
    state: SequenceState = SequenceState.WAITING
    """Changed by ``SequenceTable.move`` alone."""
    pending: PendingAction | None = None
    opened: dict[PartId, Part] = field(default_factory=dict)
    unanswered: set[PartId] = field(default_factory=set)
    fetching: Start | None = None
    """Its start, while blocks of it are fetched."""
    awaits: set[int] = field(default_factory=set)
    """Jobs that fetch them."""
    is_counted: bool = False
    """True if it is known how many tokens it was spared (``num_reused``)."""

    def stop_awaiting(self) -> None:
        """Note that it waits for no blocks."""
        self.fetching = None
        self.awaits.clear()


@dataclass
class SequenceCounts:
    """What has happened to sequences, in numbers."""

    num_cached_prompt_tokens: int = 0
    """Tokens that sequences started with, and others had run."""
    num_gap_tokens: int = 0
    """Tokens that were run again, since cached blocks behind them were left."""
    num_recomputed: int = 0
    """Sequences that started again: their R-worker was lost, or is doubted."""
    num_suspended: int = 0
    """Sequences that gave their blocks to others, to be recomputed."""


class SequenceTable:
    """Every sequence that is not over."""

    def __init__(self) -> None:
        self.counts = SequenceCounts()
        self.num_cached_tokens = 0
        """The load W, of all sequences."""
        self.by_sequence: dict[SequenceId, SequenceRecord] = {}
        self.by_request: dict[str, list[SequenceRecord]] = {}
        self.flying: dict[int, frozenset[SequenceId]] = {}
        """Sequences whose step is in flight, by lane."""
        self.num_pending = 0
        """Sequences with a pending action."""
        self._sequence_ids = map(SequenceId, itertools.count())

    def make(self, request: Request) -> list[Sequence]:
        """Make a request's sequences, not added yet."""
        return [
            Sequence.of(next(self._sequence_ids), request, index)
            for index in range(request.params.n)
        ]

    def add(self, request: Request, sequences: Iterable[Sequence]) -> None:
        """Add the sequences of a queued request."""
        assert request.request_id not in self.by_request, (
            "request ids are unique among the unfinished"
        )
        lives = [SequenceRecord(sequence, sequence.max_cached_tokens + 1) for sequence in sequences]
        self.by_request[request.request_id] = lives
        for life in lives:
            self.by_sequence[life.sequence.sequence_id] = life

    def is_at_rest(self, life: SequenceRecord) -> bool:
        """Return True if no step of it is in flight, and all that was asked for it is answered."""
        flies = any(life.sequence.sequence_id in flying for flying in self.flying.values())
        return not flies and not life.unanswered

    def set_pending(self, life: SequenceRecord, action: PendingAction) -> None:
        self.num_pending += life.pending is None
        life.pending = action

    def clear_pending(self, life: SequenceRecord) -> None:
        self.num_pending -= 1
        life.pending = None

    def move(self, life: SequenceRecord, state: SequenceState) -> None:
        """Change a sequence's state, which ``TRANSITIONS`` has to allow."""
        is_known = state is life.state or state in TRANSITIONS[life.state]
        assert is_known, f"a sequence that is {life.state.value} can't be {state.value}"
        life.state = state

    def cache(self, life: SequenceRecord, num_cached: int, behind_gap: range = NOTHING) -> None:
        """Set how many leading tokens of a sequence are cached, and which behind a gap."""
        sequence = life.sequence
        self.num_cached_tokens -= sequence.num_present
        sequence.num_cached, sequence.behind_gap = num_cached, behind_gap
        self.num_cached_tokens += sequence.num_present

    def state(self, sequence_id: SequenceId) -> SequenceState:
        """Return a sequence's state, also of one that is over."""
        life = self.by_sequence.get(sequence_id)
        return SequenceState.DONE if life is None else life.state

    def wanted(self, chunks: Seq[Chunk]) -> Seq[Chunk]:
        """Return a step's chunks that count: nothing is pending for their sequences."""
        if not self.num_pending:
            return chunks
        lives = self.by_sequence
        return [x for x in chunks if lives[x.sequence.sequence_id].pending is None]

    def awaiting(self, chunks: Seq[Chunk]) -> Seq[Chunk]:
        """Return the chunks of an ended step whose tokens are coming, and wanted."""
        return [
            chunk
            for chunk in chunks
            if chunk.sequence.is_coming
            and (life := self.by_sequence.get(chunk.sequence.sequence_id)) is not None
            and life.pending is not PendingAction.DROP
        ]

    def is_on(self, holder: HolderId) -> bool:
        """Return True if any sequence has a part on the holder."""
        residences = (life.sequence.residence for life in self.by_sequence.values())
        return any(residence is not None and residence.is_on(holder) for residence in residences)

    def of_request(self, request_id: str) -> list[Sequence]:
        return [life.sequence for life in self.by_request.get(request_id, ())]

    def untouched_requests(self) -> list[str]:
        """Return the requests of which nothing runs, and nothing was drawn yet."""
        return [
            request_id
            for request_id, lives in self.by_request.items()
            if len(lives) == lives[0].sequence.request.params.n
            and all(
                life.sequence.residence is None
                and (life.state is SequenceState.WAITING or not life.sequence.num_generated)
                for life in lives
            )
        ]

    def check_invariants(self, waiting: set[SequenceId]) -> None:
        """Recount everything. ``waiting``: those that are in the queue."""
        every = self.by_sequence.values()
        assert self.num_cached_tokens == sum(life.sequence.num_present for life in every), (
            "the load is wrong"
        )
        assert self.num_pending == sum(life.pending is not None for life in every)
        flying = [sequence_id for ids in self.flying.values() for sequence_id in ids]
        assert len(flying) == len(set(flying)) and set(flying) <= set(self.by_sequence), (
            "it steps twice"
        )
        for life in every:
            _check_life(life, life.sequence.sequence_id in waiting, self.is_at_rest(life))


def _check_life(life: SequenceRecord, is_waiting: bool, is_at_rest: bool) -> None:
    sequence, residence = life.sequence, life.sequence.residence
    assert life.state is not SequenceState.DONE or (sequence.is_coming and not is_waiting)
    assert is_waiting == (life.state in (SequenceState.WAITING, SequenceState.REQUEUED))
    assert (is_waiting or life.state is SequenceState.DONE) == (residence is None)
    assert life.pending in (None, PendingAction.RECOVER) or not is_at_rest, (
        "what is pending could have been carried out"
    )
    assert (life.pending is PendingAction.RECOVER) <= (life.state is SequenceState.RECOVERING)
    if residence is None:
        assert sequence.num_present == 0 and not life.opened and is_at_rest
        return
    assert 0 <= sequence.num_cached <= sequence.num_tokens <= sequence.max_cached_tokens + 1
    assert life.pending is not None or sequence.num_present < sequence.num_tokens
    assert sequence.num_cached <= residence.num_tokens
    if sequence.behind_gap:
        assert sequence.gap and len(residence.parts) == 1
        assert sequence.behind_gap.stop < sequence.num_tokens
    own = {part.part_id for part in residence.parts}
    assert own >= set(life.opened) | life.unanswered
    assert (life.fetching is not None) == bool(life.awaits)
    assert life.state is not SequenceState.FETCHING or life.fetching is not None
    if life.pending is None and life.state not in (_S.FETCHING, _S.EXPORTED):
        assert own == set(life.opened) | life.unanswered, "a part is neither open nor asked for"
        assert (life.state is SequenceState.RESERVING) == (not own <= set(life.opened))
