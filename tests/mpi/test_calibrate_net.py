"""``fastdecode calibrate net`` as an MPI job, and a plan from what it measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from mpi_launch import FASTDECODE, mpirun, needs_mpi, run

from fastdecode.cli.main import main
from fastdecode.core.measurement import NetProfile, read_profile

pytestmark = needs_mpi


def test_from_two_ranks_to_a_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "net.json"
    calibrate = ["calibrate", "net", "--model", "Llama-3 8B", "--out", str(out)]
    calibrate += ["--batches", "1,32", "--repeats", "2"]
    command = [*mpirun(1), *FASTDECODE, *calibrate, ":"]
    outcome = run(
        [*command, "-n", "2", *FASTDECODE, "r-worker", "--kv-memory-gb", "0.05"], timeout_s=120
    )
    assert (outcome.exit_code, outcome.orphans) == (0, []), outcome.output
    profile = read_profile(out)
    assert isinstance(profile, NetProfile) and "MPI" in profile.transport
    assert [point.size for point in profile.transfer] == [10240, 32 * 10240]
    question = ["--model", "Llama-3 8B", "--gpu", "A10", "--cpu", "EPYC 9354", "--seq-len", "1024"]
    assert main(["size", *question, "--nic", str(out), "--json"]) in (0, 1)
    inputs = {
        row["name"]: row["provenance"] for row in json.loads(capsys.readouterr().out)["inputs"]
    }
    assert inputs["network"] == inputs["round trip"] == inputs["message"] == "measured"


def test_alone_it_asks_for_a_launcher(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["calibrate", "net", "--model", "Llama-3 8B", "--out", str(tmp_path / "net.json")]
    assert main(command) == 2
    assert "mpirun" in capsys.readouterr().err
