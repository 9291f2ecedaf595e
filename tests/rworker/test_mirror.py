"""A replica against the cache that it is of: whatever happens to sequences,
however late the link is, and wherever it is cut."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from chunk_memory import ALL_KV, LENGTHS, Memory, assert_same, random_rows
from hypothesis import settings
from mirror_machine import KV, MirrorMachine, Replica
from state_machine import step_of
from store_checks import counts, ids

import cpu_kernels
from examples import examples
from fastdecode.core.errors import ProtocolError
from fastdecode.core.holders import HolderId
from fastdecode.core.spec import KVSpec
from fastdecode.wire.blocks import (
    ChunkForm,
    Fetch,
    Forget,
    Name,
    Retain,
    StoreChunk,
    TakenOver,
    keys_of,
    words_of,
)
from fastdecode.wire.messages import Accepted, Close, Open, Refused
from rworker.stream.chunks import layout_of
from rworker.stream.mirror import UNANSWERED, Mirror
from rworker.stream.taking_over import take_over

MirrorMachine.TestCase.settings = settings(max_examples=examples(160), stateful_step_count=40)
TestMirror = MirrorMachine.TestCase


def replica_of(owner: Memory) -> Replica:
    """Return a replica that was begun late, and has all."""
    mirror = Mirror(HolderId(0), owner.books, owner)
    replica = Replica(mirror.hello)
    while (message := mirror.next()) is not None:
        for answer in replica.hear(message):
            mirror.take(answer)
    assert mirror.is_whole
    replica.memory.books = replica.books
    return replica


@pytest.mark.parametrize("most_bytes", [1 << 22, 2000, 1])
@pytest.mark.parametrize("kv", ALL_KV, ids=lambda kv: kv.dtype.value)
def test_a_replica_is_its_cache_bit_for_bit(
    kv: KVSpec, most_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many tokens a chunk takes, kept blocks that are sent by themselves included."""
    for module in ("checks", "replica_log"):
        monkeypatch.setattr(f"rworker.stream.{module}.MAX_CHUNK_BYTES", most_bytes)
    owner = Memory(kv)
    owner.fill(LENGTHS, seed=1)
    owner.books.keep(Name(3, 0, words_of(KEYS[:2])))
    before = owner.stored(3, 0, 16)
    owner.books.close(Close(3))
    replica = replica_of(owner)
    assert_same(owner, replica.memory, {s: n for s, n in LENGTHS.items() if s != 3})
    (accepted,) = replica.hear(Open(3, 16, 16, words_of(KEYS[:2])))
    assert accepted == Accepted(3)
    after = replica.memory.stored(3, 0, 16)
    assert [x.tobytes() for x in before] == [x.tobytes() for x in after]


def test_a_decode_step_is_one_chunk() -> None:
    owner = Memory(KV, 200)
    owner.fill({i: 5 + i % 4 for i in range(12)}, seed=1)
    mirror = Mirror(HolderId(0), owner.books, owner)
    while (message := mirror.next()) is not None:
        if not isinstance(message, UNANSWERED):
            mirror.take(Accepted(message.sequence_id))
    assert mirror.is_whole
    begin = step_of(*[(i, 5 + i % 4, 1) for i in range(12)], queries=[0] * 12)
    owner.books.begin_step(begin)
    assert mirror.next() is None, "not before it is in every layer"
    for layer in range(KV.num_layers):
        owner.books.steps.finish_layer(0, owner.books.steps.due(0, 0, layer))
    chunk = mirror.next()
    assert isinstance(chunk, StoreChunk) and chunk.num_tokens.tolist() == [1] * 12
    assert mirror.next() is None


