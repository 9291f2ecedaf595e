"""Lanes that are regrouped in the middle of a run change no token, and
``--lanes auto`` regroups them."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from checkpoints import prompts

from fastdecode import LLM, SamplingParams
from fastdecode.core.sequence import PromptRequest
from fastdecode.engine.extensions import StepTiming
from fastdecode.engine.setup.launch import RunningEngine
from fastdecode.schedule.lanes import LaneControl
from fastdecode.schedule.times import MeasuredTimes

REQUESTS = [
    PromptRequest(
        str(i),
        prompt,
        SamplingParams(temperature=0.8, seed=i, max_tokens=20, ignore_eos=True, n=1 + i % 2),
    )
    for i, prompt in enumerate(prompts([3, 40, 11, 1, 19, 8, 60, 5, 2], seed=4))
]
OPTIONS = {
    "dtype": "float32",
    "r_threads": 1,
    "kv_memory_gb": 0.01,
    "prefill_chunk": 7,
    "max_step_tokens": 20,
}


def tokens_of(
    llm: LLM, on_delta: Callable[[], None] = lambda: None
) -> dict[str, list[tuple[int, ...]]]:
    said: dict[str, dict[int, tuple[int, ...]]] = {}
    for delta in llm.deltas(iter(REQUESTS)):
        of_request = said.setdefault(delta.request_id, {})
        of_request[delta.index] = of_request.get(delta.index, ()) + delta.token_ids
        on_delta()
    return {
        request_id: [tokens for _, tokens in sorted(by.items())] for request_id, by in said.items()
    }


def test_regrouping_changes_no_token(llama: str) -> None:
    with LLM(llama, max_num_sequences=8, **OPTIONS) as llm:
        expected = tokens_of(llm)
    with LLM(
        llama, r_workers=2, lanes=2, schedule="stabilized", max_num_sequences=8, **OPTIONS
    ) as llm:
        lanes, count = itertools.cycle([3, 1, 4, 2]), itertools.count()

        def regroup(running: RunningEngine) -> None:
            # What ends while lanes come to rest is told like anything else.
            running.engine.set_num_lanes(next(lanes))

        def on_delta() -> None:
            if next(count) % 5 == 4:
                llm.service.call(regroup)

        found = tokens_of(llm, on_delta)
    assert next(count) > 20
    assert found == expected


class Restless(LaneControl):
    """Wants another number of lanes every few steps."""

    def decide(self) -> int:
        return 1 + self._num_steps // 4 % 3


def test_the_engine_does_what_its_lane_control_wants(llama: str) -> None:
    with LLM(llama, lanes=2, max_num_sequences=8, **OPTIONS) as llm:
        expected = tokens_of(llm)
        engine = llm._running.engine
        timing = StepTiming(MeasuredTimes(), Restless(MeasuredTimes(), 2))
        engine._extensions = (timing,)
        seen = set()
        found = tokens_of(llm, lambda: seen.add(engine._pipeline.num_lanes))
    assert found == expected
    assert len(seen) > 1
