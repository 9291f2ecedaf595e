"""Placements as one MPI job, by real mpirun: the tokens are those of one engine,
byte for byte, and whoever is killed or stopped on the way leaves nobody behind."""

from __future__ import annotations

import json
import random
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from generate_jobs import answers_alone
from mpi_launch import Outcome, Running, needs_mpi, run, running

from fastdecode.core.config.placement import PLACEMENT_FORMAT

FASTDECODE = [sys.executable, "-m", "fastdecode.cli.main"]
PATHS = {"PYTHONPATH": str(Path(__file__).parents[2])}
SILENCE_S = 4.0
ENGINE = ("--dtype", "float32", "--block-size", "16", "--prefix-cache", "off")
LAUNCH = [*FASTDECODE, "launch", "--r-threads", "1", "--kv-memory-gb", "0.004"]

pytestmark = needs_mpi


@pytest.fixture(scope="module")
def model(tiny_checkpoint: Callable[..., Path]) -> str:
    return str(tiny_checkpoint("llama"))


def write_placement(path: Path, *instances: str) -> Path:
    """``ROLE:SOCKETS`` each."""
    listed = [
        {"role": role, "tp": 1, "pp": 1, "r_worker_sockets": int(sockets)}
        for role, _, sockets in (each.partition(":") for each in instances)
    ]
    tree = {"format": PLACEMENT_FORMAT, "model": "tiny", "instances": listed}
    path.write_text(json.dumps(tree))
    return path


def write_prompts(path: Path, number: int, **sampling: Any) -> Path:
    rng = random.Random(number)
    lines = [
        {
            "id": i,
            "prompt_token_ids": [rng.randrange(5, 200) for _ in range(rng.randint(1, 60))],
            "max_tokens": rng.choice([1, 2, 9, 23]),
            "temperature": rng.choice([0.0, 1.0]),
            "seed": rng.randrange(1 << 30),
            "ignore_eos": True,
            **sampling,
        }
        for i in range(number)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


class Job:
    """``fastdecode launch --placement ... -- generate ...``, and what comes of it."""

    def __init__(self, directory: Path, model: str, *instances: str) -> None:
        self.source, self.output = directory / "in.jsonl", directory / "out.jsonl"
        self.summary = directory / "summary.json"
        placement = write_placement(directory / "placement.json", *instances)
        files = ["--input", str(self.source), "--output", str(self.output)]
        its_own = ["--model", model, *ENGINE, "--worker-silence-s", str(SILENCE_S)]
        self.command: Sequence[str] = [
            *LAUNCH, "--placement", str(placement), "--", "generate", *its_own, *files,
            "--summary", str(self.summary),
        ]  # fmt: skip
        self._alone = ("--model", model, *ENGINE, "--r-threads", "1")

    def check(self, outcome: Outcome) -> dict[str, Any]:
        """All was answered as one engine does. What is told of the instances."""
        assert outcome.exit_code == 0 and not outcome.orphans, outcome.output
        assert self.output.read_text() == answers_alone(self.source, *self._alone)
        counted: dict[str, Any] = json.loads(self.summary.read_text())["instances"]
        return counted


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize(
    "instances",
    [("prefill:1", "decode:1"), ("prefill:1", "prefill:1", "decode:1", "decode:1")],
    ids=["1+1", "2+2"],
)
def test_tokens_are_those_of_one_engine(
    model: str, tmp_path: Path, instances: tuple[str, ...], n: int
) -> None:
    job = Job(tmp_path, model, *instances)
    write_prompts(job.source, 24, n=n)
    outcome = run(job.command, timeout_s=240.0, **PATHS)
    counted = job.check(outcome)
    assert "has lost its controller" not in outcome.output
    assert counted["moved"] == counted["failed_fetches"] == 0
    assert counted["handed_over"] > 0 and counted["fetched_bytes"] > 0


def rank_of(job: Running, rank: int) -> psutil.Process:
    found = [p for p in job.processes() if p.environ().get("OMPI_COMM_WORLD_RANK") == str(rank)]
    assert len(found) == 1, found
    return found[0]


THREE = ("prefill:1", "decode:1", "decode:2")
"""Ranks: 0 controls; 1 and 2 run prompts; 3 and 4, and 5 to 7, go on with them."""


def write_long_prompts(path: Path) -> None:
    """The first is done long before the others."""
    write_prompts(path, 30)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for i, line in enumerate(lines):
        line["max_tokens"] = 150 if i else 1
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize(
    ("rank", "trouble"),
    [
        (3, signal.SIGKILL),
        (1, signal.SIGKILL),
        (4, signal.SIGKILL),
        (2, signal.SIGKILL),
        (5, signal.SIGSTOP),
    ],
    ids=["decode", "prefill", "R-worker of decode", "R-worker of prefill", "decode stopped"],
)
def test_who_is_lost_is_gone_on_without(
    model: str, tmp_path: Path, rank: int, trouble: signal.Signals
) -> None:
    job = Job(tmp_path, model, *THREE)
    write_long_prompts(job.source)
    with running(job.command, **PATHS) as run_of:
        run_of.wait_for_text(job.output)
        rank_of(run_of, rank).send_signal(trouble)
        job.check(run_of.wait(240.0))


def test_without_its_controller_a_job_ends(model: str, tmp_path: Path) -> None:
    job = Job(tmp_path, model, *THREE)
    write_long_prompts(job.source)
    with running(job.command, **PATHS) as run_of:
        run_of.wait_for_text(job.output)
        rank_of(run_of, 0).kill()
        outcome = run_of.wait(120.0)
    assert outcome.exit_code not in (0, None) and not outcome.orphans, outcome.output


def test_what_can_not_begin_ends_everywhere(model: str, tmp_path: Path) -> None:
    job = Job(tmp_path, model, "prefill:1", "decode:1")
    write_prompts(job.source, 2)
    outcome = run([*job.command, "--device", "cuda:77"], timeout_s=120.0, **PATHS)
    assert outcome.exit_code == 4 and not outcome.orphans, outcome.output  # all instances are lost
    assert "device=" in outcome.output
    outcome = run([*job.command, "--replicas", "1"], timeout_s=60.0, **PATHS)
    assert outcome.exit_code == 2 and not outcome.orphans, outcome.output
    assert "--replicas 1" in outcome.output
