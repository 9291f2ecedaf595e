"""What the loop does on a device, in order (``device_runs``): no wait while
there is something to do, and nothing that nothing orders."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from device_runs import CPU, HOLDERS, NUM_LAYERS, PROMPT, LateFleet, Run, spec_of
from recorded_gpu import RecordedGpu

from fastdecode.core.dtype import DType
from fastdecode.core.holders import HolderId, Part, PartId, Residence
from fastdecode.core.sequence import Request, Sequence
from fastdecode.core.sequence import SamplingParams as Params
from fastdecode.core.spec import KVSpec
from fastdecode.engine.step.batch import StepBatch
from fastdecode.engine.step.prompts import DevicePrefill
from fastdecode.schedule.plan import Chunk
from sworker.buffers import Feed
from sworker.paged import PagedKV


class Impatient(RecordedGpu):
    """Copies end only when they are waited for; says so in the log."""

    def __init__(self) -> None:
        super().__init__(looks_until_done=1 << 40)
        self.fleet: LateFleet | None = None

    def on_wait(self, stream: str) -> None:
        assert self.fleet is not None
        assert not self.fleet.is_owed, "waits for a copy while an answer is here"
        self.fleet.log.append("wait")


@pytest.mark.parametrize("lanes", [1, 2, 3])
def test_no_copy_is_waited_for_while_an_answer_is_here(lanes: int) -> None:
    """Nor is an answer, while others are here: a lane that has its answers is
    launched before the loop waits for anything."""
    run = Run(lanes, num_holders=1, at_once=True, gpu=(gpu := Impatient()))
    gpu.fleet = run.fleet
    log = run.run().fleet.log
    assert log.count("wait") > 0
    lane_log = [entry for entry in log if not entry.startswith("wait")]
    assert len(lane_log) == 3 * run.num_steps * lanes * NUM_LAYERS
    for before, after in itertools.pairwise(lane_log):
        if before.startswith("receive") and not before.endswith(str(NUM_LAYERS - 1)):
            assert after == f"launch {before[-2]}{int(before[-1]) + 1}"


def test_the_next_lane_is_queued_before_the_present_one_is_done() -> None:
    """With two lanes, when one's copy has come to the host the other one's unit
    is under way: its answer was taken in meanwhile."""
    log = Run(2, num_holders=1, num_steps=1, at_once=True, gpu=RecordedGpu(4)).run().fleet.log
    middle = log.index("launch A2")
    assert log[middle : middle + 6] == [
        "launch A2", "send B1", "receive B1", "launch B2", "send A2", "receive A2",
    ]  # fmt: skip


def computed_before_it_arrived(run: Run) -> None:
    run.gpu.current_stream().wait_stream = lambda other: None  # type: ignore[method-assign]


def no_wait_for_compute(run: Run) -> None:
    for lane in range(run.lanes):
        run.remote.staging(lane)._out_stream.wait_stream = lambda other: None  # type: ignore[method-assign]


def sent_before_copied(run: Run) -> None:
    run.gpu.looks_until_done = 0
    run.gpu.checker.join = (  # type: ignore[method-assign]
        lambda who, clock, join=run.gpu.checker.join: join(who, clock) if who != "host" else None
    )


def short_ring(run: Run) -> None:
    for lane in range(run.lanes):
        del run.remote.staging(lane)._slots[2:]


def packed_over_what_is_copied(run: Run) -> None:
    """Nothing but the answers keeps a lane from packing the next layer; and a
    lane of prompts doesn't wait for those."""
    run.gpu.current_stream().wait_event = lambda event: None  # type: ignore[method-assign]


def memory_not_kept(run: Run) -> None:
    run.gpu.checker.staying_spans.clear()


def shared(name: str) -> Callable[[Run], None]:
    """Two lanes have the same memory."""

    def mistake(run: Run) -> None:
        first, second = (run.remote.staging(lane) for lane in (0, 1))
        setattr(second, name, getattr(first, name))

    mistake.__name__ = f"shared{name}"
    return mistake


def shared_buffers(run: Run) -> None:
    assert run.graphs_of is not None
    run.graphs_of._lanes[1] = run.graphs_of.buffers(0)


