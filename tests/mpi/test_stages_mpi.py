"""Pipeline stages as ranks of an MPI job: the tokens of one stage; a stage or an
R-worker of one is killed or stopped."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest
from families import save_tiny
from generate_jobs import answers_alone
from limited_steps import StepLimit
from mpi_launch import mpirun, needs_mpi, open_mpi_options, run, running
from stage_ranks import FASTDECODE, R_WORKER, exit_code_file, write_some_forked

from examples import TRIES_ALL

pytestmark = needs_mpi

Job: TypeAlias = Callable[..., tuple[list[str], Path, Callable[[], str]]]


@pytest.fixture
def job(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> Job:
    """``job(num_stages, num_r_workers, max_tokens, *options)``: the command, its
    output file, and what is to be in it. Each stage is ``tp`` ranks."""

    def make(
        num_stages: int,
        num_r_workers: int,
        max_tokens: int,
        *more: str,
        tp: int = 1,
        family: str = "llama",
        model: Path | None = None,
        limit: StepLimit | None = None,
    ) -> tuple[list[str], Path, Callable[[], str]]:
        source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
        write_some_forked(source, max_tokens)
        options = ["--model", str(model or tiny_checkpoint(family)), "--dtype", "float32"]
        options += ["--prefill-chunk", "16"]
        files = ["--input", str(source), "--output", str(output)]
        stages = ["--pp", str(num_stages), "--tp", str(tp), *more]
        stages += ["--exit-code-file", str(exit_code_file(tmp_path))]
        num_s_ranks = str(num_stages * tp)
        fastdecode = FASTDECODE if limit is None else limit.fastdecode
        command = [mpirun(), *open_mpi_options(), "-n", num_s_ranks, *fastdecode, "generate"]
        command += [*options, *files, *stages, ":", "-n", str(num_r_workers), *R_WORKER]
        return command, output, lambda: answers_alone(source, *options)

    return make


def add_conversations(source: Path) -> None:
    """Six of three turns, one after the other's."""
    asked = [(i, num_new) for num_new in (40, 9, 20) for i in range(6)]
    with source.open("a") as lines:
        for i, num_new in asked:
            prompt = [7 + (3 * i + j) % 90 for j in range(num_new)]
            line = {"id": f"{i}+{num_new}", "conversation_id": str(i), "prompt_token_ids": prompt}
            line |= {"max_tokens": 6, "temperature": 0, "ignore_eos": True}
            lines.write(json.dumps(line) + "\n")


def _tokens_of(answers: str) -> list[object]:
    """Without what was cached of the prompts."""
    return [{**json.loads(line), "usage": None} for line in answers.splitlines()]


ALONE_AND_TOGETHER = [(2, 1, 4), (3, 1, 6)]


@pytest.mark.parametrize(
    ("num_stages", "tp", "num_r_workers"), [(2, 2, 2), *ALONE_AND_TOGETHER * TRIES_ALL]
)
def test_stages_as_ranks(num_stages: int, tp: int, num_r_workers: int, job: Job) -> None:
    """Each of them several S-workers that act as one, or a single one."""
    command, output, expected = job(num_stages, num_r_workers, 12, tp=tp)
    outcome = run(command, timeout_s=120)
    assert (outcome.exit_code, outcome.orphans) == (0, []), outcome.output
    assert output.read_text() == expected()


def test_kv_on_each_stages_device(job: Job) -> None:
    """No rank is an R-worker; in ``make campaign``, one that is left over is refused."""
    more = ["--kv-placement", "gpu", "--kv-memory-gb", "0.01"]
    command, output, expected = job(3, 1, 12, *more)
    if TRIES_ALL:  # test_generate_mpi.py refuses ranks that have nothing to do
        outcome = run(command, timeout_s=120)
        assert outcome.exit_code not in (0, None) and outcome.orphans == [], outcome.output
        assert "one rank for each S-worker" in outcome.output, outcome.output
    for swap in ([], ["--kv-placement", "swap"])[not TRIES_ALL :]:  # test_launch.py has the first
        outcome = run([*command[: command.index(":")], *swap], timeout_s=120)
        assert (outcome.exit_code, outcome.orphans) == (0, []), outcome.output
        assert output.read_text() == expected()
        output.unlink()


