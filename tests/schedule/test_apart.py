"""Prompts in lanes of their own, over random traffic: they run there and nowhere
else, and all that decodes moves on."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from hypothesis import given
from hypothesis import strategies as st
from random_traffic import Requests, play, relaxed, traffic
from remembering_store import BLOCK_SIZE, Store
from schedule_choices import options
from traffic import Harness

from fastdecode.schedule.life.events import Run
from fastdecode.schedule.modes import make_scheduler

WORKER_BLOCKS = (12, 20)


@dataclass(eq=False)
class ApartHarness(Harness):
    """Lanes from ``first_prompt_lane`` on are of prompts."""

    first_prompt_lane: int = 1
    under_way: dict[int, int] = field(default_factory=dict)
    """By lane: the prompt that takes several steps."""

    def _members(self, lane: int) -> set[int]:
        running = self.scheduler.lanes[lane].running.values()
        of_prompts = lane >= self.first_prompt_lane
        return {
            run.sequence.sequence_id
            for run in running
            if run.sequence.sequence_id in self.live
            and not (of_prompts and run.sequence.num_uncached == 1)
        }

    def _check_run(self, lane: int, run: Run) -> None:
        super()._check_run(lane, run)
        if lane < self.first_prompt_lane:
            assert all(chunk.num_tokens == 1 for chunk in run.chunks), "a prompt where others wait"
            return
        assert all(chunk.num_tokens > 1 for chunk in run.chunks), "a token among prompts"
        begun = [chunk.sequence for chunk in run.chunks if chunk.first]
        assert [one.sequence_id for one in begun] in ([], [self.under_way.get(lane)])
        parts = [chunk for chunk in run.chunks if chunk.num_tokens < chunk.sequence.num_uncached]
        assert len({*begun, *[chunk.sequence for chunk in parts]}) <= 1, "one room a lane"
        if parts:
            self.under_way[lane] = parts[0].sequence.sequence_id


@relaxed
@given(
    st.data(),
    traffic(forks=True),
    st.integers(1, 3),
    st.integers(1, 3),
    st.booleans(),
    st.sampled_from([{}, {"length_quantile": 0.1}]),
    st.sampled_from([0, 1]),
)
def test_prompts_and_tokens_never_share_a_step(
    data: st.DataObject,
    requests: Requests,
    num_lanes: int,
    num_prompt_lanes: int,
    lose: bool,
    forecast: dict[str, float],
    opening_steps: int,
) -> None:
    chosen = replace(options("greedy", num_lanes, **forecast), num_prompt_lanes=num_prompt_lanes)
    scheduler = make_scheduler(chosen, WORKER_BLOCKS, BLOCK_SIZE, opening_steps=opening_steps)
    scheduler._lengths._min_observed = 1  # type: ignore[attr-defined]
    harness = ApartHarness(
        scheduler,
        [Store(blocks) for blocks in WORKER_BLOCKS],
        num_lanes + num_prompt_lanes,
        first_prompt_lane=num_lanes,
    )
    if opening_steps:
        harness.is_late = lambda: data.draw(st.booleans())
    play(data, harness, requests, lose=lose)
