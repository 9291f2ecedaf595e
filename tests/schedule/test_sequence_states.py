"""The table of sequence states: a random walk over it, in which every transition
is one of the table's, and what is pending is carried out at rest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from remembering_store import BLOCK_SIZE
from schedule_choices import options

from examples import examples
from fastdecode.core.holders import HolderId, KVSource
from fastdecode.core.sequence import Request, SamplingParams
from fastdecode.schedule.life import events
from fastdecode.schedule.life.lifecycle import Lifecycle
from fastdecode.schedule.life.sequences import (
    TRANSITIONS,
    SequenceRecord,
    SequenceState,
    SequenceTable,
)
from fastdecode.schedule.modes import make_scheduler
from fastdecode.schedule.plan import Send
from fastdecode.wire.blocks import Close, Done, Fetch, Open

SOURCES = (KVSource("p-r0", 7, 0, 5, 0, 2, 0, 3, is_held=True),)
NUM_HOLDERS = 2
NUM_LANES = 2


class Walk:
    """A lifecycle, and all that is to happen to it."""

    def __init__(self, *, imports: bool) -> None:
        self.life = Lifecycle(
            make_scheduler(
                options("greedy", NUM_LANES),
                (9, 9),
                BLOCK_SIZE,
                opening_steps=1,
                hands_over=imports,
            )
        )
        self.imports = imports
        self.rooms: list[events.Ask] = []
        self.takeovers: list[events.TakeOver] = []
        self.fetches: list[Send] = []
        self.runs: dict[int, events.Run] = {}
        self.lost: set[HolderId] = set()
        self.adopted: set[HolderId] = set()  # neighbours have taken over, and nobody came back
        self.num_requests = 0

    def tell(self, event: events.Event) -> None:
        for instruction in self.life.handle(event):
            match instruction:
                case events.Ask() if not isinstance(instruction.message, Close):
                    self.rooms.append(instruction)
                case events.TakeOver():
                    self.takeovers.append(instruction)
                case Send(message=Fetch()):
                    self.fetches.append(instruction)
                case events.Run():
                    self.runs[instruction.lane] = instruction
        self.life.check_invariants()

    def submit(self, n: int, num_tokens: int, max_tokens: int) -> None:
        self.num_requests += 1
        hands_over = self.imports and self.num_requests % 2 == 0
        sources = SOURCES if self.imports and self.num_requests % 4 == 1 else ()
        params = SamplingParams(n=n)
        self.tell(
            events.Submitted(
                Request(
                    str(self.num_requests),
                    (5,) * num_tokens,
                    params,
                    1 if hands_over else max_tokens,
                    seed=0,
                    hands_over=hands_over,
                    sources=sources,
                )
            )
        )

    def turn(self, lane: int) -> None:
        """The lane's step is over, or its next one begins."""
        if lane in self.runs:
            chunks = self.runs.pop(lane).chunks
            drawn = [
                events.Drawn(chunk.sequence, 7)
                for chunk in self.life.sequences.wanted(chunks)
                if chunk.num_tokens == chunk.sequence.num_uncached
            ]
            self.tell(events.StepDone(lane, tuple(drawn)))
        else:
            self.tell(events.LaneIdle(lane))
            self.tell(events.LaneReady(lane))

    def answer(self, *, refuses: bool) -> None:
        """The oldest question about a room is answered."""
        asked = self.rooms.pop(0)
        part = asked.part
        if not self.life.grants.awaits(part.holder, part.part_id):
            return
        if refuses and isinstance(asked.message, Open):
            self.tell(events.Refused(part.part_id, "r0", "capacity", "no room"))
        else:
            self.tell(events.Opened(part.part_id))

    def take_over(self, *, is_whole: bool) -> None:
        order = self.takeovers.pop(0)
        counts = [count if is_whole else None for count in order.num_tokens]
        is_home = order.holder in self.adopted
        self.adopted ^= {order.holder}
        self.tell(events.TakenOver(order.holder, tuple(counts), is_home=is_home))

    def interrupt(self, holder: HolderId) -> None:
        if not {holder} & (self.lost | self.adopted) and not self.life.adoptions:
            self.rooms = [one for one in self.rooms if one.part.holder != holder]
            self.tell(events.Interrupted(holder))

    def leave(self) -> None:
        """A replacement has a copy of a holder that a neighbour took over."""
        if self.adopted and not self.life.adoptions:
            self.tell(events.Leaving(min(self.adopted)))

    def lose(self, holder: HolderId) -> None:
        self.adopted.discard(holder)
        if holder not in self.lost and len(self.lost) + 1 < NUM_HOLDERS:
            self.lost.add(holder)
            self.takeovers = [one for one in self.takeovers if one.holder != holder]
            self.rooms = [one for one in self.rooms if one.part.holder != holder]
            self.tell(events.Lost(holder))

    def go_on(self, data: st.DataObject) -> None:
        records = list(self.life.sequences.by_request)
        acts = ["turn"] * 5 + ["submit"] * 2 + ["interrupt"]
        acts += ["answer"] * 3 * bool(self.rooms) + ["take_over"] * 3 * bool(self.takeovers)
        is_waiting = bool(self.takeovers or self.fetches)
        acts += ["fetched"] * bool(self.fetches) + ["leave"] * bool(self.adopted)
        acts += (["cancel"] * (4 if is_waiting else 1) + ["lose"]) * bool(records)
        match data.draw(st.sampled_from(acts)):
            case "turn":
                self.turn(data.draw(st.integers(0, NUM_LANES - 1)))
            case "submit":
                self.submit(*(data.draw(st.integers(1, most)) for most in (2, 20, 12)))
            case "answer":
                self.answer(refuses=data.draw(st.integers(0, 5)) == 0)
            case "take_over":
                self.take_over(is_whole=data.draw(st.booleans()))
            case "fetched":
                fetch = self.fetches.pop(0)
                assert isinstance(fetch.message, Fetch)
                num_missing = data.draw(st.integers(0, 1)) * len(fetch.message.keys)
                missing = fetch.message.keys[:num_missing]
                self.tell(Done(fetch.holder, fetch.message.job, missing, 0, 0.0))
            case "cancel" if data.draw(st.integers(0, 2)) == 0:
                self.tell(events.Cancelled(data.draw(st.sampled_from(records))))
            case "lose" if data.draw(st.integers(0, 7)) == 0:
                self.lose(HolderId(data.draw(st.integers(0, NUM_HOLDERS - 1))))
            case "leave":
                self.leave()
            case "interrupt" if data.draw(st.integers(0, 3)) == 0:
                self.interrupt(HolderId(data.draw(st.integers(0, NUM_HOLDERS - 1))))


