"""The planner's choices: rules kept, infeasibility explained, the rival taken
seriously, money counted."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from sizing import HARDWARE
from sizing import setup as ask

from cost_model.plans.placement import (
    best_gpu_only,
    best_hybrid,
    costs_of,
    gpu_only_memory_bytes,
    gpu_only_step_s,
)
from cost_model.plans.question import Goal, Prices, Setup
from cost_model.plans.report import as_json, as_text
from cost_model.plans.size import size
from cost_model.shapes import KnownModel, known_models, read_model
from cost_model.workload import Workload
from fastdecode.core.errors import ConfigError
from fastdecode.schedule.hybrid.forecast import Layout, paces


def test_the_plan_keeps_what_it_says() -> None:
    sizing = size(ask(), Goal(), HARDWARE)
    plan = sizing.plan
    assert sizing.feasible and plan is not None
    assert (
        plan.sockets
        == max(row.min_sockets or 0 for row in plan.constraints)
        == plan.binding.min_sockets
    )
    assert plan.expected.s_utilisation > 0.95
    assert (
        plan.expected.sockets == plan.sockets
        and plan.expected.batch == plan.batch == plan.lanes * plan.lane_batch
    )
    assert plan.slow.tokens_per_s < plan.expected.tokens_per_s < plan.fast.tokens_per_s
    assert plan.hosts * plan.sockets_per_host >= plan.sockets
    starved = sizing.system.predict(plan.lane_batch, plan.lanes, plan.sockets // 2)
    assert starved.limit == "R-part" and starved.tokens_per_s < 0.7 * plan.expected.tokens_per_s


def test_the_batch_stops_where_the_gain_fades() -> None:
    setup = ask()
    system = setup.system()

    def efficiency(batch: int) -> float:
        return batch / system.s_s(batch)

    for min_gain in (0.05, 0.10, 0.5):
        plan = size(setup, Goal(min_gain=min_gain)).plan
        assert plan is not None
        assert efficiency(2 * plan.lane_batch) < (1 + min_gain) * efficiency(plan.lane_batch)
        half = plan.lane_batch // 2
        assert efficiency(2 * half) >= (1 + min_gain) * efficiency(half)


def test_a_latency_that_binds() -> None:
    free, held = size(ask(), Goal()), size(ask(), Goal(latency_s=60.0))
    assert free.plan is not None and held.plan is not None and held.feasible
    assert held.plan.lane_batch < free.plan.lane_batch
    assert held.plan.expected.latency_s <= 60.0


def test_a_latency_that_nothing_holds() -> None:
    sizing = size(ask(), Goal(latency_s=10.0))
    assert not sizing.feasible and sizing.plan is None
    assert [row.name for row in sizing.in_the_way] == ["latency"]
    assert "shortest step" in sizing.nearest
    step_s = float(sizing.nearest.split("can make is ")[1].split(" ms")[0]) / 1e3
    just = size(ask(), Goal(tpot_s=step_s * 1.01))
    assert just.plan is not None, "what is called nearest can be had"


def test_a_model_that_does_not_fit() -> None:
    sizing = size(ask("OPT 175B", "A100"), Goal())
    assert (
        not sizing.feasible
        and sizing.plan is None
        and sizing.gpu_only is None
        and sizing.verdict is None
    )
    assert [row.name for row in sizing.in_the_way] == ["S-worker memory"]
    assert sizing.nearest.startswith("--gpus 6")
    assert size(ask("OPT 175B", "A100", num_gpus=6), Goal()).plan is not None


def test_too_few_sockets_for_a_busy_gpu_give_what_they_can() -> None:
    """8 sockets keep an A10 81% busy: that is the answer, not the 3,150 tokens/s at which a
    smaller batch would keep it busy."""
    free, few = size(ask(), Goal()), size(ask(), Goal(max_sockets=8))
    assert "offload, if sockets are cheap enough" in as_text(free)
    assert "Verdict      offload: " in as_text(few), "sockets at hand have no price"
    assert free.plan is not None and few.plan is not None and few.feasible
    assert few.plan.sockets == 8
    assert few.plan.expected.tokens_per_s >= max(step.tokens_per_s for step in few.over_sockets
        if step.sockets <= 8) > 4000  # fmt: skip
    given = size(ask(), Goal(max_sockets=8, batch=576))
    assert given.feasible and given.plan is not None and given.plan.batch == 576
    assert given.plan.expected.tokens_per_s == pytest.approx(4090, rel=0.01)


def test_a_given_batch_has_the_lanes_that_save_sockets() -> None:
    """27 sockets in two lanes give 0.4% more than 11 in four."""
    plan = size(ask(), Goal(batch=1024)).plan
    assert plan is not None and plan.sockets <= 11
    assert plan.expected.tokens_per_s > 0.98 * size(ask(), Goal(batch=1024)).most_tokens_per_s


def test_a_given_batch_binds_the_gpu_alone_and_both_sides() -> None:
    """One sequence on an A10 reads 16.1 GB of weights a token: 33.5 ms, and no offload helps."""
    one = size(ask("Llama-3 8B"), Goal(batch=1))
    assert one.gpu_only is not None and one.gpu_only.batch == 1
    assert one.headline is not None and one.headline.kv_placement == "gpu"
    assert one.headline.tpot_s == pytest.approx(16.1e9 / 480e9, rel=0.1)
    assert "1 sequence at once (--batch allows no more)" in as_text(one)
    some = size(ask("Llama-3 8B"), Goal(batch=150)).hybrid
    assert some is not None and some.away and some.batch <= 150


def test_no_room_for_the_batch_names_the_nearest_that_has() -> None:
    sizing = size(ask(), Goal(batch=1024, max_sockets=1))
    assert not sizing.feasible and "at hand" in sizing.in_the_way[0].detail
    assert "another --batch" in sizing.nearest and "tokens/s" in sizing.nearest
    assert sizing.plan is not None and sizing.plan.sockets == 1 and sizing.plan.batch < 1024
    none = size(ask(), Goal(max_sockets=1, replicas=1))
    assert not none.feasible and none.nearest.startswith("2 sockets")


def test_the_headline_counts_both_sides() -> None:
    """The GPU alone, R-workers alone and both: the verdict is about the best of them."""
    setup = ask("Llama-3 8B", "A100-40GB", "EPYC 7763", output=4096)
    sizing = size(setup, Goal(max_sockets=8))
    assert sizing.headline is not None and sizing.hybrid is not None
    assert sizing.headline.kv_placement == "hybrid"
    assert sizing.headline.tokens_per_s == sizing.hybrid.tokens_per_s
    assert sizing.verdict is not None and sizing.verdict.offload and sizing.verdict.gain > 1.6
    assert "both sides beside" in sizing.verdict.reason


def test_a_lane_more_must_earn_its_place() -> None:
    chosen = size(ask(), Goal()).plan
    assert chosen is not None
    counts = {}
    for lanes in (2, 3, 4):
        sizing = size(ask(), Goal(lanes=lanes, batch=lanes * chosen.lane_batch))
        counts[lanes] = (
            sizing.plan.sockets if sizing.feasible and sizing.plan is not None else 10**9
        )
    fewest = min(counts.values())
    assert counts[chosen.lanes] <= 1.25 * fewest
    assert all(
        counts[lanes] > 1.25 * counts[chosen.lanes] for lanes in counts if lanes < chosen.lanes
    )


def test_over_sockets_shows_every_limit_on_the_way() -> None:
    sizing = size(ask("Llama-3 70B", "H200", "EPYC 9354", num_gpus=2, output=2048), Goal())
    steps = sizing.over_sockets
    assert [step.sockets for step in steps] == sorted({step.sockets for step in steps})
    assert all(a.tokens_per_s <= b.tokens_per_s * (1 + 1e-9) for a, b in itertools.pairwise(steps))
    plan = sizing.plan
    assert plan is not None
    seen = {step.limit for step in steps}
    every = {
        sizing.system.predict(plan.lane_batch, plan.lanes, p).limit
        for p in range(1, 2 * plan.sockets + 1)
    }
    assert seen == every


def test_kv_on_both_sides_is_never_less_than_the_gpu_alone() -> None:
    sizing = size(ask(), Goal())
    alone, system, both = sizing.gpu_only, sizing.system, sizing.hybrid
    assert alone is not None and both is not None
    rates = [best_hybrid(system, alone, sockets, math.inf).tokens_per_s for sockets in (1, 4, 16)]
    assert alone.tokens_per_s <= rates[0] < rates[1] < rates[2]
    slow = best_hybrid(system, alone, 4, alone.tpot_s * 1.001)
    assert (slow.away_tpot_s or 0.0) <= alone.tpot_s * 1.001
    assert "--kv-placement hybrid" in as_text(sizing)
    assert 1 <= as_json(sizing)["hybrid"]["home"] <= alone.batch


@pytest.mark.parametrize(
    ("model", "gpu", "cpu", "step_limit_s"),
    [
        ("Llama-2 7B", "A10", "EPYC 7452", math.inf),
        ("Llama-3 8B", "H20", "EPYC 9354", math.inf),  # a full GPU gives less
        ("Llama-3 8B", "H20", "EPYC 9354", 0.2),
        ("Qwen3 30B-A3B", "H20", "EPYC 9354", math.inf),  # few rows read few experts
    ],
)
def test_both_sides_have_the_best_number_on_the_gpu(
    model: str, gpu: str, cpu: str, step_limit_s: float
) -> None:
    """Every number is tried that the search passed over."""
    system = ask(model, gpu, cpu).system()
    alone = best_gpu_only(system, step_limit_s)
    assert alone is not None
    both = best_hybrid(system, alone, 4, step_limit_s, part=1.0)
    assert both.away
    load, layout = system.attended_tokens, Layout(both.layout)
    costs = costs_of(
        system, lambda num: system.costs.num_layers * system.s_s(num), both.away, both.sockets
    )
    rates = []
    for home in range(1, alone.batch + 1):
        pace = paces(costs, layout, (home, home * load), (both.away, both.away * load))
        if max(pace.home_s, pace.away_s) <= step_limit_s:
            rates.append(home / pace.home_s + both.away / pace.away_s)
    assert both.tokens_per_s == pytest.approx(max(rates))


def test_both_sides_end_at_the_largest_batch_that_was_measured() -> None:
    """No step of any lane has more sequences."""
    system = ask("Llama-3 8B", "H20", "EPYC 9354").system()
    measured = replace(system, s=replace(system.s, max_batch=64))
    for known, most in ((system, math.inf), (measured, 64)):
        alone = best_gpu_only(known, math.inf)
        assert alone is not None
        both = best_hybrid(known, alone, 8, math.inf, part=1.0)
        layout = Layout(both.layout)
        steps = [both.batch] if layout is Layout.MIXED else [both.home, both.away]
        assert both.away and max(steps) <= most
        assert known is measured or max(steps) > 64


def test_the_gpu_alone_uses_its_memory_up() -> None:
    sizing = size(ask(), Goal())
    alone, system = sizing.gpu_only, sizing.system
    assert alone is not None and alone.limit == "memory"
    assert gpu_only_memory_bytes(system, alone.batch) <= system.s.usable_memory_bytes
    assert gpu_only_memory_bytes(system, alone.batch + 1) > system.s.usable_memory_bytes
    assert alone.tpot_s == gpu_only_step_s(system, alone.batch)
    quick = size(ask(), Goal(tpot_s=0.04)).gpu_only
    assert (
        quick is not None
        and quick.limit == "latency"
        and quick.batch < alone.batch
        and quick.tpot_s <= 0.04
    )


@pytest.mark.parametrize(
    ("model", "gpu", "num_gpus", "offload"),
    [
        ("Llama-2 7B", "A10", 1, True),  # 9 GB left for KV
        ("Llama-2 70B", "H200", 1, True),  # the weights fill the GPU
        ("Llama-3 70B", "H200", 2, False),  # 144 GB left for KV, a fifth of it needed
        ("Qwen2.5 7B", "H200", 1, False),  # 127 GB left, and 57 KB a token
    ],
)
def test_when_offloading_wins(model: str, gpu: str, num_gpus: int, offload: bool) -> None:
    verdict = size(ask(model, gpu, "EPYC 9354", "200GbE", num_gpus=num_gpus), Goal()).verdict
    assert verdict is not None and verdict.offload is offload
    if not offload:
        assert verdict.gain < 2.0


def test_money_decides(tmp_path: Path) -> None:
    path = tmp_path / "prices.toml"

    def verdict_at(socket: float) -> tuple[bool, float, float | None]:
        path.write_text(f"[gpu_per_hour]\nA10 = 0.5\n[socket_per_hour]\ndefault = {socket}\n")
        sizing = size(ask(), Goal(), prices=Prices.read(path))
        assert sizing.verdict is not None and sizing.cost is not None
        assert sizing.cost.currency == "USD"
        return (
            sizing.verdict.offload,
            sizing.cost.per_million_tokens,
            sizing.cost.gpu_only_per_million_tokens,
        )

    break_even = size(ask(), Goal()).verdict
    assert break_even is not None
    price = 0.5 * break_even.break_even_socket_price
    cheap, dear = verdict_at(0.99 * price), verdict_at(1.01 * price)
    assert cheap[0] and not dear[0]
    assert cheap[2] is not None and cheap[1] < cheap[2]
    assert dear[1] == dear[2], "the headline is the GPU alone"
    sizing = size(ask(), Goal(), prices=Prices({"A10": 3.6}, {"default": 0.0001}, "EUR"))
    assert sizing.cost is not None and sizing.gpu_only is not None
    assert sizing.cost.gpu_only_per_million_tokens == pytest.approx(
        1000 / sizing.gpu_only.tokens_per_s
    )


@pytest.mark.parametrize(
    "text",
    [
        "", "gpu_per_hour = 3", "[gpu_per_hour]\nA10 = -1\n[socket_per_hour]\nx = 1", "nonsense",
        "[gpu_per_hour]\nA10 = 1", "[gpu_per_hour]\nA10 = true\n[socket_per_hour]\nx = 1",
        "[gpu_per_hour]\nA10 = 1\n[socket_per_hour]\nx = 1\n[cats]\ny = 1",
    ],
)  # fmt: skip
def test_broken_price_lists(tmp_path: Path, text: str) -> None:
    path = tmp_path / "prices.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match="prices="):
        Prices.read(path)


def test_price_lists_in_json_and_missing_prices(tmp_path: Path) -> None:
    path = tmp_path / "prices.json"
    path.write_text(
        json.dumps({"gpu_per_hour": {"H200": 3.0}, "socket_per_hour": {"EPYC 7452": 0.3}})
    )
    prices = Prices.read(path)
    assert prices.of("socket", "EPYC 7452") == 0.3
    with pytest.raises(ConfigError, match="gpu_per_hour for 'A10'"):
        size(ask(), Goal(), prices=prices)
    with pytest.raises(ConfigError, match="No such file"):
        Prices.read(tmp_path / "none.toml")


@pytest.mark.parametrize("model", known_models().values(), ids=lambda model: model.name)
def test_every_known_model_is_sized(model: KnownModel) -> None:
    """By its name at Hugging Face, if it has one: with one batch, which is quick."""
    spec = read_model(model.id or model.name)
    dtype = spec.choose_dtype("auto")
    length = min(512, spec.max_model_len // 2)
    num_gpus = max(n for n in (1, 2, 4, 8) if spec.num_q_heads % n == 0)
    setup = Setup(
        spec, dtype, "int8", HARDWARE.gpu("H200"), HARDWARE.cpu("EPYC 9654"),
        HARDWARE.nic("400GbE"), Workload(length, length), num_gpus=num_gpus,
    )  # fmt: skip
    sizing = size(setup, Goal(batch=64, lanes=2), HARDWARE)
    assert sizing.plan is not None and sizing.gpu_only is not None
    text = as_text(sizing, explain=True)
    assert text.startswith(f"{model.name} ({dtype}, KV cache int8)")
    assert (spec.quantisation is not None) == ("decoded to" in text)
    assert (spec.moe is not None) == ("experts" in text)
    assert json.loads(json.dumps(as_json(sizing)))["question"]["model"] == model.name
