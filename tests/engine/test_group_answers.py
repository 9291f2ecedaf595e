"""What a group of R-workers says is known when all of it have said it."""

from __future__ import annotations

from fastdecode.engine.fleet.heads.answers import GroupAnswers
from fastdecode.engine.fleet.heads.tiers import GroupTiers
from fastdecode.wire.kv.kept import keys_of, words_of
from fastdecode.wire.kv.tiers import Moved
from fastdecode.wire.messages import Accepted, CloseSequence, OpenSequence, Refused

FIRST, SECOND = OpenSequence(1, 10), OpenSequence(2, 10)


def test_answers_come_in_the_order_of_what_was_asked() -> None:
    group = GroupAnswers()
    group.begin({0: 0, 2: 0})
    for message in (FIRST, CloseSequence(7), SECOND):  # the second has no answer
        group.ask(message)
    group.take(2, Accepted(1))
    group.take(2, Refused(2, "out_of_capacity", "full"))
    assert group.next() is None
    assert (group.silent, group.behind) == ([0], [0])
    group.take(0, Accepted(1))
    assert group.next() == (FIRST, {0: Accepted(1), 2: Accepted(1)})
    assert group.next() is None
    group.take(0, Accepted(2))
    assert group.next() == (SECOND, {0: Accepted(2), 2: Refused(2, "out_of_capacity", "full")})
    assert group.next() is None and group.behind == [0, 2]


def test_who_is_left_begins_with_nothing_asked() -> None:
    group = GroupAnswers()
    group.begin({0: 0, 1: 0})
    group.ask(FIRST)
    group.take(0, Accepted(1))
    group.begin({0: 1})  # it still owes an answer to what is forgotten
    assert group.next() is None and group.is_stale(0)
    group.ask(SECOND)
    group.take(0, Accepted(1))
    assert group.next() is None
    group.take(0, Accepted(2))
    assert group.next() == (SECOND, {0: Accepted(2)})


def test_a_block_has_moved_where_all_have_their_heads_of_it_and_faults_are_those_of_all() -> None:
    group, keys = GroupTiers(), [bytes([number]) * 16 for number in range(3)]
    group.take(1, Moved(0, 5, words_of(keys[:2]), 100, 0.5, num_damaged=2), (0, 1))
    assert not group.news
    group.take(0, Moved(0, 5, words_of(keys[1:]), 70, 0.7, num_unread=1, num_damaged=1), (0, 1))
    (moved,) = group.news
    assert isinstance(moved, Moved) and keys_of(moved.failed) == keys
    assert (moved.num_bytes, moved.seconds, moved.faults) == (170, 0.7, (1, 3, 0, 0))
