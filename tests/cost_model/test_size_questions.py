"""Plain sizing questions, each with its arithmetic by hand from the datasheets' figures, and what
the answer says of its own headline."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sizing import HARDWARE, setup

from cost_model.hardware import Hardware, described_cpu
from cost_model.plans.question import Goal
from cost_model.plans.report import as_text
from cost_model.plans.size import Sizing, size
from cost_model.shapes import model_named
from fastdecode.cli.main import main
from fastdecode.core.errors import ConfigError

WEIGHTS_8B = 16.06e9


def ask(goal: Goal | None = None, **more: Any) -> Sizing:
    return size(setup(**more), goal or Goal(), HARDWARE)


def _rate(sizing: Sizing) -> float:
    assert sizing.headline is not None
    return sizing.headline.tokens_per_s


def _alone(sizing: Sizing) -> Any:
    assert sizing.gpu_only is not None
    return sizing.gpu_only


def _plan(sizing: Sizing) -> Any:
    assert sizing.plan is not None
    return sizing.plan


_QUESTIONS: dict[str, tuple[Callable[[], float], float, float]] = {
    "seconds of a whole 8B sequence on an H100: tokens by time a token": (
        lambda: ask(Goal(batch=1), model="Llama-3 8B", gpu="H100").headlines[0].latency_s,
        1024 * (WEIGHTS_8B - 128256 * 4096 * 2) / (0.8 * 3350e9), 0.25),
    "first token of 4,096 prompt tokens on an A100: 2 operations a layer weight, and attention": (
        lambda: ask(Goal(batch=1), model="Llama-3 8B", gpu="A100", prompt=4096).headlines[0].ttft_s,
        (4096 * 2 * 6.98e9 + 32 * 4 * 4096 * 4096**2 / 2) / (0.7 * 312e12)
        + 1.5 * WEIGHTS_8B / (0.8 * 2039e9), 0.1),
    "ms a token of one 8B sequence without a GPU: 0.8 of 12 channels": (
        lambda: _alone(ask(Goal(batch=1), model="Llama-3 8B", gpu="none", cpu="EPYC 9654")).tpot_s,
        WEIGHTS_8B / (0.8 * 460.8e9), 0.25),
    "tokens/s of many without a GPU, all but a tenth: 0.6 of 96 x 2.4 GHz x 32": (
        lambda: _alone(ask(model="Llama-3 8B", gpu="none", cpu="EPYC 9654")).tokens_per_s,
        0.6 * 96 * 2.4e9 * 32 / WEIGHTS_8B / 1.1, 0.1),
    "requests/s of 100 users who think 60 s and wait for 128 tokens of 8B": (
        lambda: ask(Goal(users=100, think_s=60.0), model="Llama-3 8B", gpu="H100", output=128)
        .served.requests_per_s,  # type: ignore[union-attr]
        100 / (60 + 128 * WEIGHTS_8B / (0.8 * 3350e9)), 0.05),
}  # fmt: skip


@pytest.mark.parametrize("question", _QUESTIONS)
def test_answer_equals_arithmetic_by_hand(question: str) -> None:
    answer, by_hand, tolerance = _QUESTIONS[question]
    assert answer() == pytest.approx(by_hand, rel=tolerance)


@pytest.mark.parametrize(
    ("asked", "goal", "placement"),
    [
        ({"model": "Llama-3 8B", "gpu": "H200"}, Goal(batch=40), "gpu"),
        ({"gpu": "RTX 4090"}, Goal(max_sockets=4), "hybrid"),
        ({}, Goal(), "r"),
    ],
)
def test_lines_below_the_headline_are_its_own(
    asked: dict[str, Any], goal: Goal, placement: str
) -> None:
    sizing = ask(goal, **asked)
    headline = sizing.headline
    assert headline is not None and headline.kv_placement == placement
    lines = dict(re.findall(r"^  (\w[\w ]{11}) (.*)$", as_text(sizing), flags=re.M))
    rate = lines["Headline    "].split(" tokens/s")[0]
    low, high = re.findall(r"\(([\d,]+) to ([\d,]+)\)", lines["Expected    "])[0]
    assert lines["Expected    "].startswith(f"{rate} tokens/s (")
    numbers = [float(each.replace(",", "")) for each in (low, rate, high)]
    assert numbers == sorted(numbers) and numbers[0] < numbers[2]
    assert headline.slow.tokens_per_s < headline.tokens_per_s < headline.fast.tokens_per_s
    assert headline.fast.tpot_s < headline.tpot_s < headline.slow.tpot_s


@pytest.mark.parametrize("batch", [1, 2, 7, 50, 199, 200, 201, 333])
@pytest.mark.parametrize("lanes", [None, 1, 2, 3, 4])
def test_batch_is_what_runs(batch: int, lanes: int | None) -> None:
    if lanes is not None and lanes > batch:
        return
    plan = _plan(ask(Goal(batch=batch, lanes=lanes)))
    assert plan.batch == plan.expected.batch == batch
    assert plan.lane_batch == -(-batch // plan.lanes)


def test_batch_of_stages_is_no_larger_than_asked(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["size", "--model", "Llama-2 7B", "--gpu", "A10", "--cpu", "EPYC 7452"]
    command += ["--seq-len", "1024", "--pp", "2", "--json"]
    assert main([*command, "--batch", "201"]) == 0
    assert json.loads(capsys.readouterr().out)["stages"]["batch"] <= 201
    assert main([*command, "--batch", "1"]) == 2
    assert "--batch 1: each of the 2 stages of --pp has one" in capsys.readouterr().err


@pytest.mark.parametrize("batch", [1, 8, 32])
def test_what_if_of_lanes_keeps_the_batch(batch: int) -> None:
    sizing = ask(Goal(batch=batch), gpu="A100", cpu="EPYC 7763", output=4096)
    plan = _plan(sizing)
    for row in sizing.what_ifs:
        if "lane" in row.change and row.tokens_per_s is not None and row.tpot_s is not None:
            assert row.tokens_per_s * row.tpot_s == pytest.approx(batch)
            assert row.tpot_s <= plan.expected.tpot_s * (1 + 1e-9)
    assert batch > 1 or not any("lane" in row.change for row in sizing.what_ifs)


def test_verdict_names_the_strongest_rival() -> None:
    # FP8 halves what an H100 reads: twice the sequences, and twice the compute.
    sizing = ask(model="Llama-3 70B", gpu="H100", num_gpus=4, cpu="EPYC 9654", output=2048)
    verdict = sizing.verdict
    assert verdict is not None and verdict.rival is not None
    assert verdict.rival.tokens_per_s is not None
    assert verdict.rival.tokens_per_s > _rate(sizing)
    assert "The strongest rival, 4 x H100-SXM alone, FP8 weights and KV" in as_text(sizing).replace(
        "\n" + " " * 15, " "
    )
    weak = ask(Goal(batch=200)).verdict
    assert weak is not None and weak.rival is None, "an A10 has no FP8 units"


def test_users_fill_the_machine_and_then_wait() -> None:
    few, many = (ask(Goal(users=users, think_s=10.0, max_sockets=8)).served for users in (20, 4000))
    assert few is not None and few.queue_s == 0 and few.running < 20
    assert many is not None and many.queue_s > 0
    # Response law: users over requests/s is what a round takes.
    sizing = ask(Goal(users=4000, think_s=10.0, max_sockets=8))
    assert sizing.headline is not None
    round_s = 4000 / many.requests_per_s
    assert round_s == pytest.approx(10.0 + many.queue_s + sizing.headline.latency_s)
    assert many.requests_per_s * 1024 == pytest.approx(_rate(sizing), rel=0.01)


@pytest.mark.parametrize(
    "text",
    [
        "8xDDR4-3200, 32 cores, 2.35 GHz, avx2, 256 GB",
        "8 x ddr4-3200,32c,2.35GHz,AVX2,256GiB",
        "AVX-2, 2.35 GHz, 32 cores, 8 channels DDR4-3200, 256 GiB",
        "8ch 3200 MT/s, 32 cores, 2.35 ghz, avx2, 256 gb",
    ],
)
def test_described_cpu_equals_the_named_one(text: str) -> None:
    cpu, known = described_cpu(text, HARDWARE), HARDWARE.cpu("EPYC 7452")
    for field in ("memory_bytes_per_s", "fp32_flops_per_s", "memory_bytes", "kernels"):
        assert getattr(cpu, field) == getattr(known, field)


QUESTION = ["size", "--model", "Llama-3.1 8B", "--gpu", "A10", "--cpu", "EPYC 7452"]


def run(capsys: pytest.CaptureFixture[str], *more: str) -> tuple[int, str, str]:
    code = main([*QUESTION, *more])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_context_as_seq_len_is_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, err = run(capsys, "--seq-len", "128k")
    assert "131,072 output tokens a sequence" in out
    assert "--prompt-len 130560 --output-len 512" in err
    _, out, err = run(capsys, "--seq-len", "4k")
    assert "4,096 output tokens" in out and not err


def test_list_prints_all_names_without_a_question(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["size", "--list"]) == 0
    out = capsys.readouterr().out
    for name in ("Llama-2 7B", "GB300", "EPYC 7452", "100GbE"):
        assert f"\n  {name}\n" in out
    for words in (["--list", "--json"], ["--json", "--list"]):
        assert main(["size", *words]) == 0
        names = json.loads(capsys.readouterr().out)
        assert "Llama-2 7B" in names["models"] and "100GbE" in names["nics"]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("deepseek-ai/DeepSeek-R1", "compressed latent KV cache (MLA)"),
        ("DeepSeek-V3.2-Exp", "indexer that chooses the keys"),
        ("moonshotai/Kimi-K2-Instruct", "compressed latent KV cache (MLA)"),
        ("Kimi-Linear-48B-A3B", "gated delta rule"),
        ("deepseek", "MLA"),
        ("zai-org/GLM-5", "sparse attention"),
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", "gated delta rule"),
        ("google/gemma-3n-E4B-it", "KV that layers share"),
    ],
)
def test_refused_model_has_its_reason(name: str, why: str) -> None:
    with pytest.raises(ConfigError) as caught:
        model_named(name)
    assert why in caught.value.message and caught.value.code == "unsupported_model"


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (["--gpu", "all", "--tpot", "1us"], "Nearest: the shortest step"),
        (["--gpus", "2", "--own", "--max-sockets", "2", "--tpot", "5us"], "latency. Nearest:"),
        (["--gpu", "all", "--dtype", "float32"], "use --dtype float16 or bfloat16"),
    ],
)
def test_empty_table_says_why(
    more: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run(capsys, "--seq-len", "512", *more)
    assert code == 1 and "nothing runs it" in out
    assert why in re.sub(r"\n +", " ", out)


def test_table_names_what_it_leaves_out(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--seq-len", "512", "--gpu", "all", "--dtype", "bfloat16")
    assert code == 0 and "Left out" in out and "V100" in out.split("Left out")[1]


@pytest.mark.parametrize(
    ("kv", "group", "share"),
    [
        ("bfloat16", 1, 0.55), ("float16", 7, 0.55), ("bfloat16", 8, 0.60), ("bfloat16", 16, 0.65),
        ("bfloat16", 64, 0.65), ("int8", 4, 0.65), ("int8", 1, 0.65), ("int4", 8, 0.75),
        ("float32", 8, 0.55),
    ],
)  # fmt: skip
def test_avx2_attention_counts_what_was_measured(kv: str, group: int, share: float) -> None:
    assert HARDWARE.cpu("EPYC 7763").attention_peak(kv, group).value == share


def test_attention_is_bound_by_arithmetic_from_eight_heads_a_kv_head() -> None:
    """70B: 64 heads of 128 over 8 KV heads, 4 operations each, at 0.6 of 64 x 2.45 GHz x 32."""
    system = setup(model="Llama-3 70B", gpu="H200", cpu="EPYC 7763").system()
    arithmetic_s = 4 * 64 * 128 / (0.60 * 64 * 2.45e9 * 32)
    reads_s = 4096 / (0.68 * 204.8e9)
    assert system.r.token_s == pytest.approx(max(arithmetic_s, reads_s))
    narrow = replace(HARDWARE.cpu("EPYC 7763"), cores=16)
    slow = replace(setup(model="Llama-3 70B", gpu="H200"), cpu=narrow).system()
    assert slow.r.token_s == pytest.approx(4 * arithmetic_s)


def test_own_compute_efficiency_goes_before_the_table(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    text = '[cpu.mine]\nlike = "EPYC 7763"\ncompute_efficiency = 0.3\n'
    file.write_text(text + 'compute_efficiency_source = "measured"\n')
    assert Hardware.load(file).cpu("mine").attention_peak("int8", 8).value == 0.3


SOCKETS = ["size", "--model", "Llama-3 8B", "--gpu", "none", "--cpu", "EPYC 9654"]


def test_own_sockets_without_a_gpu_are_all_counted(capsys: pytest.CaptureFixture[str]) -> None:
    own = [*SOCKETS, "--seq-len", "1024", "--own", "--max-sockets", "4"]
    assert main(own) == 0
    title, _, first, *rest = capsys.readouterr().out.splitlines()
    assert "on 4 x EPYC 9654, those of S-workers counted" in title and "none" not in title
    assert re.match(r"  4 systems +S-worker +1,910 ", first), "four times what one gives alone"
    assert main([*own, "--json"]) == 0
    choices = json.loads(capsys.readouterr().out)["choices"]
    assert len(choices) == 6 and {each["copies"] for each in choices} == {1, 2, 4}
    assert any(line.startswith("  1 system   ") for line in rest)
    assert main([*own, "--gpus", "2"]) == 2


@pytest.mark.parametrize("max_sockets", [None, 1, 3])
def test_r_workers_are_compared_with_as_many_sockets_alone(max_sockets: int | None) -> None:
    goal = Goal(max_sockets=max_sockets)
    sizing = ask(goal, model="Llama-3 8B", gpu="none", cpu="EPYC 9654", kv="bfloat16")
    verdict = sizing.verdict
    assert verdict is not None and not verdict.offload and verdict.gain < 2
    assert "each alone, give" in verdict.reason and "a S-worker" not in as_text(sizing)
    assert sizing.headline is not None and sizing.headline.kv_placement == "gpu"


@pytest.mark.parametrize("more", [{}, {"max_sockets": 4}, {"max_sockets": 1}, {"batch": 2000}])
def test_headline_is_what_the_verdict_recommends(more: dict[str, int]) -> None:
    for asked in (
        {"model": "Llama-3 70B", "gpu": "H100", "num_gpus": 4, "cpu": "EPYC 9654"},
        {"model": "Llama-3 8B", "gpu": "RTX 4090", "cpu": "EPYC 9654"},
        {"model": "Llama-2 7B"},
    ):
        sizing = ask(Goal(**more), **asked)  # type: ignore[arg-type]
        assert sizing.verdict is not None and sizing.headline is not None
        assert sizing.verdict.offload is (sizing.headline.kv_placement != "gpu")


def test_small_gain_chooses_neither_latency_nor_sockets() -> None:
    asked = {"model": "Llama-3 8B", "gpu": "L40S", "cpu": "EPYC 7452"}
    sizing = ask(Goal(max_sockets=4), **asked)  # type: ignore[arg-type]
    headline, both = sizing.headline, sizing.hybrid
    assert headline is not None and both is not None
    assert headline.tokens_per_s < both.tokens_per_s < 1.02 * headline.tokens_per_s
    assert headline.kv_placement == "r" and headline.sockets <= both.sockets
    assert headline.tpot_s < both.tpot_s / 4


def test_without_a_gpu_none_is_advised(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["size", "--model", "Llama-3 70B", "--gpu", "none", "--cpu", "EPYC 9654"]
    asked += ["--seq-len", "1024", "--dram-gb"]
    assert main([*asked, "128"]) == 1
    out = capsys.readouterr().out
    assert "Would help: more memory, a" in out and "GPU" not in out.replace("no GPU", "")
    found = re.search(r"a CPU with (\d+) GB of memory \(--dram-gb\), or --pp N", out)
    assert found is not None
    assert main([*asked, found[1]]) == 0, "what is advised runs"
    out = capsys.readouterr().out
    assert "CPU alone" in out and "GPU" not in out.replace("no GPU", "")
    assert main([*asked, str(int(found[1]) - 1)]) == 1
    assert main([*asked, "128", "--pp", "2"]) == 0


@pytest.mark.parametrize(
    ("users", "pause", "words"),
    [
        ("1", "0s", "1 user who asks again at once: "),
        ("1", "30s", "1 user who asks again 30 s after an answer: "),
        ("20", "0s", "20 users who ask again at once: "),
    ],
)
def test_users_in_plain_words(
    users: str, pause: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run(capsys, "--seq-len", "512", "--users", users, "--think-time", pause)
    assert code == 0 and f"Users        {words}" in out
    assert ("1 sequence in flight" in out) is (users == "1") and "0 ns" not in out


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (["--users", "0"], "--users 0"),
        (["--users", "9", "--batch", "9"], "Remove --batch"),
        (["--think-time", "5"], "Give --users"),
        (["--batch", "2", "--lanes", "3"], "--batch 2 can't be split into 3 lanes"),
        (["--survive", "4", "--max-sockets", "4"], "--survive 4 leaves none of --max-sockets 4"),
        (["--min-gain", "0"], "--min-gain 0.0 is not a number from"),
        (["--users", "9", "--pp", "2"], "--users is not supported with --pp"),
        (["--requests", "9", "--pp", "2"], "--requests is not supported with --pp"),
        (["--requests", "0"], "--requests 0 is not a whole number"),
        (["--requests", "1.5"], "--requests: 1.5 is not a whole number from 1 to 1000000000000"),
        (["--requests", "nan"], "--requests: nan is not a whole number"),
        (["--prefix-hit", "1"], "--prefix-hit 1.0 is not a part"),
        (["--start-interval", "513"], "--start-interval 513 is more than the 512 output tokens"),
        (["--dtype", "float32"], "--dtype float16 or bfloat16"),
        (["--gpu", "none", "--gpus", "2"], "--gpus 2: there is no GPU"),
        (["--gpus", "3"], "--gpus 3: the 32 query heads of Llama-3.1 8B"),
        (["--gpu", "all", "--sort", "cost"], "--sort cost needs prices. Give --prices"),
        (["--gpu", "all", "--own", "--max-sockets", "2"], "not with --own"),
        (["--gpu", "all", "--explain"], "--explain is for one plan"),
        (["--gpu", "all", "--pp", "2"], "--pp 2 is for one plan"),
        (["--own"], "Give --max-sockets"),
        (["--sort", "energy"], "--sort energy orders a table"),
        (["--cpu", "8xDDR4-3200, 32 cores, 2.35 GHz"], "lacks its instruction set"),
        (["--cpu", "32 cores, avx2"], "--cpu 32 cores, avx2 lacks its channels and GHz"),
        (["--cpu", "8xDDR4-3200, 32 cores, 64 cores, 2 GHz, avx2"], "gives cores twice"),
        (["--cpu", "8xDDR4-3200, 32 cores, 2 GHz, mmx"], "has 'mmx', which is not understood"),
        (["--cpu", "0xDDR4-3200, 32 cores, 2 GHz, avx2"], "memory_channels = 0 is not a whole"),
        (["--cpu", "8xDDR4-3200, 32 cores, 9999 GHz, avx2"], "base_ghz = 9999.0 is not a number"),
        (["--cpu", "64c avx512"], "'12xDDR5-4800, 64 cores, 2.4 GHz, avx512'"),
    ],
)
def test_options_that_make_no_sense_are_named(
    more: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main([*QUESTION, "--seq-len", "512", *more])
    except SystemExit as error:  # of argparse
        code = int(str(error.code))
    assert code == 2 and why in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "base"),
    [
        ("Qwen/Qwen2.5-7B-Instruct", "Qwen2.5 7B"),
        ("unsloth/Llama-3.1-8B-Instruct", "Llama-3.1 8B"),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", "Qwen3 30B-A3B"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "Mistral 7B v0.3"),
        ("google/gemma-3-27b-it", "Gemma-3 27B"),
        ("microsoft/Phi-3-mini-128k-instruct", "Phi-3 mini 3.8B 128k"),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", "R1-Distill-Qwen 7B"),
        ("deepseek-ai/DeepSeek-R1-Distill-Llama-8B", "R1-Distill-Llama 8B"),
    ],
)
def test_a_tuned_release_has_the_shape_of_its_base(name: str, base: str) -> None:
    found, expected = model_named(name), model_named(base)
    assert found.num_parameters == expected.num_parameters
    assert found.max_model_len == expected.max_model_len


def test_another_model_is_not_taken_for_a_tuned_release() -> None:
    for name in ("Qwen/Qwen2.5-9B-Instruct", "deepseek-ai/DeepSeek-R1-Distill-Qwen-9B", "-it"):
        with pytest.raises(ConfigError, match="is not known"):
            model_named(name)
