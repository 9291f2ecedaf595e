"""A lifecycle that is put to work: what it wants is carried out on the R-workers' real KV stores,
step by step, in lanes that finish in any order, and checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from copy import copy
from dataclasses import dataclass, field

from remembering_store import Store
from schedule_choices import MAX_SEQUENCES, MAX_STEP_TOKENS, PREFILL_CHUNK

from fastdecode.core.errors import CapacityError
from fastdecode.core.holders import HolderId, Part
from fastdecode.core.sequence import SHARED, CacheUse, Request, SamplingParams, Sequence
from fastdecode.core.spec import first_seen
from fastdecode.schedule.continuous import ContinuousScheduler
from fastdecode.schedule.life.events import (
    Ask,
    Came,
    Cancelled,
    Drawn,
    Event,
    Fail,
    Finish,
    Instruction,
    LaneIdle,
    LaneReady,
    Lost,
    Opened,
    Run,
    StepDone,
    Submitted,
)
from fastdecode.schedule.life.lifecycle import Lifecycle
from fastdecode.schedule.life.sequences import SequenceState
from fastdecode.schedule.plan import Chunk, Send
from fastdecode.wire.blocks import (
    Close,
    Done,
    Extend,
    Fetch,
    Forget,
    Name,
    Open,
    Progress,
    Retain,
    keys_of,
    words_of,
)
from rworker.tiers.tier import MoveJob


@dataclass
class Moves:
    """They arrive one job after the other."""

    fail: Callable[[], bool] = lambda: False
    """Asked for each block."""
    tell: Callable[[], bool] = lambda: False
    """Return True to report progress while blocks are fetched."""
    num_fetched: int = 0
    under_way: list[tuple[Send, MoveJob]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.under_way)

    def begin(self, order: Send, store: Store) -> None:
        assert isinstance(order.message, Retain | Fetch)
        self.under_way.append((order, store.begin_move(order.message)))

    def next(self, stores: Seq[Store]) -> Progress | Done | None:
        """Let the oldest message arrive, or come half of the way, if there is one."""
        if not self.under_way:
            return None
        order, job = self.under_way[0]
        if job.is_fetch and self.tell():
            return Progress(order.holder, job.number, 1, 2, 0.5)
        self.under_way.pop(0)
        job.failed.update(place for place in range(len(job.keys)) if self.fail())
        failed = stores[order.holder].end_move(job)
        self.num_fetched += (len(job.keys) - len(failed)) * job.is_fetch
        return Done(order.holder, job.number, words_of(failed), 1, 1.0)

    def lose(self, worker: int) -> None:
        self.under_way = [move for move in self.under_way if move[0].holder != worker]


def contexts_of(sequence: Sequence) -> list[int]:
    """Return a hash of the salt and all tokens up to it, for each token of a sequence."""
    context = hash(sequence.request.cache.salt)
    contexts = []
    for token in sequence.token_ids:
        context = hash((context, token))
        contexts.append(context)
    return contexts


def last_part(sequence: Sequence) -> Part:
    """The one that grows."""
    assert sequence.residence is not None
    return sequence.residence.parts[sequence.residence.index_of(sequence.num_cached)]


def check_memory(
    chunk: Chunk, contexts: Seq[int], stores: Mapping[int, Store], window: int | None
) -> None:
    """Check that what it attends to was written for it, and that missing blocks are missing.

    Args:
        contexts: of its sequence's tokens.
        stores: of the R-workers that aren't lost.
    """
    sequence, last = chunk.sequence, chunk.first + chunk.num_tokens
    assert sequence.residence is not None
    assert sequence.residence.parts[0].first_token <= first_seen(chunk.first, window)
    for part in sequence.residence.parts:
        if part.holder in stores:
            there = stores[part.holder].contexts(part.part_id)
            assert None not in there[: max(0, last - part.first_token)]
            assert all(
                context in (None, expected)
                for context, expected in zip(there, contexts[part.first_token :], strict=False)
            )


def check_sizes(run: Run) -> None:
    """Check the size of a step, and of each sequence's share in it."""
    assert sum(chunk.num_tokens for chunk in run.chunks) <= MAX_STEP_TOKENS
    sequences = {chunk.sequence.sequence_id: chunk.sequence for chunk in run.chunks}
    assert len(sequences) <= MAX_SEQUENCES
    for sequence in sequences.values():
        count = sum(chunk.num_tokens for chunk in run.chunks if chunk.sequence is sequence)
        assert 1 <= count <= max(1, min(PREFILL_CHUNK, sequence.num_uncached))


