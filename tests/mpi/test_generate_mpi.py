"""``fastdecode generate`` as an MPI job, one job for each mechanism.

``tests/engine`` simulates losses in every topology, and ``make campaign`` plays them with real
processes."""

from __future__ import annotations

import json
import re
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from checkpoints import FAMILIES
from families import save_tiny
from generate_jobs import answers_alone, write_requests
from limited_steps import StepLimit
from mpi_launch import FASTDECODE, Running, has_text, mpirun, needs_mpi, run, running

from examples import TRIES_ALL
from fastdecode.cli.main import main

pytestmark = needs_mpi

R_WORKER = [*FASTDECODE, "r-worker", "--kv-memory-gb", "0.01"]
FORKED = {
    "id": "forked", "prompt_token_ids": [7, 8, 9] * 6, "max_tokens": 8, "n": 3,
    "temperature": 0.8, "seed": 5, "ignore_eos": True,
}  # fmt: skip


@dataclass(frozen=True)
class Job:
    """``generate`` over ranks."""

    command: list[str]
    output: Path
    expected: Callable[[], str]  # return what this process answers on its own


MakeJob: TypeAlias = Callable[..., Job]


@pytest.fixture
def job(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> MakeJob:
    """Make jobs of ``num_s`` S-workers, and ``num_r`` R-workers with a command of their own."""

    def make(
        num_s: int,
        num_r: int,
        options: str = "",
        *,
        max_tokens: int = 12,
        btl: str = "self,sm",
        limit: StepLimit | None = None,
        family: str = "llama",
        model: Path | None = None,
        model_options: str = "",
        **overrides: Any,
    ) -> Job:
        source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
        if not source.exists():
            write_requests(source, max_tokens)
            with source.open("a") as file:
                file.write(json.dumps(FORKED) + "\n")
        path = model or tiny_checkpoint(family, **overrides)
        options_of_model = ["--model", str(path), "--dtype", "float32", "--prefill-chunk", "16"]
        options_of_model += model_options.split()
        fastdecode = FASTDECODE if limit is None else limit.fastdecode
        command = [*mpirun(num_s, btl=btl), *fastdecode, "generate"]
        command += [*options_of_model, "--input", str(source), "--output", str(output)]
        command += ["--exit-code-file", str(tmp_path / "exit_code"), *options.split()]
        if num_r:
            command += [":", "-n", str(num_r), *R_WORKER]
        return Job(command, output, lambda: answers_alone(source, *options_of_model))

    return make


LONG_ROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.3, 1.5, 1.7, 1.8],
    "long_factor": [1.5, 2.0, 4.0, 5.0, 7.0, 9.0],
    "original_max_position_embeddings": 20,
}
"""Factors that go by ``max_model_len``, which every S-worker has to know."""
NEEDS_TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
TWO_S_WORKERS = {"model_options": "--max-model-len 64", "rope_scaling": LONG_ROPE}


@pytest.mark.parametrize(
    ("num_s", "num_r", "options", "more"),
    [
        pytest.param(2, 0, "--kv-memory-gb 0.01", {"btl": "self,tcp"}, id="roles by rank"),
        pytest.param(4, 0, "--pp 2 --tp 2 --kv-placement gpu --kv-memory-gb 0.01", {},
                     id="stages of two S-workers each with KV on their devices"),
        pytest.param(10, 0, "--pp 2 --prompt-pp 1 --tp 2 --kv-memory-gb 0.01", TWO_S_WORKERS,
                     id="instances with stages of two S-workers each"),
        *[
            pytest.param(
                2, 2, f"--tp 2 --device cuda --cuda-graphs {graphs}", TWO_S_WORKERS,
                marks=[pytest.mark.gpu, NEEDS_TWO_GPUS], id=f"two GPUs, graphs {graphs}",
            )
            for graphs in ("auto", "on")
        ],
    ],
)  # fmt: skip
def test_tokens_are_those_of_threads(
    num_s: int, num_r: int, options: str, more: dict[str, Any], job: MakeJob
) -> None:
    ranks = job(num_s, num_r, options, **more)
    outcome = run(ranks.command, timeout_s=240)  # ten ranks on a busy host
    assert (outcome.exit_code, outcome.orphans) == (0, []), outcome.output
    assert ranks.output.read_text() == ranks.expected()
    assert all("error" not in json.loads(line) for line in ranks.expected().splitlines())


