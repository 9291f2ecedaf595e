"""The virtual clock: what a round takes, what the modes gain on the paper's
workload, and that nothing gets lost."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_choices import LongestLengths, schedule_options

from cost_model.simulate import Table, TabledTimes, as_json, as_text, summarise
from examples import examples
from fastdecode.schedule.admission.load_control import FixedInterval
from fastdecode.schedule.lengths import LengthPredictor
from fastdecode.schedule.modes import make_scheduler
from fastdecode.schedule.options import MODES
from fastdecode.schedule.simulation.resources import Rounds
from fastdecode.schedule.simulation.simulation import Simulation, SimulationOutcome
from fastdecode.schedule.simulation.trace import ArrivalUnit, RequestTrace, TracedRequest


def constant(s_part_s: float, *r_token_s: float) -> TabledTimes:
    return TabledTimes(
        Table(((0, s_part_s),)), tuple(Table(((0, 0.0), (1, rate))) for rate in r_token_s)
    )


def simulate(
    requests: list[TracedRequest],
    times: TabledTimes,
    *,
    mode: str = "greedy",
    unit: ArrivalUnit = "s",
    lanes: int = 1,
    blocks: int = 10_000,
    block_size: int = 32,
    link_s: float = 0.0,
    lengths: LengthPredictor | None = None,
    **more: object,
) -> SimulationOutcome:
    chosen: dict[str, object] = {"max_num_sequences": 16, "max_step_tokens": 16 + 512}
    options = schedule_options(mode, lanes, **(chosen | more))
    worker_blocks = (blocks,) * len(times.r_parts)
    scheduler = make_scheduler(options, worker_blocks, block_size, times, lengths=lengths)
    ordered = tuple(sorted(requests, key=lambda request: request.arrival))
    times = replace(times, way_s=link_s)
    simulator = Simulation(
        RequestTrace(ordered, unit),
        scheduler,
        Rounds(times, len(worker_blocks)),
        worker_blocks=worker_blocks,
        block_size=block_size,
        num_lanes=lanes,
    )
    outcome = simulator.run()
    assert all(not worker.reserved and not worker.cached for worker in simulator.workers)
    return outcome


def test_one_lane_takes_s_plus_r() -> None:
    outcome = simulate([TracedRequest(3, 4, 4)], constant(1.0, 0.1))
    assert [step.load_tokens for step in outcome.steps] == [3, 4, 5, 6]
    assert [step.step_s for step in outcome.steps] == pytest.approx([1.3, 1.4, 1.5, 1.6])
    assert [step.started_s for step in outcome.steps] == pytest.approx([0, 1.3, 2.7, 4.2])
    (served,) = outcome.served
    assert served.ttft_s == pytest.approx(1.3)
    assert served.tpot_s == pytest.approx(1.5)
    assert outcome.total_s == pytest.approx(5.8)


def test_two_lanes_take_the_longer_part() -> None:
    outcome = simulate([TracedRequest(1, 30, 30)] * 2, constant(1.0, 0.1), lanes=2)
    for length, step in enumerate(outcome.steps, 1):
        assert step.load_tokens == 2 * length
        assert step.s_part_s == 2.0 and step.r_part_s == pytest.approx(0.2 * length)
        assert step.step_s == pytest.approx(max(2.0, 0.2 * length))


def test_other_lanes_cover_the_link_where_they_can() -> None:
    requests = [TracedRequest(1, 30, 30)] * 2
    alone = simulate(requests[:1], constant(1.0, 0.1), link_s=0.5)
    assert [step.step_s for step in alone.steps[:3]] == pytest.approx([1.6, 1.7, 1.8])
    outcome = simulate(requests, constant(1.0, 0.1), lanes=2, link_s=0.5)
    for length, step in enumerate(outcome.steps, 1):
        assert step.step_s == pytest.approx(max(2.0, 0.2 * length, 1.5 + 0.1 * length))


def test_the_busiest_r_worker_counts() -> None:
    requests = [TracedRequest(10, 1, 1), TracedRequest(20, 1, 1)]
    (step,) = simulate(requests, constant(0.0, 0.1, 0.3)).steps
    assert step.r_part_s == pytest.approx(6.0)
    assert step.r_parts_s == pytest.approx(7.0)


def test_arrivals_in_seconds_and_in_steps() -> None:
    requests = [TracedRequest(1, 2, 2), TracedRequest(1, 2, 2, 1.5), TracedRequest(1, 1, 1, 100.0)]
    in_seconds = simulate(requests, constant(1.0, 0.0))
    assert [step.num_running for step in in_seconds.steps] == [1, 1, 1, 1, 1]
    assert [step.started_s for step in in_seconds.steps] == pytest.approx([0, 1, 2, 3, 100])
    assert [served.ttft_s for served in in_seconds.served] == pytest.approx([1, 1.5, 1])
    in_steps = simulate(requests, constant(1.0, 0.0), unit="step")
    assert [step.started_s for step in in_steps.steps] == pytest.approx([0, 1, 2, 3, 4])


def test_what_never_fits_is_counted_and_the_rest_is_served() -> None:
    outcome = simulate(
        [TracedRequest(1000, 1, 1), TracedRequest(5, 2, 2)], constant(1.0, 0.0), blocks=2
    )
    assert (outcome.num_refused, len(outcome.served)) == (1, 1)


def papers_workload(mode: str, lanes: int, **more: object) -> SimulationOutcome:
    """B = 32 sequences of S = 128 from nothing; the R-part of the mean load
    takes as long as the S-part."""
    r_token_s = 0.010 / (32 * 128 / 2)
    return simulate(
        [TracedRequest(1, 128, 128)] * (32 * 30),
        constant(0.010 / lanes, r_token_s),
        mode=mode,
        lanes=lanes,
        max_num_sequences=32,
        max_step_tokens=32 + 512,
        expected_output_tokens=128,
        **more,
    )


def test_stabilizing_flattens_the_load_and_gains_what_the_paper_says() -> None:
    stabilized, synchronized = (
        papers_workload(mode, lanes=2) for mode in ("stabilized", "synchronized")
    )
    assert max(step.load_tokens for step in synchronized.steps) == 32 * 128
    limit = 32 * (128 + 8) // 2  # in each lane, one of 16 starts every 8 steps
    peak = max(step.load_tokens for step in stabilized.steps)
    assert 0.95 * limit <= peak <= limit
    settled = [step.load_tokens for step in stabilized.steps[200:-200]]
    assert sum(settled) / len(settled) > 0.92 * 32 * 128 / 2
    # Synchronized: max(S, R) over a ramp of R from 0 to 2·S is 1.25·S on average.
    assert synchronized.total_s == pytest.approx(1.25 * 0.010 * len(synchronized.steps), rel=0.01)
    assert synchronized.total_s / stabilized.total_s > 1.1
    assert max(step.step_s for step in stabilized.steps) <= 0.010 * 17 / 16 + 1e-9
    assert summarise(stabilized)["tpot_s"]["p99"] < 0.85 * summarise(synchronized)["tpot_s"]["p99"]


@pytest.mark.parametrize(
    "r_parts", [((0, 0.0), (1, 2e-6)), ((0, 0.020), (1, 0.020001))], ids=["load", "prompts"]
)
def test_a_batch_that_waits_for_r_workers_is_not_made_smaller(
    r_parts: tuple[tuple[int, float], ...],
) -> None:
    """Their part takes longer than the S-part, by the load or by prompts beside it: starting fewer
    sequences would make more steps of them, and none shorter."""
    requests = [TracedRequest(512, 64, 64)] * 32
    times = TabledTimes(Table(((0, 0.010),)), (Table(r_parts),))
    chosen = {"lanes": 2, "max_num_sequences": 256, "max_step_tokens": 256 + 2048}
    stabilized, greedy = (
        simulate(requests, times, mode=mode, **chosen) for mode in ("stabilized", "greedy")
    )
    assert len(stabilized.steps) <= 1.2 * len(greedy.steps)
    assert stabilized.total_s <= 1.1 * greedy.total_s


def test_fixed_f_peaks_at_the_closed_form() -> None:
    outcome = papers_workload("fixed-f", lanes=1)
    interval = FixedInterval.of(32, 128, 8)
    assert interval.peak == 32 * (128 + 8) // 2
    assert max(step.load_tokens for step in outcome.steps) == interval.peak
    assert len(outcome.steps) == (30 * 32 // 2 - 1) * 8 + 128


def test_learnt_lengths_make_up_for_high_max_tokens() -> None:
    rng = random.Random(1)
    lengths = [1 + min(199, int(rng.expovariate(1 / 40))) for _ in range(600)]
    requests = [TracedRequest(1, length, 200) for length in lengths]
    known, learnt, bound = (
        simulate(
            [TracedRequest(1, r.num_output_tokens, r.num_output_tokens) for r in requests]
            if i == 0
            else requests,
            constant(0.010, 0.010 / 1000),
            mode="stabilized",
            max_num_sequences=64,
            max_step_tokens=64 + 512,
            load_limit=1000,
            lengths=None if i < 2 else LongestLengths(),
        )
        for i in range(3)
    )
    assert bound.total_s > 1.5 * learnt.total_s
    assert learnt.total_s < 1.15 * known.total_s
    assert learnt.num_suspended == bound.num_suspended == 0


def test_load_goes_where_it_is_fast() -> None:
    rng = random.Random(0)
    lengths = [rng.randint(20, 200) for _ in range(300)]
    slow, fast = 2e-5, 1e-5
    outcome = simulate(
        [TracedRequest(1, length, length) for length in lengths],
        constant(0.010, slow, fast),
        mode="stabilized",
        max_num_sequences=20,  # spread evenly, just below the load that is in balance: 1500 tokens
        max_step_tokens=20 + 512,
    )
    settled = outcome.steps[100:-200]
    # Both R-workers are near their limit of 10 ms at the same time: the fast
    # one holds twice the load.
    busy = sum(step.r_parts_s for step in settled) / sum(2 * step.r_part_s for step in settled)
    assert busy > 0.85
    # Half a sequence of 110 tokens, at the slow one's 20 µs, above balance.
    assert max(step.r_part_s for step in outcome.steps) <= 0.010 + 0.0013


@settings(max_examples=examples(300), deadline=None)
@given(
    st.data(),
    st.sampled_from(MODES),
    st.integers(1, 3),
    st.sampled_from(["s", "step"]),
    st.booleans(),
)
def test_every_mode_serves_every_request_on_random_traces(
    data: st.DataObject, mode: str, lanes: int, unit: ArrivalUnit, learn: bool
) -> None:
    requests = []
    for _ in range(data.draw(st.integers(1, 25))):
        output = data.draw(st.integers(1, 30))
        max_tokens = data.draw(st.integers(output, 40))
        requests.append(
            TracedRequest(
                data.draw(st.integers(1, 40)), output, max_tokens, data.draw(st.floats(0, 60))
            )
        )
    outcome = simulate(
        requests,
        constant(1.0, 0.02, 0.05),
        mode=mode,
        unit=unit,
        lanes=lanes,
        blocks=16,
        block_size=8,
        max_num_sequences=6,
        max_step_tokens=6 + 20,
        prefill_chunk=16,
        expected_output_tokens=40 if mode == "fixed-f" else None,
        length_quantile=0.5 if learn else None,
    )
    assert len(outcome.served) == len(requests)
    assert sorted(map(id, (served.traced for served in outcome.served))) == sorted(
        map(id, requests)
    )
    for served in outcome.served:
        assert served.arrived_s < served.first_token_s <= served.finished_s
    elapsed = [step.started_s + step.step_s for step in outcome.steps]
    assert all(
        later.started_s >= end - 1e-9
        for end, later in zip(elapsed, outcome.steps[1:], strict=False)
    )
    assert outcome.total_s == pytest.approx(elapsed[-1])
    for step in outcome.steps:
        assert (
            max(step.s_part_s, step.r_part_s) <= step.step_s <= step.s_part_s + step.r_part_s + 1e-9
        )


def test_reports_agree_with_the_steps() -> None:
    outcome = papers_workload("greedy", lanes=2)
    summary = summarise(outcome)
    assert summary["output_tokens"] == 32 * 30 * 128
    assert summary["output_tokens_per_s"] == pytest.approx(
        summary["output_tokens"] / outcome.total_s
    )
    assert summary["load_peak_tokens"] == 4096
    assert summary["s_idle_share"] == pytest.approx(0.2, abs=0.01)
    columns = as_json({"greedy": outcome})["modes"]["greedy"]["steps"]
    assert {len(column) for column in columns.values()} == {len(outcome.steps)}
    assert columns["load_tokens"][:3] == [32, 64, 96]
    header, *rows = as_text({"greedy": outcome, "again": outcome}).splitlines()
    assert header.split() == ["greedy", "again"]
    assert len({len(row) for row in rows}) == 1