def answers_in_one_place(run: Run) -> None:
    """An R-worker answers a lane where another one's answer may still be read."""
    room, answer = run.fleet._room, run.gpu.host(np.ones(4096, np.float32)).numpy()
    assert room(0, 0, (1, 1)) is not None

    def shared_room(holder: int, lane: int, shape: tuple[int, ...]) -> np.ndarray:
        place = answer[: int(np.prod(shape))].reshape(shape)
        run.gpu.write(place, "an answer")
        return place

    run.fleet._room = shared_room  # type: ignore[method-assign, assignment]


def drawn_is_read_before_it_is_there(run: Run) -> None:
    Fetched = type(run.s_worker._fetch(0)(torch.zeros(1)))
    for lane in range(run.lanes):
        fetch = run.s_worker._fetch(lane)
        run.s_worker._fetches[lane] = lambda x, fetch=fetch: Fetched(fetch(x).host)  # type: ignore[misc]


def drawn_over_what_nobody_has_read(run: Run) -> None:
    """The lane's next tokens come to where the last ones still lie."""
    launch = run.pipeline.launch

    def launched(*args: Any, fed_by: Any) -> None:
        launch(*args)

    run.pipeline.launch = launched  # type: ignore[method-assign]
    late: dict[int, Any] = {}

    def draw(step: Any, draw: Any = run._draw) -> Any:
        late.update(run.coming)
        done = draw(step)
        if step.lane in late:
            run.gpu.read(late[step.lane].fetched.host.numpy(), "what was drawn")
        return done

    run._draw = draw  # type: ignore[method-assign]


def embedded_before_it_is_drawn(run: Run) -> None:
    elsewhere, feed = run.gpu.new_stream(), run.feed

    class Hasty(Feed):
        def put_into(self, token_ids: torch.Tensor, upload: Any) -> None:
            with run.gpu.on(elsewhere):
                super().put_into(token_ids, upload)

    def hasty(tokens: torch.Tensor) -> Feed:
        fed = feed(tokens)
        return Hasty(fed.tokens, fed.sources, fed.rows)

    run.feed = hasty  # type: ignore[method-assign]


MISTAKES = [
    (drawn_over_what_nobody_has_read, Run(2, feeds=True, num_steps=3)),
    (embedded_before_it_is_drawn, Run(2, feeds=True, num_steps=3)),
    (shared("_landing"), Run(2)),
    (shared("_packed"), Run(2)),
    (shared("_slots"), Run(2)),
    (shared_buffers, Run(2)),
    (drawn_is_read_before_it_is_there, Run(2, draws=True)),
    (computed_before_it_arrived, Run(2)),
    (no_wait_for_compute, Run(2)),
    (sent_before_copied, Run(2)),
    (short_ring, Run(2, rows=(3,), prompts=3)),
    (packed_over_what_is_copied, Run(2, rows=(3,), prompts=3)),
    (memory_not_kept, Run(2)),
    (answers_in_one_place, Run(2, at_once=True, num_holders=1, direct=True)),
    (computed_before_it_arrived, Run(2, direct=True)),
]


@pytest.mark.parametrize(("mistake", "run"), MISTAKES)
def test_planted_mistakes_are_found(mistake: Callable[[Run], None], run: Run) -> None:
    checker = run.run(mistake).gpu.checker
    assert checker.races or checker.unkept


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("num_holders", [1, 4])
def test_calls_a_lane_and_layer(num_holders: int, direct: bool) -> None:
    """Of torch and of the driver, where nothing but Python is left to be waited for: each takes
    microseconds of the thread that feeds the GPU. They are as many for any number of R-workers,
    but for long answers, each of which is copied from where it is."""

    def calls(num_layers: int) -> Counter[str]:
        run = Run(
            1, capture=True, num_steps=1, num_layers=num_layers, num_holders=num_holders,
            rows=(8,), direct=direct, gpu=RecordedGpu(0),
        )  # fmt: skip
        return run.run().gpu.calls

    # The layers beyond those whose slots are cut up for the first time.
    eight_layers = calls(NUM_LAYERS + 8)
    eight_layers.subtract(calls(NUM_LAYERS))
    a_layer = {
        "replay": 1,  # the unit
        "wait_event": 1, "aten::cat": 1,  # packed, when the copy before is done
        "wait_stream": 2, "on": 2, "aten::copy_": 2, "record_event": 1,  # out and back
    }  # fmt: skip
    if direct:
        a_layer |= {"aten::copy_": 1 + num_holders, "view": num_holders}
    assert +eight_layers == {name: 8 * num for name, num in a_layer.items()} | {"mark": 2}


