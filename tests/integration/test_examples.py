"""Every program in ``examples/`` runs, and prints what its docstring promises."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest
from mpi_launch import mpirun, needs_mpi, run

from examples import TRIES_ALL

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
WITHIN_S = 240.0
STARTS_PROCESSES = ("replicas.py", "server_client.py")
PROMISED = {
    "offline_batch.py": "[0] Once upon a time there was a baker who",
    "sizing.py": "A10",
    "conversation.py": "Falivith: I live in Whitehill.",
    "replicas.py": "12 answers; equal to the undisturbed run: True",
    "systems.py": "FastDecode's schedule says what a plain engine says: True",
    "stages.py": "two stages say what one says: True",
    "instances.py": "prompts fetched by the decode instance: 4",
    "hybrid.py": "32 of 32 answered",
    "server_client.py": "model checkpoint:",
    "model/evaluate.py": "questions                 200 items",
}


def _run(*command: str) -> str:
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    outcome = run(command, timeout_s=WITHIN_S, PATH=path)
    assert outcome.exit_code == 0 and not outcome.orphans, outcome.output
    return outcome.output


def test_every_program_is_listed() -> None:
    programs = {path.relative_to(EXAMPLES).as_posix() for path in EXAMPLES.rglob("*.py")}
    assert programs == set(PROMISED)


@pytest.mark.parametrize("name", sorted(PROMISED))
def test_a_program(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a script, in this process: what most import is loaded already."""
    if name in STARTS_PROCESSES:
        output = _run(sys.executable, str(EXAMPLES / name))
    else:
        monkeypatch.setattr(sys, "argv", [name])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        output = capsys.readouterr().out
    assert PROMISED[name] in output
    if name == "systems.py":
        assert output.count("says what a plain engine says: True") == 6
    if name == "replicas.py":
        assert int(output.split("resumed from replicas: ")[1].split()[0]) > 0


@needs_mpi
def test_a_script_as_an_mpi_job() -> None:
    """The other ranks are its R-workers."""
    script = str(EXAMPLES / "offline_batch.py")
    output = _run(*mpirun(3), sys.executable, script)
    assert output.count(PROMISED["offline_batch.py"]) == 1
    assert "R-workers 2/2" in output


@needs_mpi
@pytest.mark.skipif(not TRIES_ALL, reason="make campaign: mpi/test_placement_mpi.py says it")
@pytest.mark.parametrize(
    ("name", "num_ranks"), [("Pensieve with tensor parallelism", 2), ("DistServe", 7)]
)
def test_a_system_that_is_an_mpi_job(name: str, num_ranks: int) -> None:
    script = [sys.executable, str(EXAMPLES / "systems.py"), "--of", name]
    plain = _run(*script[:-1], "plain").split("\n")
    said = _run(*mpirun(num_ranks), *script).split("\n")
    assert len(said[-5:-1]) == 4 and said[-5:-1] == plain[-5:-1]


@needs_mpi
def test_the_cluster_job(tmp_path: Path) -> None:
    prompts, answers = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    asked = (EXAMPLES / "prompts.jsonl").read_text("utf-8").splitlines()[:4]
    prompts.write_text("\n".join(asked) + "\n", "utf-8")
    model = str(EXAMPLES / "model" / "checkpoint")
    _run("/bin/sh", str(EXAMPLES / "cluster.sh"), model, str(prompts), str(answers))
    lines = [json.loads(line) for line in answers.read_text("utf-8").splitlines()]
    assert [line["id"] for line in lines] == [json.loads(line)["id"] for line in asked]
    assert not [line for line in lines if "error" in line]