@pytest.fixture(scope="module")
def seen() -> Iterator[Counter[tuple[SequenceState, SequenceState]]]:
    """Transitions, counted while this module's walks run."""
    counted: Counter[tuple[SequenceState, SequenceState]] = Counter()
    move = SequenceTable.move

    def watched(self: SequenceTable, record: SequenceRecord, state: SequenceState) -> None:
        before = record.state
        move(self, record, state)
        if before is not state:
            counted[before, state] += 1

    SequenceTable.move = watched  # type: ignore[method-assign]
    yield counted
    SequenceTable.move = move  # type: ignore[method-assign]


@settings(
    max_examples=examples(900, share=8),
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
@given(data=st.data(), imports=st.booleans(), length=st.integers(20, 120))
def test_a_walk(
    seen: Counter[tuple[SequenceState, SequenceState]],
    data: st.DataObject,
    imports: bool,
    length: int,
) -> None:
    walk = Walk(imports=imports)
    for _ in range(length):
        walk.go_on(data)


def test_every_transition_was_walked(seen: Counter[tuple[SequenceState, SequenceState]]) -> None:
    wanted = {(before, after) for before, afters in TRANSITIONS.items() for after in afters}
    rare = {  # a doubted last token, known only later
        (SequenceState.DONE, SequenceState.REQUEUED),
        (SequenceState.EXPORTED, SequenceState.REQUEUED),
    }
    assert wanted - rare <= (+seen).keys() <= wanted


def test_other_transitions_are_refused() -> None:
    table = SequenceTable()
    request = Request("a", (1, 2), SamplingParams(), 1, seed=0)
    table.add(request, table.make(request))
    (record,) = table.by_sequence.values()
    with pytest.raises(AssertionError, match="a sequence that is waiting can't be running"):
        table.move(record, SequenceState.RUNNING)
    assert record.state is SequenceState.WAITING
