"""``fastdecode doctor``: what it finds right and wrong, alone, in an MPI job, and at addresses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mpi_launch import FASTDECODE, mpirun, needs_mpi, run, running
from values import replace

from fastdecode.cli.main import main
from fastdecode.core.errors import WorkerError
from fastdecode.core.host.facts import HostFacts, lacks_for_triton, this_host
from fastdecode.measure.doctor import LinkFacts, ModelFacts, WorkerFacts, examine_all, judge
from fastdecode.wire.messages import Report

HERE = HostFacts(
    "s0", ("python 3.12.1", "fastdecode 0.1.0", "numpy 2.1.0"), "Open MPI v5.0.8", (0, 1), 2,
    ("0-1",), "madvise", 10**10, ("eth0 10.0.0.1",),
)  # fmt: skip
THERE = replace(HERE, host="r0", cpus=(0, 1, 2, 3), num_host_cpus=4, numa_cpus=("0-3",))
GOOD = Report("rank 1 on r0", THERE, num_threads=4, kv_bytes=10**9, model_hash="")
FAST = LinkFacts(50e-6, 5e9)


def found(
    report: Report, link: LinkFacts = FAST, here: HostFacts = HERE, model: str | None = None
) -> dict[str, str]:
    """What isn't right: check → level."""
    known = None if model is None else ModelFacts(model, 131_072, 655_360)
    findings = list(judge(here, [WorkerFacts("R-worker rank 1", report, link)], known))
    assert all(finding.mend for finding in findings if finding.level != "PASS")
    return {finding.check: finding.level for finding in findings if finding.level != "PASS"}


def on(host: HostFacts) -> Report:
    return replace(GOOD, host=host)


@pytest.mark.parametrize(
    "name", ["OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY"]
)
def test_doctor_names_variables_that_bind_threads(name: str) -> None:
    (finding,) = [each for each in judge(HERE, [], environment={name: "close"})
                  if each.level == "WARN"]  # fmt: skip
    assert finding.check == "binding" and f"{name}=close" in finding.text


def test_doctor_shows_the_cpu_quota() -> None:
    (cores,) = [each.text for each in judge(HERE, [], cpu_quota=0.5) if each.check == "cores"]
    assert "for 0.5 CPU(s) of time" in cores


def test_a_good_set_of_hosts_has_nothing_wrong() -> None:
    assert found(GOOD, model="abc") == {}


@pytest.mark.parametrize(
    ("report", "wrong"),
    [
        (on(replace(THERE, versions=("fastdecode 0.2.0",))), {"versions": "WARN"}),
        (on(replace(THERE, versions=("fastdecode 0.1.0", "numpy 1.26.0"))), {"versions": "WARN"}),
        (on(replace(THERE, mpi="MPICH 4.2")), {"versions": "FAIL"}),
        (replace(GOOD, model_hash="xyz"), {"model": "FAIL"}),
        (on(replace(THERE, huge_pages="never")), {"huge pages": "WARN"}),
        (on(replace(THERE, cpus=(0, 1))), {"cores": "WARN", "binding": "WARN"}),
        (on(replace(THERE, numa_cpus=("0-1", "2-3"))), {"binding": "WARN"}),
        (replace(GOOD, kv_bytes=2 * 10**10), {"memory": "FAIL"}),
        (replace(GOOD, kv_bytes=95 * 10**8), {"memory": "WARN"}),
    ],
)
def test_what_is_wrong_is_found(report: Report, wrong: dict[str, str]) -> None:
    assert found(report, model="abc") == wrong


@pytest.mark.parametrize(
    ("num_workers", "num_cores", "rate", "tokens"),
    [
        (1, 16, 1.9e9, "1 of them: at most 2,899 tokens/s"),
        (8, 16, 1.9e9, "4 of them: at most 11,597 tokens/s"),
        (2, 64, 6.7e9, "2 of them: at most 20,447 tokens/s"),
    ],
)
def test_what_zeromqs_threads_carry_bounds_a_model(
    num_workers: int, num_cores: int, rate: float, tokens: str
) -> None:
    """An 8B Llama sends and gets back 655,360 bytes a token."""
    here = replace(HERE, cpus=tuple(range(num_cores)))
    link = LinkFacts(50e-6, 5e9, rate)
    workers = [WorkerFacts(f"R-worker {i}", GOOD, link) for i in range(num_workers)]
    findings = judge(here, workers, ModelFacts("abc", 131_072, 655_360))
    (found,) = [finding for finding in findings if finding.check == "ZeroMQ I/O"]
    assert tokens in found.text
    without = judge(here, [WorkerFacts("R-worker", GOOD, FAST)])
    assert "ZeroMQ I/O" not in [finding.check for finding in without]


def test_a_slow_link_and_an_r_worker_that_is_not_there() -> None:
    assert found(GOOD, LinkFacts(5e-3, 5e9)) == {"link": "WARN"}
    assert found(GOOD, LinkFacts(5e-5, 1e8)) == {"link": "WARN"}
    here = "R-worker tcp://r0:5600"
    (reach, *_) = judge(HERE, [WorkerFacts(here, error="crashed", code="worker_failed")])
    assert (reach.level, reach.text) == ("FAIL", f"{here}: crashed") and "restart" in reach.mend


@pytest.mark.parametrize("code", ["busy", "worker_unreachable", "connection_closed"])
def test_an_error_with_a_remedy_gets_no_other(code: str) -> None:
    error = "can't use R-worker r0: wait for it"
    (found, *_) = judge(HERE, [WorkerFacts("R-worker r0", GOOD, error=error, code=code)])
    assert (found.level, found.text, found.mend) == ("FAIL", error, "")


