"""Blocks that outlive their sequences, against a memory that remembers what
each slot was written for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule
from state_machine import BLOCK_SIZE, HELLO, NUM_LAYERS, Worker, attend, step_of
from store_machine import BLOCK_SIZE as STORE_BLOCK
from store_machine import NUM_BLOCKS, KVStoreMachine, counts, ids, refuses_unchanged
from values import replace

from examples import examples
from fastdecode.core.errors import CapacityError, ProtocolError
from fastdecode.wire.kv.kept import EndSequence, ForgetBlocks, KeepBlocks, ResumeSequence
from fastdecode.wire.messages import (
    Accepted,
    CloseSequence,
    ForkSequence,
    OpenSequence,
    Refused,
)
from rworker.blocks.kv_store import KVStore


class KeepingMachine(KVStoreMachine):
    """Keep full blocks, resume from any of them, and forget them, beside all
    else that befalls sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[bytes, tuple[int, tuple[int, ...]]] = {}
        """Key → block, and the tokens in it."""
        self.num_keys = 0

    def _new_key(self) -> bytes:
        self.num_keys += 1
        return self.num_keys.to_bytes(16, "little")

    @precondition(lambda self: any(len(t) >= STORE_BLOCK for t in self.tokens.values()))
    @rule(data=st.data())
    def keep(self, data: st.DataObject) -> None:
        full = [s for s, tokens in self.tokens.items() if len(tokens) >= STORE_BLOCK]
        sequence = data.draw(st.sampled_from(full), "sequence")
        place = data.draw(st.integers(0, len(self.tokens[sequence]) // STORE_BLOCK - 1), "place")
        table = self.store.tables.of_row(self.store.tables.row(sequence))
        block, key = table[place : place + 1].copy(), self._new_key()
        if int(block[0]) in {kept for kept, _ in self.kept.values()}:
            refuses_unchanged(
                self.store, ProtocolError, lambda: self.store.cached.keep([key], block)
            )
            return
        self.store.cached.keep([key], block)
        first = place * STORE_BLOCK
        tokens = tuple(self.tokens[sequence][first : first + STORE_BLOCK])
        self.kept[key] = int(block[0]), tokens

    @precondition(lambda self: self.kept)
    @rule(data=st.data(), less=st.integers(0, STORE_BLOCK - 1), more=st.integers(0, 9))
    def resume(self, data: st.DataObject, less: int, more: int) -> None:
        """Of any kept blocks in any order: a store knows nothing of chains."""
        drawn = data.draw(st.lists(st.sampled_from(sorted(self.kept)), min_size=1, unique=True))
        keys = [key for key in drawn[:-1] if len(self.kept[key][1]) == STORE_BLOCK] + drawn[-1:]
        less %= len(self.kept[keys[-1]][1])
        tokens = [token for key in keys for token in self.kept[key][1]][: -less or None]
        blocks = self.store.cached.of_keys(keys)
        assert blocks.tolist() == [self.kept[key][0] for key in keys]
        self._try(
            lambda new: self.store.resume(new, blocks, len(tokens), len(tokens) + more),
            tokens,
            len(tokens) + more,
        )

    @precondition(lambda self: any(len(tokens) == STORE_BLOCK for _, tokens in self.kept.values()))
    @rule(data=st.data(), num_missing=st.integers(1, 3), less=st.integers(0, 3))
    def resume_around_a_gap(self, data: st.DataObject, num_missing: int, less: int) -> None:
        """What is missing comes in pieces, beside others' tokens; or the sequence
        is given up, or cut back, before it has come."""
        full = sorted(key for key, (_, tokens) in self.kept.items() if len(tokens) == STORE_BLOCK)
        keys = data.draw(st.lists(st.sampled_from(full), min_size=1, unique=True), "keys")
        num_before = data.draw(st.integers(0, len(keys) - 1), "before")
        start, size = num_before * STORE_BLOCK, num_missing * STORE_BLOCK
        blocks = self.store.cached.of_keys(keys)
        total = len(keys) * STORE_BLOCK + size - less
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
            self._append_rows(data.draw(st.permutations(rows), "rows"))
        self.tokens[new], self.reserved[new] = tokens, reserved

    def _append_rows(self, rows: list[tuple[int, int, list[int]]]) -> None:
        """(sequence, tokens before, new tokens) of each."""
        past = counts(*[first for _, first, _ in rows])
        appended = self.store.append(
            ids(*[row[0] for row in rows]), counts(*[len(row[2]) for row in rows]), past
        )
        cells = self.memory.cells
        cells[appended.copy_targets] = cells[appended.copy_sources]
        cells.reshape(-1)[appended.slots] = [token for row in rows for token in row[2]]

    @precondition(lambda self: any(len(t) % STORE_BLOCK for t in self.tokens.values()))
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        """Close a sequence whose last block isn't full, and keep that."""
        partly = [s for s, tokens in self.tokens.items() if len(tokens) % STORE_BLOCK]
        sequence = data.draw(st.sampled_from(partly), "sequence")
        block = int(self.store.tables.of_row(self.store.tables.row(sequence))[-1])
        key = self._new_key()
        if block in {kept for kept, _ in self.kept.values()}:
            refuses_unchanged(self.store, ProtocolError, lambda: self.store.close(sequence, key))
            return
        self.store.close(sequence, key)
        tokens = self.tokens.pop(sequence)
        del self.reserved[sequence]
        self.kept[key] = block, tuple(tokens[-(len(tokens) % STORE_BLOCK) :])

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
    def sharing_never_costs_blocks(self) -> None:
        num_used = NUM_BLOCKS - self.store.pool.num_free
        own = sum(-(-len(tokens) // STORE_BLOCK) for tokens in self.tokens.values())
        assert num_used <= own + len(self.kept)

    @invariant()
    def promises_are_no_dearer_than_without_sharing(self) -> None:
        num_held = NUM_BLOCKS - self.store.pool.num_available
        own = sum(-(-tokens // STORE_BLOCK) for tokens in self.reserved.values())
        assert num_held <= own + len(self.kept)

    def teardown(self) -> None:
        if self.kept:
            self.store.cached.forget(list(self.kept))
        super().teardown()


KeepingMachine.TestCase.settings = settings(
    max_examples=examples(240), stateful_step_count=40, deadline=None, derandomize=True
)
TestKeepingMachine = KeepingMachine.TestCase


def key(number: int) -> bytes:
    return bytes([number]) * 16


def keys(*numbers: int) -> np.ndarray:
    return np.frombuffer(b"".join(map(key, numbers)), np.int64).reshape(-1, 2)


def test_a_store_without_room_for_the_rest_refuses_to_resume() -> None:
    store = KVStore(4, STORE_BLOCK)
    store.open(0, 8)
    store.append(ids(0), counts(8))
    store.cached.keep([key(1), key(2)], store.tables.of_row(store.tables.row(0)).copy())
    store.close(0)
    assert store.pool.num_available == 2 and len(store.cached) == 2
    blocks = store.cached.of_keys([key(1), key(2)])
    refuses_unchanged(store, CapacityError, lambda: store.resume(1, blocks, 8, 17))
    refuses_unchanged(store, CapacityError, lambda: store.resume(1, blocks, 7, 16)), "the tail's"
    store.resume(1, blocks, 8, 16)
    assert store.pool.num_available == 0


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (KeepBlocks(1, 0, keys(1)), "sequence 1 is not open"),
        (KeepBlocks(0, 1, keys(1, 2)), "has 8 tokens in every layer"),
        (KeepBlocks(0, -1, keys(1)), "first_block"),
        (KeepBlocks(0, 0, keys(1, 1)), "another block's"),
        (KeepBlocks(0, 0, keys(9)), "another block's"),
        (KeepBlocks(0, 1, keys(1)), "kept by another key"),
        (KeepBlocks(0, 0, keys()), "none"),
        (KeepBlocks(0, 0, np.zeros((1, 3), np.int64)), "shape"),
        (KeepBlocks(0, 0, np.zeros((1, 2), np.int32)), "int64"),
        (ResumeSequence(1, 9, 8, keys(9, 1)), "no block is kept"),
        (ResumeSequence(1, 9, 5, keys(9)), "would resume 5 tokens"),
        (ResumeSequence(1, 3, 4, keys(9)), "would resume 4 tokens"),
        (ResumeSequence(0, 9, 4, keys(9)), "is open already"),
        (ResumeSequence(1, 20, 8, keys(9), 0, 5), "which isn't whole blocks"),
        (ResumeSequence(1, 20, 8, keys(9), 4, 8), "which isn't whole blocks"),
        (ResumeSequence(1, 20, 8, keys(9), 4, 0), "gap_stop"),
        (ResumeSequence(1, 20, 8, keys(9), -4, 4), "gap_start"),
        (ResumeSequence(1, 20, 12, keys(9), 0, 4), "would resume 12 tokens"),
        (EndSequence(1, keys(1)), "sequence 1 is not open"),
        (EndSequence(0, keys(1)), "no last block that isn't full"),
        (EndSequence(0, keys(1, 2)), "shape"),
        (ForgetBlocks(keys(1)), "no block is kept"),
        (ForgetBlocks(keys(9, 9)), "twice"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(message: Any, reason: str) -> None:
    worker = Worker()
    worker.tell(HELLO)
    worker.answer(OpenSequence(0, 20))
    worker.run_step(step_of((0, 0, 8)))
    worker.tell(KeepBlocks(0, 1, keys(9)))
    worker.fails(message, reason)


def test_a_block_is_kept_only_when_it_is_there_in_every_layer() -> None:
    worker = Worker()
    worker.tell(HELLO)
    worker.answer(OpenSequence(0, 20))
    worker.tell(step_of((0, 0, BLOCK_SIZE)))
    worker.fails(KeepBlocks(0, 0, keys(1)), "has 0 tokens in every layer")


def test_a_resumed_sequence_steps_from_where_its_blocks_end() -> None:
    worker = Worker()
    worker.tell(HELLO)
    worker.answer(OpenSequence(0, 20))
    worker.run_step(step_of((0, 0, 2 * BLOCK_SIZE)))
    worker.tell(KeepBlocks(0, 0, keys(1, 2)))
    worker.tell(CloseSequence(0))
    resume = ResumeSequence(1, 20, 2 * BLOCK_SIZE - 1, keys(1, 2))
    assert worker.answer(resume) == Accepted(1) and resume.undo() == CloseSequence(1)
    copy, *_ = worker.tell(step_of((1, 2 * BLOCK_SIZE - 1, 1), step=1))
    assert (copy.source_ids, copy.target_ids) == ([1], [2]), "what is kept isn't written"
    far = replace(resume, sequence_id=2, num_reserved_tokens=1 << 20)
    refused = worker.answer(far)
    assert isinstance(refused, Refused) and refused.code == "exceeds_capacity"


def gapped() -> Worker:
    """Sequence 1 has blocks 0 and 2 of another, and misses tokens 4 to 7."""
    worker = Worker()
    worker.tell(HELLO)
    worker.answer(OpenSequence(0, 20))
    worker.run_step(step_of((0, 0, 3 * BLOCK_SIZE)))
    worker.tell(KeepBlocks(0, 0, keys(1, 2, 3)))
    worker.tell(CloseSequence(0))
    worker.tell(ForgetBlocks(keys(2)))
    assert worker.answer(ResumeSequence(1, 20, 11, keys(1, 3), 4, 8)) == Accepted(1)
    return worker


def test_a_gap_is_filled_first_and_with_its_end_the_sequence_goes_on_behind_it() -> None:
    worker = gapped()
    (first, *_) = worker.run_step(step_of((1, 4, 3), step=1))
    assert first.plan.slots.tolist() == [4, 5, 6]
    begin = step_of((1, 11, 2), (1, 7, 1), step=2)  # in any order
    copy, *_ = worker.tell(begin)
    assert (copy.source_ids, copy.target_ids) == ([2], [3]), "what is kept isn't written"
    for layer in range(NUM_LAYERS):
        (compute,) = worker.tell(attend(begin, layer))
    plan = compute.plan
    assert plan.slots.tolist() == [3 * 4 + 3, 4 * 4, 7]
    assert plan.context_lens.tolist() == [13, 8] and plan.query_positions.tolist() == [11, 7]
    worker.run_step(step_of((1, 13, 1), step=3))


def test_a_token_that_another_row_of_its_step_sees_is_written_before_attention() -> None:
    worker = gapped()
    worker.run_step(step_of((1, 4, 3), step=1))
    begin = step_of((1, 7, 1), (1, 11, 1), step=2)
    worker.tell(begin)
    computes = [worker.tell(attend(begin, layer))[0] for layer in range(NUM_LAYERS)]
    plan = computes[0].plan
    assert (plan.num_single, plan.num_last) == (2, 0)
    assert worker.run_step(step_of((1, 12, 1), step=3))[0].plan.num_last == 1


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (step_of((1, 11, 1)), "behind its gap, of which 4 tokens are missing"),
        (step_of((1, 4, 3), (1, 11, 1)), "behind its gap, of which 1 tokens are missing"),
        (step_of((1, 4, 5)), "would append 5 tokens to its gap, of which 4"),
        (step_of((1, 4, 2), (1, 4, 2)), "to its gap"),
        (step_of((1, 4, 4), (1, 11, 1), (1, 11, 1)), "is in the step twice"),
        (step_of((1, 0, 1)), "num_past must equal the 4 tokens"),
        (step_of((1, 4, 4), (1, 11, 30)), "room was reserved for 20"),
        (step_of((1, 11, 0), queries=[1], num_beyond=counts(1)), "must equal the 4 tokens"),
        (ForkSequence(1, 2, 4, 20), "has a gap"),
        (KeepBlocks(1, 1, keys(9)), "has 4 tokens in every layer"),
        (EndSequence(1, keys(9)), "has a gap"),
    ],
    ids=str,
)
def test_nobody_gets_behind_a_gap_that_is_not_filled(message: Any, reason: str) -> None:
    worker = gapped()
    if "reserved for" in reason:
        worker.fails(message, reason, code="out_of_capacity")
    else:
        worker.fails(message, reason)


def test_a_sequence_is_closed_with_its_gap_and_all_is_free() -> None:
    worker = gapped()
    worker.tell(CloseSequence(1))
    worker.tell(ForgetBlocks(keys(1, 3)))
    (cache,) = worker.state._caches
    store = cache.books.store
    assert store.pool.num_available == store.num_blocks


def test_the_last_block_of_a_sequence_that_ends_is_kept_as_it_is() -> None:
    worker = Worker()
    worker.tell(HELLO)
    worker.answer(OpenSequence(0, 20))
    num_tokens = 2 * BLOCK_SIZE - 3
    worker.run_step(step_of((0, 0, num_tokens)))
    worker.tell(KeepBlocks(0, 0, keys(1)))
    worker.tell(EndSequence(0, keys(2)))
    assert worker.answer(ResumeSequence(1, 20, num_tokens, keys(1, 2))) == Accepted(1)
    copy, *_ = worker.tell(step_of((1, num_tokens, 1), step=1))
    assert (copy.source_ids, copy.target_ids) == ([1], [2]), "what is kept isn't written"


def test_a_sequence_ends_with_its_last_block_only_when_that_is_there_in_every_layer() -> None:
    worker = Worker()
    worker.tell(HELLO)
    worker.answer(OpenSequence(0, 20))
    worker.tell(step_of((0, 0, BLOCK_SIZE - 1)))
    worker.fails(EndSequence(0, keys(1)), "is in an open step")