def check_loads(run: Run, limits: Seq[int]) -> None:
    """No R-worker attends more of a lane than it may, unless it is for one sequence."""
    loads = [0] * len(limits)
    here = [0] * len(limits)  # of each R-worker: sequences that have a part there
    for chunk in {chunk.sequence.sequence_id: chunk for chunk in run.chunks}.values():
        assert chunk.sequence.residence is not None
        for part in chunk.sequence.residence.parts:
            num_cached = chunk.sequence.num_cached + chunk.num_tokens  # at least
            loads[part.holder] += max(0, min(num_cached - part.first_token, part.num_tokens))
        for worker in set(chunk.sequence.residence.holders):
            here[worker] += 1
    for load, members_here, limit in zip(loads, here, limits, strict=True):
        assert load <= limit or members_here == 1, "no start above the limit"


@dataclass(eq=False)
class Harness:
    """Carries out what a lifecycle wants, as the engine does, and checks all of it."""

    scheduler: ContinuousScheduler
    stores: list[Store]
    num_lanes: int
    lane_limits: list[int] | None = None
    """W_lim of each R-worker and lane, where lengths are known."""
    is_late: Callable[[], bool] = lambda: False
    """Asked for each answer of an R-worker, whether it comes after the step
    that it was asked for has begun."""
    goes_ahead: Callable[[], bool] = lambda: False
    """Return True to hand on a step's tokens only after the lane's next step, or when all
    lanes are idle."""
    coming: dict[int, tuple[Drawn, ...]] = field(default_factory=dict)
    """By lane, those tokens."""
    in_flight: dict[int, Run] = field(default_factory=dict)
    lane_of: dict[int, int] = field(default_factory=dict)
    parts: dict[int, dict[int, Part]] = field(default_factory=dict)
    """What is open of a sequence, by part id."""
    live: dict[int, Sequence] = field(default_factory=dict)
    length_of: dict[int, int] = field(default_factory=dict)
    """How many tokens a sequence will generate."""
    lost: set[int] = field(default_factory=set)
    unanswered: list[Part] = field(default_factory=list)
    num_arrived: int = 0
    finished: dict[int, list[int]] = field(default_factory=dict)
    together: set[tuple[int, ...]] = field(default_factory=set)
    """Sequences that stepped together."""
    stepped: set[int] = field(default_factory=set)
    """Sequences that stepped since they last started."""
    moves: Moves = field(default_factory=Moves)
    num_stepped_early: int = 0  # chunks of sequences of which blocks were still coming
    num_disbelieved: int = 0  # chunks of these whose step was void, since blocks did not come
    has_forks: bool = False
    num_resumed_tokens: int = 0
    num_gaps: int = 0  # sequences that started with one

    def __post_init__(self) -> None:
        self.lifecycle = Lifecycle(self.scheduler)
        self._owners: dict[int, int] = {}

    @property
    def num_suspended(self) -> int:
        return self.lifecycle.sequences.counts.num_suspended

    def arrive(
        self,
        num_prompt_tokens: int,
        lengths: tuple[int, ...],
        max_tokens: int,
        prompt: tuple[int, ...] | None = None,
        cache: CacheUse = SHARED,
    ) -> bool:
        """A request of one sequence a length. Returns whether it was taken."""
        first, n = self.num_arrived, len(lengths)
        self.num_arrived += n
        if prompt is None:
            prompt = tuple(range(num_prompt_tokens))
        params = SamplingParams(n=n)
        request = Request(str(first), prompt, params, max_tokens, seed=0, cache=cache)
        try:
            self._tell(Submitted(request))
        except CapacityError:
            return False
        for sequence, length in zip(
            self.lifecycle.sequences.of_request(request.request_id), lengths, strict=True
        ):
            self.live[sequence.sequence_id] = sequence
            self.length_of[sequence.sequence_id] = length
        return True

    def turn(self, lane: int) -> bool:
        """Finish the lane's step, or begin one. Returns whether there was anything to do."""
        if lane in self.in_flight:
            self.complete(lane)
            return True
        answered = self.answer()
        begun = self.begin(lane) is not None
        came = not begun and self.take_in(lane)
        moved = not begun and self.end_move()
        return begun or came or answered or moved or bool(self.unanswered)

    def end_move(self) -> bool:
        """What is longest on its way arrives, or comes half of the way. Returns
        whether there was anything."""
        news = self.moves.next(self.stores)
        if news is not None:
            self._tell(news)
        return news is not None

    def begin(self, lane: int) -> Run | None:
        """Begin the lane's next step, if a sequence can step."""
        self._check_order(self._tell(LaneIdle(lane), lane))
        for part in [part for part in self.unanswered if not self.is_late()]:
            self._answer(part)
        for run in self._tell(LaneReady(lane)):
            assert isinstance(run, Run)
            self._check_run(lane, run)
            self.in_flight[lane] = run
            for chunk in run.chunks:
                self.stepped.add(chunk.sequence.sequence_id)
                part = last_part(chunk.sequence)
                if part.holder not in self.lost:
                    store = self.stores[part.holder]
                    first = chunk.first
                    assert store.num_cached(part.part_id) == first - part.first_token
                    contexts = self._contexts_of(chunk.sequence)[first : first + chunk.num_tokens]
                    store.append(part.part_id, first - part.first_token, contexts)
                if not self._awaits(chunk):
                    self._check_memory(chunk)
            return run
        return None

    def answer(self) -> bool:
        """Tell all answers that were late. Returns whether there was any."""
        parts = self.unanswered[:]
        for part in parts:
            self._answer(part)
        return bool(parts)

    def _answer(self, part: Part) -> None:
        self.unanswered.remove(part)
        assert self.lifecycle.grants.awaits(part.holder, part.part_id)
        self._tell(Opened(part.part_id))

    def complete(self, lane: int) -> None:
        """The lane's step is over: a token depends on the sequence alone,
        however often it was computed."""
        self.take_in(lane)
        late = [chunk for chunk in self.in_flight[lane].chunks if self._awaits(chunk)]
        while any(map(self._awaits, late)):
            self.end_move()
        run = self.in_flight.pop(lane)
        wanted_late = self.lifecycle.sequences.wanted(late)
        self.num_stepped_early += len(late)
        self.num_disbelieved += len(late) - len(wanted_late)
        for chunk in wanted_late:
            self._check_memory(chunk)
        drawn = []
        wanted = [chunk.sequence for chunk in self.lifecycle.sequences.wanted(run.chunks)]
        for chunk in run.chunks:
            sequence = chunk.sequence
            if sequence in wanted and chunk.first + chunk.num_tokens == len(sequence.token_ids):
                sequence_id, n = sequence.sequence_id, sequence.num_generated
                reason = "stop" if n + 1 == self.length_of[sequence_id] else None
                drawn.append(Drawn(sequence, 1000 * sequence_id + n, reason))  # type: ignore[arg-type]
        if drawn and self.goes_ahead():
            self.coming[lane] = tuple(drawn)
            self._tell(StepDone(lane, (), tuple([one.sequence for one in drawn])))
        else:
            self._tell(StepDone(lane, tuple(drawn)))
        for sequence in wanted:
            if sequence.residence is not None:
                parts = sequence.residence.parts
                assert sequence.num_cached == parts[0].first_token + sum(
                    self.stores[p.holder].num_cached(p.part_id) for p in parts
                )

    def _awaits(self, chunk: Chunk) -> bool:
        """Whether its sequence steps before all that it started with has come."""
        assert chunk.sequence.residence is not None
        parts = [x for x in chunk.sequence.residence.parts if x.holder not in self.lost]
        return any(self.stores[part.holder].awaits(part.part_id) for part in parts)

    def take_in(self, lane: int) -> bool:
        """Take in the tokens of the lane's previous step. Return True if there were any."""
        drawn = self.coming.pop(lane, ())
        if drawn:
            self._tell(Came(drawn))
        return bool(drawn)

    def cancel(self, sequence: Sequence) -> set[int]:
        """And all its siblings. Returns who they were."""
        request_id = sequence.request.request_id
        siblings = {one.sequence_id for one in self.lifecycle.sequences.of_request(request_id)}
        self._tell(Cancelled(request_id))
        for sequence_id in siblings:
            del self.live[sequence_id]
        return siblings

    def lose(self, worker: int) -> None:
        self.lost.add(worker)
        self.unanswered = [part for part in self.unanswered if part.holder != worker]
        self.moves.lose(worker)
        self._tell(Lost(HolderId(worker)))

    def _tell(self, event: Event, lane: int | None = None) -> list[Instruction]:
        """Returns what is left to be done: who was to be opened, and what runs."""
        instructions = self.lifecycle.handle(event)
        left: list[Instruction] = []
        for instruction in instructions:
            match instruction:
                case Ask(part, Close(tail=tail)):
                    self._close(part, tail)
                case Finish():
                    sequence = instruction.sequence
                    assert sequence.num_generated == self.length_of[sequence.sequence_id]
                    self.finished[sequence.sequence_id] = sequence.token_ids[
                        sequence.num_prompt_tokens :
                    ]
                    del self.live[sequence.sequence_id]
                case Fail():
                    assert self.lost or any(x.is_spoilt for x in self.live.values())
                    failed = instruction.request_id
                    for sequence in [*self.live.values()]:
                        if sequence.request.request_id == failed:
                            del self.live[sequence.sequence_id]
                case Run():
                    left.append(instruction)
                case Ask(part, Extend(num_reserved_tokens=num_tokens)):
                    assert lane is not None
                    self.stores[part.holder].extend(part.part_id, num_tokens)
                    self.unanswered.append(part)
                case Send(holder, Name(sequence_id, first_block, keys)):
                    self.stores[holder].keep(sequence_id, first_block, keys_of(keys))
                case Send(holder, Forget(keys, is_below)):
                    store = self.stores[holder]
                    (store.drop if is_below else store.forget)(keys_of(keys))
                case Send():
                    self.moves.begin(instruction, self.stores[instruction.holder])
                case Ask(part, Open() as message):
                    self._open(part, message)
                    left.append(instruction)
        self.lifecycle.check_invariants()
        self._check_free_blocks()
        return left

    def _check_free_blocks(self) -> None:
        """The S-worker's count is the R-workers', or errs on the safe side
        where siblings share what isn't kept."""
        ledger = self.scheduler.ledger
        for holder in ledger.holders.open:
            said, there = ledger.free_blocks(holder), self.stores[holder].num_available
            is_exact = not self.has_forks and not self._fetching()
            assert said <= there and (not is_exact or said == there)

    def _fetching(self) -> set[int]:
        """Return sequences that wait for blocks and hold their room."""
        lives = self.lifecycle.sequences.by_sequence
        return {i for i, life in lives.items() if life.state is SequenceState.FETCHING}

    def _check_memory(self, chunk: Chunk) -> None:
        window = self.scheduler.ledger.cache.stock.window.num_tokens
        there = {holder: x for holder, x in enumerate(self.stores) if holder not in self.lost}
        check_memory(chunk, self._contexts_of(chunk.sequence), there, window)

    def _contexts_of(self, sequence: Sequence) -> list[int]:
        """As R-workers know it, who are sent K and V of tokens that are coming."""
        if not sequence.is_coming:
            return contexts_of(sequence)
        (token,) = (
            one.token_id
            for drawn in self.coming.values()
            for one in drawn
            if one.sequence is sequence
        )
        known = copy(sequence)
        known.token_ids = [*sequence.token_ids[:-1], token]
        return contexts_of(known)

    def _open(self, part: Part, message: Open) -> None:
        (sequence,) = [
            s for s in self.live.values() if s.residence is not None and part in s.residence.parts
        ]
        self._owners[part.part_id] = sequence.sequence_id
        lanes = enumerate(self.scheduler.lanes)
        (lane,) = [index for index, lane in lanes if sequence.sequence_id in lane.running]
        self.lane_of[sequence.sequence_id] = lane
        self.stepped.discard(sequence.sequence_id)
        assert part.holder not in self.lost
        store = self.stores[part.holder]
        if message.keys is not None:
            keys, gap = keys_of(message.keys), range(message.gap_start, message.gap_stop)
            store.resume(part, keys, message.num_tokens, gap)
            self.num_resumed_tokens += message.num_tokens - len(gap)
            self.num_gaps += len(gap) > 0
        elif message.num_tokens:
            store.fork(message.parent_id, part.part_id, message.num_tokens, part.num_tokens)
            self.has_forks = True
        else:
            store.open(part.part_id, part.num_tokens)
        self.unanswered.append(part)

    def _close(self, part: Part, tail: str) -> None:
        del self._owners[part.part_id]
        assert part.holder not in self.lost and part not in self.unanswered
        self.stores[part.holder].close(part.part_id, bytes.fromhex(tail) or None)

    def _check_order(self, opened: list[Instruction]) -> None:
        """First come, first served."""
        parts = [x.part.part_id for x in opened if isinstance(x, Ask)]
        started = [self._owners[part_id] for part_id in parts]
        lives = self.lifecycle.sequences
        waiting = [
            sequence_id
            for sequence_id, sequence in self.live.items()
            if sequence.residence is None and lives.state(sequence_id) is not SequenceState.DONE
        ]
        assert started == sorted(started) and max(started, default=-1) < min(
            waiting, default=1 << 60
        )

    def _members(self, lane: int) -> set[int]:
        fetching = self._fetching()
        return {
            i
            for i, s in self.live.items()
            if s.residence is not None and i not in fetching and self.lane_of[i] == lane
        }

    def _check_run(self, lane: int, run: Run) -> None:
        chunks = {chunk.sequence.sequence_id: chunk for chunk in run.chunks}
        assert len(chunks) == sum(not chunk.is_behind_gap for chunk in run.chunks)
        self.together.add(tuple(sorted(chunks)))
        waits = {self._owners[part.part_id] for part in self.unanswered}
        members = {
            i
            for i in self._members(lane)
            if self.lifecycle.sequences.by_sequence[i].pending is None
        }
        assert set(chunks) <= members - waits
        opening_steps = self.scheduler._opening_steps
        if not opening_steps and not waits:
            assert set(chunks) == members, "everyone gets on in every step"
            assert len(self._members(lane)) <= self.scheduler.num_running <= MAX_SEQUENCES
        assert (members & self.stepped) - waits <= set(chunks), "nobody is held up who has begun"
        check_sizes(run)
        if self.lane_limits is not None:
            check_loads(run, self.lane_limits)

    def run_out(self) -> None:
        """Until nothing is left, within as many turns as running one sequence after the other
        would take, and then as blocks take that are copied down a few at a time."""
        turns = sum(2 * (len(s.token_ids) + s.request.max_tokens) for s in self.live.values()) + 1
        turns *= 4 if self.scheduler._opening_steps else 2
        for number in range(turns + 200):
            assert number <= turns or not self.live, "somebody starves"
            if not (self.live or self.in_flight or self.unanswered or self.coming or self.moves):
                return
            moved = [self.turn(lane) for lane in range(self.num_lanes)]
            assert any(moved) or not self.live, "somebody can always get on"
        raise AssertionError("somebody starves")