class Asked:
    """An R-worker, as the doctor asks it: what happens is told ``story``."""

    heard_s = None

    def __init__(self, peer: str, story: list[str], answer: Report | None) -> None:
        self.peer = peer
        self._story, self._answer = story, answer

    def send(self, message: object) -> None:
        self._story.append(f"{type(message).__name__} to {self.peer}")

    def receive(self, timeout_s: float) -> Report:
        self._story.append(f"{self.peer} is waited for")
        if self._answer is None or type(self._answer) is not Report:
            raise WorkerError(f"{self.peer} hasn't answered within {timeout_s:g} s")
        answer, self._answer = self._answer, None
        return answer


def test_all_are_asked_at_once_and_each_finding_is_told_as_it_is_known() -> None:
    story: list[str] = []
    asked: list[Any] = [Asked("r0", story, None), WorkerFacts("r1", error="nobody there")]
    asked.append(Asked("r2", story, GOOD))
    findings = judge(HERE, examine_all(asked))
    assert next(findings).text == "r1: nobody there" and story == ["Inspect to r0"]
    assert next(findings).text.startswith("r0 hasn't answered within 30 s")
    assert story == ["Inspect to r0", "Inspect to r2", "r0 is waited for"]
    assert next(findings).check == "serve", "its link couldn't be measured"
    assert story[3] == "r2 is waited for"
    assert next(findings).check == "versions"


def test_triton_without_a_compiler_is_told(tmp_path: Path) -> None:
    """Its kernels are built when they are first run, and nobody would know why they aren't."""

    def lacks(*, module: object = "", program: str | None = "/usr/bin/gcc") -> str:
        return lacks_for_triton(lambda name: module, lambda name: program, tmp_path)

    assert lacks(module=None, program=None) == ""
    assert "C compiler" in lacks(program=None)
    assert "Python.h" in lacks()
    (tmp_path / "Python.h").touch()
    assert lacks() == ""
    (finding, *_) = judge(HERE, [], None, lacks(program=None))
    assert (finding.level, finding.check) == ("WARN", "kernels") and "gcc" in finding.mend


@pytest.mark.parametrize(("value", "warns"), [("1", True), ("0", False), (None, False)])
def test_tf32_by_the_environment_is_named(value: str | None, warns: bool) -> None:
    environment = {} if value is None else {"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": value}
    checks = [finding.check for finding in judge(HERE, [], environment=environment)]
    assert ("float32" in checks) is warns


def test_sharing_cores_with_the_s_worker_counts() -> None:
    assert found(on(replace(THERE, host="s0"))) == {"cores": "WARN"}


def test_this_host_alone(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["doctor", "--json"])
    written = json.loads(capsys.readouterr().out)
    assert code == (1 if any(x["level"] == "FAIL" for x in written["findings"]) else 0)
    assert written["s_worker"]["host"] == this_host().host and written["r_workers"] == []
    texts = {x["check"]: x["text"] for x in written["findings"]}
    assert "CPU(s) may be used" in texts["cores"] and "GB free" in texts["memory"]
    assert "no R-worker was asked" in texts["versions"]


def test_a_wrong_address_names_the_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--r-worker", "127.0.0.1:1"]) == 1
    assert "FAIL  transport: --r-worker 127.0.0.1:1 is not of the form" in capsys.readouterr().out


@needs_mpi
def test_in_an_mpi_job(tmp_path: Path) -> None:
    options = ["doctor", "--kv-memory-gb", "0.1", "--r-threads", "1"]
    command = [*mpirun(3), *FASTDECODE, *options]
    outcome = run(command)
    assert (outcome.exit_code, outcome.orphans) == (0, []), outcome
    assert "2 R-worker(s) answered" in outcome.output and outcome.output.count("link: ") == 2
    assert outcome.output.count("neighbours: ") == 2 and " GB/s; with --replicas" in outcome.output
    assert "PASS  mpi: Open MPI" in outcome.output and "FAIL  " not in outcome.output


@needs_mpi
def test_another_mpis_launcher_is_found_out() -> None:
    outcome = run([*FASTDECODE, "doctor"], PMI_SIZE="4", PMI_RANK="0")
    assert outcome.exit_code == 1 and "the launcher started 4 ranks" in outcome.output, outcome
    assert "Traceback" not in outcome.output


def test_at_addresses_where_a_job_is_served_afterwards(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("zmq", reason="needs pyzmq: pip install pyzmq")
    model = str(tiny_checkpoint("llama"))
    source = tmp_path / "in.jsonl"
    output = tmp_path / "out.jsonl"
    source.write_text('{"id": 1, "prompt_token_ids": [5], "max_tokens": 2, "temperature": 0}\n')
    command = [*FASTDECODE, "r-worker", "--bind", "tcp://127.0.0.1:*"]
    command += ["--threads", "1", "--kv-memory-gb", "0.1"]
    with running([*command, "--model-hash", "another"]) as job:
        address = job.address()
        reached = ["doctor", "--r-worker", address, "--model", model, "--json"]
        for more, kinds in (
            (["--r-worker", "tcp://127.0.0.1:9"], ["model", "reach"]),
            ([], ["model"]),
        ):
            main([*reached, *more])
            written = json.loads(capsys.readouterr().out)
            wrong = {x["check"]: x["text"] for x in written["findings"] if x["level"] == "FAIL"}
            assert sorted(wrong) == kinds and "another" in wrong["model"], wrong
            assert not more or "127.0.0.1:9" in wrong["reach"]
            assert written["r_workers"][0]["link"]["bytes_per_s"] > 0
        files = ["-i", str(source), "-o", str(output)]
        assert main(["generate", model, *files, "--r-worker", address]) == 4
        assert "another" in capsys.readouterr().err  # it was there, and refused the wrong model
