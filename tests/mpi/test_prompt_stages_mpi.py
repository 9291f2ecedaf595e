"""Stages that run prompts only as ranks of an MPI job: the tokens of one stage; a
stage or an R-worker is killed or stopped while prompts arrive."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest
from generate_jobs import answers_alone
from limited_steps import FIRST_STEPS, StepLimit
from mpi_launch import mpirun, needs_mpi, open_mpi_options, run, running
from stage_ranks import FASTDECODE, R_WORKER, exit_code_file, write_some_forked

from examples import TRIES_ALL

pytestmark = needs_mpi

Job: TypeAlias = Callable[..., tuple[list[str], Path, Callable[[], str]]]


@pytest.fixture
def job(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> Job:
    """``job(prompt_pp, pp, num_r_workers, max_tokens, *options)``: the command, its
    output file, and what is to be in it. Each stage is ``tp`` ranks."""

    def make(
        prompt_pp: int,
        pp: int,
        num_r_workers: int,
        max_tokens: int,
        *more: str,
        tp: int = 1,
        limit: StepLimit | None = None,
    ) -> tuple[list[str], Path, Callable[[], str]]:
        source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
        write_some_forked(source, max_tokens)
        options = ["--model", str(tiny_checkpoint("llama")), "--dtype", "float32"]
        options += ["--prefill-chunk", "16"]
        files = ["--input", str(source), "--output", str(output)]
        stages = ["--pp", str(pp), "--prompt-pp", str(prompt_pp), "--tp", str(tp), *more]
        stages += ["--exit-code-file", str(exit_code_file(tmp_path))]
        fastdecode = FASTDECODE if limit is None else limit.fastdecode
        command = [mpirun(), *open_mpi_options(), "-n", str(tp * (pp + prompt_pp)), *fastdecode]
        command += ["generate", *options, *files, *stages]
        command += [":", "-n", str(num_r_workers), *R_WORKER]
        return command, output, lambda: answers_alone(source, *options)

    return make


TWO_STAGES = [(1, 2, 1, 4), (3, 2, 1, 2), (2, 2, 2, 4)]


@pytest.mark.parametrize(
    ("prompt_pp", "pp", "tp", "num_r_workers"), [(1, 1, 2, 2), *TWO_STAGES * TRIES_ALL]
)
def test_prompt_stages_as_ranks(
    prompt_pp: int, pp: int, tp: int, num_r_workers: int, job: Job
) -> None:
    """Each stage several S-workers that act as one, or a single one."""
    more = ["--replicas", "1"] if num_r_workers == 4 else []
    command, output, expected = job(prompt_pp, pp, num_r_workers, 12, *more, tp=tp)
    outcome = run(command, timeout_s=120)
    assert (outcome.exit_code, outcome.orphans) == (0, []), outcome.output
    assert output.read_text() == expected()
    assert "is lost" not in outcome.output, outcome.output


LOST = [(2, signal.SIGKILL, "prompt stage 1")]
MORE_LOST = [
    (1, signal.SIGKILL, "prompt stage 0"),
    (2, signal.SIGSTOP, "prompt stage 1"),
    (1, signal.SIGSTOP, "prompt stage 0"),
]


@pytest.mark.parametrize(("rank", "trouble", "name"), LOST + MORE_LOST * TRIES_ALL)
def test_a_lost_prompt_stage_ends_the_job(
    rank: int, trouble: signal.Signals, name: str, job: Job, tmp_path: Path, limit: StepLimit
) -> None:
    """Soon, by its name, with exit code 4, and with every process; at a prompt
    where it is stopped, since nothing is expected of it before."""
    more = ["--worker-silence-s", "3", "--max-num-sequences", "1"]
    command, output, _ = job(2, 1, 2, 60, *more, limit=limit)
    with running(command) as started:
        victim = started.rank(rank)
        started.wait_for_text(output)
        limit.lose(victim, trouble)
        outcome = started.wait(timeout_s=90)
    assert outcome.exit_code not in (0, None) and outcome.orphans == [], outcome.output
    assert name in outcome.output and "is lost" in outcome.output, outcome.output
    assert exit_code_file(tmp_path).read_text().strip() == "4", outcome.output


@pytest.mark.parametrize(
    ("stages", "num_r_workers", "victim"),
    [((2, 1), 2, 1), *[((2, 2), 4, victim) for victim in range(4)] * TRIES_ALL],
)
def test_a_lost_r_worker_changes_no_token(
    stages: tuple[int, int], num_r_workers: int, victim: int, job: Job, limit: StepLimit
) -> None:
    """While prompts arrive: chunks are small, and the queue is long."""
    more = ["--prefill-chunk", "2", "--max-num-sequences", "3"]
    command, output, expected = job(*stages, num_r_workers, 40, *more, limit=limit)
    limit.allow(3 * FIRST_STEPS)  # some of other requests, while a short one's prompt arrives
    with running(command) as started:
        workers = started.r_workers(num_r_workers)
        workers = sorted(workers, key=lambda p: int(p.environ()["OMPI_COMM_WORLD_RANK"]))
        started.wait_for_text(output)
        limit.lose(workers[victim], signal.SIGKILL)
        outcome = started.wait(timeout_s=120)
    assert output.read_text() == expected(), outcome.output
    assert "is lost" in outcome.output
    assert outcome.exit_code is not None and not outcome.orphans, outcome
