"""``run-batch --resume`` goes on with what R-workers at addresses have kept of a
job whose S-worker was killed."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from limited_steps import StepLimit
from mpi_launch import FASTDECODE, has_text, mpirun, needs_mpi, run, running
from zmq_r_workers import at, r_workers

from examples import TRIES_ALL
from fastdecode.cli.main import main

pytest.importorskip("zmq", reason="needs pyzmq: pip install pyzmq")


def _write(path: Path) -> None:
    """The first is done long before the others; every other one is sampled."""
    sampled = {"temperature": 0.9, "top_p": 0.9}
    lines = [
        {
            "id": str(i),
            "prompt_token_ids": [(7 * i + 3 * j) % 90 + 5 for j in range(20 + 9 * i)],
            "max_tokens": 120 if i else 10,
            "ignore_eos": True,
            "n": 2 if i == 3 else 1,
            **({**sampled, "seed": i} if i % 2 else {"temperature": 0}),
        }
        for i in range(4)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def _answers(output: Path) -> dict[str, Any]:
    rows = [json.loads(text) for text in output.read_text().splitlines()]
    return {row["id"]: row.get("completions", row.get("token_ids")) for row in rows}


HYBRID = ("--kv-placement", "hybrid", "--device", "cpu", "--device-kv-gb", "0.00004")
"""The device has room for the shortest alone."""
REPLICAS = ("--replicas", "1")
TWO_RANKS = mpirun(2)  # the S-workers of a job; R-workers have addresses
CASES: dict[str, tuple[int, tuple[str, ...]]] = {
    "stages, replicas": (4, ("--pp", "2", *REPLICAS)),
    "stages as ranks, replicas": (4, ("--pp", "2", *REPLICAS)),
    "r-workers": (2, ()),
    "hybrid": (2, HYBRID),
    "stages": (2, ("--pp", "2")),
    "replicas": (2, REPLICAS),
    "hybrid, replicas": (2, (*HYBRID, *REPLICAS)),
    "heads, replicas": (2, ("--r-partition", "heads", *REPLICAS)),
    "stages, heads": (4, ("--pp", "2", "--r-partition", "heads")),
}
"""By name: R-workers, and options."""
RUN = [
    pytest.param(*CASES[name], "ranks" in name, id=name, marks=[needs_mpi] * ("ranks" in name))
    for name in list(CASES)[: len(CASES) if TRIES_ALL else 2]
]


def _run(command: Sequence[str], *, as_ranks: bool) -> int | None:
    """The exit code of a command."""
    if not as_ranks:
        return main(command)
    outcome = run([*TWO_RANKS, *FASTDECODE, *command], timeout_s=240.0)
    assert not outcome.orphans, outcome.output
    return outcome.exit_code


@pytest.mark.parametrize(("num_r_workers", "more", "as_ranks"), RUN)
def test_another_s_worker_goes_on_with_what_r_workers_have_kept(
    num_r_workers: int,
    more: tuple[str, ...],
    as_ranks: bool,
    tiny_checkpoint: Callable[..., Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    limit: StepLimit,
) -> None:
    _write(tmp_path / "in.jsonl")
    model = ["--model", str(tiny_checkpoint("llama")), "--dtype", "float32"]
    model += ["--prefill-chunk", "16", "--input", str(tmp_path / "in.jsonl"), "--output"]
    plain, output = tmp_path / "plain.jsonl", tmp_path / "out.jsonl"
    assert main(["run-batch", *model, str(plain), "--kv-memory-gb", "0.01"]) == 0
    summary, session = tmp_path / "summary.json", tmp_path / "out.jsonl.session"
    places = r_workers(*"*" * num_r_workers, options=("--log-level", "info"))
    with places as (jobs, addresses):
        command = ["run-batch", *model, str(output), *at(addresses), *more]
        launched = TWO_RANKS if as_ranks else []
        with running([*launched, *limit.fastdecode, *command]) as s_workers:
            # When the first line begins, and in how many lanes, is a matter of time.
            s_workers.wait_until(lambda: has_text(output) or limit.extend())
            s_workers.kill()
        assert session.stat().st_mode & 0o777 == 0o600
        for job in jobs:  # until then it serves the one that was killed
            job.wait_until(lambda job=job: "keeps the KV cache" in job.output())
        capsys.readouterr()
        stranger = ["generate", *model, str(tmp_path / "other.jsonl"), *at(addresses), *more]
        assert main(stranger) == 4
        assert "keeps the KV cache of a job whose S-worker is lost" in capsys.readouterr().err
        going_on = [*command, "--resume", "--summary", str(summary)]
        assert _run(going_on, as_ranks=as_ranks) == 0
        assert {job.wait().exit_code for job in jobs} == {0}
    assert _answers(output) == _answers(plain)
    found = json.loads(summary.read_text())["session"]
    if "hybrid" not in more:  # there, when prompts begin is a matter of time
        assert found["sequences_kept"] and found["tokens_kept"] > found["tokens"] // 2, found
    assert not session.exists()
