"""What happens to a cache, to its replica, and to the link between them, in any
order."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from state_machine import step_of
from stream_suite import Memory, hello_for

import cpu_kernels
from fastdecode.core.dtype import DType
from fastdecode.core.errors import CapacityError
from fastdecode.core.holders import HolderId
from fastdecode.core.spec import KVSpec
from fastdecode.wire.kv.chunks import ChunkStored, StoreChunk
from fastdecode.wire.kv.taking_over import MISSING, TakeOver, TruncateSequence
from fastdecode.wire.messages import (
    Accepted,
    CloseSequence,
    ExtendSequence,
    ForkSequence,
    Hello,
    OpenSequence,
    Welcome,
)
from rworker.caches import Caches
from rworker.instructions import CopyBlocks, Drop, PlaceChunk, Prepare, Send
from rworker.state import RWorkerState
from rworker.stream.memory import gather
from rworker.stream.mirror import Mirror
from rworker.stream.taking_over import take_over

KV = KVSpec(2, 2, 8, DType.INT8, 4)
NUM_BLOCKS = 14
SESSION = 5
LINK, S_WORKER = 0, 1
_MOSTLY = st.sampled_from([True, True, True, False])


class Replica:
    """A neighbour's R-worker, with its state machine and a memory."""

    def __init__(self, hello: Hello) -> None:
        self.state = RWorkerState("r1", kv_bytes=1 << 22)
        own = replace(hello_for(KV), holder=1, session=SESSION, max_blocks=1)
        self.state.handle(S_WORKER, own)
        self.memory = Memory(KV, NUM_BLOCKS)
        answers = self.hear(hello)
        assert isinstance(answers[0], Welcome) and answers[0].num_blocks == NUM_BLOCKS

    def hear(self, message: Any, peer: int = LINK) -> list[Any]:
        """What the link brings; the answers to it."""
        answers: list[Any] = []
        for instruction in self.state.handle(peer, message):
            match instruction:
                case Send(_, told):
                    answers.append(told)
                case CopyBlocks(_, sources, targets):
                    self.memory.pool[:, targets] = self.memory.pool[:, sources]
                case PlaceChunk(_, _, chunk, slots):
                    gather(self.memory.layout, self.memory.pool, chunk, slots)
                    answers.append(len(chunk.data))
                case Prepare() | Drop():
                    pass
        self.state.check_invariants()
        return answers


