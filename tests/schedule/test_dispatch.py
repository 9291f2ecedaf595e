"""Which instance prefills, and which decodes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import takewhile
from operator import eq

from hypothesis import given, settings
from hypothesis import strategies as st

from fastdecode.core.holders import KVSource, num_offered
from fastdecode.schedule.dispatch import (
    AssignDecode,
    AssignPrefill,
    DecodeReservations,
    Dispatcher,
    DispatchJob,
    PrefillQueue,
)
from fastdecode.schedule.kept_prefixes import BlockChain, KeptPrefixes


def dispatcher(num_prefill: int = 2, *capacities: int, batch_tokens: int = 100) -> Dispatcher:
    return Dispatcher(
        [PrefillQueue(batch_tokens, float) for _ in range(num_prefill)],
        [DecodeReservations(capacity, 1000) for capacity in capacities or (1000,)],
    )


def job(number: int, prompt: int = 60, reserved: int = 80) -> DispatchJob:
    return DispatchJob(number, prompt, reserved)


def test_binds_late_and_to_the_shortest_queue() -> None:
    queues = dispatcher()
    bound = [decision for i in range(12) for decision in queues.arrived(job(i))]
    # Below 200 tokens an instance takes another: four of 60 each.
    assert [(each.job.job_id, each.instance) for each in bound] == [(i, i % 2) for i in range(8)]
    assert queues.num_waiting == 4
    (bind, fetch) = queues.prefilled(job(3), 1)
    assert isinstance(bind, AssignPrefill) and (bind.job.job_id, bind.instance) == (8, 1)
    assert isinstance(fetch, AssignDecode) and fetch.job.job_id == 3


def test_a_faster_instance_has_the_shorter_queue() -> None:
    queues = Dispatcher(
        [
            PrefillQueue(100, lambda tokens: tokens / 10),
            PrefillQueue(100, lambda tokens: tokens / 90),
        ],
        [DecodeReservations(10_000, 10)],
    )
    bound = [decision.instance for i in range(4) for decision in queues.arrived(job(i))]
    assert bound == [0, 1, 1, 1]


def test_a_herd_is_spread_evenly() -> None:
    queues = dispatcher(1, *[10_000] * 4, batch_tokens=10**6)
    for i in range(100):
        list(queues.arrived(job(i)))
    fetched = [each for i in range(100) for each in queues.prefilled(job(i), 0)]
    places = [each.instance for each in fetched if isinstance(each, AssignDecode)]
    assert [places.count(instance) for instance in range(4)] == [25] * 4


def test_instances_for_both_share_what_comes_by_what_they_hold() -> None:
    rooms = [DecodeReservations(capacity, 1000) for capacity in (10_000, 10_000, 20_000)]
    queues = Dispatcher([PrefillQueue(100, float, own_room=room) for room in rooms], rooms)
    kept = []
    for number in range(40):
        (bind,) = queues.arrived(job(number))
        assert isinstance(bind, AssignPrefill)
        kept.append(queues.kept(bind))
    assert [sum(each == AssignDecode(each.job, i) for each in kept if each) for i in range(3)] == [
        10, 10, 20,
    ]  # fmt: skip
    list(queues.decoded(job(0), 1))
    (bind,) = queues.arrived(job(40))
    assert bind.instance == 1


@settings(max_examples=40, deadline=None)
@given(st.data(), st.lists(st.integers(1, 50), min_size=1, max_size=20))
def test_in_order_within_room_and_none_forgotten(data: st.DataObject, sizes: list[int]) -> None:
    queues = dispatcher(2, 100, 60, batch_tokens=40)
    coming = [DispatchJob(i, size, size + 10) for i, size in enumerate(sizes)]
    prefilling: list[AssignPrefill] = []
    decoding: list[AssignDecode] = []
    bound, fetched, offered, over = [], [], [], 0

    def do(decisions: object) -> None:
        for each in list(decisions):  # type: ignore[call-overload]
            (prefilling if isinstance(each, AssignPrefill) else decoding).append(each)
            (bound if isinstance(each, AssignPrefill) else fetched).append(each.job.job_id)

    while over < len(sizes):
        ways = [way for way, some in enumerate((coming, prefilling, decoding)) if some]
        assert ways, "everybody waits for somebody"
        match data.draw(st.sampled_from(ways)):
            case 0:
                do(queues.arrived(coming.pop(0)))
            case 1:
                one = prefilling.pop(data.draw(st.integers(0, len(prefilling) - 1)))
                offered.append(one.job.job_id)
                do(queues.prefilled(one.job, one.instance))
            case _:
                last = decoding.pop(data.draw(st.integers(0, len(decoding) - 1)))
                over += 1
                do(queues.decoded(last.job, last.instance))
        for room in queues.decode:
            assert 0 <= room.num_tokens <= room.capacity_tokens
    assert bound == sorted(bound) and fetched == offered
    assert sorted(fetched) == list(range(len(sizes)))


SIZE = 4


def chain(token_ids: Sequence[int], salt: str = "") -> BlockChain:
    return BlockChain.of(token_ids, salt, SIZE)


class Prefixes(KeptPrefixes):
    """Engines keep all tokens that they have run; the right to read them is their number."""

    def ran(self, token_ids: Sequence[int], instance: int) -> None:
        source = KVSource("r0", instance, 0, len(token_ids), 0, 1, 0, 1)
        self.note(chain(token_ids), instance, (source,))

    def counts(self, token_ids: Sequence[int], salt: str = "") -> dict[int, int]:
        """Return how many of a prompt's first tokens each instance may keep."""
        found = self.kept(chain(token_ids, salt))
        return {instance: num_offered(sources) for instance, sources in found.items()}


def test_the_longest_prefix_of_any_instance() -> None:
    prefixes = Prefixes()
    prefixes.ran(range(10), 0)
    prefixes.ran(range(7), 1)
    asked = list(range(20))
    assert prefixes.counts(asked) == {0: 10, 1: 7}
    assert prefixes.counts(asked, "another") == {}
    assert prefixes.counts([9, *asked]) == {}
    assert prefixes.counts([*range(9), 77, 78])[0] == 8, "another tail"
    assert prefixes.counts(asked[:8]) == {0: 4, 1: 7}, "the last token has to run"
    prefixes.forget(0)
    assert prefixes.counts(asked) == {1: 7}
    prefixes.forget_lost(1)
    assert prefixes.counts(asked) == {}


def test_keys_go_on_from_those_that_are_hashed() -> None:
    """As if all were hashed at once, wherever the first part ends."""
    for first in range(11):
        begun = chain(range(first))
        assert begun.then(range(first, 14)) == chain(range(14))
        assert begun.then(()) == begun and len(begun.keys) == first // SIZE


def test_against_plain_lists() -> None:
    chance = random.Random(3)
    prefixes, noted = Prefixes(), []
    for _ in range(300):
        tokens = [chance.randrange(2) for _ in range(chance.randrange(1, 14))]
        instance = chance.randrange(3)
        prefixes.ran(tokens, instance)
        noted.append((tokens, instance))
        asked = [chance.randrange(2) for _ in range(14)]
        kept = prefixes.counts(asked)
        for who in range(3):
            shared = [sum(takewhile(bool, map(eq, asked, x))) for x, other in noted if other == who]
            assert kept.get(who, 0) <= max(shared, default=0), "nobody has run that"
            assert kept.get(who, 0) >= min(max(shared, default=0), 13) // SIZE * SIZE
