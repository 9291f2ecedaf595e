"""A KV store against a naive model: a dict of token lists, and a memory that a
slot really writes to."""

from __future__ import annotations

from collections.abc import Callable

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

    def append(self, store: KVStore, new: dict[int, list[int]]) -> None:
        appended = store.append(ids(*new), counts(*map(len, new.values())))
        self.cells[appended.copy_targets] = self.cells[appended.copy_sources]
        self.cells.reshape(-1)[appended.slots] = [
            token for tokens in new.values() for token in tokens
        ]

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
    """Open, fork, append and close in any order. An append inside its
    reservation must never fail."""

    def __init__(self) -> None:
        super().__init__()
        self.store = KVStore(NUM_BLOCKS, BLOCK_SIZE, max_sequences=9)
        self.memory = Memory(NUM_BLOCKS, BLOCK_SIZE)
        self.tokens: dict[int, list[int]] = {}
        self.reserved: dict[int, int] = {}
        self.next_id = 0
        self.next_token = 0

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
        self.memory.append(self.store, new)
        for sequence, tokens in new.items():
            self.tokens[sequence] = self.tokens[sequence] + tokens

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
        self.memory.append(self.store, new)
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
        assert num_used <= sum(-(-len(tokens) // BLOCK_SIZE) for tokens in self.tokens.values())

    @invariant()
    def promises_are_no_dearer_than_without_sharing(self) -> None:
        num_held = NUM_BLOCKS - self.store.pool.num_available
        assert num_held <= sum(-(-tokens // BLOCK_SIZE) for tokens in self.reserved.values())

    def teardown(self) -> None:
        for sequence in list(self.tokens):
            self.store.close(sequence)
        self.store.check_invariants()
        assert self.store.pool.num_free == self.store.pool.num_available == NUM_BLOCKS