@pytest.mark.parametrize("most_blocks", [64, 5])
def test_whole_blocks_travel_as_they_lie(most_blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many a chunk takes; ends of sequences, as tokens, come with their blocks."""
    block_bytes = layout_of(KV).block_bytes * KV.num_layers
    monkeypatch.setattr("rworker.stream.replica_log.MAX_CHUNK_BYTES", most_blocks * block_bytes)
    owner = Memory(KV, 64)
    owner.fill({7: 9 * KV.block_size + 3, 8: KV.block_size - 1}, seed=2)
    mirror = Mirror(HolderId(0), owner.books, owner)
    num_tokens: dict[ChunkForm, int] = {}
    while (message := mirror.next()) is not None:
        if isinstance(message, StoreChunk):
            added = int(message.num_tokens.sum())
            num_tokens[message.form] = num_tokens.get(message.form, 0) + added
    assert num_tokens == {
        ChunkForm.BLOCKS: 9 * KV.block_size,
        ChunkForm.TOKENS: 3 + KV.block_size - 1,
    }


def test_chunks_that_are_read_at_once_leave_one_by_one_without_credit() -> None:
    owner = Memory(KV, 64)
    owner.fill({7: 2 * KV.block_size + 1}, seed=2)
    mirror = Mirror(HolderId(0), owner.books, owner, link_bytes=1)
    assert isinstance(mirror.next(), Open)
    mirror.take(Accepted(7))
    for form in (ChunkForm.BLOCKS, ChunkForm.TOKENS):
        chunk = mirror.next()
        assert isinstance(chunk, StoreChunk) and chunk.form is form
        assert mirror.next() is None and mirror.num_unacknowledged == len(chunk.data)
        mirror.take(Accepted(7))
    assert mirror.is_whole


def test_a_neighbour_that_says_something_else_keeps_no_copy() -> None:
    owner = Memory(KV, 64)
    owner.open(7, 20)
    mirror = Mirror(HolderId(0), owner.books, owner)
    mirror.next()
    with pytest.raises(ProtocolError, match="no copy any more"):
        mirror.take(Refused(7, "out_of_capacity", "full"))


KEYS = [bytes([number] * 16) for number in range(5)]


def kept(num_blocks: int) -> Memory:
    """A cache that keeps a closed sequence's blocks, by ``KEYS``."""
    owner = Memory(KV, 64)
    owner.fill({1: num_blocks * KV.block_size}, seed=4)
    owner.books.keep(Name(1, 0, words_of(KEYS[:num_blocks])))
    owner.books.close(Close(1))
    return owner


def sent(mirror: Mirror) -> list[Any]:
    """All that there is to be sent; everything is answered as it is due."""
    messages = []
    while (message := mirror.next()) is not None:
        messages.append(message)
        while mirror._due:
            mirror.take(mirror._due[0].answer)
    return messages


def keeps(messages: list[Any]) -> set[bytes]:
    return {key for one in messages if isinstance(one, Name) for key in keys_of(one.keys)}


def test_of_a_sequence_with_a_gap_only_kept_blocks_are_replicated() -> None:
    owner = kept(3)
    owner.books.forget(Forget(words_of(KEYS[1:2])))
    mirror = Mirror(HolderId(0), owner.books, owner)
    assert keeps(sent(mirror)) == {KEYS[0], KEYS[2]}
    size = KV.block_size
    resumed = Open(7, 20, 3 * size, words_of([KEYS[0], KEYS[2]]), size, 2 * size)
    assert owner.books.reserve(resumed) == Accepted(7)
    mirror.follow(resumed)
    owner.books.begin_step(step_of((7, size, size), queries=[0]))
    for layer in range(KV.num_layers):
        owner.books.steps.finish_layer(0, owner.books.steps.due(0, 0, layer))
    assert sent(mirror) == []
    message = Name(7, 1, words_of(KEYS[3:4]))
    owner.books.keep(message)
    mirror.follow(message)
    messages = sent(mirror)
    assert keeps(messages) == {KEYS[3]}, "while it is open, too"
    assert not [one for one in messages if getattr(one, "sequence_id", None) == 7]
    owner.books.close(Close(7))
    mirror.follow(Close(7))
    assert sent(mirror) == []


def test_a_start_waits_for_blocks_from_the_lower_tier() -> None:
    owner = kept(1)
    cached = owner.books.store.cached
    mirror = Mirror(HolderId(0), owner.books, owner)
    sent(mirror)
    cached.begin(Fetch(0, words_of(KEYS[1:2])))
    resumed = Open(7, 20, 2 * KV.block_size, words_of(KEYS[:2]))
    assert owner.books.reserve(resumed) == Accepted(7)
    mirror.follow(resumed)
    assert sent(mirror) == []
    cached.end(0)
    messages = sent(mirror)
    assert keeps(messages) == {KEYS[1]} and isinstance(messages[-1], Open)


def test_a_block_that_nobody_names_at_a_takeover_is_free_once_it_has_moved() -> None:
    owner = kept(3)
    store = owner.books.store
    store.cached.begin(Retain(0, words_of(KEYS[:1]), np.ones(1, np.int32)))
    num_free = store.pool.num_free
    taken, changes = take_over(owner.books, {}, [KEYS[2], KEYS[4]])
    assert isinstance(taken, TakenOver) and taken.is_kept.tolist() == [1, 0]
    assert [keys_of(change.keys) for change in changes] == [[KEYS[0], KEYS[1]]]
    assert list(store.cached) == [KEYS[2]] and store.pool.num_free == num_free + 1
    store.check_invariants()
    store.cached.end(0)
    assert store.pool.num_free == num_free + 2
    store.check_invariants()


def test_a_late_replica_of_sequences_with_the_same_block_behind_different_ones_is_exact() -> None:
    """Two sequences fill the same gap at once. A fork of the first has what lies behind it, too."""
    owner, size = kept(3), KV.block_size
    owner.books.forget(Forget(words_of(KEYS[1:2])))
    for sequence in (7, 8):
        resumed = Open(sequence, 20, 3 * size, words_of([KEYS[0], KEYS[2]]), size, 2 * size)
        assert owner.books.reserve(resumed) == Accepted(sequence)
    slots = owner.books.store.append(ids(7, 8), counts(size, size), counts(size, size)).slots
    for layer, (k, v) in zip(owner.pool, random_rows(KV, 2 * size, seed=5), strict=True):
        cpu_kernels.append(owner.layout, layer, k, v, slots)
    assert owner.books.reserve(Open(9, 20, 3 * size, parent_id=7)) == Accepted(9)
    assert_same(owner, replica_of(owner).memory, dict.fromkeys((7, 8, 9), 3 * size))
