"""A replica against the cache that it is of: whatever happens to sequences,
however late the link is, and wherever it is cut."""

from __future__ import annotations

import pytest
from hypothesis import settings
from mirror_machine import KV, MirrorMachine
from state_machine import step_of
from stream_suite import Memory

from examples import examples
from fastdecode.core.errors import ProtocolError
from fastdecode.core.holders import HolderId
from fastdecode.wire.kv.chunks import ChunkStored, ExpectTokens, StoreChunk
from fastdecode.wire.messages import (
    Accepted,
    CloseSequence,
    ExtendSequence,
    OpenSequence,
    Refused,
)
from rworker.stream.mirror import Mirror

MirrorMachine.TestCase.settings = settings(max_examples=examples(160), stateful_step_count=40)
TestMirror = MirrorMachine.TestCase


def test_a_decode_step_is_one_announcement_and_one_chunk() -> None:
    owner = Memory(KV, 200)
    owner.fill({i: 5 + i % 3 for i in range(12)}, seed=1)
    mirror = Mirror(HolderId(0), owner.books, owner)
    while (message := mirror.next()) is not None:
        if not isinstance(message, (ExpectTokens, CloseSequence)):
            mirror.take(Accepted(message.sequence_id) if not isinstance(message, StoreChunk)
                        else mirror._due[0].answer)  # fmt: skip
    assert mirror.is_whole
    begin = step_of(*[(i, 5 + i % 3, 1) for i in range(12)], queries=[0] * 12)
    owner.books.begin_step(begin)
    assert mirror.next() is None, "not before it is in every layer"
    for layer in range(KV.num_layers):
        owner.books.steps.finish_layer(0, 0, layer)
    announced, chunk = mirror.next(), mirror.next()
    assert isinstance(announced, ExpectTokens) and isinstance(chunk, StoreChunk)
    assert chunk.num_tokens.tolist() == [1] * 12 and chunk.num_layers == KV.num_layers
    assert mirror.next() is None


def test_without_credit_nothing_is_read_and_later_it_all_leaves_together() -> None:
    owner = Memory(KV, 64)
    owner.open(7, 20)
    mirror = Mirror(HolderId(0), owner.books, owner, link_bytes=1)
    opened = mirror.next()
    assert isinstance(opened, OpenSequence)
    mirror.take(Accepted(7))

    def step(past: int, count: int) -> None:
        owner.books.begin_step(step_of((7, past, count), step=past, queries=[0]))
        for layer in range(KV.num_layers):
            owner.books.steps.finish_layer(0, past, layer)

    step(0, 2)
    assert isinstance(mirror.next(), ExpectTokens)
    first = mirror.next()
    assert isinstance(first, StoreChunk)
    for past in (2, 3, 4):
        step(past, 1)
        assert mirror.next() is None
    assert (mirror.num_behind, mirror.num_unacknowledged) == (3, len(first.data))
    mirror.follow(ExtendSequence(7, 24))
    assert isinstance(mirror.next(), ExtendSequence), "changes are told all the same"
    mirror.take(ChunkStored(len(first.data)))
    assert isinstance(mirror.next(), ExpectTokens)
    rest = mirror.next()
    assert isinstance(rest, StoreChunk)
    assert (rest.first_tokens.tolist(), rest.num_tokens.tolist()) == ([2], [3])


def test_a_neighbour_that_says_something_else_keeps_no_copy() -> None:
    owner = Memory(KV, 64)
    owner.open(7, 20)
    mirror = Mirror(HolderId(0), owner.books, owner)
    mirror.next()
    with pytest.raises(ProtocolError, match="no copy any more"):
        mirror.take(Refused(7, "out_of_capacity", "full"))
