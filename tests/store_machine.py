"""A KV store against a naive model: a dict of token lists, and a memory that a
slot really writes to."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fastdecode.core.errors import CapacityError, ProtocolError
from rworker.blocks.kv_store import KVStore

NUM_BLOCKS = 12
BLOCK_SIZE = 4


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def counts(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


class Memory:
    """What a pool of KV would hold, one number a slot."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.cells = np.full((num_blocks, block_size), -1, np.int64)

    def append(self, store: KVStore, rows: Sequence[tuple[int, int, list[int]]]) -> None:
        """Append tokens. Each row is a sequence, its number of tokens before, and new tokens."""
        sequences, past, new = zip(*rows, strict=True)
        appended = store.append(ids(*sequences), counts(*map(len, new)), counts(*past))
        self.cells[appended.copy_targets] = self.cells[appended.copy_sources]
        self.cells.reshape(-1)[appended.slots] = [token for tokens in new for token in tokens]

    def read(self, store: KVStore, sequence_id: int) -> list[int]:
        table = store.block_tables(ids(sequence_id))[0]
        (length,) = store.num_tokens(ids(sequence_id))
        return self.cells[table].reshape(-1)[:length].tolist()


def snapshot(store: KVStore) -> dict[str, object]:
    pool, tables = store.pool, store.tables
    in_pool = {
        name: value.tolist() if isinstance(value, np.ndarray) else value
        for name, value in vars(pool).items()
        if name != "_returned"
    }
    rows = {
        f"row {key}": (
            tables.blocks[row].tolist(),
            tables.lengths[row].item(),
            tables.reserved[row].item(),
            tables.widths[row].item(),
        )
        for key, row in tables.row_of.items()
    }
    return in_pool | rows | {"free": pool.free.tolist(), "row of": repr(tables.row_of)}


def refuses_unchanged(
    store: KVStore, error: type[Exception], act: Callable[[], object]
) -> Exception:
    before = snapshot(store)
    with pytest.raises(error) as caught:
        act()
    assert snapshot(store) == before
    return caught.value


