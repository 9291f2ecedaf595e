"""The queue: its order, what an operation costs, and what a waiting sequence keeps."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastdecode.core.holders import SequenceId
from fastdecode.core.sequence import Request, SamplingParams, Sequence
from fastdecode.schedule.dispatch import DecodeReservations, Dispatcher, DispatchJob, PrefillQueue
from fastdecode.schedule.waiting_queue import WaitingQueue

Order = Callable[[Sequence], tuple[int, ...]]
MANY = 20_000
FEW_COMPARISONS = 64
"""Above 4 · log2(MANY), below any scan."""


def sequence(number: int) -> Sequence:
    request = Request(str(number), (1, 2, 3), SamplingParams(), 16, 0)
    return Sequence.of(SequenceId(number), request, 0)


def by_id(one: Sequence) -> tuple[int, ...]:
    return (one.sequence_id,)


def shuffled(one: Sequence) -> tuple[int, ...]:
    """Another order than that of arrival."""
    return (one.sequence_id * 7919 % 1009, one.sequence_id)


@given(st.data(), st.sampled_from([by_id, shuffled]))
def test_the_queue_is_two_sorted_lists(data: st.DataObject, order: Order) -> None:
    waiting = WaitingQueue(order)
    interrupted: list[Sequence] = []
    new: list[Sequence] = []
    started: list[Sequence] = []
    num_arrived = 0
    for _ in range(data.draw(st.integers(1, 40))):
        match data.draw(st.sampled_from(["arrive", "pop", "come back", "remove"])):
            case "arrive":
                count = data.draw(st.integers(1, 4))
                arrived = [sequence(num_arrived + i) for i in range(count)]
                num_arrived += count
                waiting.arrive(arrived)
                new = sorted(new + arrived, key=order)
            case "pop" if interrupted or new:
                started.append((interrupted or new).pop(0))
                assert waiting.head is started[-1]
                waiting.pop()
            case "come back" if started:
                one = started.pop(data.draw(st.integers(0, len(started) - 1)))
                waiting.come_back(one)
                interrupted = sorted([*interrupted, one], key=order)
            case "remove" if interrupted or new:
                one = data.draw(st.sampled_from([*interrupted, *new]))
                waiting.remove(one)
                interrupted = [each for each in interrupted if each is not one]
                new = [each for each in new if each is not one]
        assert list(waiting) == [*interrupted, *new] and len(waiting) == len(interrupted + new)
        assert waiting.has_head_run == bool(interrupted)
        waiting.check_invariants()


def test_a_sequence_that_does_not_wait_cannot_be_removed() -> None:
    waiting = WaitingQueue(by_id)
    waiting.arrive([sequence(0), sequence(2)])
    for number in (0, 1, 3):  # 0: another sequence of the same order
        with pytest.raises(ValueError, match=f"sequence {number} doesn't wait"):
            waiting.remove(sequence(number))


def test_an_operation_looks_at_few_of_many() -> None:
    num_looks = 0

    class Counted(Sequence):
        def __eq__(self, other: object) -> bool:
            nonlocal num_looks
            num_looks += 1
            return self is other

        __hash__ = object.__hash__

    def counting(one: Sequence) -> tuple[int, ...]:
        nonlocal num_looks
        num_looks += 1
        return shuffled(one)

    waiting = WaitingQueue(counting)
    request = sequence(0).request
    sequences = [Counted.of(SequenceId(number), request, 0) for number in range(MANY)]
    some = sequences[5::97]
    for operate, those in (
        (lambda one: waiting.arrive([one]), sequences),
        (waiting.remove, some),
        (waiting.come_back, some),
        (waiting.remove, some),
    ):
        for one in those:
            num_looks = 0
            operate(one)
            assert num_looks <= FEW_COMPARISONS


def test_a_prompt_that_waits_for_an_instance_is_withdrawn_at_once() -> None:
    num_compared = 0

    class Counted(DispatchJob):
        def __eq__(self, other: object) -> bool:
            nonlocal num_compared
            num_compared += 1
            return self is other

        __hash__ = DispatchJob.__hash__

    queues = Dispatcher([PrefillQueue(1, float)], [DecodeReservations(10**9, 10**6)])
    jobs = [Counted(number, 60, 80) for number in range(1000)]
    for job in jobs:
        list(queues.arrived(job))
    assert queues.num_waiting == 999
    for job in reversed(jobs[500:]):
        list(queues.withdrawn(job))
    assert queues.num_waiting == 499 and num_compared == 0


def test_a_waiting_sequence_keeps_no_tokens_of_its_own() -> None:
    drawn = Request("a", (1, 2, 3), SamplingParams(), 16, 0, drawn={0: (7, 8)})
    one = Sequence.of(SequenceId(0), drawn, 0)
    assert (one.num_tokens, one.num_generated, one.num_uncached) == (5, 2, 5)
    assert one.num_prompt_tokens == 3 and not one.is_coming
    assert "token_ids" not in vars(one)
    assert one.token_ids == [1, 2, 3, 7, 8]
    one.token_ids.append(9)
    assert (one.num_tokens, one.num_generated) == (6, 3)
