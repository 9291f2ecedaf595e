"""``fastdecode generate`` as an MPI job: the tokens that threads give, also
when an R-worker is killed or stopped."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from generate_jobs import answers_alone, write_requests
from hybrid_jobs import HybridJob
from limited_steps import StepLimit
from mpi_launch import mpirun, needs_mpi, open_mpi_options, run, running
from turn_lines import check_turns, token_ids, write_turns

from examples import TRIES_ALL
from fastdecode.cli.main import main
from rworker.tiers.disk import slot_files

pytestmark = needs_mpi

FASTDECODE = [sys.executable, "-m", "fastdecode.cli.main"]


Job: TypeAlias = Callable[..., tuple[list[str], Path, Callable[[], str]]]


@pytest.fixture
def job(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> Job:
    """``job(max_tokens, *options, **model)``: generate's options, its output
    file, and what is to be in it."""

    def make(
        max_tokens: int, *options: str, **overrides: Any
    ) -> tuple[list[str], Path, Callable[[], str]]:
        source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
        write_requests(source, max_tokens)
        model = ["--model", str(tiny_checkpoint("llama", **overrides)), "--dtype", "float32"]
        model += ["--prefill-chunk", "16", *options]
        files = ["--input", str(source), "--output", str(output)]
        return ["generate", *model, *files], output, lambda: answers_alone(source, *model)

    return make


def test_a_disk_that_no_rank_has_is_refused(job: Job, tmp_path: Path) -> None:
    """R-workers of a command of their own have what is given there."""
    options, output, _ = job(4, "--cache-disk", str(tmp_path / "kv"), "--cache-disk-gb", "0.01")
    command = [mpirun(), *open_mpi_options(), "-n", "1", *FASTDECODE, *options, ":"]
    outcome = run(
        [*command, "-n", "1", *FASTDECODE, "r-worker", "--kv-memory-gb", "0.01"], timeout_s=120
    )
    assert (outcome.exit_code, outcome.orphans) == (2, []), outcome.output
    assert "--cache-disk was given here, and no R-worker has a disk" in outcome.output
    assert not output.exists() and not (tmp_path / "kv").exists()


@pytest.mark.skipif(not TRIES_ALL, reason="make campaign: two S-workers' ranks have one each, too")
def test_ranks_with_a_command_each(job: Job) -> None:
    options, output, expected = job(12)
    command = [mpirun(), *open_mpi_options(), "-n", "1", *FASTDECODE, *options, ":"]
    outcome = run(
        [*command, "-n", "3", *FASTDECODE, "r-worker", "--kv-memory-gb", "0.01"], timeout_s=120
    )
    assert (outcome.exit_code, outcome.orphans) == (0, []), outcome.output
    assert "rank 3" in outcome.output
    assert output.read_text() == expected()


def test_conversations_go_on_from_kept_blocks_on_ranks(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    write_turns(tmp_path / "turns.jsonl")
    options = ["generate", "--model", str(tiny_checkpoint("llama")), "--dtype", "float32"]
    options += ["--block-size", "16", "--input", str(tmp_path / "turns.jsonl"), "--output"]
    plain, kept = tmp_path / "plain.jsonl", tmp_path / "kept.jsonl"
    assert main([*options, str(plain), "--kv-memory-gb", "0.01"]) == 0
    disk = ["--cache-disk", str(tmp_path / "disk"), "--cache-disk-gb", "0.001"]
    disk += ["--swap-threshold", "1", "--summary", str(tmp_path / "summary.json")]
    command = [mpirun(), *open_mpi_options(), "-n", "3", *FASTDECODE, *options, str(kept)]
    outcome = run([*command, *disk, "--kv-memory-gb", "0.01"], timeout_s=120)
    assert (outcome.exit_code, outcome.orphans) == (0, []), outcome.output
    check_turns(plain, kept)
    assert json.loads((tmp_path / "summary.json").read_text())["tiers"]["num_stored"] > 0
    assert len(slot_files(tmp_path / "disk")) == 2
    if TRIES_ALL:  # found again by another job's ranks, and memory for few of them
        outcome = run([*command, *disk, "--kv-memory-gb", "0.0002"], timeout_s=120)
        assert (outcome.exit_code, outcome.orphans) == (0, []), outcome.output
        assert token_ids(kept) == token_ids(plain)
        tiers = json.loads((tmp_path / "summary.json").read_text())["tiers"]
        assert tiers["num_found"] > 0 and tiers["num_fetched"] > 0


def test_roles_by_rank(job: Job) -> None:
    options, output, expected = job(12)
    command = [
        mpirun(),
        *open_mpi_options("self,tcp"),
        "-n",
        "2",
        *FASTDECODE,
        *options,
        "--kv-memory-gb",
        "0.01",
    ]
    outcome = run(command, timeout_s=120)
    assert (outcome.exit_code, outcome.orphans) == (0, []), outcome.output
    assert output.read_text() == expected()


NEEDS_TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


@pytest.mark.parametrize("device", [
    ["--device", "cpu"],
    pytest.param(["--device", "cuda"], marks=[pytest.mark.gpu, NEEDS_TWO_GPUS]),
    pytest.param(["--device", "cuda", "--cuda-graphs", "on"], marks=[pytest.mark.gpu,
        NEEDS_TWO_GPUS]),
])  # fmt: skip
def test_two_s_workers_act_as_one(device: list[str], job: Job) -> None:
    """Also in the LongRoPE factors that each takes, which go by max_model_len."""
    short, long = [1.0, 1.1, 1.3, 1.5, 1.7, 1.8], [1.5, 2.0, 4.0, 5.0, 7.0, 9.0]
    scaling = {"rope_type": "longrope", "short_factor": short, "long_factor": long}
    scaling["original_max_position_embeddings"] = 20
    options, output, expected = job(12, "--max-model-len", "64", rope_scaling=scaling)
    options += device
    command = [mpirun(), *open_mpi_options(), "-n", "2", *FASTDECODE, *options, "--tp", "2", ":"]
    outcome = run(
        [*command, "-n", "2", *FASTDECODE, "r-worker", "--kv-memory-gb", "0.01"], timeout_s=120
    )
    assert (outcome.exit_code, outcome.orphans) == (0, []), outcome.output
    assert "rank 3" in outcome.output and "R-worker rank 1" not in outcome.output
    assert output.read_text() == expected()
    assert all("error" not in json.loads(line) for line in expected().splitlines())


@pytest.mark.parametrize("rank", [1, *[0] * TRIES_ALL])
def test_a_lost_s_worker_ends_the_job(rank: int, job: Job, limit: StepLimit) -> None:
    """Soon, and with every process."""
    options, output, _ = job(60)
    command = [mpirun(), *open_mpi_options(), "-n", "2", *limit.fastdecode, *options]
    command += ["--tp", "2", ":"]
    with running(
        [*command, "-n", "1", *FASTDECODE, "r-worker", "--kv-memory-gb", "0.01"]
    ) as started:
        victim = started.rank(rank)
        started.wait_for_text(output)
        limit.lose(victim, signal.SIGKILL)
        outcome = started.wait(timeout_s=120)
    assert outcome.exit_code not in (0, None) and outcome.orphans == [], outcome.output


def test_an_r_worker_in_an_s_workers_place(job: Job) -> None:
    options, _, _ = job(1)
    command = [mpirun(), *open_mpi_options(), "-n", "1", *FASTDECODE, *options, "--tp", "2", ":"]
    outcome = run(
        [*command, "-n", "2", *FASTDECODE, "r-worker", "--kv-memory-gb", "0.01"], timeout_s=120
    )
    assert "or was started as an R-worker" in outcome.output and "Traceback" not in outcome.output
    assert outcome.exit_code not in (0, None) and outcome.orphans == []


def test_ranks_with_nothing_to_do(job: Job) -> None:
    options, _, _ = job(1)
    command = [
        mpirun(),
        *open_mpi_options(),
        "-n",
        "2",
        *FASTDECODE,
        *options,
        "--kv-placement",
        "gpu",
    ]
    outcome = run(command, timeout_s=120)
    assert outcome.exit_code == 2, outcome.output
    assert "without a launcher" in outcome.output and "Traceback" not in outcome.output


def test_one_rank_is_too_few(job: Job) -> None:
    options, _, _ = job(1)
    outcome = run([mpirun(), *open_mpi_options(), "-n", "1", *FASTDECODE, *options], timeout_s=120)
    assert outcome.exit_code == 2, outcome.output
    assert "1 MPI rank" in outcome.output and "Traceback" not in outcome.output


WHOLE = ["--r-partition", "sequences"]
HEADS = ["--r-partition", "heads"]
PARTS = ["--split-tokens", "64"]


LOSSES = [(signal.SIGSTOP, HEADS)]
MORE_LOSSES = [
    (signal.SIGKILL, WHOLE),
    (signal.SIGSTOP, WHOLE),
    (signal.SIGKILL, HEADS),
    (signal.SIGKILL, PARTS),
]


@pytest.mark.parametrize(("trouble", "partition"), LOSSES + MORE_LOSSES * TRIES_ALL)
def test_a_lost_r_worker_changes_no_token(
    trouble: signal.Signals, partition: list[str], job: Job, limit: StepLimit
) -> None:
    options, output, expected = job(80, num_key_value_heads=3)
    options += [*partition, "--worker-silence-s", "1"]
    command = [mpirun(), *open_mpi_options(), "-n", "1", *limit.fastdecode, *options, ":"]
    command += ["-n", "3", *FASTDECODE, "r-worker", "--kv-memory-gb", "0.01"]
    with running(command) as started:
        workers = started.r_workers(3)
        started.wait_for_text(output)
        limit.lose(workers[1], trouble)
        outcome = started.wait(timeout_s=120)
    assert output.read_text() == expected(), outcome.output
    assert "is lost" in outcome.output and "has replaced" not in outcome.output
    # Every request was answered; but only the launcher can end a rank that
    # hangs, and it wants an exit code for that.
    assert outcome.exit_code == 4 if trouble == signal.SIGSTOP else outcome.exit_code is not None
    assert outcome.exit_code is not None and not outcome.orphans, outcome


def test_a_killed_r_worker_is_restored_from_its_file(
    job: Job, tmp_path: Path, limit: StepLimit
) -> None:
    """Only tokens that had not reached the disk are run again; no file is left."""
    summary, directory = tmp_path / "summary.json", tmp_path / "kv"
    options, output, expected = job(80)
    options += ["--replicas", "disk", "--summary", str(summary)]
    command = [mpirun(), *open_mpi_options(), "-n", "1", *limit.fastdecode, *options, ":"]
    command += ["-n", "3", *FASTDECODE, "r-worker", "--kv-memory-gb", "0.01"]
    command += ["--cache-disk", str(directory), "--cache-disk-gb", "0.01"]
    with running(command) as started:
        workers = started.r_workers(3)
        started.wait_for_text(output)
        limit.lose(workers[1], signal.SIGKILL)
        outcome = started.wait(timeout_s=120)
    assert output.read_text() == expected(), outcome.output
    assert "with the replica that it has kept" in outcome.output
    assert outcome.exit_code is not None and not outcome.orphans, outcome
    told = json.loads(summary.read_text())
    assert len(told["replicas"]["failovers"]) == 1
    assert told["replicas"]["tokens_resumed"] > 0 and told["recomputed"] == 0, told
    assert not list(directory.glob("replica-*"))


def test_with_kv_on_both_sides_nobody_at_home_notices_a_loss(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, limit: StepLimit
) -> None:
    hybrid = HybridJob(tiny_checkpoint("llama"), tmp_path)
    command = [mpirun(), *open_mpi_options(), "-n", "1", *limit.fastdecode, *hybrid.options, ":"]
    command += ["-n", "3", *FASTDECODE, "r-worker", "--kv-memory-gb", "0.01"]
    with running(command) as started:
        workers = started.r_workers(3)
        started.wait_for_text(hybrid.output)
        limit.lose(workers[1], signal.SIGKILL)
        outcome = started.wait()
    assert "is lost" in outcome.output
    # Every request was answered; the launcher gives the killed rank's code.
    assert outcome.exit_code is not None and not outcome.orphans, outcome
    hybrid.check_with_one_lost()


def test_an_r_worker_that_answers_nan_changes_no_token(
    job: Job,
) -> None:
    options, output, expected = job(40)
    command = [mpirun(), *open_mpi_options(), "-n", "1", *FASTDECODE, *options, ":", "-n", "1"]
    command += [*FASTDECODE, "r-worker", "--kv-memory-gb", "0.01", ":", "-n", "1", sys.executable]
    outcome = run([*command, str(Path(__file__).with_name("ranks") / "not_finite.py")])
    assert output.read_text() == expected(), outcome.output
    assert "is lost: it answered NaN or Inf in layer" in outcome.output
    # Every request was answered; the rank that was given up is the launcher's to end.
    assert (outcome.exit_code, outcome.orphans) == (4, []), outcome


def test_two_that_are_stopped_one_after_the_other_are_both_given_up(
    job: Job, limit: StepLimit
) -> None:
    """The second, while heads are shared among those that are left of the first's loss."""
    options, output, expected = job(80, num_key_value_heads=3)
    options += [*HEADS, "--worker-silence-s", "3"]
    command = [mpirun(), *open_mpi_options("self,tcp"), "-n", "1", *limit.fastdecode, *options, ":"]
    with running(
        [*command, "-n", "3", *FASTDECODE, "r-worker", "--kv-memory-gb", "0.01"]
    ) as started:
        workers = started.r_workers(3)
        started.wait_for_text(output)
        workers[0].suspend()
        limit.allow(20)
        started.wait_until(lambda: "is lost" in started.output())
        limit.lose(workers[1], signal.SIGSTOP)
        outcome = started.wait(timeout_s=120)
    assert output.read_text() == expected(), outcome.output
    assert outcome.exit_code == 4 and not outcome.orphans, outcome
