"""Placements as one MPI job, by real mpirun: the tokens are those of one engine,
byte for byte, and whoever is killed or stopped on the way leaves nobody behind."""

from __future__ import annotations

import concurrent.futures
import json
import os
import random
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from generate_jobs import answers_alone
from limited_steps import UNLIMITED, StepLimit
from mpi_launch import FASTDECODE, Outcome, needs_mpi, run, running
from server_process import CHECKPOINT, events, serving

from fastdecode.core.config.placement import PLACEMENT_FORMAT

SILENCE_S = 4.0
LOSES_NOBODY_S = 60.0  # of jobs whose ranks all live, however busy the machine is
ENGINE = ("--dtype", "float32", "--block-size", "16", "--prefix-cache", "off")
ON_ONE_HOST = ["launch", "--r-threads", "1", "--kv-memory-gb", "0.004"]

pytestmark = needs_mpi


@pytest.fixture(scope="module")
def model(tiny_checkpoint: Callable[..., Path]) -> str:
    return str(tiny_checkpoint("llama"))


def write_placement(path: Path, *instances: str) -> Path:
    """``ROLE:SOCKETS`` each, and perhaps ``:tp=N`` and the like."""
    listed = []
    for role, sockets, *degrees in (each.split(":") for each in instances):
        given = {
            name.replace("-", "_"): int(value)
            for name, value in (each.split("=") for each in degrees)
        }
        listed.append({"role": role, "tp": 1, "pp": 1, "r_worker_sockets": int(sockets), **given})
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


def answers_of(lines: str) -> list[dict[str, Any]]:
    """But for how many tokens of a prompt were kept."""
    answers = [json.loads(line) for line in lines.splitlines()]
    for answer in answers:
        answer["usage"].pop("cached_tokens", None)
    return answers


class Job:
    """``fastdecode launch --placement ... --`` with a command, and what comes of it."""

    def __init__(
        self,
        directory: Path,
        model: str,
        *instances: str,
        options: Sequence[str] = (),
        launch: Sequence[str] = (),
        command: str = "generate",
        silence_s: float = SILENCE_S,
        limit: StepLimit | None = None,
    ) -> None:
        self.source, self.output = directory / "in.jsonl", directory / "out.jsonl"
        self.summary = directory / "summary.json"
        placement = write_placement(directory / "placement.json", *instances)
        files = ["--input", str(self.source), "--output", str(self.output)]
        its_own = ["--model", model, *ENGINE, "--worker-silence-s", str(silence_s)]
        self.command: Sequence[str] = [
            *(FASTDECODE if limit is None else limit.fastdecode), *ON_ONE_HOST,
            *launch, "--placement", str(placement), "--", command, *its_own, *files,
            "--summary", str(self.summary), *options,
        ]  # fmt: skip
        self._alone = ("--model", model, *ENGINE, "--r-threads", "1")

    @property
    def alone(self) -> str:
        """What one engine answers."""
        return answers_alone(self.source, *self._alone)

    def check(self, outcome: Outcome) -> dict[str, Any]:
        """All was answered as one engine does. What is told of the instances."""
        assert outcome.exit_code == 0 and not outcome.orphans, outcome.output
        assert answers_of(self.output.read_text()) == answers_of(self.alone)
        counted: dict[str, Any] = json.loads(self.summary.read_text())["instances"]
        return counted


ON_DEVICES = ("--device", "cpu", "--kv-placement", "gpu", "--cache-memory-gb", "0.001")


@pytest.mark.parametrize(
    ("instances", "options"),
    [(("prefill:2:tp=2:pp=2", "decode:2:pp=2"), ()), (("prefill:0", "decode:0:pp=2"), ON_DEVICES)],
    ids=["R-workers", "devices"],
)
def test_each_instance_has_its_own_s_workers(
    model: str, tmp_path: Path, instances: tuple[str, ...], options: tuple[str, ...]
) -> None:
    """Prompts run on two stages of two that act as one, or on one, and decode on
    two stages: with KV on R-workers, and kept blocks on their disks; or on the devices, and
    kept blocks in the host's memory."""
    disk = () if options else ("--cache-disk", str(tmp_path / "kv"), "--cache-disk-gb", "0.01")
    job = Job(
        tmp_path, model, *instances, options=["--prefix-cache", "on", *options], launch=disk,
        silence_s=LOSES_NOBODY_S,
    )  # fmt: skip
    write_prompts(job.source, 16, n=2)
    outcome = run(job.command, timeout_s=240.0)
    counted = job.check(outcome)
    assert "has lost its controller" not in outcome.output
    assert counted["moved"] == counted["failed_fetches"] == 0
    assert counted["handed_over"] > 0 and counted["fetched_bytes"] > 0


