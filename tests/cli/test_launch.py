"""``fastdecode launch``: the lines that it builds, and a job that it runs."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from generate_jobs import GenerateJob, job_of
from limited_steps import StepLimit
from mpi_launch import FASTDECODE, PATHS, needs_mpi, run, running

from fastdecode.cli import launch
from fastdecode.cli.main import main
from fastdecode.core.config.instances import InstanceRole, PlacedInstance
from fastdecode.core.errors import ConfigError
from fastdecode.wire.mpirun_line import JobHost, JobLine, parse_hosts, vendor_of
from fastdecode.wire.ranks import LAUNCH_LINE
from rworker.tiers.disk import slot_files

ROOT = Path(__file__).parents[2]
SMALL = ("--r-threads", "1", "--kv-memory-gb", "0.01")
ON_TWO = ["launch", "--hosts", "localhost:2", *SMALL]


@pytest.fixture
def generate(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> GenerateJob:
    return job_of(tmp_path, tiny_checkpoint("llama"), 60, [9] * 6)


def test_hosts() -> None:
    assert parse_hosts("a:2, b,node-3.cluster:0") == (
        JobHost("a", 2),
        JobHost("b"),
        JobHost("node-3.cluster", 0),
    )
    for bad in ("", "a:", "a:-1", "a:x", "a,,b", "-x:1", "a:1,a:2", "a:0", "a b", "a;b", "a:99999"):
        with pytest.raises(ConfigError, match="--hosts="):
            parse_hosts(bad)


def test_launchers_are_told_apart() -> None:
    assert vendor_of("mpirun (Open MPI) 5.0.8\n") == "Open MPI"
    assert vendor_of("HYDRA build details:\n    Version: 4.3\n") == "MPICH"
    with pytest.raises(ConfigError, match="'Intel"):
        vendor_of("Intel(R) MPI Library\n")


def test_the_lines() -> None:
    hosts = parse_hosts("a:2,b:1,c:0")
    line = JobLine(("s", "x y"), ("r",), hosts, s_host="c", interface="eth0")
    words = line.words()
    assert words[0] == "mpirun" and "--bind-to none" in " ".join(words)
    assert words[-18:] == shlex.split(
        "-n 1 --host c:1 s 'x y' : -n 2 --host a:2 r : -n 1 --host b:1 r"
    )
    assert (
        words[words.index("btl_tcp_if_include") + 1]
        == words[words.index("prte_if_include") + 1]
        == "eth0"
    )
    assert shlex.split(line.shown().replace("\\\n", "")) == words
    mpich = JobLine(("s",), ("r",), hosts, vendor="MPICH", interface="eth0")
    assert mpich.shown().split(" \\\n    ") == [
        "mpirun -iface eth0 -hosts a:3,b:1",
        "-n 1 s",
        ": -n 3 r",
    ]
    instances = tuple(PlacedInstance(InstanceRole.BOTH, num) for num in (1, 2, 1))
    placed = JobLine(("s",), ("r",), parse_hosts("a:2,b:2"), instances=instances)
    assert placed.words()[-41:] == shlex.split(
        "-n 2 --host a:2 s : -n 1 --host a:1 r : -n 1 --host a:1 s : -n 1 --host a:1 r : "
        "-n 1 --host b:1 r : -n 1 --host b:1 s : -n 1 --host b:1 r"
    )
    mpich = JobLine(("s",), ("r",), parse_hosts("a:2,b:2"), vendor="MPICH", instances=instances)
    assert mpich.shown().split(" \\\n    ")[0] == "mpirun -hosts a:5,b:3"
    with pytest.raises(ConfigError, match="take 4 R-workers' places, and --hosts has room for 3"):
        JobLine(("s",), ("r",), parse_hosts("a:3"), instances=instances)
    assert "-n 2 --host a:2 s : -n 2" in " ".join(
        JobLine(("s",), ("r",), hosts, num_s_ranks=2).words()
    )
    staged = JobLine(("s",), ("r",), parse_hosts("a:2,b:2"), num_stages=2)
    assert "-n 1 --host a:1 s : -n 1 --host b:1 s : -n 2" in " ".join(staged.words())
    both = JobLine(("s",), ("r",), parse_hosts("a:2,b:2"), num_s_ranks=2, num_stages=2)
    assert "-n 2 --host a:2 s : -n 2 --host b:2 s : -n 2" in " ".join(both.words())
    on_one = JobLine(("s",), ("r",), parse_hosts("a:3,b:1"), num_stages=2)
    assert "-n 2 --host a:2 s : -n 3 --host a:3 r" in " ".join(on_one.words())
    with pytest.raises(ConfigError, match="isn't a multiple of 2"):
        JobLine(("s",), ("r",), hosts, num_stages=2)
    with pytest.raises(ConfigError, match="MPICH takes"):
        JobLine(("s",), ("r",), hosts, vendor="MPICH", interface="10.0.0.0/24")
    with pytest.raises(ConfigError, match="--interface"):
        JobLine(("s",), ("r",), hosts, interface="; rm")
    for bad in ("", "c:2", "-c", "c d"):
        with pytest.raises(ConfigError, match="--s-host"):
            JobLine(("s",), ("r",), hosts, s_host=bad)


def test_the_lines_of_stages_without_r_workers() -> None:
    """Their hosts' numbers are of stages, each of which may be several ranks."""
    hosts = parse_hosts("a:2,b,c:0")
    line = JobLine(("s",), ("r",), hosts, num_stages=3, has_r_workers=False)
    assert " ".join(line.words()).endswith("tcp -n 2 --host a:2 s : -n 1 --host b:1 s")
    both = JobLine(("s",), ("r",), hosts, num_stages=3, num_s_ranks=2, has_r_workers=False)
    assert " ".join(both.words()).endswith("-n 4 --host a:4 s : -n 2 --host b:2 s")
    mpich = JobLine(("s",), ("r",), hosts, num_stages=3, vendor="MPICH", has_r_workers=False)
    assert mpich.words() == shlex.split("mpirun -hosts a:2,b:1 -n 3 s")
    with pytest.raises(ConfigError, match="room for 3 where there are 4"):
        JobLine(("s",), ("r",), hosts, num_stages=4, has_r_workers=False)
    with pytest.raises(ConfigError, match="--s-host=c contradicts --hosts"):
        JobLine(("s",), ("r",), hosts, num_stages=3, s_host="c", has_r_workers=False)


