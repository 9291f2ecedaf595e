"""MPI jobs that lose ranks while they start, or are asked to stop: tokens, and exit codes."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import psutil
import pytest
from generate_jobs import answers_alone, write_requests
from limited_steps import StepLimit
from mpi_launch import Running, has_text, mpirun, needs_mpi, open_mpi_options, running

from examples import TRIES_ALL
from fastdecode.cli.main import main

pytestmark = needs_mpi

FASTDECODE = [sys.executable, "-m", "fastdecode.cli.main"]
PATHS = {"PYTHONPATH": str(Path(__file__).parents[2])}
R_WORKERS = ["-n", "2", *FASTDECODE, "r-worker", "--kv-memory-gb", "0.01", "--log-level", "info"]


Asked: TypeAlias = Callable[..., tuple[list[str], Path, Callable[[], str]]]


@pytest.fixture
def asked(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> Asked:
    """``asked(command, max_tokens, number=6)``: a command's options, its output
    file, and what ``generate`` is to put in there."""

    def make(
        command: str, max_tokens: int, number: int = 6
    ) -> tuple[list[str], Path, Callable[[], str]]:
        source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
        write_requests(source, max_tokens, [9] * number)
        model = ["--model", str(tiny_checkpoint("llama")), "--dtype", "float32"]
        options = [command, *model, "--input", str(source), "--output", str(output)]
        return options, output, lambda: answers_alone(source, *model)

    return make


def ranks(job: Running) -> dict[int, psutil.Process]:
    variables = {p: p.environ().get("OMPI_COMM_WORLD_RANK", "") for p in job.processes()}
    return {int(rank): p for p, rank in variables.items() if rank}


def events(job: Running, event: str) -> list[str]:
    return [line for line in job.output().splitlines() if event in line]


LOSSES = [(signal.SIGKILL, "heads"), (signal.SIGSTOP, "sequences")]
MORE_LOSSES = [(signal.SIGKILL, "sequences"), (signal.SIGSTOP, "heads")]


@pytest.mark.parametrize(("trouble", "partition"), LOSSES + MORE_LOSSES * TRIES_ALL)
def test_who_is_lost_before_the_greeting_is_done_without(
    trouble: signal.Signals, partition: str, asked: Asked
) -> None:
    """It has joined, and gives signs of life; the S-worker hasn't loaded the model yet."""
    options, output, expected = asked("generate", 40)
    options += ["--r-partition", partition, "--worker-silence-s", "3"]
    with running(
        [mpirun(), *open_mpi_options(), "-n", "1", *FASTDECODE, *options, ":", *R_WORKERS], **PATHS
    ) as job:
        job.wait_until(lambda: len(events(job, "serves")) == 2)
        found = ranks(job)
        found[0].suspend()
        assert not events(job, "greeting")
        found[2].send_signal(trouble)
        found[0].resume()
        outcome = job.wait(120)
    assert output.read_text() == expected(), outcome.output
    assert "the job starts with 1 of 2 R-workers: R-worker rank 2" in outcome.output
    assert outcome.exit_code is not None and outcome.orphans == [], outcome


@pytest.mark.skipif(not TRIES_ALL, reason="make campaign: tests/cli/test_launch.py has it")
def test_when_the_s_worker_is_killed_the_job_has_failed(asked: Asked, limit: StepLimit) -> None:
    options, output, _ = asked("generate", 60)
    command = [mpirun(), *open_mpi_options(), "-n", "1", *limit.fastdecode, *options]
    with running([*command, ":", *R_WORKERS], **PATHS) as job:
        job.wait_for_text(output)
        ranks(job)[0].kill()
        outcome = job.wait(120)
    assert (outcome.exit_code, outcome.orphans) == (4, []), outcome
    assert "the S-worker has died" in outcome.output


FINISHING = ("finishing requests", "to go on:")
STOPS = [
    ("run-batch", signal.SIGINT, FINISHING),
]
MORE_STOPS = [
    ("run-batch", signal.SIGTERM, FINISHING),
    ("generate", signal.SIGTERM, ("stopping after this step", "answers are in")),
]


@pytest.mark.parametrize(("command", "stop", "told"), STOPS + MORE_STOPS * TRIES_ALL)
def test_a_job_that_is_launched_may_finish_what_runs(
    command: str,
    stop: signal.Signals,
    told: tuple[str, str],
    asked: Asked,
    limit: StepLimit,
) -> None:
    options, output, _ = asked(command, 400, number=60)  # far from its end when it goes on
    launch = [*limit.fastdecode, "launch", "--hosts", "localhost:2", "--r-threads", "1"]
    launch += ["--kv-memory-gb", "0.01", "--"]
    with running([*launch, *options, "--max-num-sequences", "3"], **PATHS) as job:
        job.wait_until(lambda: has_text(output) or limit.extend())
        next(p for p in job.processes() if "launch" in p.cmdline()).send_signal(stop)
        job.wait_until(lambda: told[0] in job.output())
        limit.lift()
        outcome = job.wait(120)
    assert (outcome.exit_code, outcome.orphans) == (130, []), outcome
    assert all(words in outcome.output for words in told)
    if command == "run-batch":  # what ran was finished
        assert len(output.read_text().splitlines()) >= 3, outcome.output


def test_launch_refuses_what_would_end_before_its_ranks_have_met(
    asked: Asked, capsys: pytest.CaptureFixture[str]
) -> None:
    options, _, _ = asked("generate", 1)
    launch = ["launch", "--hosts", "localhost:2", "--"]
    for bad, told in (("--input", "is not a file"), ("--model", "is not a directory")):
        assert main([*launch, *options, bad, "/nonexistent"]) == 2
        assert f"/nonexistent {told}" in capsys.readouterr().err
    assert main([*launch, *options, "--block-size", "17"]) == 2
    assert "--block-size 17" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main([*launch, *options, "--typo"])