def test_calls_of_a_step_that_is_fed() -> None:
    """What the device alone knows costs no wait, and little more."""

    def calls(*, feeds: bool) -> Counter[str]:
        run = Run(
            1, capture=True, num_steps=3, rows=(8,), draws=not feeds, feeds=feeds,
            gpu=RecordedGpu(0),
        )  # fmt: skip
        return run.run().gpu.calls

    fed = calls(feeds=True)
    fed.subtract(calls(feeds=False))
    fed_steps = {"upload": 2, "aten::index_select": 2, "aten::index_copy_": 2}
    assert {name: num for name, num in fed.items() if num and name != "view"} == fed_steps


@pytest.mark.parametrize("looks", range(1, 6))
def test_tokens_may_come_at_any_moment(looks: int) -> None:
    """Also between two looks at them, while no R-worker owes an answer."""
    for feeds in (False, True):
        run = Run(1, draws=not feeds, feeds=feeds, num_steps=3, at_once=True)
        run.gpu.looks_until_done = looks
        assert run.run().gpu.checker.races == []


CHUNKS = (8, 8, 4)  # a prompt of 20 tokens


def held_prompts(num_tokens: int, num_layers: int = 2) -> DevicePrefill:
    spec = spec_of(num_layers).attention
    kv = KVSpec(num_layers, spec[0].num_kv_heads, spec[0].head_dim, DType.FLOAT32, 4)
    return DevicePrefill(PagedKV(kv, spec, num_tokens // 4, CPU))


def sequence(number: int, holder: int = 0) -> Sequence:
    request = Request("r", PROMPT, Params(temperature=0), 9, seed=0)
    made = Sequence.of(number, request, 0)  # type: ignore[arg-type]
    made.residence = Residence((Part(PartId(number), HolderId(holder), 0, 64),))
    return made


@dataclass
class HeldRun(Run):
    """Every second row's prompt comes in chunks; then it decodes, as the others do."""

    num_steps: int = 4
    num_held: int = 256
    sequences: dict[int, Sequence] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        prompts = held_prompts(self.num_held, self.num_layers)
        self.plan = self.remote = replace(self.remote, prompts=prompts)

    def _batch(self, lane: int, num_rows: int, step: int) -> StepBatch:
        chunks, num_before = [], step // self.lanes
        for i in range(num_rows):
            number = lane * 100 + i
            one = self.sequences.setdefault(number, sequence(number, i % self.num_holders))
            is_prompt = i % 2 == 0 and num_before < len(CHUNKS)
            one.num_cached = 8 * num_before if is_prompt else len(PROMPT) - 1
            chunks.append(Chunk(one, CHUNKS[num_before] if is_prompt else 1))
        return StepBatch.build(chunks, HOLDERS[: self.num_holders], step=step, lane=lane)


@pytest.mark.parametrize("lanes", [1, 2])
def test_no_races_beside_held_prompts(lanes: int) -> None:
    run = HeldRun(lanes, gpu=RecordedGpu(3))
    with torch.inference_mode():
        run.run()
    assert run.gpu.checker.num_accesses > 500
    assert run.gpu.checker.races == [] and run.gpu.checker.unkept == []
    # Three rows of six decode in the first three steps, and all in the fourth.
    assert run.fleet.num_queries == lanes * run.num_layers * (3 * 3 + 6)


def test_a_lane_of_prompts_runs_ahead_of_r_workers() -> None:
    """Which may owe answers while they only store."""
    run = HeldRun(1, rows=(1,), num_holders=1, num_steps=3, gpu=RecordedGpu(0))
    with torch.inference_mode():
        log = run.run().fleet.log
    ahead = [entry for entry in log if entry.startswith(("launch", "receive"))]
    second = ahead[ahead.index("launch A0", 1) :]
    assert second.index("receive A0") > second.index("launch A1")