@pytest.mark.skipif(not TRIES_ALL, reason="make campaign: one family stands for all")
@pytest.mark.parametrize("family", FAMILIES)
def test_every_familys_tokens_in_stages_of_two_s_workers(family: str, job: MakeJob) -> None:
    test_tokens_are_those_of_threads(4, 2, "--pp 2 --tp 2", {"family": family}, job)


@pytest.mark.skipif(not TRIES_ALL, reason="make campaign: two ranks are threads in tests/sworker")
@pytest.mark.parametrize("ep", [1, 2])
def test_experts_of_two_s_workers(ep: int, job: MakeJob, tmp_path: Path) -> None:
    """A share of every expert on each, or whole ones."""
    save_tiny(tmp_path / "model", "qwen2_moe", seed=2)
    model = {"model": tmp_path / "model"}
    test_tokens_are_those_of_threads(2, 2, f"--tp 2 --ep {ep}", model, job)


def add_conversations(source: Path) -> None:
    """Add six conversations of three turns."""
    with source.open("a") as lines:
        for num_new in (40, 9, 20):
            for i in range(6):
                prompt = [7 + (3 * i + j) % 90 for j in range(num_new)]
                line = {"id": f"{i}+{num_new}", "conversation_id": str(i), "max_tokens": 6}
                line |= {"prompt_token_ids": prompt, "temperature": 0, "ignore_eos": True}
                lines.write(json.dumps(line) + "\n")


def _tokens_of(answers: str) -> list[object]:
    """Return answers without the number of cached tokens."""
    return [{**json.loads(line), "usage": None} for line in answers.splitlines()]


def test_each_s_worker_keeps_its_heads_kv(job: MakeJob, tmp_path: Path) -> None:
    """Two S-workers act as one: each attends in the KV heads of its own device, and keeps
    them in the host's memory. ALiBi's slopes are its heads', and forks copy blocks on both."""
    more = "--tp 2 --kv-placement gpu --kv-memory-gb 0.0001 --block-size 16 --prefix-cache on"
    more += " --cache-memory-gb 0.001 --max-num-sequences 2"
    ranks = job(2, 0, more, family="bloom")
    add_conversations(tmp_path / "in.jsonl")
    outcome = run(ranks.command, timeout_s=120)
    assert (outcome.exit_code, outcome.orphans) == (0, []), outcome.output
    assert _tokens_of(ranks.output.read_text()) == _tokens_of(ranks.expected())
    restored = re.search(r"stored, (\d+) restored", outcome.output)
    assert restored is not None and int(restored[1]) > 0, outcome.output


@pytest.mark.parametrize(
    ("num_s", "num_r", "options", "reason"),
    [
        (1, 1, "--cache-disk {tmp}/kv --cache-disk-gb 0.01", "no R-worker has a disk"),
        (1, 2, "--tp 2", "or was started as an R-worker"),
        (2, 0, "--kv-placement gpu", "without a launcher"),
        (1, 0, "", "1 MPI rank"),
    ],
)
def test_ranks_that_do_not_fit_are_refused(
    num_s: int, num_r: int, options: str, reason: str, job: MakeJob, tmp_path: Path
) -> None:
    ranks = job(num_s, num_r, options.format(tmp=tmp_path))
    outcome = run(ranks.command, timeout_s=120)
    assert outcome.exit_code not in (0, None) and outcome.orphans == [], outcome.output
    assert reason in outcome.output and "Traceback" not in outcome.output
    assert not ranks.output.exists() and not (tmp_path / "kv").exists()


@pytest.mark.parametrize(
    ("num_s", "options", "rank", "name"),
    [(2, "--tp 2", 1, "S-worker 1 of 2"), (2, "--pp 2", 1, "stage 1")],
    ids=["one of two that act as one", "a stage"],
)
def test_a_lost_s_worker_ends_the_job(
    num_s: int, options: str, rank: int, name: str, job: MakeJob, tmp_path: Path, limit: StepLimit
) -> None:
    """Soon, by its name, with exit code 4, and with every process."""
    ranks = job(num_s, 2, f"{options} --worker-silence-s 3", max_tokens=60, limit=limit)
    with running(ranks.command) as started:
        victim = started.rank(rank)
        started.wait_for_text(ranks.output)
        limit.lose(victim, signal.SIGKILL)
        outcome = started.wait(timeout_s=90)
    assert outcome.exit_code not in (0, None) and outcome.orphans == [], outcome.output
    assert name in outcome.output, outcome.output
    assert (tmp_path / "exit_code").read_text().strip() == "4", outcome.output