@needs_mpi
@pytest.mark.parametrize("less", [["--kv-placement", "gpu"], ["--r-worker=tcp://a:1", "--r-worker",
                                                              "tcp://b:1"]])  # fmt: skip
def test_commands_that_need_no_r_workers_get_none(
    less: list[str], generate: GenerateJob, capsys: pytest.CaptureFixture[str]
) -> None:
    command, _, _ = generate
    more = ["--", *command, "--pp", "2", *less]
    assert main(["launch", "--hosts", "a,b", "--dry-run", *more]) == 0
    shown = capsys.readouterr().out
    assert "--host a:1" in shown and "--host b:1" in shown and " r-worker " not in shown
    for given in (["--kv-memory-gb", "1"], ["--r-threads", "1"]):
        assert main(["launch", "--hosts", "a,b", *given, "--dry-run", *more]) == 2
        assert f"{given[0]}" in capsys.readouterr().err


@needs_mpi
def test_stages_that_keep_kv_on_their_devices_are_launched(generate: GenerateJob) -> None:
    command, output, expected = generate
    stages = ["--pp", "2", "--kv-placement", "gpu", "--kv-memory-gb", "0.01"]
    launch = [*FASTDECODE, "launch", "--hosts", "localhost:2", "--", *command, *stages]
    outcome = run(launch, timeout_s=120)
    assert (outcome.exit_code, outcome.orphans) == (0, []), outcome.output
    assert output.read_text() == expected()


@needs_mpi
@pytest.mark.parametrize(
    ("options", "match"),
    [
        (["--hosts", "a:2"], "name a command behind --"),
        (["--hosts", "a:2", "--", "r-worker"], "one of generate, run-batch"),
        (["--hosts", "a:2", "--", "genrate"], "genrate cannot be launched"),
        (["--hosts", "a:2,a:1", "--", "generate"], "twice"),
        (["--hosts", "a:2", "--mpirun", "/nonexistent", "--", "doctor"], "/nonexistent"),
        (["--hosts", "a:2", "--s-host", "a b", "--", "doctor"], "--s-host"),
    ],
)
def test_options_that_are_refused(
    options: list[str], match: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["launch", *options]) == 2
    assert match in capsys.readouterr().err


