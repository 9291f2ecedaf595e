"""Deltas on their way to a reader, and back into an output."""

from __future__ import annotations

import threading

from hypothesis import given
from hypothesis import strategies as st

from fastdecode.core.delta import Delta, DeltaQueue, OutputFold, parted
from fastdecode.core.errors import RequestError
from fastdecode.core.sequence import TokenLogprob


def delta(index: int, token: int, *, last: bool = False) -> Delta:
    logprobs = (TokenLogprob(token, -1.0),)
    return Delta("r", index, chr(97 + token % 26), (token,), logprobs, "length" if last else None)


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    order=st.randoms(use_true_random=False),
    reads=st.sets(st.integers(0, 160)),
)
def test_however_rarely_a_reader_looks_it_finds_the_same(
    lengths: list[int], order: object, reads: set[int]
) -> None:
    steps = [index for index, length in enumerate(lengths) for _ in range(length)]
    order.shuffle(steps)  # type: ignore[attr-defined]
    queue, fold = DeltaQueue(), OutputFold("r", "p", (1, 2), len(lengths))
    left, output = list(lengths), None
    for step, index in enumerate(steps):
        left[index] -= 1
        queue.put([delta(index, left[index], last=left[index] == 0)])
        if step in reads:
            found = queue.take(0)
            assert len(found) == len({d.index for d in found})
            for each in found:
                output = fold.add(each)
    for each in queue.take(0):
        output = fold.add(each)
    assert output is not None and output.ok
    for index, length in enumerate(lengths):
        completion = output.completions[index]
        tokens = tuple(range(length - 1, -1, -1))
        assert (completion.index, completion.token_ids) == (index, tokens)
        assert completion.text == "".join(chr(97 + token % 26) for token in tokens)
        assert tuple(step.token_id for step in completion.logprobs or ()) == tokens


def test_an_error_ends_the_request_after_what_was_said() -> None:
    queue, fold = DeltaQueue(), OutputFold("r", None, (), 2)
    error = RequestError("no")
    queue.put([delta(0, 1), Delta("r", 0, error=error)])
    queue.put([delta(1, 2)])
    found = queue.take()
    assert [d.error for d in found if d.index == 0] == [None, error]
    assert fold.add(found[0]) is None
    output = fold.add(next(d for d in found if d.error is not None))
    assert output is not None and output.error is error and output.completions == ()


def test_a_reader_is_woken_and_waits_no_longer_than_it_said() -> None:
    queue = DeltaQueue()
    assert queue.take(0.001) == []
    thread = threading.Thread(target=queue.put, args=([delta(0, 1)],))
    thread.start()
    assert queue.take() == [delta(0, 1)]
    thread.join()
    queue.put([])
    assert queue.take(0) == []


def test_what_waits_is_few_objects_however_long_nobody_reads() -> None:
    queue = DeltaQueue()
    for token in range(10_000):
        queue.put([delta(0, token % 50)])
    (pile,) = queue._pending.values()
    assert len(pile.deltas) < 20
    (whole,) = queue.take()
    assert len(whole.token_ids) == len(whole.text) == 10_000


def test_deltas_are_parted_by_their_values_and_none_is_cut() -> None:
    step = TokenLogprob(1, -1.0, ((1, -1.0), (2, -2.0)))
    plain, long = Delta("a", 0, "x", (1,)), Delta("b", 0, prompt_logprobs=(None, step, step))
    assert [plain.num_values, long.num_values] == [1, 6]
    deltas = [plain, plain, long, plain, long, long]
    assert list(parted(deltas, 7)) == [[plain, plain], [long, plain], [long], [long]]
    assert list(parted(deltas, 1)) == [[each] for each in deltas]
    assert list(parted([])) == []
