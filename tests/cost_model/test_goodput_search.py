"""From hardware, requests and an SLO to a placement."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product

import pytest
from fixed_time import fixed
from sizing import HARDWARE, setup

from cost_model.goodput.answer import answer, as_json, as_text, placement_file
from cost_model.goodput.placements import Degrees, InstanceHardware
from cost_model.goodput.search import STEP_TOKENS, Question, Search, plan_colocated
from cost_model.goodput.simulator import (
    Load,
    PrefillSpec,
    greatest_rate,
    simulate,
    simulate_colocated,
)
from cost_model.goodput.slo import Slo
from cost_model.goodput.workload import Lengths, drawn
from cost_model.printing import round_to
from fastdecode.core.errors import ConfigError

DRAW = drawn(Lengths(512), Lengths(100), 1.0, 300, seed=0)


@cache
def hardware(model: str = "Llama-2 7B", nodes: int = 1, gpus: int = 2) -> InstanceHardware:
    return InstanceHardware(setup(model, prompt=512, output=100), nodes, gpus, 8, 512.0)


def question(slo: str = "ttft=600ms,tpot=100ms", rate: float = 3.0, **changes: object) -> Question:
    load = Load(DRAW, Slo.parse(slo, 0.9))
    asked = Question("Llama-2 7B", hardware(), load, rate, "high", 4)
    return replace(asked, **changes)  # type: ignore[arg-type]


def full_gpus() -> InstanceHardware:
    """GPUs whose memory the weights fill, and one socket."""
    found = hardware(gpus=1)
    gpu = replace(found.setup.gpu, memory_bytes=int(13.75e9 / 0.95))  # type: ignore[type-var]
    return replace(found, setup=replace(found.setup, gpu=gpu), max_sockets=1, _systems={})


def test_the_greatest_rate_is_found_to_two_percent() -> None:
    load = Load(drawn(Lengths(100), Lengths(1), 0.0, 300, 0), Slo(0.15, 1.0, 1.0))

    def run_at(requests: list[tuple[float, int, int]]) -> object:
        return simulate(requests, [PrefillSpec(fixed(0.1), 100)], [])

    # Clockwork arrivals never wait below 10 a second, and soon do above.
    found = greatest_rate(load, run_at, 64.0)  # type: ignore[arg-type]
    assert 9.8 <= found <= 10.3
    assert greatest_rate(load, run_at, 5.0) == 5.0  # type: ignore[arg-type]
    never = replace(load, slo=Slo(0.05, 1.0, 1.0))
    assert greatest_rate(never, run_at, 64.0) == 0.0  # type: ignore[arg-type]


def test_a_placement_that_keeps_the_slo() -> None:
    found = answer(question())
    best = found.best
    assert best is not None and best.num_gpus <= 2 and best.attainment >= 0.9
    tree = as_json(found)
    assert tree["chosen"] == best.kind and tree["plans"][best.kind]["keeps_slo"]
    assert f"{best.binds} binds" in as_text(found, explain=True)
    again = answer(question())
    assert as_json(again) == tree and as_text(again) == as_text(found)
    placed = placement_file(best)
    assert placed["format"] == "fastdecode-placement/1"
    assert len(placed["instances"]) == sum(each.count for each in best.instances)


@pytest.mark.parametrize("objective", ["gpu", "cost"])
def test_kv_stays_on_the_gpu_where_it_has_room(objective: str) -> None:
    found = answer(question(objective=objective))
    assert found.best is not None and found.best.num_sockets == 0
    assert all(each.is_on_device for each in found.best.instances)
    tpot_s = found.best.quantiles[1]
    # Weights and K and V are read once a token, and chunks of prompts come between.
    one, gpu = hardware().setup, HARDWARE.gpu("A10")
    read_s = one.costs.weight_bytes / (gpu.memory_bytes_per_s * gpu.memory_efficiency.value)
    assert read_s < tpot_s < found.question.load.slo.tpot_s
    full = answer(question(objective=objective, hardware=full_gpus()))
    assert full.best is not None and full.best.num_sockets == 1
    alone = Degrees(1, 1)
    crowded = hardware().decode(alone, 0)
    assert not full_gpus().fits_on_device(alone) and hardware().fits_on_device(alone)
    room = gpu.usable_memory_bytes - one.costs.weight_bytes
    assert crowded.capacity_tokens == pytest.approx(room / one.costs.kv_bytes, rel=0.02)


def test_low_affinity_keeps_pairs_together() -> None:
    found = answer(question(affinity="low"))
    assert found.disaggregated is not None
    prefill, decode = found.disaggregated.instances
    assert prefill.count == decode.count and decode.sockets <= 4
    assert not any(found.disaggregated.run.link_busy)
    assert found.colocated is not None
    (both,) = found.colocated.instances
    assert both.sockets <= 2 * both.degrees.num_gpus, "of 4 sockets on a node of 2 GPUs"


@pytest.mark.parametrize(("output", "rate", "cheapest"), [(100, 15.0, (2, 0)), (200, 10.0, (1, 8))])
def test_kv_on_a_gpu_is_not_missed(output: int, rate: float, cheapest: tuple[int, int]) -> None:
    """13B on an A100: two instances carry 15 a second with K and V on their GPUs as well as with
    two sockets each. With longer outputs one instance with eight sockets does the work of two."""
    slo = Slo.parse("ttft=1s,tpot=80ms", 0.9)
    load = Load(drawn(Lengths(512), Lengths(output), 1.0, 300, 0), slo)
    asked = setup("Llama-2 13B", "A100", "EPYC 9654", prompt=512, output=output)
    here = InstanceHardware(asked, 1, 4, 16, 512.0)
    found = plan_colocated(Search(Question("13B", here, load, rate)))
    assert found is not None and (found.num_gpus, found.num_sockets) == cheapest
    for gpus, sockets in product((1, 2), (0, 1, 2, 4, 6)):
        if (gpus, gpus * sockets) < cheapest:
            specs = [here.decode(Degrees(1, 1), sockets)] * gpus
            run = simulate_colocated(load.requests(rate), specs, STEP_TOKENS)
            assert not load.is_carried(run)


def test_no_verdict_depends_on_where_the_search_ends() -> None:
    asked = question(rate=6.0)
    trees = []
    for most in (2, 8, 64):
        found = as_json(answer(replace(asked, hardware=replace(hardware(), max_sockets=most))))
        trees.append((found["verdict"], found["limits"], found["plans"]))
    assert trees[0] == trees[1] == trees[2]
    assert not trees[0][1]


def test_the_same_hardware_either_way_is_named_once() -> None:
    found = answer(question())
    assert found.colocated is not None
    twin = replace(found.colocated, kind="disaggregated")
    verdict = replace(found, disaggregated=twin).verdict
    assert verdict.startswith("don't disaggregate: either way takes 1 GPU")
    assert "instead of" not in verdict


def test_says_where_the_search_ends_too_soon() -> None:
    long = Load(drawn(Lengths(2048), Lengths(400), 1.0, 300, 0), Slo(2.0, 0.2, 0.9))
    few = replace(hardware(gpus=4), max_sockets=1, mean_prompt=2048.0)
    found = answer(question(load=long, rate=2.0, hardware=few))
    assert any("--max-sockets binds" in limit for limit in found.limits)
    assert found.limits[0] in as_text(found)


def test_what_gpus_carry_that_are_too_few() -> None:
    asked = question(rate=40.0)
    found = answer(asked)
    assert found.best is None
    most = max(plan.carried_by(2) for plan in found.plans)
    assert f"carry about {round_to(most, 3):g}" in found.verdict
    # What is said they carry, they do; and little more.
    assert answer(replace(asked, rate=0.9 * most)).best is not None
    assert answer(replace(asked, rate=1.15 * most)).best is None


def test_too_few_gpus_for_one_of_each_role_are_named() -> None:
    asked = question()
    found = answer(asked)
    one = replace(asked, hardware=replace(asked.hardware, num_nodes=1, gpus_per_node=1))
    assert found.disaggregated is not None
    apart = replace(found.disaggregated, asked=one)
    verdict = replace(found, question=one, disaggregated=apart, colocated=None).verdict
    assert verdict.startswith(f"{asked.rate:g} requests a second take 2 GPUs and there are 1, too")


def test_says_the_nearest_slo_or_rate() -> None:
    found = answer(question("ttft=1ms,tpot=100ms"))
    assert found.best is None and found.nearest is not None
    ttft_s, tpot_s = found.nearest.ttft_s, found.nearest.tpot_s
    assert "no instance keeps the SLO" in found.verdict and tpot_s == 0.1
    assert "KV on the GPU" in found.verdict
    kept = answer(question(f"ttft={ttft_s:.6f}s,tpot={tpot_s}s", rate=0.01))
    assert kept.best is not None
    few = answer(question("ttft=600ms,tpot=1ms", hardware=full_gpus()))
    assert few.nearest is not None and few.nearest.sockets == 1
    assert "1 socket, which are all that there may be" in few.verdict
    many = answer(question(rate=40.0))
    assert many.best is None and "give more, or lower --rate" in many.verdict


def test_refuses_what_fits_nowhere() -> None:
    with pytest.raises(ConfigError, match="fits on no instance of up to 2 GPUs"):
        answer(question(hardware=hardware("Llama-2 70B")))


def test_what_launch_can_not_start_is_left_out() -> None:
    long = Load(drawn(Lengths(512), Lengths(300), 1.0, 300, 0), question().load.slo)
    here = replace(hardware(gpus=4), can_run=lambda tp, pp, sockets: tp == pp == 1 and sockets > 0)
    found = answer(question(load=long, rate=5.0, hardware=here))
    assert found.best is not None
    for each in (group for plan in found.plans for group in plan.instances):
        assert each.degrees == Degrees(1, 1) and not each.is_on_device