@needs_mpi
def test_r_workers_that_are_launched_have_a_disk_each(
    generate: GenerateJob, tmp_path: Path
) -> None:
    command, output, expected = generate
    disk = ["--cache-disk", str(tmp_path / "kv"), "--cache-disk-gb", "0.01"]
    options = ["--hosts", "localhost:2", "--kv-memory-gb", "0.01", *disk, "--", *command]
    outcome = run([*FASTDECODE, "launch", *options], timeout_s=120)
    assert (outcome.exit_code, outcome.orphans) == (0, []), outcome.output
    assert "kept blocks on disk: 0 found" in outcome.output
    assert len(slot_files(tmp_path / "kv")) == 2
    assert output.read_text() == expected()


@needs_mpi
def test_a_dry_run_shows_the_line_and_runs_nothing(
    generate: GenerateJob, capsys: pytest.CaptureFixture[str]
) -> None:
    command, output, _ = generate
    assert main(["launch", "--hosts", "localhost:2", "--dry-run", "--", *command]) == 0
    shown = capsys.readouterr().out
    assert "-n 2 --host localhost:2" in shown and "r-worker --numa-node auto" in shown
    assert not output.exists()


@needs_mpi
def test_prompt_stages_are_launched_as_an_instance_on_hosts_without_r_workers(
    generate: GenerateJob, capsys: pytest.CaptureFixture[str]
) -> None:
    command, _, _ = generate
    stages = ["--pp", "2", "--prompt-pp", "1"]
    assert main(["launch", "--hosts", "a,b,p:0", "--dry-run", "--", *command, *stages]) == 0
    shown = capsys.readouterr().out
    assert re.findall(r"--host (\w):\d \S+ ([\w-]+)", shown) == [
        ("p", "generate"), ("p", "r-worker"), ("a", "generate"), ("b", "generate"),
        ("a", "r-worker"), ("b", "r-worker"),
    ]  # fmt: skip
    assert "--instances prefill:1,decode:2:pp=2" in shown


@needs_mpi
def test_a_job_whose_r_worker_is_killed_still_ends_with_the_s_workers_exit_code(
    generate: GenerateJob, limit: StepLimit
) -> None:
    command, output, expected = generate
    with running([*limit.fastdecode, *ON_TWO, "--", *command]) as job:
        workers = job.r_workers(2)
        job.wait_for_text(output)
        limit.lose(workers[0], signal.SIGKILL)
        outcome = job.wait()
    assert (outcome.exit_code, outcome.orphans) == (0, []), outcome
    assert output.read_text() == expected() and "is lost" in outcome.output


@needs_mpi
def test_a_job_whose_s_worker_is_killed_has_failed(generate: GenerateJob, limit: StepLimit) -> None:
    command, output, _ = generate
    with running([*limit.fastdecode, *ON_TWO, "--", *command]) as job:
        job.wait_for_text(output)
        (s_worker,) = [p for p in job.processes() if "--exit-code-file" in _ranks_words(p)]
        s_worker.send_signal(signal.SIGKILL)
        outcome = job.wait()
    assert (outcome.exit_code, outcome.orphans) == (4, []), outcome
    assert "the S-worker has died" in outcome.output


def _ranks_words(process: psutil.Process) -> list[str]:
    """The command line of a rank; nothing, of who launches it."""
    words = process.cmdline()
    return words if "python" in words[0] and "launch" not in words else []


@needs_mpi
def test_exit_codes_of_mpirun_pass_through(generate: GenerateJob) -> None:
    command, _, _ = generate
    launch = [*FASTDECODE, "launch", "--hosts", "localhost:1", "--"]
    outcome = run([*launch, *command, "--model", "/nonexistent"])
    assert (outcome.exit_code, outcome.orphans) == (2, []), outcome


@pytest.mark.parametrize(("code", "truth"), [(0, 0), (2, 2), (130, 130), (255, 4), (-9, 4)])
def test_exit_code_of_a_launcher_that_starts_no_rank(code: int, truth: int) -> None:
    assert launch._truthful(code, None, was_stopped=False) == truth


def test_ranks_are_told_the_line_that_launched_them(tmp_path: Path) -> None:
    mpirun, told = tmp_path / "mpirun", tmp_path / "told"
    mpirun.write_text(
        f"#!{sys.executable}\nimport os, pathlib, sys\n"
        "print('Open MPI')\n"
        f"pathlib.Path({str(told)!r}).write_text(os.environ.get({LAUNCH_LINE!r}, ''))\n"
    )
    mpirun.chmod(0o755)
    words = ["launch", "--mpirun", str(mpirun), "--hosts", "localhost:1", "--", "doctor"]
    run([*FASTDECODE, *words])  # whose ranks say nothing of how it has ended
    assert json.loads(told.read_text()) == words


