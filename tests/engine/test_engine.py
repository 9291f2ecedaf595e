"""The engine, built of its parts: a scripted S-worker, whose tokens anybody can
work out, and R-workers as threads."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from scripted_engine import continued, request, rig

from fastdecode.core.errors import RequestError, WorkerError
from fastdecode.core.sequence import Request, RequestOutput
from fastdecode.wire.messages import Open

ASKED = [
    request("a", 3, 20),
    request("b", 40, 9),
    request("c", 1, 30, n=2),
    request("d", 25, 12, n=3),
]


def assert_right(asked: Sequence[Request], outputs: dict[str, RequestOutput]) -> None:
    assert set(outputs) == {one.request_id for one in asked}
    for one in asked:
        output = outputs[one.request_id]
        assert output.error is None
        expected = continued(one.prompt_token_ids, one.max_tokens)
        assert [completion.token_ids for completion in output.completions] == [
            expected
        ] * one.params.n


@pytest.mark.parametrize("lanes", [1, 2])
def test_r_workers_with_less_room_than_they_said_make_sequences_wait(lanes: int) -> None:
    with rig(2, num_blocks=4, said_blocks=9, lanes=lanes) as made:
        asked = [request(str(i), 20, 20) for i in range(6)]
        for one in asked:
            made.submit(one)
        assert_right(asked, made.run())


def test_what_an_empty_r_worker_refuses_has_failed() -> None:
    with rig(1, num_blocks=2, said_blocks=9) as made:
        made.submit(request("long", 60, 30))
        made.submit(request("short", 6, 3))
        outputs = made.run()
        assert str(outputs["long"].error).startswith("R-worker r0 refused request long: ")
        assert outputs["short"].ok


def test_an_error_ends_the_request_with_all_its_siblings() -> None:
    with rig(2, fails_at={"96": 5}) as made:
        made.submit(ASKED[0])
        made.submit(request("f", 7, 12, n=3, stop_token_ids=(96,)))
        outputs = made.run()
        assert isinstance(outputs["f"].error, RequestError)
        assert_right(ASKED[:1], {"a": outputs["a"]})


def test_what_can_t_be_queued_leaves_nothing_behind() -> None:
    with rig(1) as made:
        with pytest.raises(RequestError, match="tokenizer"):
            made.submit(request("s", 3, 4, stop=("x",)))
        assert not made.engine.requests and not made.lifecycle.scheduler.waiting
        made.submit(ASKED[0])
        with pytest.raises(RequestError, match="unfinished"):
            made.submit(ASKED[0])
        assert_right(ASKED[:1], made.run())


def test_an_answer_that_nobody_asked_for_costs_the_r_worker_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with rig(2) as made:
        for one in ASKED:
            made.submit(one)
        made.engine.step()
        made.fleet.send(0, Open(1 << 40, 16))
        assert_right(ASKED, made.run())
        assert list(made.fleet.lost) == [0] and "which was not asked for" in caplog.text


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (RuntimeError("CUDA error"), "the S-worker failed: CUDA error"),
        (torch.OutOfMemoryError("no room"), "the S-worker failed: no room"),
    ],
)
def test_a_failed_s_worker_has_a_type_of_ours(error: Exception, told: str) -> None:
    with rig(1) as made:
        made.s_worker.failure = error
        made.submit(ASKED[0])
        with pytest.raises(WorkerError) as caught:
            made.run()
        assert (str(caught.value), caught.value.code) == (told, "s_worker_failed")


def test_a_mistake_of_ours_is_raised_as_it_is() -> None:
    with rig(1) as made:
        made.s_worker.failure = RuntimeError("shapes differ")
        made.submit(ASKED[0])
        with pytest.raises(RuntimeError, match="shapes differ"):
            made.run()
