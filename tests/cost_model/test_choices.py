"""What planners ask beside one plan: several GPUs in a table, what owned hardware gives, how long
a job takes, a prefix cache, rivals in FP8."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import sizing

from cost_model.plans.choices import arrange, choose, sort_choices
from cost_model.plans.question import Goal, Prices, Setup
from cost_model.plans.size import Job, job, size
from cost_model.workload import Workload
from fastdecode.cli.main import main
from fastdecode.core.dtype import DType
from fastdecode.core.errors import ConfigError

PRICES = Prices({"A10": 1.0, "H100-SXM": 4.0}, {"default": 0.1}, "EUR")


def setup(gpu: str = "A10", **workload: float) -> Setup:
    lengths = Workload(512, 512, **workload)  # type: ignore[arg-type]
    return sizing.setup("Llama-3 8B", gpu, workload=lengths)


def test_every_way_to_use_what_one_owns() -> None:
    found = arrange(setup(), 4, Goal(max_sockets=8), size, PRICES).found
    assert len({each.name for each in found}) == len(found) == 6
    single = size(setup(), Goal(max_sockets=2))
    (apart,) = (each for each in found if each.copies == 4)
    assert single.headline is not None
    assert apart.tokens_per_s == pytest.approx(4 * single.headline.tokens_per_s)
    assert all(each.systems * each.headline.sockets <= 8 for each in found)
    (staged,) = (each for each in found if each.name == "1 system, pp 4")
    assert staged.tpot_s == 4 * staged.headline.tpot_s
    # A GPU's hour and a tenth for each socket, over the tokens of an hour.
    per_hour = 4 * (1.0 + 0.1 * apart.headline.sockets)
    assert apart.job.money == pytest.approx(per_hour / (apart.tokens_per_s * 3600) * 1e6)
    with pytest.raises(ConfigError, match="number of CPU sockets is missing"):
        arrange(setup(), 4, Goal(), size, None)


def test_gpus_side_by_side() -> None:
    asked = [(name, setup(name)) for name in ("A10", "H100-SXM", "L4")]
    found = choose(asked, Goal(), size, PRICES).found
    assert sort_choices(found, "tokens")[0].name == "H100-SXM"
    by_cost = sort_choices(found, "cost")
    assert by_cost[-1].name == "L4" and by_cost[-1].job.money is None, "its price isn't given"
    first, second = (each.job.money for each in by_cost[:2])
    assert first is not None and second is not None and first <= second
    by_energy = sort_choices(found, "energy")
    assert by_energy[0].job.kwh == min(each.job.kwh or 0.0 for each in found)
    bfloat16 = replace(setup("V100"), dtype=DType.BFLOAT16)
    left = choose([("V100", bfloat16)], Goal(), size, None)
    assert not left.found and "no bfloat16 units" in left.left_out["V100"]


@pytest.mark.parametrize("by", ["cost", "energy"])
def test_a_line_is_its_parts_cheapest_placement(by: str) -> None:
    def price(job: Job) -> float | None:
        return job.money if by == "cost" else job.kwh

    dear = Prices(PRICES.gpu_per_hour, {"default": 2.0})
    asked = [(name, setup(name)) for name in ("A10", "H100-SXM")]
    for each in choose(asked, Goal(), size, dear, by).found:
        sizing = size(setup(each.name), Goal())
        prices = [price(job(sizing, one, 1e6, dear)) for one in sizing.headlines]
        assert len(prices) == 3 and price(each.job) == min(x for x in prices if x is not None)
    for way in arrange(setup("H100-SXM"), 2, Goal(max_sockets=4), size, dear, by).found:
        most = arrange(setup("H100-SXM"), 2, Goal(max_sockets=4), size, dear).found
        (rival,) = (one for one in most if one.name == way.name)
        assert (price(way.job) or 0) < (price(rival.job) or 0), "the fastest is not the cheapest"


@pytest.mark.parametrize("text", ["1e6", "1000000"])
def test_requests_in_float_notation(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*QUESTION, "--gpu", "A10", "--requests", text]) == 0
    assert "1,000,000 requests: " in capsys.readouterr().out


def test_what_a_job_takes() -> None:
    sizing = size(setup(), Goal(requests=10**6, max_sockets=4), prices=PRICES)
    job, headline = sizing.job, sizing.headline
    assert job is not None and headline is not None and job.kwh is not None
    assert job.hours == pytest.approx(10**6 * 512 / headline.tokens_per_s / 3600)
    assert job.kwh == pytest.approx(job.hours * (150 + 155 * headline.sockets) / 1000)
    assert job.money == pytest.approx(job.hours * (1.0 + 0.1 * headline.sockets))
    assert size(setup(), Goal()).job is None


def test_a_prefix_cache_saves_work_and_bytes() -> None:
    none, half = (setup(prefix_hit=hit).system() for hit in (0.0, 0.5))
    assert half.prompt_s == none.s.prefill_s(512) - none.s.prefill_s(256)
    assert half.prompt_s > none.prompt_s / 2, "later tokens attend to more"
    sent, kept, no_prompts = (
        each.way_bytes(64)[0] for each in (none, half, replace(none, workload=Workload(0, 512)))
    )
    assert kept - no_prompts == (sent - no_prompts) / 2
    rates = [size(setup(prefix_hit=hit), Goal()).most_tokens_per_s for hit in (0.0, 0.5, 0.9)]
    assert rates == sorted(rates) and rates[2] > 1.1 * rates[0]
    with pytest.raises(ConfigError, match="prefix_hit=1"):
        setup(prefix_hit=1.0)


@pytest.mark.parametrize("gpu", ["A10", "H100-SXM"])
def test_rivals_in_fp8(gpu: str) -> None:
    plain, rival = setup(gpu), setup(gpu).fp8_rival()
    assert rival.costs.kv_bytes == plain.costs.kv_bytes / 2
    ends = 2 * plain.spec.vocab_size * plain.spec.hidden_size
    layers = plain.spec.num_parameters - ends
    assert rival.costs.weight_bytes == pytest.approx(layers + 2 * ends)
    (row,) = (each for each in size(plain, Goal()).what_ifs if "FP8" in each.change)
    alone = size(plain, Goal()).gpu_only
    assert alone is not None and row.tokens_per_s is not None
    assert row.tokens_per_s > 1.5 * alone.tokens_per_s


QUESTION = ["size", "--model", "Llama-3 8B", "--cpu", "EPYC 7452", "--seq-len", "512"]


def test_tables_of_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prices = tmp_path / "prices.toml"
    prices.write_text("[gpu_per_hour]\nA10 = 1.0\n[socket_per_hour]\ndefault = 0.1\n")
    own = [*QUESTION, "--gpu", "A10", "--gpus", "2", "--own", "--max-sockets", "2"]
    assert main([*own, "--prices", str(prices), "--sort", "cost"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "2 x A10" in lines[0] and "USD a million" in lines[1] and len(lines) == 5
    assert main([*own, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["choices"]) == 3
    few = [*QUESTION, "--gpu", "all", "--tpot", "1us"]
    assert main(few) == 1, "none is so fast"
