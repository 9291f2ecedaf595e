"""The pipeline's laws: what overlaps, what doesn't, and the paper's special case."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles.sizing_forms import required_cpus

from cost_model.plans.constraints import Constraint, constraints
from cost_model.plans.question import Goal
from cost_model.predict import LaneTimes, System
from cost_model.shapes import model_named
from cost_model.stages import LinkModel, Provenance, RPartModel, SPartModel
from cost_model.workload import TokenCosts, Workload
from fastdecode.core.dtype import DType

SPEC = model_named("Llama-2 7B")
stage = st.floats(1e-6, 1e-2)


def ideal_system(
    t_of_b: float = 2e-3,
    r_s: float = 5e-7,
    seq_len: int = 1024,
    network_bytes_per_s: float = 1e18,
    **s: float,
) -> System:
    """The paper's world: constant T(B), R proportional to tokens, a network that takes no time."""
    source = (Provenance.GIVEN, "")
    return System(
        s=SPartModel("s", *source, SPEC.num_layers, lambda _: t_of_b, lambda _: 0.0,
                     lambda n: 1e-3 * n, 1e15, 1e12, None, None, relative_error=0.1),
        r=RPartModel("r", *source, 0.0, 0.0, r_s, r_s / 2, 1e15, 1e15, 2, None, relative_error=0.1),
        link=LinkModel("net", *source, network_bytes_per_s, 0.0, 0.0, relative_error=0.1),
        num_nics=1,
        costs=TokenCosts(SPEC, DType.FLOAT16, "float16"),
        workload=Workload(0, seq_len),
    )  # fmt: skip


@given(stage, stage, stage, stage, stage, stage)
def test_cycle_bounds(
    s: float, out: float, r: float, back: float, trip: float, messages: float
) -> None:
    lane = LaneTimes(s, out, r, back, trip, messages)
    assert lane.cycle_s(1) == pytest.approx(s + out + r + back + trip + messages)
    for lanes in (1, 2, 3, 4):
        cycle = lane.cycle_s(lanes)
        assert cycle >= lanes * max(s, out, r, back, messages) and cycle >= lane.chain_s
        # A lane more never makes a lane's own way shorter, and never makes the whole give less.
        assert lane.cycle_s(lanes + 1) >= cycle
        assert (lanes + 1) / lane.cycle_s(lanes + 1) >= lanes / cycle * (1 - 1e-12)


def test_what_limits() -> None:
    assert LaneTimes(4.0, 1.0, 2.0, 1.0, 0.0).limit(3) == "S-part"
    assert LaneTimes(2.0, 1.0, 4.0, 1.0, 0.0).limit(3) == "R-part"
    assert LaneTimes(2.0, 4.0, 2.0, 1.0, 0.0).limit(3) == "network"
    assert LaneTimes(2.0, 1.0, 1.0, 1.0, 9.0).limit(3) == "round trip"
    assert LaneTimes(2.0, 1.0, 1.0, 1.0, 0.0, 3.0).limit(3) == "messages"
    assert LaneTimes(2.0, 1.0, 1.0, 1.0, 0.0).limit(1) == "round trip"


def busy_rows(system: System, lane_batch: int, lanes: int) -> dict[str, Constraint]:
    """What it takes that the GPU never waits."""
    cycle_s = lanes * system.s_s(lane_batch)
    rows = constraints(system, lane_batch, lanes, Goal(headroom=0.0), cycle_s)
    return {row.name: row for row in rows}


def test_two_lanes_and_a_perfect_network_are_the_paper() -> None:
    """Latency 2·N·S·T(B), P = B·S·R / 2T(B) but for the (S+1)/S of whole tokens."""
    system, batch, seq_len = ideal_system(), 512, 1024
    rows = busy_rows(system, batch, 2)
    paper = required_cpus(batch, seq_len, 5e-7, 2e-3, 1e12)
    assert paper.compute_bound == pytest.approx(65.536, rel=1e-9)
    assert rows["R-part"].min_sockets == 66
    assert rows["round trips"].min_sockets == 66
    step = system.predict(batch, 2, 66)
    assert step.latency_s == pytest.approx(2 * SPEC.num_layers * seq_len * 2e-3, rel=1e-9)
    assert step.s_utilisation == pytest.approx(1.0) and step.limit == "S-part"
    assert step.tokens_per_s == pytest.approx(2 * batch / (2 * SPEC.num_layers * 2e-3))
    one_fewer = system.predict(batch, 2, 65)
    assert one_fewer.limit == "R-part" and one_fewer.s_utilisation < 1.0