class KVStoreMachine(RuleBasedStateMachine):
    """Open, fork, append, keep, resume, forget and close in any order.

    An append inside its reservation must never fail.
    """

    def __init__(self) -> None:
        super().__init__()
        self.store = KVStore(NUM_BLOCKS, BLOCK_SIZE, max_sequences=9)
        self.memory = Memory(NUM_BLOCKS, BLOCK_SIZE)
        self.tokens: dict[int, list[int]] = {}
        self.reserved: dict[int, int] = {}
        self.next_id = 0
        self.next_token = 0
        self.kept: dict[bytes, tuple[int, tuple[int, ...]]] = {}
        """Key → block, and the tokens in it."""
        self.num_keys = 0

    def _append(self, new: dict[int, list[int]]) -> None:
        if new:
            rows = [(s, len(self.tokens[s]), tokens) for s, tokens in new.items()]
            self.memory.append(self.store, rows)
        for sequence, tokens in new.items():
            self.tokens[sequence] = self.tokens[sequence] + tokens

    def _fresh(self, num_tokens: int) -> list[int]:
        self.next_token += num_tokens
        return list(range(self.next_token - num_tokens, self.next_token))

    def _try(self, act: Callable[[int], None], tokens: list[int], num_reserved: int) -> None:
        self.next_id += 1
        try:
            act(self.next_id)
        except CapacityError:
            refuses_unchanged(self.store, CapacityError, lambda: act(self.next_id))
            return
        self.tokens[self.next_id] = tokens
        self.reserved[self.next_id] = num_reserved

    @rule(num_reserved=st.integers(1, 24))
    def open(self, num_reserved: int) -> None:
        self._try(lambda new: self.store.open(new, num_reserved), [], num_reserved)

    @precondition(lambda self: any(self.tokens.values()))
    @rule(data=st.data(), more=st.integers(0, 9))
    def fork(self, data: st.DataObject, more: int) -> None:
        parent = data.draw(
            st.sampled_from([s for s, tokens in self.tokens.items() if tokens]), "parent"
        )
        shared = data.draw(st.integers(1, len(self.tokens[parent])), "shared")
        self._try(
            lambda new: self.store.fork(parent, new, shared, shared + more),
            self.tokens[parent][:shared],
            shared + more,
        )

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def append(self, data: st.DataObject) -> None:
        some = data.draw(
            st.lists(st.sampled_from(list(self.tokens)), min_size=1, unique=True), "sequences"
        )
        new = {
            sequence: self._fresh(data.draw(st.integers(1, room), "num_new"))
            for sequence in some
            if (room := self.reserved[sequence] - len(self.tokens[sequence]))
        }
        self._append(new)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), more=st.integers(0, 9))
    def extend(self, data: st.DataObject, more: int) -> None:
        sequence = data.draw(st.sampled_from(list(self.tokens)), "sequence")
        enlarged = self.reserved[sequence] + more
        try:
            self.store.extend(sequence, enlarged)
        except CapacityError:
            refuses_unchanged(
                self.store, CapacityError, lambda: self.store.extend(sequence, enlarged)
            )
            return
        self.reserved[sequence] = enlarged
        refuses_unchanged(
            self.store, ProtocolError, lambda: self.store.extend(sequence, enlarged - 1)
        )

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def outgrow(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(list(self.tokens)), "sequence")
        over = self.reserved[sequence] - len(self.tokens[sequence]) + 1
        refuses_unchanged(
            self.store, CapacityError, lambda: self.store.append(ids(sequence), counts(over))
        )

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(list(self.tokens)), "sequence")
        self.store.close(sequence)
        del self.tokens[sequence], self.reserved[sequence]
        refuses_unchanged(self.store, ProtocolError, lambda: self.store.close(sequence))

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(list(self.tokens)), "sequence")
        tokens = self.tokens[sequence]
        kept = data.draw(st.integers(0, len(tokens)), "kept")
        try:
            self.store.truncate(sequence, kept)
        except CapacityError:
            refuses_unchanged(
                self.store, CapacityError, lambda: self.store.truncate(sequence, kept)
            )
            return
        self.tokens[sequence] = tokens[:kept]
        refuses_unchanged(
            self.store, ProtocolError, lambda: self.store.truncate(sequence, kept + 1)
        )

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), num_forks=st.integers(0, 2))
    def roll_back(self, data: st.DataObject, num_forks: int) -> None:
        """What was just appended can always be taken away again, whatever was
        forked of what came before meanwhile."""
        self.append(data)
        before = {s: list(tokens) for s, tokens in self.tokens.items()}
        appended = [s for s in before if data.draw(st.booleans(), "appended")]
        new = {
            s: self._fresh(data.draw(st.integers(1, room), "num_new"))
            for s in appended
            if (room := self.reserved[s] - len(self.tokens[s]))
        }
        if not new:
            return
        self.memory.append(self.store, [(s, len(before[s]), added) for s, added in new.items()])
        for _ in range(num_forks):
            parent = data.draw(st.sampled_from(list(new)), "parent")
            if before[parent]:
                shared = data.draw(st.integers(1, len(before[parent])), "shared")
                self._try(
                    lambda fork, parent=parent, shared=shared: self.store.fork(  # type: ignore[misc]
                        parent, fork, shared, shared + 3
                    ),
                    before[parent][:shared],
                    shared + 3,
                )
        for sequence in new:
            self.store.truncate(sequence, len(before[sequence]))

    def _new_key(self) -> bytes:
        self.num_keys += 1
        return self.num_keys.to_bytes(16, "little")

    @precondition(lambda self: any(len(t) >= BLOCK_SIZE for t in self.tokens.values()))
    @rule(data=st.data())
    def keep(self, data: st.DataObject) -> None:
        full = [s for s, tokens in self.tokens.items() if len(tokens) >= BLOCK_SIZE]
        sequence = data.draw(st.sampled_from(full), "sequence")
        place = data.draw(st.integers(0, len(self.tokens[sequence]) // BLOCK_SIZE - 1), "place")
        table = self.store.tables.of_row(self.store.tables.row(sequence))
        block, key = table[place : place + 1].copy(), self._new_key()
        if int(block[0]) in {kept for kept, _ in self.kept.values()}:
            refuses_unchanged(
                self.store, ProtocolError, lambda: self.store.cached.keep([key], block)
            )
            return
        self.store.cached.keep([key], block)
        first = place * BLOCK_SIZE
        tokens = tuple(self.tokens[sequence][first : first + BLOCK_SIZE])
        self.kept[key] = int(block[0]), tokens

    @precondition(lambda self: self.kept)
    @rule(data=st.data(), less=st.integers(0, BLOCK_SIZE - 1), more=st.integers(0, 9))
    def resume(self, data: st.DataObject, less: int, more: int) -> None:
        """Of any kept blocks in any order: a store knows nothing of chains."""
        drawn = data.draw(st.lists(st.sampled_from(sorted(self.kept)), min_size=1, unique=True))
        keys = [key for key in drawn[:-1] if len(self.kept[key][1]) == BLOCK_SIZE] + drawn[-1:]
        less %= len(self.kept[keys[-1]][1])
        tokens = [token for key in keys for token in self.kept[key][1]][: -less or None]
        blocks = self.store.cached.of_keys(keys)
        assert blocks.tolist() == [self.kept[key][0] for key in keys]
        self._try(
            lambda new: self.store.resume(new, blocks, len(tokens), len(tokens) + more),
            tokens,
            len(tokens) + more,
        )

    @precondition(lambda self: any(len(tokens) == BLOCK_SIZE for _, tokens in self.kept.values()))
    @rule(data=st.data(), num_missing=st.integers(1, 3), less=st.integers(0, 3))
    def resume_around_a_gap(self, data: st.DataObject, num_missing: int, less: int) -> None:
        """What is missing comes in pieces, beside others' tokens; or the sequence
        is given up, or cut back, before it has come."""
        full = sorted(key for key, (_, tokens) in self.kept.items() if len(tokens) == BLOCK_SIZE)
        keys = data.draw(st.lists(st.sampled_from(full), min_size=1, unique=True), "keys")
        num_before = data.draw(st.integers(0, len(keys) - 1), "before")
        start, size = num_before * BLOCK_SIZE, num_missing * BLOCK_SIZE
        blocks = self.store.cached.of_keys(keys)
        total = len(keys) * BLOCK_SIZE + size - less
        held = [token for key in keys for token in self.kept[key][1]]
        missing = self._fresh(size)
        tokens = (held[:start] + missing + held[start:])[:total]
        gap, reserved = range(start, start + size), total + 3
        self.next_id += 1
        new = self.next_id
        try:
            self.store.resume(new, blocks, total, reserved, gap)
        except CapacityError:
            return
        self._fill(data, new, gap, tokens, reserved)

    def _fill(
        self, data: st.DataObject, new: int, gap: range, tokens: list[int], reserved: int
    ) -> None:
        while gap:
            self.store.check_invariants()
            (there,) = self.store.num_tokens(ids(new))
            assert there == gap.start
            way = data.draw(st.sampled_from(("fill", "fill", "fill", "cut", "close")), "way")
            if way == "close":
                self.store.close(new)
                return
            if way == "cut":
                self.store.truncate(new, gap.start)
                tokens = tokens[: gap.start]
                break
            count = data.draw(st.integers(1, len(gap)), "filled")
            rows = [(new, gap.start, tokens[gap.start : gap.start + count])]
            gap = range(gap.start + count, gap.stop)
            if not gap and data.draw(st.booleans(), "goes on"):
                more = self._fresh(data.draw(st.integers(1, reserved - len(tokens)), "more"))
                rows.append((new, len(tokens), more))
                tokens = tokens + more
            for other in data.draw(st.sets(st.sampled_from([0, *self.tokens])), "others"):
                if other and len(self.tokens[other]) < self.reserved[other]:
                    rows.append((other, len(self.tokens[other]), self._fresh(1)))
                    self.tokens[other] = self.tokens[other] + rows[-1][2]
            self.memory.append(self.store, data.draw(st.permutations(rows), "rows"))
        self.tokens[new], self.reserved[new] = tokens, reserved

    @precondition(lambda self: any(len(t) % BLOCK_SIZE for t in self.tokens.values()))
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        """Close a sequence whose last block isn't full, and keep that."""
        partly = [s for s, tokens in self.tokens.items() if len(tokens) % BLOCK_SIZE]
        sequence = data.draw(st.sampled_from(partly), "sequence")
        block = int(self.store.tables.of_row(self.store.tables.row(sequence))[-1])
        key = self._new_key()
        if block in {kept for kept, _ in self.kept.values()}:
            refuses_unchanged(self.store, ProtocolError, lambda: self.store.close(sequence, key))
            return
        self.store.close(sequence, key)
        tokens = self.tokens.pop(sequence)
        del self.reserved[sequence]
        self.kept[key] = block, tuple(tokens[-(len(tokens) % BLOCK_SIZE) :])

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.kept)), "key")
        self.store.cached.forget([key])
        del self.kept[key]
        refuses_unchanged(self.store, ProtocolError, lambda: self.store.cached.forget([key]))

    @invariant()
    def kept_blocks_hold_what_they_held(self) -> None:
        for block, tokens in self.kept.values():
            assert tuple(self.memory.cells[block, : len(tokens)].tolist()) == tokens

    @invariant()
    def store_is_sound(self) -> None:
        self.store.check_invariants()
        assert len(self.store.tables.row_of) == len(self.tokens)

    @invariant()
    def every_sequence_reads_its_own_tokens(self) -> None:
        for sequence, tokens in self.tokens.items():
            assert self.memory.read(self.store, sequence) == tokens

    @invariant()
    def sharing_never_costs_blocks(self) -> None:
        num_used = NUM_BLOCKS - self.store.pool.num_free
        own = sum(-(-len(tokens) // BLOCK_SIZE) for tokens in self.tokens.values())
        assert num_used <= own + len(self.kept)

    @invariant()
    def promises_are_no_dearer_than_without_sharing(self) -> None:
        num_held = NUM_BLOCKS - self.store.pool.num_available
        own = sum(-(-tokens // BLOCK_SIZE) for tokens in self.reserved.values())
        assert num_held <= own + len(self.kept)

    def teardown(self) -> None:
        if self.kept:
            self.store.cached.forget(list(self.kept))
        for sequence in list(self.tokens):
            self.store.close(sequence)
        self.store.check_invariants()
        assert self.store.pool.num_free == self.store.pool.num_available == NUM_BLOCKS