@pytest.mark.parametrize("num_stages", [1, *[2] * TRIES_ALL])
def test_each_s_worker_keeps_its_heads_kv(num_stages: int, job: Job, tmp_path: Path) -> None:
    """Two S-workers act as one: each attends in the KV heads of its own device, and keeps
    them in the host's memory. ALiBi's slopes are its heads', and forks copy blocks on both."""
    more = ["--kv-placement", "gpu", "--kv-memory-gb", "0.0001", "--block-size", "16"]
    more += ["--prefix-cache", "on", "--cache-memory-gb", "0.001", "--max-num-sequences", "2"]
    command, output, expected = job(num_stages, 1, 12, *more, tp=2, family="bloom")
    add_conversations(tmp_path / "in.jsonl")
    outcome = run(command[: command.index(":")], timeout_s=120)
    assert (outcome.exit_code, outcome.orphans) == (0, []), outcome.output
    assert _tokens_of(output.read_text()) == _tokens_of(expected())
    restored = re.search(r"stored, (\d+) restored", outcome.output)
    assert restored is not None and int(restored[1]) > 0, outcome.output


@pytest.mark.skipif(not TRIES_ALL, reason="make campaign: one family stands for all")
@pytest.mark.parametrize("family", ["phi3", "gemma2", "gpt2", "gpt_neox", "bloom", "opt"])
def test_every_familys_tokens_in_stages_of_two_s_workers(family: str, job: Job) -> None:
    command, output, expected = job(2, 2, 12, tp=2, family=family)
    outcome = run(command, timeout_s=120)
    assert (outcome.exit_code, outcome.orphans) == (0, []), outcome.output
    assert output.read_text() == expected()


@pytest.mark.skipif(not TRIES_ALL, reason="make campaign: two ranks are threads elsewhere")
@pytest.mark.parametrize("ep", [1, 2])
def test_experts_of_two_s_workers(ep: int, job: Job, tmp_path: Path) -> None:
    """A share of every expert on each, or whole ones."""
    save_tiny(tmp_path / "model", "qwen2_moe", seed=2)
    command, output, expected = job(1, 2, 12, "--ep", str(ep), tp=2, model=tmp_path / "model")
    outcome = run(command, timeout_s=120)
    assert (outcome.exit_code, outcome.orphans) == (0, []), outcome.output
    assert output.read_text() == expected()


@pytest.mark.parametrize("trouble", [signal.SIGKILL, *[signal.SIGSTOP] * TRIES_ALL])
def test_a_lost_stage_ends_the_job(
    trouble: signal.Signals, job: Job, tmp_path: Path, limit: StepLimit
) -> None:
    """Soon, by its name, with exit code 4, and with every process."""
    command, output, _ = job(2, 2, 60, "--worker-silence-s", "3", limit=limit)
    with running(command) as started:
        victim = started.rank(1)
        started.wait_for_text(output)
        limit.lose(victim, trouble)
        outcome = started.wait(timeout_s=60)
    assert outcome.exit_code not in (0, None) and outcome.orphans == [], outcome.output
    assert "stage 1" in outcome.output and "is lost" in outcome.output, outcome.output
    assert exit_code_file(tmp_path).read_text().strip() == "4", outcome.output