@pytest.mark.parametrize(
    ("num_s", "num_r", "options", "rank", "trouble"),
    [
        (1, 3, "--r-partition heads --worker-silence-s 1", 2, signal.SIGSTOP),
        (2, 4, "--pp 2 --spare-r-workers 1", 4, signal.SIGKILL),
    ],
    ids=["stopped", "killed, and a standby replaces it"],
)
def test_a_lost_r_worker_changes_no_token(
    num_s: int,
    num_r: int,
    options: str,
    rank: int,
    trouble: signal.Signals,
    job: MakeJob,
    limit: StepLimit,
) -> None:
    ranks = job(num_s, num_r, options, max_tokens=80, limit=limit, num_key_value_heads=3)
    with running(ranks.command) as started:
        victim = started.rank(rank)
        started.wait_for_text(ranks.output)
        limit.lose(victim, trouble)
        outcome = started.wait(timeout_s=120)
    assert ranks.output.read_text() == ranks.expected(), outcome.output
    assert "is lost" in outcome.output
    replaced = re.findall("(.*) has replaced an R-worker", outcome.output)
    assert len(replaced) == ("--spare" in options), outcome.output
    assert all(each.endswith("stage 1: R-worker rank 5") for each in replaced), outcome.output
    # Only the launcher can end a rank that hangs, and it returns 1 then.
    assert outcome.exit_code == 1 if trouble == signal.SIGSTOP else outcome.exit_code is not None
    assert not outcome.orphans, outcome


def events(job: Running, event: str) -> list[str]:
    return [line for line in job.output().splitlines() if event in line]


def test_an_r_worker_that_is_lost_before_the_greeting_is_left_out(
    job: MakeJob, tmp_path: Path
) -> None:
    """The R-worker has joined before the S-worker loads the model."""
    ranks = job(1, 2, max_tokens=40)
    with running([*ranks.command, "--log-level", "info"]) as started:
        started.wait_until(lambda: len(events(started, "serves")) == 2)
        s_worker = started.rank(0)
        s_worker.suspend()
        assert not events(started, "greeting")
        started.rank(2).kill()
        s_worker.resume()
        outcome = started.wait(120)
    assert ranks.output.read_text() == ranks.expected(), outcome.output
    assert "the job starts with 1 of 2 R-workers: R-worker rank 2" in outcome.output
    assert outcome.exit_code is not None and outcome.orphans == [], outcome


def test_a_launched_batch_that_is_interrupted_finishes_what_runs(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, limit: StepLimit
) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write_requests(source, 400, [9] * 60)  # far from its end when it continues
    launch = [*limit.fastdecode, "launch", "--hosts", "localhost:2", "--r-threads", "1"]
    launch += ["--kv-memory-gb", "0.01", "--", "run-batch", "--dtype", "float32"]
    launch += ["--model", str(tiny_checkpoint("llama")), "--max-num-sequences", "3"]
    with running([*launch, "--input", str(source), "--output", str(output)]) as job:
        job.wait_until(lambda: has_text(output) or limit.extend())
        launcher = next(p for p in job.processes() if "launch" in p.cmdline())
        launcher.send_signal(signal.SIGINT)
        job.wait_until(lambda: "finishing requests" in job.output())
        limit.lift()
        outcome = job.wait(120)
    assert (outcome.exit_code, outcome.orphans) == (130, []), outcome
    assert "to continue:" in outcome.output
    assert len(output.read_text().splitlines()) >= 3, outcome.output


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ("--input /nonexistent", "/nonexistent is not a file"),
        ("--model /nonexistent", "/nonexistent is not a directory"),
        ("--block-size 17", "--block-size 17"),
        ("--typo", "--typo"),
    ],
)
def test_launch_refuses_what_would_end_before_its_ranks_have_met(
    bad: str,
    reason: str,
    tiny_checkpoint: Callable[..., Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "in").write_text("a\n")
    command = ["generate", "--model", str(tiny_checkpoint("llama")), "--input"]
    command += [str(tmp_path / "in"), "--output", str(tmp_path / "out"), *bad.split()]
    with pytest.raises(SystemExit, match="2"):
        sys.exit(main(["launch", "--hosts", "localhost:2", "--", *command]))
    assert reason in capsys.readouterr().err