EXITS = """
import pathlib, sys
if sys.argv[1:] == ["--version"]:
    print("Open MPI")
    sys.exit()
files = [sys.argv[i + 1] for i, word in enumerate(sys.argv) if word == "--exit-code-file"]
if code := pathlib.Path(sys.argv[0]).with_name("s-worker-says").read_text():
    pathlib.Path(files[-1]).write_text(code)
"""
"""An mpirun whose S-worker reports an exit code, or none, in the last file that it was given."""


@pytest.mark.parametrize(
    ("says", "mpirun_code", "code"), [("3", 9, 3), ("", 9, 9), ("", 1, 4), ("", 0, 4)]
)
def test_the_users_exit_code_file_gets_the_exit_code(
    says: str, mpirun_code: int, code: int, tmp_path: Path
) -> None:
    """And a job whose S-worker reports nothing ends with a line of its own."""
    mpirun, noted = tmp_path / "mpirun", tmp_path / "code"
    mpirun.write_text(f"#!{sys.executable}\n{EXITS}sys.exit({mpirun_code})")
    mpirun.chmod(0o755)
    (tmp_path / "s-worker-says").write_text(says)
    launch = [*FASTDECODE, "launch", "--mpirun", str(mpirun), "--hosts", "localhost:1", "--"]
    model = str(ROOT / "examples/model/checkpoint")
    command = ["generate", "--exit-code-file", str(noted), "--model", model]
    (tmp_path / "in").write_text("a\n")
    command += ["--input", str(tmp_path / "in"), "--output", str(tmp_path / "out")]
    outcome = run([*launch, *command])
    assert outcome.exit_code == code
    line = f"mpirun ended with exit code {mpirun_code}, and the S-worker reported no"
    assert (line in outcome.output) is (says == "")
    assert noted.read_text() == f"{code}\n"


STAYS = """
import pathlib, signal, sys
if sys.argv[2:]:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
pathlib.Path(sys.argv[1]).write_text("0")
signal.pause()
"""
"""An mpirun that stays once its S-worker has reported, for a rank that was stopped."""


@pytest.mark.parametrize(("words", "ended_by"), [([], signal.SIGTERM), (["deaf"], signal.SIGKILL)])
def test_an_mpirun_that_stays_after_the_report_is_ended(
    words: list[str], ended_by: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "_LOOK_S", 0.02)
    monkeypatch.setattr(launch, "_ENDING_S", 0.1)
    monkeypatch.setattr(launch, "_TERMINATING_S", 0.1)
    report = tmp_path / "report"
    line = [sys.executable, "-c", STAYS, str(report), *words]
    assert launch._run(line, signal.SIGUSR1, {**os.environ}, report) == (-ended_by, False)


SEES_OFF = """
import signal, sys
if sys.argv[1:] == ["--version"]:
    print("Open MPI")
    sys.exit()
stops = {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1}
signal.pthread_sigmask(signal.SIG_BLOCK, stops)
print("begins", flush=True)
signal.sigwait(stops)
print("sees them off", flush=True)
sys.stdin.read()
"""
"""An mpirun that goes on until its stdin ends, once it is told to stop."""


@pytest.mark.parametrize(
    ("stop", "its_code", "code"),
    [(signal.SIGINT, 7, 7), (signal.SIGTERM, 7, 7), (signal.SIGTERM, 1, 130)],
)
def test_mpirun_has_time_to_see_the_ranks_off(
    stop: signal.Signals, its_code: int, code: int, tmp_path: Path
) -> None:
    """The last: its ranks were killed before they could say anything."""
    mpirun = tmp_path / "mpirun"
    mpirun.write_text(f"#!{sys.executable}\n{SEES_OFF}sys.exit({its_code})\n")
    mpirun.chmod(0o755)
    words = ["launch", "--mpirun", str(mpirun), "--hosts", "localhost:1", "--", "doctor"]
    pipe, environ = subprocess.PIPE, {**os.environ, **PATHS}
    with subprocess.Popen(
        [*FASTDECODE, *words], stdin=pipe, stdout=pipe, text=True, env=environ
    ) as launch:
        assert launch.stdin is not None and launch.stdout is not None
        assert launch.stdout.readline() == "begins\n"
        launch.send_signal(stop)
        assert launch.stdout.readline() == "sees them off\n"
        launch.stdin.close()
        assert launch.wait(60) == code