def test_starting_together_needs_twice_the_sockets() -> None:
    spread = ideal_system()
    together = replace(spread, workload=Workload(0, 1024, 1024))
    counts = [busy_rows(each, 512, 2)["R-part"].min_sockets for each in (spread, together)]
    assert counts == [66, 132]


def test_prompts_cost_the_gpu_their_share() -> None:
    """Each step, one of ``output`` sequences ends and another one's prompt runs."""
    without, with_prompt = ideal_system(), replace(ideal_system(), workload=Workload(300, 100))
    extra = with_prompt.s_s(512) - without.s_s(512)
    assert extra == pytest.approx(512 / 100 * 300e-3 / SPEC.num_layers)
    by_r = replace(with_prompt, s=replace(with_prompt.s, prompts_on_r=True))
    costs, (out, back) = without.costs, without.way_bytes(100)
    assert with_prompt.way_bytes(100) == pytest.approx((out + 300 * costs.prompt_out_bytes, back))
    all_of_it = (out + 300 * costs.out_bytes, back + 300 * costs.back_bytes)
    assert by_r.way_bytes(100) == pytest.approx(all_of_it), "R-workers attend to prompts"


def test_messages_limit_the_sockets_from_above() -> None:
    """66 sockets are needed; 30 us a message and 2 ms of S-part allow for 66, 31 us do not."""
    for message_s, met in ((30e-6, True), (31e-6, False)):
        base = ideal_system()
        system = replace(base, link=replace(base.link, message_s=message_s))
        rows = busy_rows(system, 512, 4)
        assert rows["R-part"].min_sockets == 66
        assert rows["messages"].min_sockets == (0 if met else None)
        assert system.lane(512, 66).messages_s == pytest.approx(66 * message_s)
        assert system.lane(8, 66).messages_s == pytest.approx(8 * message_s), (
            "no more messages than sequences"
        )


def test_the_fewest_sockets_are_found_though_messages_add_up() -> None:
    base = ideal_system()
    system = replace(base, link=replace(base.link, message_s=10e-6))
    for lanes in (2, 3, 4):
        rows = busy_rows(system, 512, lanes)
        hidden_s = (lanes - 1) * system.s_s(512)
        brute = [
            p for p in range(1, 600) if system.lane(512, p).chain_s - system.s_s(512) <= hidden_s
        ]
        assert rows["round trips"].min_sockets == (brute[0] if brute else None)


def test_network_times_come_from_the_narrower_side() -> None:
    system = ideal_system(network_bytes_per_s=1e9)
    out, back = 64 * system.costs.out_bytes, 64 * system.costs.back_bytes
    one_host, many = system.lane(64, 1), system.lane(64, 40)
    assert one_host.out_s == many.out_s == pytest.approx(out / 1e9)
    assert one_host.back_s == pytest.approx(back / 1e9)
    assert replace(system, num_nics=4).lane(64, 40).out_s == pytest.approx(out / 4e9)
    assert replace(system, num_nics=4).lane(64, 2).out_s == pytest.approx(out / 1e9)
    narrow_pcie = replace(system, s=replace(system.s, host_link_bytes_per_s=1e8))
    assert narrow_pcie.lane(64, 40).out_s == pytest.approx(out / 1e8)


def test_bounds_enclose_the_prediction() -> None:
    system = ideal_system(network_bytes_per_s=1e10)
    for lanes, sockets in ((1, 4), (2, 66), (3, 200)):
        fast, mid, slow = (
            system.scaled(sign).predict(512, lanes, sockets).step_s for sign in (-1, 0, 1)
        )
        assert fast < mid < slow
        assert slow / mid == pytest.approx(1.1) and mid / fast == pytest.approx(1.1)


@given(st.integers(1, 2000), st.integers(1, 100))
def test_load_limit_is_where_r_meets_s(lane_batch: int, sockets: int) -> None:
    base = ideal_system()
    system = replace(base, r=replace(base.r, call_s=1e-5, sequence_s=2e-7))
    limit, each = system.load_limit_tokens(lane_batch, sockets), max(1.0, lane_batch / sockets)
    r_part_s = [system.r.r_s(each, tokens / sockets) for tokens in (limit, limit + 1)]
    assert r_part_s[0] <= system.s_s(lane_batch) < r_part_s[1]