THREE = ("prefill:1", "decode:1", "decode:2")
"""Ranks: 0 controls; 1 and 2 run prompts; 3 and 4, and 5 to 7, go on with them."""


def write_long_prompts(path: Path) -> None:
    """The first is done long before the others."""
    write_prompts(path, 30)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for i, line in enumerate(lines):
        line["max_tokens"] = 60 if i else 1
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_lost_instance_changes_no_token(model: str, tmp_path: Path, limit: StepLimit) -> None:
    """``tests/instances`` loses each kind of process, and simulates every moment."""
    job = Job(tmp_path, model, *THREE, limit=limit)
    write_long_prompts(job.source)
    with running(job.command) as run_of:
        victim = run_of.rank(5)
        run_of.wait_for_text(job.output)
        limit.lose(victim, signal.SIGSTOP)
        job.check(run_of.wait(240.0))


def tokens_of(lines: str) -> dict[str, Any]:
    """By request; of answers as ``generate`` and ``run-batch`` write them."""
    return {str(x["id"]): x.get("token_ids") for x in map(json.loads, lines.splitlines())}


def test_without_its_controller_a_batch_ends_and_goes_on(
    model: str, tmp_path: Path, limit: StepLimit
) -> None:
    job = Job(tmp_path, model, "prefill:1", "decode:1", command="run-batch", limit=limit)
    write_long_prompts(job.source)
    with running(job.command) as run_of:
        victim = run_of.rank(0)
        run_of.wait_for_text(job.output)
        limit.lose(victim, signal.SIGKILL)
        outcome = run_of.wait(120.0)
    assert outcome.exit_code not in (0, None) and not outcome.orphans, outcome.output
    assert len(tokens_of(job.output.read_text())) < 30
    outcome = run([*job.command, "--resume"], timeout_s=240.0)
    assert outcome.exit_code == 0 and not outcome.orphans, outcome.output
    assert tokens_of(job.output.read_text()) == tokens_of(job.alone)


def test_a_server_streams_and_drains(tmp_path: Path) -> None:
    pytest.importorskip("uvicorn", reason='needs the server: pip install ".[server]"')
    placement = write_placement(tmp_path / "placement.json", "prefill:1", "decode:1")
    serve = ["serve", str(CHECKPOINT), "--port", "0", "--dtype", "float32"]
    body: dict[str, Any] = {"prompt": [5, 6, 7], "max_tokens": 60, "temperature": 0,
                            "ignore_eos": True}  # fmt: skip
    limit = StepLimit(tmp_path, UNLIMITED)
    launch = [*limit.fastdecode, *ON_ONE_HOST, "--placement", str(placement)]
    with serving([*launch, "--", *serve]) as server:
        said = server.complete(**body)[1]["choices"][0]["text"]
        streamed = events(server.ask("POST", "/v1/completions", {**body, "stream": True})[2])
        assert streamed[-1] == "[DONE]"
        parts = [part["choices"][0]["text"] for part in streamed[:-1] if part["choices"]]
        assert "".join(parts) == said and len(parts) > 1
        limit.allow(20)
        with concurrent.futures.ThreadPoolExecutor() as clients:
            two = [clients.submit(server.complete, **{**body, "max_tokens": 90}) for _ in range(2)]
            server.wait_until(lambda: server.status()["num_open"] == 2)
            os.kill(server.job.pid, signal.SIGTERM)
            limit.lift()
            answers = [each.result()[1] for each in two]
        assert [x["usage"]["completion_tokens"] for x in answers] == [90, 90]
        assert all(x["choices"][0]["text"].startswith(said) for x in answers)
        outcome = server.job.wait(120, grace_s=30)
    assert (outcome.exit_code, outcome.orphans) == (0, []), outcome


def test_what_can_not_begin_ends_everywhere(model: str, tmp_path: Path) -> None:
    job = Job(tmp_path, model, "prefill:1", "decode:1")
    write_prompts(job.source, 2)
    outcome = run([*job.command, "--device", "cuda:77"], timeout_s=120.0)
    assert outcome.exit_code == 4 and not outcome.orphans, outcome.output  # all instances are lost
    assert "device=" in outcome.output
    outcome = run([*job.command, "--kv-placement", "swap"], timeout_s=60.0)
    assert outcome.exit_code == 2 and not outcome.orphans, outcome.output
    assert "--kv-placement swap" in outcome.output
