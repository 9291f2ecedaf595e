"""Which instance prefills, and which decodes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastdecode.core.errors import CapacityError
from fastdecode.schedule.dispatch import (
    AssignDecode,
    AssignPrefill,
    DecodeReservations,
    Dispatcher,
    DispatchJob,
    PrefillQueue,
)


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


def test_nobody_overtakes_the_oldest() -> None:
    queues = dispatcher(1, 100)
    for i, reserved in enumerate((80, 90, 10)):
        list(queues.arrived(job(i, 20, reserved)))
    fetched = [each for i, reserved in enumerate((80, 90, 10))
               for each in queues.prefilled(job(i, 20, reserved), 0)]  # fmt: skip
    assert [each.job.job_id for each in fetched if isinstance(each, AssignDecode)] == [0]
    assert queues.num_offered == 2
    assert [each.job.job_id for each in queues.decoded(job(0, 20, 80), 0)] == [1, 2]


def test_what_fits_nowhere_is_refused() -> None:
    with pytest.raises(CapacityError, match=r"101 tokens fits on no decode instance.*holds 100"):
        dispatcher(1, 50, 100).arrived(job(0, 1, 101))


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
