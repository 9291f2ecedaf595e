"""The queue: its order, what an operation costs, and what a waiting sequence keeps."""

from __future__ import annotations

from fastdecode.core.holders import SequenceId
from fastdecode.core.sequence import Request, SamplingParams, Sequence
from fastdecode.schedule.plan import WaitingQueue

MANY = 20_000
FEW_COMPARISONS = 64  # above 4 · log2(MANY), below any scan


def sequence(number: int) -> Sequence:
    request = Request(str(number), (1, 2, 3), SamplingParams(), 16, 0)
    return Sequence.of(SequenceId(number), request, 0)


def shuffled(one: Sequence) -> tuple[int, ...]:
    """Another order than that of arrival."""
    return (one.sequence_id * 7919 % 1009, one.sequence_id)


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


def test_a_waiting_sequence_keeps_no_tokens_of_its_own() -> None:
    drawn = Request("a", (1, 2, 3), SamplingParams(), 16, 0, drawn={0: (7, 8)})
    one = Sequence.of(SequenceId(0), drawn, 0)
    assert (one.num_tokens, one.num_generated, one.num_uncached) == (5, 2, 5)
    assert one.num_prompt_tokens == 3 and not one.is_coming
    assert "token_ids" not in vars(one)
    assert one.token_ids == [1, 2, 3, 7, 8]
    one.token_ids.append(9)
    assert (one.num_tokens, one.num_generated) == (6, 3)
