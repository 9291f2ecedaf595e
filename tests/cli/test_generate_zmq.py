"""``fastdecode generate --r-worker``: R-workers are processes at
addresses; their loss changes no token."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeAlias

import pytest
from generate_jobs import GenerateJob, job_of
from limited_steps import StepLimit
from mpi_launch import running
from zmq_r_workers import at, r_workers

from examples import TRIES_ALL
from fastdecode import LLM, SamplingParams
from fastdecode.cli.main import main
from fastdecode.cli.workers import MOST_FILES
from fastdecode.core.config.groups import Cluster

pytest.importorskip("zmq", reason="needs pyzmq: pip install pyzmq")

Asked: TypeAlias = Callable[[int], GenerateJob]


@pytest.fixture
def asked(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> Asked:
    """``asked(max_tokens)``: a job, and what threads answer."""
    return partial(job_of, tmp_path, tiny_checkpoint("llama"))


def test_conversations_go_on_from_kept_blocks_at_addresses(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    turns = [
        {"id": f"{whose}{turn}", "prompt_token_ids": [place * 7 + turn] * 20,
         "conversation_id": whose, "temperature": 0, "ignore_eos": True, "max_tokens": 9}
        for turn in range(3) for place, whose in enumerate("ab", 1)
    ]  # fmt: skip
    (tmp_path / "turns.jsonl").write_text("".join(json.dumps(line) + "\n" for line in turns))
    options = ["generate", "--model", str(tiny_checkpoint("llama")), "--dtype", "float32"]
    options += ["--block-size", "16", "--input", str(tmp_path / "turns.jsonl"), "--output"]
    plain, kept = tmp_path / "plain.jsonl", tmp_path / "kept.jsonl"
    assert main([*options, str(plain), "--kv-memory-gb", "0.01"]) == 0
    with r_workers("*", "*") as (_, addresses):
        assert main([*options, str(kept), "--prefix-cache", "on", *at(addresses)]) == 0
    before, after = (
        [json.loads(line) for line in path.read_text().splitlines()] for path in (plain, kept)
    )
    assert [line["token_ids"] for line in after] == [line["token_ids"] for line in before]
    for line in after:  # a later turn runs what is new, and the last drawn token
        spared = 0 if line["id"].endswith("0") else line["usage"]["prompt_tokens"] - 21
        assert line["usage"].get("cached_tokens", 0) == spared, line["id"]


def test_tokens_are_those_of_threads_one_job_after_another(asked: Asked, tmp_path: Path) -> None:
    options, output, expected = asked(12)
    key, summary = tmp_path / "key", tmp_path / "summary.json"
    assert main(["r-worker", "--new-key", str(key)]) == 0
    with r_workers("*", "*", options=("--keep-serving", "--key", str(key))) as (jobs, addresses):
        for how in ([], ["--r-partition", "heads", "--lanes", "2"]):
            command = [*options, *how, *at(addresses), "--key", str(key), "--summary", str(summary)]
            assert main(command) == 0
            assert output.read_text() == expected()
        assert all(job.processes() for job in jobs)
    written = json.loads(summary.read_text())
    assert (written["r_workers"], written["r_workers_lost"], written["r_threads"]) == (2, 0, 1)


def test_ends_without_key_or_encryption_that_say_so(asked: Asked, tmp_path: Path) -> None:
    """R-workers reach each other like that, too: a replica is kept. A key finds none there."""
    options, output, expected = asked(6)
    assert main(["r-worker", "--new-key", str(tmp_path / "key")]) == 0
    with r_workers("*", "*", options=("--keep-serving", "--key", "none")) as (jobs, addresses):
        plain = [*at(addresses), "--key", "none"]
        assert main([*options, *plain, "--replicas", "1"]) == 0
        assert output.read_text() == expected()
        assert main(["doctor", *plain]) == 0
        assert main(["doctor", *at(addresses), "--key", str(tmp_path / "key")]) == 1
        assert all("nothing between hosts is encrypted" in job.output() for job in jobs)


def test_the_python_api_and_workers_that_end_with_it(tiny_checkpoint: Callable[..., Path]) -> None:
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    path = str(tiny_checkpoint("llama"))
    with LLM(path, dtype="float32", kv_memory_gb=0.01, r_threads=1) as llm:
        expected = [x.completions for x in llm.generate([[5, 6, 7], [9]], params)]
    with r_workers("*", "*") as (jobs, addresses):
        with LLM(path, dtype="float32", r_worker_addresses=addresses) as llm:
            assert [x.completions for x in llm.generate([[5, 6, 7], [9]], params)] == expected
        for job in jobs:
            outcome = job.wait()
            assert (outcome.exit_code, outcome.orphans) == (0, []), outcome


@pytest.mark.parametrize("stop", [signal.SIGTERM, *[signal.SIGINT] * TRIES_ALL])
def test_told_to_stop_it_leaves_whole_lines_and_its_r_workers_end(
    stop: signal.Signals, asked: Asked, limit: StepLimit
) -> None:
    options, output, expected = asked(400)  # far from its end when it goes on
    with r_workers("*", "*") as (jobs, addresses):
        with running([*limit.fastdecode, *options, *at(addresses)]) as s_worker:
            s_worker.wait_for_text(output)
            s_worker.process.send_signal(stop)
            s_worker.wait_until(lambda: "stopping after this step" in s_worker.output())
            limit.lift()
            outcome = s_worker.wait()
        assert (outcome.exit_code, outcome.orphans) == (130, []), outcome
        assert [job.wait().exit_code for job in jobs] == [0, 0]
    answered = output.read_text()
    assert answered.endswith("\n") and expected().startswith(answered) and answered != expected()
    assert "interrupted; 1 of 8 answers are in" in outcome.output


LOSSES = [(signal.SIGSTOP, "sequences")]
MORE_LOSSES = [(signal.SIGKILL, "sequences"), (signal.SIGKILL, "heads")]


@pytest.mark.parametrize(("trouble", "partition"), LOSSES + MORE_LOSSES * TRIES_ALL)
def test_a_lost_r_worker_changes_no_token(
    trouble: signal.Signals, partition: str, asked: Asked, tmp_path: Path, limit: StepLimit
) -> None:
    options, output, expected = asked(60)
    summary = tmp_path / "summary.json"
    with r_workers("*", "*") as (jobs, addresses):
        command = [*limit.fastdecode, *options, *at(addresses)]
        command += ["--summary", str(summary), "--worker-silence-s", "1"]
        with running([*command, "--r-partition", partition]) as s_worker:
            s_worker.wait_for_text(output)
            limit.lose(jobs[0].process, trouble)
            outcome = s_worker.wait()
    assert (outcome.exit_code, outcome.orphans) == (0, []), outcome  # every request was answered
    assert output.read_text() == expected(), outcome.output
    assert f"R-worker {addresses[0]} is lost" in outcome.output
    written = json.loads(summary.read_text())
    assert written["r_workers_lost"] == 1 and written["recomputed"] > 0


def test_more_connections_than_an_r_worker_takes_change_no_token(
    asked: Asked, limit: StepLimit
) -> None:
    """They wait outside; who is served goes on being served."""
    options, output, expected = asked(60)
    with r_workers("*") as ((job,), (address,)), contextlib.ExitStack() as strangers:
        with running([*limit.fastdecode, *options, *at([address])]) as s_worker:
            s_worker.wait_for_text(output)
            host, port = address.removeprefix("tcp://").split(":")
            r_worker = job.process

            def is_full() -> bool:
                for _ in range(MOST_FILES - r_worker.num_fds()):
                    stranger = strangers.enter_context(socket.socket())
                    stranger.setblocking(False)
                    stranger.connect_ex((host, int(port)))
                return r_worker.num_fds() == MOST_FILES

            job.wait_until(is_full)
            limit.lift()
            outcome = s_worker.wait()
        assert (outcome.exit_code, outcome.orphans) == (0, []), outcome
        assert output.read_text() == expected() and "is lost" not in outcome.output
        assert job.wait().exit_code == 0


SPLIT, WHOLE = (
    pytest.param(["--split-tokens", "64"], id="split"),
    pytest.param([], id="whole"),  # as one that joins later
)


@pytest.mark.parametrize("split", [SPLIT, WHOLE][: 1 + TRIES_ALL])
def test_a_replacement_at_the_same_address_joins(
    split: list[str], asked: Asked, tmp_path: Path, limit: StepLimit
) -> None:
    options, output, expected = asked(40)
    options += split
    summary = tmp_path / "summary.json"
    with r_workers("*", "*", options=("--silence-s", "60")) as (jobs, addresses):
        command = [*limit.fastdecode, *options, *at(addresses), "--summary", str(summary)]
        command += ["--max-num-sequences", "1", "--worker-silence-s", "60"]
        with running(command) as s_worker:
            s_worker.wait_for_text(output)
            jobs[0].kill()
            with r_workers(addresses[0].rpartition(":")[2]):
                # It outlives the other one, so that the end is the replacement's work.
                s_worker.wait_until(lambda: "has replaced an R-worker" in s_worker.output())
                limit.lose(jobs[1].process, signal.SIGKILL)
                outcome = s_worker.wait()
    assert (outcome.exit_code, outcome.orphans) == (0, []), outcome
    assert output.read_text() == expected(), outcome.output
    written = json.loads(summary.read_text())
    assert (written["r_workers_lost"], written["r_workers_rejoined"]) == (1, 1)


def test_when_all_are_lost_the_exit_code_says_so(asked: Asked, limit: StepLimit) -> None:
    options, output, _ = asked(60)
    options += ["--worker-timeout-s", "2"]
    with (
        r_workers("*") as ((job,), (address,)),
        running([*limit.fastdecode, *options, *at([address])]) as s_worker,
    ):
        s_worker.wait_for_text(output)
        limit.lose(job.process, signal.SIGKILL)
        outcome = s_worker.wait()
    assert (outcome.exit_code, outcome.orphans) == (4, []), outcome
    assert "workers were lost" in outcome.output and "Traceback" not in outcome.output


def test_an_s_worker_that_was_stopped_finds_its_r_workers_again(
    asked: Asked, tmp_path: Path, limit: StepLimit
) -> None:
    """They have given it up meanwhile, and let go of their caches; they listen on."""
    options, output, expected = asked(60)
    summary = tmp_path / "summary.json"
    quick = ("--silence-s", "1", "--log-level", "info")
    with r_workers("*", "*", options=quick) as (jobs, addresses):
        command = [*limit.fastdecode, *options, *at(addresses)]
        command += ["--summary", str(summary), "--worker-silence-s", "1"]
        with running(command) as s_worker:
            s_worker.wait_for_text(output)
            s_worker.process.suspend()
            limit.lift()
            for job in jobs:
                job.wait_until(lambda job=job: "goes on without a peer" in job.output())
            s_worker.process.resume()
            outcome = s_worker.wait()
        ends = [job.wait() for job in jobs]
    assert (outcome.exit_code, outcome.orphans) == (0, []), outcome
    assert output.read_text() == expected(), outcome.output
    assert json.loads(summary.read_text())["r_workers_rejoined"] >= 1
    assert [end.exit_code for end in ends] == [0, 0], ends


def test_a_job_starts_without_an_r_worker_that_joins_later(
    asked: Asked, tmp_path: Path, limit: StepLimit
) -> None:
    options, output, expected = asked(40)
    summary = tmp_path / "summary.json"
    with r_workers("*") as (_, addresses), socket.socket() as kept:
        # Nobody else is given the port meanwhile, and who sets this option, too, may listen there.
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        kept.bind(("127.0.0.1", 0))
        later = kept.getsockname()[1]
        command = [*limit.fastdecode, *options, *at([*addresses, f"tcp://127.0.0.1:{later}"])]
        command += ["--summary", str(summary), "--max-num-sequences", "1"]
        command += ["--worker-timeout-s", "10"]  # is how long it looks for the other
        with running(command) as s_worker:
            s_worker.wait_for_text(output)
            with r_workers(str(later)):
                s_worker.wait_until(lambda: "has replaced an R-worker" in s_worker.output())
                limit.lift()
                outcome = s_worker.wait()
    assert (outcome.exit_code, outcome.orphans) == (0, []), outcome
    assert output.read_text() == expected(), outcome.output
    assert (
        f"the job starts with 1 of 2 R-workers: can't reach R-worker tcp://127.0.0.1:{later}"
        in outcome.output
    )
    assert json.loads(summary.read_text())["r_workers_rejoined"] >= 1


def test_a_job_without_any_is_refused(asked: Asked) -> None:
    options, _, _ = asked(1)
    assert main([*options, "--worker-timeout-s", "1", *at(["tcp://127.0.0.1:9"])]) == 4


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (
            ["--r-worker", "tcp://127.0.0.1:1", "--r-worker", "tcp://127.0.0.1:1"],
            "each address once",
        ),
        (["--r-worker", "127.0.0.1:1"], "not of the form tcp://HOST:PORT"),
        (["--r-worker", "tcp://10.0.0.1:1"], "needs a key"),
        (["--r-worker", "tcp://127.0.0.1:1", "--key", "/nonexistent"], "/nonexistent"),
        (["--key", "/nonexistent"], "for R-workers and instances at addresses"),
        (
            ["--r-worker", "tcp://127.0.0.1:1", "--kv-memory-gb", "1"],
            "give --kv-memory-gb to each `fastdecode r-worker`",
        ),
        (
            ["--r-worker", "tcp://127.0.0.1:1", "--r-threads", "2"],
            "give --threads to each `fastdecode r-worker`",
        ),
        (["--worker-silence-s", "nan"], "--worker-silence-s nan"),
        (["--worker-silence-s", "0.4"], "--worker-silence-s 0.4"),
    ],
)
def test_options_that_are_refused(
    options: list[str], match: str, asked: Asked, capsys: pytest.CaptureFixture[str]
) -> None:
    command, _, _ = asked(1)
    assert main([*command, *options]) == 2
    assert match in capsys.readouterr().err


def test_the_least_silence() -> None:
    assert Cluster(worker_silence_s=0.5).worker_silence_s == 0.5
