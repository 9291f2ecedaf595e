"""The R-worker's state machine in a step: what it plans for a layer, and which
messages it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from msgspec import structs
from state_machine import HELLO, HKV, HQ, NUM_LAYERS, D, Worker, attend, step_of
from values import replace

from fastdecode.core.dtype import DType
from fastdecode.wire.messages import MAX_LANES, Accepted, BeginStep, Close, Open
from rworker.instructions import Compute


def test_a_step_is_planned_once_for_all_layers(worker: Worker) -> None:
    for sequence in (5, 6, 7):
        worker.tell(Open(sequence, 12))
    worker.run_step(step_of((5, 0, 6), (7, 0, 1)))
    begin = step_of(
        (7, 1, 1), (6, 0, 5), (5, 6, 3), queries=[1, 0, 2], want_lse=True, step=1, lane=2
    )
    computes = worker.run_step(begin)
    plan = computes[0].plan
    assert all(compute.plan is plan for compute in computes)
    assert [compute.layer for compute in computes] == [0, 1, 2]
    assert (plan.step, plan.lane, plan.want_lse) == (1, 2, True)
    # Blocks 0, 1 are sequence 5's, 2 is sequence 7's; 3, 4 go to sequence 6 and 5 to sequence 5.
    assert plan.slots.tolist() == [9, 12, 13, 14, 15, 16, 6, 7, 20]
    assert [
        table[: -(-n // 4)].tolist() for table, n in zip(plan.block_tables, [2, 9], strict=True)
    ] == [[2], [0, 1, 5]]
    assert plan.query_starts.tolist() == [0, 1, 3]
    assert plan.query_positions.tolist() == [1, 7]
    assert plan.context_lens.tolist() == [2, 9]
    int32_arrays = (plan.block_tables, plan.query_starts, plan.query_positions, plan.context_lens)
    assert all(array.dtype == np.int32 and array.flags.c_contiguous for array in int32_arrays)


def test_attention_writes_what_decodes(worker: Worker) -> None:
    """All of the sequences in front that have one query, unless one sees what another
    row of this step brings."""
    for sequence in (5, 6, 7):
        worker.tell(Open(sequence, 12))
    worker.run_step(step_of((5, 0, 6), (7, 0, 1)))
    begin = step_of((5, 6, 1), (7, 1, 1), (6, 0, 5), queries=[1, 1, 0], step=1)
    plan = worker.run_step(begin)[0].plan
    assert (plan.num_last, plan.num_single) == (2, 2)
    last = plan.context_lens.astype(int) - 1
    blocks = plan.block_tables[[0, 1], last // 4].astype(int)
    assert plan.slots[:2].tolist() == (blocks * 4 + last % 4).tolist()


def test_what_only_looks_back_is_not_written_by_attention(worker: Worker) -> None:
    worker.tell(Open(1, 12))
    plan = worker.run_step(step_of((1, 0, 5)))[0].plan
    assert (plan.num_single, plan.num_last) == (0, 0)  # five queries
    worker.tell(Open(2, 12))
    worker.run_step(step_of((2, 0, 3), step=1))
    begin = step_of((2, 3, 1), queries=[1], step=2)
    begin = replace(begin, num_visible=begin.num_past)  # not the token that it brings
    plan = worker.run_step(begin)[0].plan
    assert (plan.num_single, plan.num_last) == (1, 0)


def test_a_closed_part_is_attended_without_growing(worker: Worker) -> None:
    """Also where a fork shares its last block: nothing is copied as nothing is written."""
    for sequence in (1, 3):
        worker.tell(Open(sequence, 8))
    worker.run_step(step_of((1, 0, 6)))
    worker.tell(Open(2, 8, 6, parent_id=1))
    begin = step_of(
        (3, 0, 1), (1, 6, 0), (2, 6, 0), queries=[1, 1, 2], num_beyond=np.array([0, 4, 2], np.int32)
    )
    plan = worker.run_step(begin)[0].plan
    assert plan.slots.size == 1
    assert plan.query_positions.tolist() == [0, 9, 6]
    assert plan.context_lens.tolist() == [1, 6, 6]
    alone = step_of((1, 6, 0), queries=[1], step=1, num_beyond=np.array([1], np.int32))
    assert worker.run_step(alone)[0].plan.slots.size == 0


def test_plans_keep_nothing_of_the_peers_arrays(worker: Worker) -> None:
    worker.tell(Open(1, 8))
    begin = step_of((1, 0, 5))
    worker.tell(begin)
    (compute,) = worker.tell(attend(begin, 0))
    assert isinstance(compute, Compute)
    for mine in vars(compute.plan).values():
        for theirs in structs.asdict(begin).values():
            assert not np.shares_memory(mine, theirs)


@pytest.mark.parametrize(
    ("begin", "reason"),
    [
        (step_of((9, 0, 1)), "sequence 9 is not open"),
        (step_of((1, 5, 1), (1, 5, 1)), "sequence 1 is in the step twice"),
        (step_of((1, 4, 1)), "sequence 1 (num_past=4"),
        (step_of((2, 0, 1), (1, 6, 1)), "the 5 tokens cached here"),
        (step_of((1, 5, -1)), "num_new"),
        (step_of((1, 5, 0)), "num_new must be at least 1, or 0 where something is attended"),
        (step_of((1, 5, 0), queries=[1]), "num_queries"),
        (step_of((1, 5, 0), queries=[2], num_beyond=np.array([1], np.int32)), "num_queries"),
        (step_of((1, 5, 1), num_beyond=np.array([-1], np.int32)), "num_beyond must be at least 0"),
        (
            step_of((1, 5, 0), queries=[1], num_beyond=np.array([1 << 30], np.int32)),
            "no sequence is longer",
        ),
        (
            step_of((1, 5, 1), num_beyond=np.array([(1 << 23) - 5], np.int32)),
            "no sequence is longer than 8388608",
        ),
        (step_of((1, 5, 1), num_beyond=np.array([1])), "int64 [1] stands where int32 of 1 dims"),
        (step_of((1, 5, 1), queries=[2]), "num_queries"),
        (step_of((1, 5, 1), queries=[-1]), "num_queries"),
        (step_of((1, 5, 2), num_visible=np.array([6], np.int32)), "num_visible"),
        (step_of((1, 5, 2), num_visible=np.array([8], np.int32)), "num_visible"),
        (step_of((1, 5, 2**31 - 6), num_visible=np.array([5], np.int32)), "is the most"),
        (step_of((1, 5, 4)), "room was reserved for 8"),
        (step_of((1, 5, 1), lane=-1), "lane"),
        (step_of((1, 5, 1), lane=MAX_LANES), "lane"),
        (step_of((1, 5, 1), step=-1), "step"),
        (step_of((1, 5, 1), sequence_ids=np.array([1], np.int32)), "where int64 of 1 dims"),
        (step_of((1, 5, 1), sequence_ids=np.array([[1]])), "where int64 of 1 dims"),
        (step_of((1, 5, 1), sequence_ids=[1]), "sequence_ids"),
        (step_of((1, 5, 1), num_queries=np.ones((1, 1), np.int32)), "where int32 of 1 dims"),
    ],
)
def test_bad_steps_fail_and_change_nothing(worker: Worker, begin: BeginStep, reason: str) -> None:
    worker.tell(Open(1, 8))
    worker.tell(Open(2, 8))
    worker.run_step(step_of((1, 0, 5)))
    code = "out_of_capacity" if "reserved" in reason else "protocol_error"
    worker.fails(begin, reason, code=code)
    worker.run_step(step_of((1, 5, 3), (2, 0, 8)))


def test_open_steps_hold_their_sequences(worker: Worker) -> None:
    for sequence in (1, 2):
        worker.tell(Open(sequence, 12))
    worker.run_step(step_of((1, 0, 5)))
    begin = step_of((1, 5, 3), step=4, lane=1)
    worker.tell(begin)
    worker.fails(Close(1), "sequence 1 is in an open step")
    worker.fails(step_of((2, 0, 1), (1, 8, 1), lane=0), "sequence 1 is in another lane's open step")
    worker.fails(step_of((2, 0, 1), step=5, lane=1), "its step 4 is open")
    worker.fails(Open(3, 8, 6, parent_id=1), "which has 5 in every layer")
    assert worker.answer(Open(3, 8, 5, parent_id=1)) == Accepted(3)
    worker.run_step(step_of((2, 0, 1), (3, 5, 2), lane=0))  # another lane goes through meanwhile
    for layer in range(NUM_LAYERS):
        worker.tell(attend(begin, layer))
    assert worker.answer(Open(4, 8, 6, parent_id=1)) == Accepted(4)
    assert worker.tell(Close(1)) == ()
    worker.run_step(step_of((4, 6, 1), step=5, lane=1))


def wrong_attends() -> list[tuple[dict[str, Any], str]]:
    f4, u2 = np.float32, np.uint16
    return [
        ({"step": 1}, "step 1, layer 0 when step 0, layer 0 was due"),
        ({"layer": 1}, "layer 1 when step 0, layer 0"),
        ({"layer": True, "step": True}, "Expected `int`"),
        ({"lane": 1}, "lane 1 has no open step"),
        ({"lane": -1}, "lane"),
        ({"q": np.zeros((2, HQ, D), f4)}, "q has shape [2, 4, 16]"),
        ({"q": np.zeros((3, HKV, D), f4)}, "q has shape"),
        ({"k": np.zeros((3, HQ, D), f4)}, "k has shape"),
        ({"v": np.zeros((3, HKV, D + 1), f4)}, "v has shape"),
        ({"v": np.zeros(3 * HKV * D, f4)}, "where float32 or uint16 of 3 dims"),
        ({"q": np.zeros((3, HQ, D), np.float64)}, "an array of float64"),
        ({"k": np.zeros((3, HKV, D), u2)}, "k must be an array of float32"),
        ({"v": np.zeros((3, HKV, D), ">f4")}, "an array of >f4"),
        ({"v": None}, "v"),
        ({"k": np.zeros((D, HKV, 3), f4).T}, "k must be C-contiguous"),
        ({"q": np.zeros((6, HQ, D), f4)[::2]}, "q must be C-contiguous"),
    ]


@pytest.mark.parametrize(("changes", "reason"), wrong_attends())
def test_bad_attends_fail_and_the_step_goes_on(
    worker: Worker, changes: dict[str, Any], reason: str
) -> None:
    worker.tell(Open(1, 8))
    begin = step_of((1, 0, 3))
    worker.tell(begin)
    worker.fails(attend(begin, 0, **changes), reason)
    for layer in range(NUM_LAYERS):
        assert isinstance(worker.tell(attend(begin, layer))[0], Compute)
    worker.fails(attend(begin, 0), "lane 0 has no open step")


def test_sixteen_bit_activations_travel_as_their_bits() -> None:
    worker = Worker()
    worker.tell(replace(HELLO, activation_dtype=DType.BFLOAT16))
    worker.tell(Open(1, 8))
    begin = step_of((1, 0, 1))
    worker.tell(begin)
    worker.fails(attend(begin, 0), "q must be an array of uint16")
    bits = {name: getattr(attend(begin, 0), name).astype(np.uint16) for name in "qkv"}
    assert isinstance(worker.tell(attend(begin, 0, **bits))[0], Compute)