class MirrorMachine(RuleBasedStateMachine):
    """An owner's cache and its replica. Token t of a sequence is a number that
    K and V are made of, so that what a cache holds can be told from its bytes."""

    @initialize(link_bytes=st.sampled_from([1, 700, 1 << 20]), begun=st.booleans())
    def begin(self, link_bytes: int, begun: bool) -> None:
        self.hello = replace(hello_for(KV), session=SESSION)
        self.owner = Memory(KV, NUM_BLOCKS)
        self.owner.books.hello = self.hello
        self.link_bytes = link_bytes
        self.largest = 0
        self.tokens: dict[int, list[int]] = {}
        self.reserved: dict[int, int] = {}
        self.history: dict[int, list[list[int]]] = {}
        self.rows: dict[tuple[int, ...], bytes] = {}
        self.next_id, self.next_token, self.next_step = 0, 1, 0
        self.open_steps: dict[int, list[int]] = {}
        self.mirror: Mirror | None = None
        if not begun:
            self.connect()

    def connect(self) -> None:
        self.mirror = Mirror(HolderId(0), self.owner.books, self.owner, self.link_bytes)
        self.replica = Replica(self.mirror.hello)
        self.under_way: deque[Any] = deque()
        self.answers: deque[Any] = deque()

    # What the owner does.

    def change(self, message: Any) -> bool:
        """One of the S-worker's messages. Whether it was accepted."""
        answer = self.owner.books.reserve(message)
        if isinstance(answer, Accepted) and self.mirror is not None:
            self.mirror.follow(message)
        return isinstance(answer, Accepted)

    def note(self, sequence: int) -> None:
        self.history.setdefault(sequence, []).append(list(self.tokens[sequence]))

    @rule(reserved=st.integers(1, 20))
    def open(self, reserved: int) -> None:
        self.next_id += 1
        if self.change(OpenSequence(self.next_id, reserved)):
            self.tokens[self.next_id], self.reserved[self.next_id] = [], reserved
            self.note(self.next_id)

    @precondition(lambda self: any(self.tokens.values()))
    @rule(data=st.data(), more=st.integers(0, 8))
    def fork(self, data: st.DataObject, more: int) -> None:
        parent = data.draw(st.sampled_from([s for s, t in self.tokens.items() if t]))
        most = self.owner.books.num_settled(parent)
        if not most:
            return
        shared = data.draw(st.integers(1, most))
        self.next_id += 1
        if self.change(ForkSequence(parent, self.next_id, shared, shared + more)):
            self.tokens[self.next_id] = self.tokens[parent][:shared]
            self.reserved[self.next_id] = shared + more
            self.note(self.next_id)

    def at_rest(self) -> list[int]:
        busy = {s for members in self.open_steps.values() for s in members}
        return [s for s in self.tokens if s not in busy]

    @precondition(lambda self: self.at_rest())
    @rule(data=st.data(), lane=st.integers(0, 1))
    def begin_step(self, data: st.DataObject, lane: int) -> None:
        if lane in self.open_steps:
            return
        some = data.draw(st.lists(st.sampled_from(self.at_rest()), min_size=1, unique=True))
        new = {
            s: data.draw(st.integers(1, room))
            for s in some
            if (room := self.reserved[s] - len(self.tokens[s]))
        }
        if not new:
            return
        rows = [(s, len(self.tokens[s]), count) for s, count in new.items()]
        begin = step_of(*rows, step=self.next_step, lane=lane, queries=[0] * len(rows))
        appended = self.owner.books.begin_step(begin)
        pool = self.owner.pool
        pool[:, appended.copy_targets] = pool[:, appended.copy_sources]
        fresh = []
        for s, count in new.items():
            numbers = list(range(self.next_token, self.next_token + count))
            self.next_token += count
            self.tokens[s] = self.tokens[s] + numbers
            fresh += numbers
        self.write(appended.slots, fresh)
        self.open_steps[lane] = list(new)
        self.next_step += 1

    def write(self, slots: np.ndarray, numbers: list[int]) -> None:
        for layer in range(KV.num_layers):
            values = np.array(numbers, np.float32)[:, None, None] * (1 + layer)
            k = np.ascontiguousarray(np.broadcast_to(values, (len(numbers), 2, 8)))
            k = k + np.arange(8, dtype=np.float32)
            cpu_kernels.append(self.owner.layout, self.owner.pool[layer], k, -k, slots)

    @precondition(lambda self: self.open_steps)
    @rule(data=st.data())
    def end_step(self, data: st.DataObject) -> None:
        lane = data.draw(st.sampled_from(list(self.open_steps)))
        books = self.owner.books
        step = books.steps.of_lane[lane].step
        for layer in range(KV.num_layers):
            books.steps.finish_layer(lane, step, layer)
        for sequence in self.open_steps.pop(lane):
            self.note(sequence)

    @precondition(lambda self: self.at_rest())
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.at_rest()))
        kept = data.draw(st.integers(0, len(self.tokens[sequence])))
        try:
            self.owner.books.store.truncate(sequence, kept)
        except CapacityError:  # others share what it would leave
            return
        if self.mirror is not None:
            self.mirror.follow(TruncateSequence(sequence, kept))
        self.tokens[sequence] = self.tokens[sequence][:kept]
        self.note(sequence)

    @rule(data=st.data())
    def roll_back(self, data: st.DataObject) -> None:
        """Steps under way come to nothing; some sequences are cut, others closed."""
        settled = {s: self.owner.books.num_settled(s) for s in self.tokens}
        wanted = {s: data.draw(st.integers(0, n)) for s, n in settled.items() if data.draw(_MOSTLY)}
        counts, changes = take_over(self.owner.books, wanted)
        self.open_steps.clear()
        for change in changes if self.mirror is not None else ():
            self.mirror.follow(change)
        left = dict(zip(wanted, counts.tolist(), strict=True))
        for sequence in settled:
            if left.get(sequence, MISSING) == MISSING:
                del self.tokens[sequence], self.reserved[sequence]
            else:
                self.tokens[sequence] = self.tokens[sequence][: left[sequence]]
                self.note(sequence)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), more=st.integers(0, 6))
    def extend(self, data: st.DataObject, more: int) -> None:
        sequence = data.draw(st.sampled_from(list(self.tokens)))
        if self.change(ExtendSequence(sequence, self.reserved[sequence] + more)):
            self.reserved[sequence] += more

    @precondition(lambda self: self.at_rest())
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.at_rest()))
        self.owner.books.close(CloseSequence(sequence))
        if self.mirror is not None:
            self.mirror.follow(CloseSequence(sequence))
        del self.tokens[sequence], self.reserved[sequence]

    # The link.

    @precondition(lambda self: self.mirror is None)
    @rule()
    def connect_late(self) -> None:
        self.connect()

    @precondition(lambda self: self.mirror)
    @rule(count=st.integers(1, 6))
    def send(self, count: int) -> None:
        for _ in range(count):
            message = self.mirror.next()
            if message is None:
                return
            if isinstance(message, StoreChunk):
                self.largest = max(self.largest, len(message.data))
            self.under_way.append(message)

    @precondition(lambda self: self.mirror and self.under_way)
    @rule(count=st.integers(1, 6))
    def deliver(self, count: int) -> None:
        for _ in range(min(count, len(self.under_way))):
            message = self.under_way.popleft()
            for answer in self.replica.hear(message):
                self.answers.append(self.told(message, answer))

    def told(self, message: Any, answer: Any) -> Any:
        return ChunkStored(answer) if isinstance(message, StoreChunk) else answer

    @precondition(lambda self: self.mirror and self.answers)
    @rule()
    def answer(self) -> None:
        while self.answers:
            self.mirror.take(self.answers.popleft())  # a refusal would raise

    # What must hold.

    @precondition(lambda self: self.mirror)
    @rule(data=st.data())
    def cut_the_link(self, data: st.DataObject) -> None:
        """Some of what is under way arrives, the owner is gone, and the replica
        is taken over: a prefix of what each sequence was at some time."""
        if self.under_way:
            self.deliver(data.draw(st.integers(0, 10)))
        self.replica.state.lost(LINK)
        ids = np.array(sorted(self.history), np.int64)
        most = np.full(len(ids), 1 << 20, np.int32)
        (taken,) = self.replica.hear(TakeOver(SESSION, ids, most, 0), S_WORKER)
        for sequence, count in zip(ids.tolist(), taken.num_tokens.tolist(), strict=True):
            if count > 0:
                versions = {tuple(version[:count]) for version in self.history[sequence]}
                assert self.read(self.books_of_replica(), sequence, count) in versions
        self.connect_if_possible()

    def connect_if_possible(self) -> None:
        self.mirror = None
        if not self.open_steps:
            self.connect()

    @precondition(lambda self: self.mirror)
    @rule()
    def let_it_catch_up(self) -> None:
        """Then the replica has every settled token, and as much room."""
        while not self.idle():
            self.send(3)
            if self.under_way:
                self.deliver(3)
            if self.answers:
                self.answer()
        assert self.mirror.num_behind == 0
        books = self.books_of_replica()
        assert books.store.tables.row_of.keys() == self.tokens.keys()
        for sequence, tokens in self.tokens.items():
            settled = self.owner.books.num_settled(sequence)
            assert books.num_settled(sequence) == settled
            if settled:
                assert self.read(books, sequence, settled) == tuple(tokens[:settled])
                self.replica.memory.books = books
                mine = self.owner.stored(sequence, 0, settled)
                theirs = self.replica.memory.stored(sequence, 0, settled)
                assert [x.tobytes() for x in mine] == [x.tobytes() for x in theirs]

    def idle(self) -> bool:
        return bool(self.mirror.is_whole and not self.under_way)

    def books_of_replica(self) -> Any:
        caches: Caches = self.replica.state._caches
        return next(cache.books for cache in caches if cache.holder == 0)

    def read(self, books: Any, sequence: int, count: int) -> tuple[int, ...]:
        """The numbers that tokens were made of, from the scales of int8: the
        largest of K is number + 7 in the first layer."""
        self.replica.memory.books = books
        k, _, scales = self.replica.memory.stored(sequence, 0, count)
        largest = scales[0, :, 0, 0] * (np.abs(k[0, :, 0].astype(np.int32) - 128)).max(axis=-1)
        return tuple(np.rint(largest - 7).astype(int).tolist())

    @invariant()
    def the_link_is_bounded(self) -> None:
        if getattr(self, "mirror", None):
            assert self.mirror.num_unacknowledged <= max(self.link_bytes, self.largest)
