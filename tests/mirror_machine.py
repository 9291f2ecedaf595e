"""What happens to a cache, to its replica, and to the link between them, in any order.

The cache's KV store is checked after every step: no block is lost, shared by mistake or
overwritten, and what is refused changes nothing."""

from __future__ import annotations

import hashlib
from collections import deque
from functools import partial
from typing import Any

import numpy as np
import pytest
from chunk_memory import Memory, hello_for
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from state_machine import step_of
from store_checks import counts, ids, refuses_unchanged, snapshot
from values import replace

import cpu_kernels
from fastdecode.core.dtype import DType
from fastdecode.core.errors import CapacityError, ProtocolError
from fastdecode.core.holders import HolderId
from fastdecode.core.spec import KVSpec
from fastdecode.wire.blocks import MISSING, Forget, Name, StoreChunk, TakeOver, Truncate, words_of
from fastdecode.wire.messages import Accepted, Close, Extend, Hello, Open, Refused, Welcome
from rworker.blocks.kv_store import KVStore
from rworker.cache_state import CacheState
from rworker.caches import Caches
from rworker.instructions import CopyBlocks, Drop, PlaceChunk, Prepare, Send
from rworker.state import RWorkerState
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
        self.state = RWorkerState("r1", kv_bytes=1 << 24)
        own = replace(hello_for(KV), holder=1, session=SESSION, max_blocks=1)
        self.state.handle(S_WORKER, own)
        self.memory = Memory(hello.kv, hello.max_blocks)
        answers = self.hear(hello)
        assert isinstance(answers[0], Welcome) and answers[0].num_blocks == hello.max_blocks

    def hear(self, message: Any, peer: int = LINK) -> list[Any]:
        """What the link brings; the answers to it."""
        answers: list[Any] = []
        for instruction in self.state.handle(peer, message):
            match instruction:
                case Send(_, told):
                    answers.append(told)
                case CopyBlocks(_, sources, targets):
                    self.memory.pool[:, targets] = self.memory.pool[:, sources]
                case PlaceChunk():
                    self.memory.place(instruction)
                case Prepare() | Drop():
                    pass
        self.state.check_invariants()
        return answers

    @property
    def books(self) -> CacheState:
        caches: Caches = self.state._caches
        return next(cache.books for cache in caches if cache.holder == 0)


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
        self.behind: dict[int, tuple[int, list[int]]] = {}  # sequence → end of its gap, and tokens
        self.chains: dict[bytes, tuple[int, ...]] = {}  # key → all tokens up to its block's end
        self.kept: set[bytes] = set()
        self.unprotected: set[int] = set()  # with a gap, and their forks
        self.started_with: dict[int, set[bytes]] = {}  # sequence → its kept blocks' keys
        self.doubtful: set[int] = set()  # with kept blocks that the replica may lack
        self.mirror: Mirror | None = None
        if not begun:
            self.connect()

    def connect(self) -> None:
        self.unprotected &= self.behind.keys()  # what has filled its gap is there
        self.started_with, self.doubtful = {}, set()
        self.mirror = Mirror(HolderId(0), self.owner.books, self.owner, self.link_bytes)
        self.replica = Replica(self.mirror.hello)
        self.under_way: deque[Any] = deque()
        self.answers: deque[Any] = deque()

    # What the owner does.

    @property
    def store(self) -> KVStore:
        return self.owner.books.store

    def change(self, message: Any) -> bool:
        """Apply one of the S-worker's messages. Return True if it was accepted."""
        before = snapshot(self.store)
        answer = self.owner.books.reserve(message)
        is_accepted = isinstance(answer, Accepted)
        if is_accepted:
            self.follow(message)
        assert is_accepted or snapshot(self.store) == before
        return is_accepted

    def note(self, sequence: int) -> None:
        self.history.setdefault(sequence, []).append(list(self.tokens[sequence]))

    @rule(reserved=st.integers(1, 20))
    def open(self, reserved: int) -> None:
        self.next_id += 1
        if self.change(Open(self.next_id, reserved)):
            self.tokens[self.next_id], self.reserved[self.next_id] = [], reserved
            self.note(self.next_id)

    @precondition(lambda self: any(self.tokens.values()))
    @rule(data=st.data(), more=st.integers(0, 8))
    def fork(self, data: st.DataObject, more: int) -> None:
        parent = data.draw(st.sampled_from([s for s, t in self.tokens.items() if t]))
        if parent in self.behind:
            return
        most = self.owner.books.num_settled(parent)
        if not most:
            return
        shared = data.draw(st.integers(1, most))
        self.next_id += 1
        if self.change(Open(self.next_id, shared + more, shared, parent_id=parent)):
            self.tokens[self.next_id] = self.tokens[parent][:shared]
            if parent in self.unprotected:
                self.unprotected.add(self.next_id)
            if parent in self.doubtful:
                self.doubtful.add(self.next_id)
            self.started_with[self.next_id] = self.started_with.get(parent, set())
            self.reserved[self.next_id] = shared + more
            self.note(self.next_id)

    def follow(self, message: Any) -> None:
        if self.mirror is not None:
            self.mirror.follow(message)

    def name(self, tokens: list[int]) -> bytes:
        """The key of the block that such a chain ends with."""
        key = hashlib.md5(repr(tokens).encode()).digest()
        self.chains[key] = tuple(tokens)
        return key

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def keep(self, data: st.DataObject) -> None:
        """Full blocks of a sequence, but those whose keys are in use, or that are kept."""
        self.keep_blocks_of(data.draw(st.sampled_from(list(self.tokens))))

    def keep_blocks_of(self, sequence: int) -> None:
        books = self.owner.books
        num_full = books.num_settled(sequence) // KV.block_size
        table = self.store.tables.of_row(self.store.tables.row(sequence)).copy()
        for block in range(num_full):
            key = self.name(self.tokens[sequence][: (block + 1) * KV.block_size])
            if int(table[block]) in self.store.cached.key_of():
                again = partial(self.store.cached.keep, [b"another key"], table[block : block + 1])
                refuses_unchanged(self.store, ProtocolError, again)
            elif key not in self.kept:
                message = Name(sequence, block, words_of([key]))
                books.keep(message)
                self.follow(message)
                self.kept.add(key)

    @rule(data=st.data(), num_tokens=st.integers(3, 14), link=st.booleans())
    def turn(self, data: st.DataObject, num_tokens: int, link: bool) -> None:
        """A sequence comes, runs, and ends; what it has come to is kept. Meanwhile the
        link may be served, or not."""
        if 0 in self.open_steps:
            return
        number = self.next_id
        if self.kept and data.draw(_MOSTLY):
            self.resume(data, num_tokens)
        else:
            self.open(num_tokens)
        sequence = self.next_id
        if sequence == number or sequence not in self.tokens:
            return
        self.begin_step_of([sequence], data, 0)
        if 0 in self.open_steps:
            self.finish(0)
        if link:
            self.send(4)
        self.keep_blocks_of(sequence)
        if data.draw(_MOSTLY):
            self.end(sequence)

    def idle_keys(self) -> list[bytes]:
        """Of kept blocks that no sequence uses: others are never forgotten."""
        store = self.owner.books.store
        used = {int(x) for row in store.tables.row_of.values() for x in store.tables.of_row(row)}
        return sorted(key for block, key in store.cached.key_of().items() if block not in used)

    @precondition(lambda self: self.idle_keys())
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        gone = data.draw(st.lists(st.sampled_from(self.idle_keys()), min_size=1, unique=True))
        message = Forget(words_of(gone))
        self.owner.books.forget(message)
        self.follow(message)
        self.forgot(set(gone))
        refuses_unchanged(self.store, ProtocolError, lambda: self.store.cached.forget(gone))

    def forgot(self, gone: set[bytes]) -> None:
        """Note kept blocks that are gone. The link may open what started with them too late."""
        self.kept -= gone
        self.doubtful |= {s for s, keys in self.started_with.items() if keys & gone}

    @precondition(lambda self: self.kept)
    @rule(data=st.data(), more=st.integers(0, 8))
    def resume(self, data: st.DataObject, more: int) -> None:
        """A sequence starts with kept blocks, with or without a gap between them."""
        chain = list(self.chains[data.draw(st.sampled_from(sorted(self.kept)))])
        size = KV.block_size
        ends = [*range(size, len(chain), size), len(chain)]
        is_kept = [self.name(chain[:end]) in self.kept for end in ends]
        first = is_kept.index(False) if False in is_kept else len(ends)
        behind = [block for block in range(first, len(ends)) if is_kept[block]]
        stop = behind[0] if behind and data.draw(st.booleans()) else first
        last = stop
        while last < len(ends) and is_kept[last]:
            last += 1
        if stop == first:
            last = data.draw(st.integers(min(1, first), first))
        if not last:
            return
        numbers = [*range(min(first, last)), *range(stop, last)] if stop > first else range(last)
        keys = [self.name(chain[: ends[block]]) for block in numbers]
        gap = (first * size, stop * size) if stop > first else (0, 0)
        least = max(gap[1], (last - 1) * size) + 1
        num_tokens = data.draw(st.integers(least, ends[last - 1]))
        self.next_id += 1
        sequence, reserved = self.next_id, num_tokens + more
        if self.change(Open(sequence, reserved, num_tokens, words_of(keys), *gap)):
            self.tokens[sequence], self.reserved[sequence] = chain[:num_tokens], reserved
            self.started_with[sequence] = set(keys)
            if gap[1]:
                self.unprotected.add(sequence)
                self.behind[sequence] = gap[1], chain[gap[1] : num_tokens]
                self.tokens[sequence] = chain[: gap[0]]
            self.note(sequence)

    @precondition(lambda self: self.at_rest())
    @rule(data=st.data())
    def end_with_its_tail(self, data: st.DataObject) -> None:
        self.end(data.draw(st.sampled_from(self.at_rest())))

    def end(self, sequence: int) -> None:
        """With its tail, if that can be kept; or not at all."""
        tokens = self.tokens[sequence]
        key = self.name(tokens)
        books = self.owner.books
        last = books.store.tables.of_row(books.store.tables.row(sequence))[-1:].tolist()
        is_kept = set(last) <= set(books.store.cached.key_of())
        if len(tokens) % KV.block_size == 0 or key in self.kept or sequence in self.behind:
            return
        if not is_kept:
            message = Close(sequence, tail=key.hex())
            books.close(message)
            self.follow(message)
            self.kept.add(key)
            self.gone(sequence)

    def gone(self, sequence: int) -> None:
        del self.tokens[sequence], self.reserved[sequence]
        self.behind.pop(sequence, None)

    def some_kept(self, data: st.DataObject) -> list[bytes]:
        """Of the owner's kept blocks, what it goes on with."""
        gone = {key for key in self.idle_keys() if not data.draw(_MOSTLY)}
        self.forgot(gone)
        return sorted(self.kept)

    def at_rest(self) -> list[int]:
        busy = {s for members in self.open_steps.values() for s in members}
        return [s for s in self.tokens if s not in busy]

    @precondition(lambda self: self.at_rest())
    @rule(data=st.data(), lane=st.integers(0, 1))
    def begin_step(self, data: st.DataObject, lane: int) -> None:
        if lane in self.open_steps:
            return
        some = data.draw(st.lists(st.sampled_from(self.at_rest()), min_size=1, unique=True))
        self.begin_step_of(some, data, lane)

    def begin_step_of(self, some: list[int], data: st.DataObject, lane: int) -> None:
        new = {
            s: data.draw(st.integers(1, room))
            for s in some
            if (room := self.behind.get(s, (self.reserved[s],))[0] - len(self.tokens[s]))
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
            if s in self.behind and len(self.tokens[s]) == self.behind[s][0]:
                self.tokens[s] += self.behind.pop(s)[1]
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
        self.finish(data.draw(st.sampled_from(list(self.open_steps))))

    def finish(self, lane: int) -> None:
        books = self.owner.books
        step = books.steps.of_lane[lane].step
        for layer in range(KV.num_layers):
            books.steps.finish_layer(lane, books.steps.due(lane, step, layer))
        for sequence in self.open_steps.pop(lane):
            self.note(sequence)

    @precondition(lambda self: self.at_rest())
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.at_rest()))
        kept = data.draw(st.integers(0, len(self.tokens[sequence])))
        before = snapshot(self.store)
        try:
            self.store.truncate(sequence, kept)
        except CapacityError:  # others share what it would leave
            assert snapshot(self.store) == before
            return
        self.follow(Truncate(sequence, kept))
        self.behind.pop(sequence, None)
        self.tokens[sequence] = self.tokens[sequence][:kept]
        self.note(sequence)

    @rule(data=st.data())
    def roll_back(self, data: st.DataObject) -> None:
        """Steps under way come to nothing; some sequences are cut, others closed."""
        settled = {s: self.owner.books.num_settled(s) for s in self.tokens}
        wanted = {s: data.draw(st.integers(0, n)) for s, n in settled.items() if data.draw(_MOSTLY)}
        taken, changes = take_over(self.owner.books, wanted, self.some_kept(data))
        self.open_steps.clear()
        for change in changes:
            self.follow(change)
        left = dict(zip(wanted, taken.num_tokens.tolist(), strict=True))
        self.behind.clear()
        for sequence in settled:
            if left.get(sequence, MISSING) == MISSING:
                self.gone(sequence)
            else:
                self.tokens[sequence] = self.tokens[sequence][: left[sequence]]
                self.note(sequence)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), more=st.integers(0, 6))
    def extend(self, data: st.DataObject, more: int) -> None:
        sequence = data.draw(st.sampled_from(list(self.tokens)))
        if self.change(Extend(sequence, self.reserved[sequence] + more)):
            self.reserved[sequence] += more
        less = partial(self.store.extend, sequence, self.reserved[sequence] - 1)
        refuses_unchanged(self.store, ProtocolError, less)
        if sequence not in self.behind:
            over = counts(self.reserved[sequence] - len(self.tokens[sequence]) + 1)
            outgrow = partial(self.store.append, ids(sequence), over)
            refuses_unchanged(self.store, CapacityError, outgrow)

    @precondition(lambda self: self.at_rest())
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.at_rest()))
        self.owner.books.close(Close(sequence))
        self.follow(Close(sequence))
        self.gone(sequence)
        refuses_unchanged(self.store, ProtocolError, lambda: self.store.close(sequence))

    # The link.

    @precondition(lambda self: self.mirror is None)
    @rule()
    def connect_late(self) -> None:
        self.connect()

    @precondition(lambda self: self.mirror)
    @rule(count=st.integers(1, 6))
    def send(self, count: int) -> None:
        for _ in range(count):
            message = None if self.mirror is None else self.mirror.next()
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
            self.answers.extend(self.replica.hear(message))

    @precondition(lambda self: self.mirror and self.answers)
    @rule()
    def answer(self) -> None:
        while self.answers:
            answer = self.answers.popleft()
            if isinstance(answer, Refused):  # a block that lies twice finds no room
                assert answer.code == "out_of_capacity" and self.chains
                with pytest.raises(ProtocolError, match="no copy any more"):
                    self.mirror.take(answer)
                self.connect_if_possible()
                return
            self.mirror.take(answer)

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
        keys = sorted(self.chains)
        order = TakeOver(SESSION, ids, most, 0, words_of(keys))
        (taken,) = self.replica.hear(order, S_WORKER)
        self.replica.memory.books = self.replica.books
        for key, is_kept in zip(keys, taken.is_kept.tolist(), strict=True):
            if is_kept:
                assert self.read_kept(self.replica.memory, key) == self.last_block(key)
        for sequence, count in zip(ids.tolist(), taken.num_tokens.tolist(), strict=True):
            if count > 0:
                versions = {tuple(version[:count]) for version in self.history[sequence]}
                assert self.read(self.replica.memory, sequence, count) in versions
        self.connect_if_possible()

    def connect_if_possible(self) -> None:
        self.mirror = None
        if not self.open_steps:
            self.connect()

    @precondition(lambda self: self.mirror)
    @rule()
    def let_it_catch_up(self) -> None:
        """Then the replica has every settled token, and as much room."""
        mirror = self.mirror
        while not self.idle():
            self.send(3)
            if self.under_way:
                self.deliver(3)
            if self.answers:
                self.answer()
            if self.mirror is not mirror:
                return  # it was refused
        assert self.mirror.num_behind == 0
        books = self.replica.memory.books = self.replica.books
        kept = set(books.store.cached)  # a block that an open step fills comes when that ends
        assert kept == self.kept or (kept < self.kept and self.open_steps)
        for key in kept:
            assert self.read_kept(self.replica.memory, key) == self.last_block(key)
        there, protected = books.store.tables.row_of.keys(), self.tokens.keys() - self.unprotected
        assert protected >= there >= protected - self.doubtful
        for sequence in books.store.tables.row_of:
            tokens = self.tokens[sequence]
            settled = self.owner.books.num_settled(sequence)
            assert books.num_settled(sequence) == settled
            if settled:
                assert self.read(self.replica.memory, sequence, settled) == tuple(tokens[:settled])
                mine = self.owner.stored(sequence, 0, settled)
                theirs = self.replica.memory.stored(sequence, 0, settled)
                assert [x.tobytes() for x in mine] == [x.tobytes() for x in theirs]

    def idle(self) -> bool:
        is_whole = self.mirror.is_whole and not self.mirror.lacking
        return bool(is_whole and not self.under_way)

    def last_block(self, key: bytes) -> tuple[int, ...]:
        """The tokens of the block that is kept by a key."""
        chain = self.chains[key]
        return chain[(len(chain) - 1) // KV.block_size * KV.block_size :]

    def read_kept(self, memory: Memory, key: bytes) -> tuple[int, ...]:
        """Return the same, as a memory has them."""
        block = int(memory.books.store.cached.of_keys([key])[0])
        count = len(self.last_block(key))
        slots = block * KV.block_size + np.arange(count, dtype=np.int64)
        tokens = cpu_kernels.allocate_tokens(memory.layout, count)
        cpu_kernels.gather(memory.layout, memory.pool[0], slots, *tokens)
        return self.numbers(tokens[0], tokens[2])

    def read(self, memory: Memory, sequence: int, count: int) -> tuple[int, ...]:
        """Return the numbers that tokens were made of.

        The scales of int8 tell them: the largest of K is number + 7 in the first layer."""
        k, _, scales = memory.stored(sequence, 0, count)
        return self.numbers(k[0], scales[0])

    def numbers(self, k: np.ndarray, scales: np.ndarray) -> tuple[int, ...]:
        largest = scales[:, 0, 0] * (np.abs(k[:, 0].astype(np.int32) - 128)).max(axis=-1)
        return tuple(np.rint(largest - 7).astype(int).tolist())

    @invariant()
    def the_store_is_sound(self) -> None:
        self.store.check_invariants()
        for sequence, tokens in self.tokens.items():
            if tokens:
                assert self.read(self.owner, sequence, len(tokens)) == tuple(tokens)
        for key in self.kept:
            assert self.read_kept(self.owner, key) == self.last_block(key)
        free, available = self.store.pool.num_free, self.store.pool.num_available
        ends = [self.behind[s][0] + len(self.behind[s][1]) if s in self.behind else len(tokens)
                for s, tokens in self.tokens.items()]  # fmt: skip
        for num_blocks, totals in ((free, ends), (available, self.reserved.values())):
            unshared = sum(-(-total // KV.block_size) for total in totals)
            assert NUM_BLOCKS - num_blocks <= unshared + len(self.kept)

    @invariant()
    def the_link_is_bounded(self) -> None:
        if getattr(self, "mirror", None):
            assert self.mirror.num_unacknowledged <= max(self.link_bytes, self.largest)
