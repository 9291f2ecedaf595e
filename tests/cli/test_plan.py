"""``fastdecode plan`` as its users see it."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from fastdecode.cli.main import main
from fastdecode.cli.options import progress_teller
from fastdecode.core.config.placement import read_placement

ROOT = Path(__file__).parents[2]
EXAMPLES = [
    example
    for page in ("design/disaggregation.md", "design/goodput.md")
    for example in re.findall(
        r"```console\n\$ fastdecode (plan [^\n]*)\n(.*?)```",
        (ROOT / "docs" / page).read_text("utf-8"),
        flags=re.S,
    )
]
SPLIT = ["disaggregate", "--machines", "7", "--prompt-time", "3.1", "--token-time", "0.1"]
SWAP = ["disaggregate", "--prompt-tokens", "9", "--tokens", "9", "--token-time", "1"]
SWAP += ["--batch", "2"]
MACHINE = ["--model", "Llama-2 13B", "--gpu", "A100"]


def plan(*arguments: str) -> int:
    return main(["plan", *arguments])


@pytest.mark.parametrize(("command", "answer"), EXAMPLES, ids=[command for command, _ in EXAMPLES])
def test_documented_answers(
    command: str, answer: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    assert main(shlex.split(command)) == 0
    assert capsys.readouterr().out == answer


def answered(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    code = plan(*arguments, "--json")
    tree: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert code in (0, 1)
    return tree


def test_disaggregate_with_streaming_and_memory(capsys: pytest.CaptureFixture[str]) -> None:
    streaming = ["--tokens", "200", "--kv-gb", "10.7", "--bandwidth-gbps", "20"]
    memory = ["--layers", "70", "--weights-gb", "4.93", "--prompt-kv-gb", "0.918"]
    memory += ["--token-kv-gb", "0.918", "--memory-gb"]
    answer = answered(capsys, *SPLIT, *streaming, *memory, "320")
    assert answer["asked"]["overhead"] == pytest.approx(4.28 / 3.1)
    (split,) = answer["splits"]
    assert (split["prompt_machines"], split["token_machines"]) == (2, 5) and not answer["wins"]
    assert plan(*SPLIT, *streaming, *memory, "20") == 1
    assert "nothing fits: 7 machines can't hold prompts and tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([*SPLIT, "--tokens", "0"], "--tokens 0 is not a whole number from 1 to 10000000"),
        ([*SPLIT, "--tokens", "9", "--overhead", "0.5"], "--overhead 0.5 is not a number from 1"),
        ([*SPLIT, "--tokens", "9", "--kv-gb", "1"], "--bandwidth-gbps missing"),
        ([*SPLIT, "--tokens", "9", "--layers", "2"], "--weights-gb and --prompt-kv-gb and"),
        (SWAP, "--kv-kb and --bandwidth-gb missing"),
        ([*SWAP, "--gpu", "A10"], "--model missing"),
        ([*SPLIT[:-2], "--tokens", "9"], "--token-time missing"),
        ([*SPLIT, "--tokens", "9", *MACHINE], "--batch and --prompt-tokens missing"),
        ([*SWAP, "--kv-kb", "-1", "--bandwidth-gb", "25"], "--kv-kb -1.0 is not a number from"),
        (["disaggregate", "--tokens", "9"], "--prompt-tokens and --token-time and --batch and"),
    ],
)
def test_refusals_name_the_option(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(*arguments) == 2
    error = capsys.readouterr().err
    assert says in error and error.startswith("fastdecode plan disaggregate: ")


def test_disaggregate_takes_times_of_a_model_on_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    """Weights and K and V are read once a token, by hand; each of four stages has a quarter."""
    asked = ["disaggregate", "--prompt-tokens", "512", "--tokens", "512", "--batch", "16"]
    found = answered(capsys, *asked, *MACHINE, "--machines", "4")
    kv_bytes = 2 * 40 * 5120 * 2
    read_s = (26e9 + 16 * 768 * kv_bytes) / (0.8 * 2039e9)
    flops_s = 16 * 512 * 2 * 13e9 / (0.7 * 312e12)
    assert found["asked"]["prompt_time"] == pytest.approx(flops_s / 4, rel=0.1)
    assert found["asked"]["token_time"] == pytest.approx(read_s / 4, rel=0.1)
    assert found["swap"]["unswapped_s"] == pytest.approx(2 * 512 * read_s / 4, rel=0.1)
    swapped_s = sum(2 * 16 * i * kv_bytes / 4 / (0.8 * 32e9) for i in range(513, 1025))
    assert found["swap"]["swapped_s"] == pytest.approx(swapped_s, rel=1e-6)


GOODPUT = [
    "goodput", "--slo", "ttft=600ms,tpot=100ms", "--prompt-len", "512", "--output-len", "100",
]  # fmt: skip


def test_goodput_of_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, placed = tmp_path / "day.jsonl", tmp_path / "placement.json"
    rows = [
        {"time": i / 2, "status": 200, "prompt_tokens": 300, "output_tokens": 40 + i % 30}
        for i in range(60)
    ]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    where = ["--model", "llama-2-7b", "--gpu", "A10", "--gpus-per-node", "2", "--max-sockets", "4"]
    arguments = [*GOODPUT[:3], *where, f"--trace={trace}", f"--emit={placed}", "--json"]
    assert plan(*arguments, "--seed", "3") == 0
    told = capsys.readouterr()
    answer = json.loads(told.out)
    assert answer["rate"] == pytest.approx(2.0) and "server" in answer["workload"]
    assert "only 60 requests" in told.err and f"is in {placed}" in told.err
    instances = json.loads(placed.read_text())["instances"]
    assert sum(each["tp"] * each["pp"] for each in instances) <= 2
    assert plan(*arguments, "--seed", "3") == 0
    assert capsys.readouterr().out == told.out, "same seed, same bytes"


def test_emits_what_launch_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The best placement keeps K and V on GPUs; launch can't start it yet where two act as one."""
    placed = tmp_path / "placement.json"
    where = ["--model", "llama-2-7b", "--gpu", "A10", "--gpus-per-node", "2", "--max-sockets", "8"]
    assert plan(*GOODPUT, *where, "--rate", "3", f"--emit={placed}") == 0
    told = capsys.readouterr()
    assert "KV on the GPU" in told.out and "can't start" not in told.err
    assert not any(each.num_r_workers for each in read_placement(placed))
    where[1] = "llama-2-13b"
    assert plan(*GOODPUT, *where, "--rate", "1", f"--emit={placed}") == 0
    told = capsys.readouterr()
    assert "KV on the GPU" in told.out
    assert "fastdecode launch can't start this placement: instance 0 has no R-worker" in told.err
    assert f"the best placement that launch starts is in {placed}" in told.err
    assert all(each.num_r_workers or each.tp == 1 for each in read_placement(placed))
    monkeypatch.setattr("fastdecode.core.config.placement.is_launchable", lambda *_: False)
    none = tmp_path / "none.json"
    assert plan(*GOODPUT, *where, "--rate", "1", f"--emit={none}") == 0
    assert "it starts none that keeps the SLO" in capsys.readouterr().err and not none.exists()
    monkeypatch.undo()
    monkeypatch.setattr("fastdecode.core.config.placement.MAX_INSTANCES", 0)
    assert plan(*GOODPUT, *where, "--rate", "1", f"--emit={none}") == 0
    assert "it starts none that keeps the SLO" in capsys.readouterr().err and not none.exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--gpu", "A10"], "--rate is missing: give the request rate"),
        (["--gpu", "A10", "--rate", "0"], "--rate 0.0 is not a number of requests a second"),
        (["--gpu", "A10", "--rate", "1e12"], "requests a second from 1e-06 to 1e+06"),
        (["--gpu", "A10", "--rate", "1", "--trace", "x"], "--trace, or --prompt-len and"),
        (["--gpu", "A10", "--rate", "1", "--replay"], "--replay needs a --trace"),
        (["--gpu", "A10", "--rate", "1", "--prices", "gpu=1"], "--prices gpu=1: give both"),
        (["--gpu", "A10", "--rate", "1", "--cv", "-1"], "--cv -1.0 is not a number from 0"),
        (["--gpu", "A10", "--rate", "1", "--seed", "-1"], "--seed -1 is not a whole number from 0"),
        (["--gpu", "A10", "--rate", "1", "--nodes", "0"], "--nodes 0 is not a whole number"),
        (["--gpu", "A10", "--rate", "1", "--max-sockets", "0"], "--max-sockets 0 is not"),
        (["--gpu", "A10", "--rate", "1", "--requests", "0"], "--requests 0 is not"),
        (["--gpu", "A10", "--rate", "1", "--attainment", "90"], "--attainment 90.0 is not a part"),
        (["--gpu", "A11", "--rate", "1"], "--gpu A11 is not known. Did you mean"),
    ],
)
def test_goodput_refuses(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(*GOODPUT, "--model", "llama-2-7b", *arguments) == 2
    assert says in capsys.readouterr().err


def test_progress_of_long_commands(capsys: pytest.CaptureFixture[str]) -> None:
    progress_teller(every_s=0.0)("3 layouts simulated,")
    progress_teller(every_s=1e9)("too early")
    assert re.fullmatch(r"3 layouts simulated, in \d+ s\n", capsys.readouterr().err)