@pytest.mark.skipif(not TRIES_ALL, reason="make campaign: the same as without swapping")
@pytest.mark.parametrize("trouble", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_stage_whose_kv_is_swapped_ends_the_job(
    trouble: signal.Signals, job: Job, tmp_path: Path, limit: StepLimit
) -> None:
    more = ["--kv-placement", "swap", "--kv-memory-gb", "0.01"]
    command, output, _ = job(3, 1, 60, *more, "--worker-silence-s", "3", limit=limit)
    with running(command[: command.index(":")]) as started:
        victim = started.rank(2)
        started.wait_for_text(output)
        limit.lose(victim, trouble)
        outcome = started.wait(timeout_s=60)
    assert outcome.exit_code not in (0, None) and outcome.orphans == [], outcome.output
    assert "stage 2" in outcome.output and "is lost" in outcome.output, outcome.output
    assert exit_code_file(tmp_path).read_text().strip() == "4", outcome.output


@pytest.mark.skipif(not TRIES_ALL, reason="make campaign: tests/sworker plays a lost rank")
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_a_lost_s_worker_of_a_stage_ends_the_job(
    rank: int, job: Job, tmp_path: Path, limit: StepLimit
) -> None:
    """One of the first stage's, the one that leads the second, and another of that."""
    command, output, _ = job(2, 2, 60, "--worker-silence-s", "3", tp=2, limit=limit)
    with running(command) as started:
        victim = started.rank(rank)
        started.wait_for_text(output)
        limit.lose(victim, signal.SIGKILL)
        outcome = started.wait(timeout_s=60)
    assert outcome.exit_code not in (0, None) and outcome.orphans == [], outcome.output
    says = "S-worker 1 of 2 has ended" if rank % 2 else "stage 1"
    assert says in outcome.output, outcome.output
    assert exit_code_file(tmp_path).read_text().strip() == "4", outcome.output


STANDBY = "--spare-r-workers 1"
ONE_OF_EACH_STAGE = [
    ("16", ""),
    ("16", "--replicas 1"),
    ("2", "--replicas 1"),
    ("16", "--r-partition heads"),
    ("16", STANDBY),
]


@pytest.mark.parametrize(
    ("victim", "chunk", "option"),
    [
        (3, "2", ""),
        (2, "16", STANDBY),
        *[(n, *how) for how in ONE_OF_EACH_STAGE for n in (0, 2)] * TRIES_ALL,
    ],
)
def test_a_lost_r_worker_of_a_stage_changes_no_token(
    victim: int, chunk: str, option: str, job: Job, limit: StepLimit
) -> None:
    """The first one's, and the second one's; while others' prompts arrive, where chunks
    are small; and where its neighbour takes over, others share its heads, or a standby
    replaces it."""
    more = ["--prefill-chunk", chunk, *option.split()]
    command, output, expected = job(2, 4, 60, *more, limit=limit)
    with running(command) as started:
        workers = started.r_workers(4)
        workers = sorted(workers, key=lambda p: int(p.environ()["OMPI_COMM_WORLD_RANK"]))
        started.wait_for_text(output)
        limit.lose(workers[victim], signal.SIGKILL)
        outcome = started.wait(timeout_s=120)
    assert output.read_text() == expected(), outcome.output
    says = ", with the replica that it has kept" if "replicas" in option else "is lost"
    assert says in outcome.output, outcome.output
    replaced = re.findall("(.*) has replaced an R-worker", outcome.output)
    assert len(replaced) == (option == STANDBY), outcome.output
    if replaced and victim == 2:
        assert replaced[0].endswith("stage 1: R-worker rank 5"), outcome.output
    assert outcome.exit_code is not None and not outcome.orphans, outcome


@pytest.mark.skipif(not TRIES_ALL, reason="make campaign: see tests/wire/test_stage_ranks.py")
def test_r_workers_that_cant_be_shared_out(job: Job) -> None:
    command, _, _ = job(2, 3, 5)
    outcome = run(command, timeout_s=60)
    assert outcome.exit_code == 2, outcome.output
    assert "isn't a multiple of 2" in outcome.output and "Traceback" not in outcome.output


@pytest.mark.skipif(not TRIES_ALL, reason="make campaign: the same as with an R-worker")
def test_a_first_stage_that_never_begins_keeps_nobody_waiting(job: Job) -> None:
    """Its output can't be written, which no other rank finds out."""
    command, output, _ = job(2, 2, 5)
    output.mkdir()
    outcome = run(command, timeout_s=60)
    assert outcome.exit_code == 2 and outcome.orphans == [], outcome.output


@pytest.mark.skipif(not TRIES_ALL, reason="make campaign: two ranks swap in tests/sworker")
def test_s_workers_that_act_as_one_swap_lanes(job: Job) -> None:
    """Three stages of two S-workers, each of which brings its own heads of a lane."""
    more = ["--kv-placement", "swap", "--kv-memory-gb", "0.01"]
    command, output, expected = job(3, 1, 12, *more, tp=2)
    outcome = run(command[: command.index(":")], timeout_s=150)
    assert (outcome.exit_code, outcome.orphans) == (0, []), outcome.output
    assert output.read_text() == expected()
