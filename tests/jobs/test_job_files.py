"""The files of jobs: what is the same file, what can't be written, and who
holds what when two start at once."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from batch_jobs import NUM_LINES, Job
from fake_llm import FakeLLM, model_dir
from full_disk import files_of_at_most

from examples import TRIES_ALL
from fastdecode.core.errors import ConfigError, FastDecodeError
from fastdecode.core.files import check_paths, open_output, write_json
from fastdecode.core.progress import Progress
from fastdecode.jobs.job import BatchJob
from fastdecode.jobs.journal import OrderedOutput
from fastdecode.jobs.opening import open_ordered_job
from fastdecode.jobs.options import JobOptions
from fastdecode.jobs.stopping import Stopping

CHECKPOINT = Path(__file__).parents[2] / "examples" / "model" / "checkpoint"


def ordered(tmp_path: Path, num_lines: int, output: Path | None = None) -> tuple[BatchJob, Path]:
    source, output = tmp_path / "in.jsonl", output or tmp_path / "out.jsonl"
    lines = [
        json.dumps({"id": i, "prompt_token_ids": [i % 50], "seed": i}) for i in range(num_lines)
    ]
    source.write_text("".join(line + "\n" for line in lines))
    return open_ordered_job(
        JobOptions(input=source, output=output, on_error="skip"),
        model_dir(tmp_path),
        lambda text: None,
    ), output


def test_an_ordered_job_writes_lines_in_their_order_whatever_ends_first(tmp_path: Path) -> None:
    job, output = ordered(tmp_path, 200)
    with job:
        result = job.run(FakeLLM(width=16), Stopping(0), Progress(io.StringIO()))
    answers = [json.loads(line) for line in output.read_text().splitlines()]
    assert [answer["id"] for answer in answers] == list(range(200)) and result.num_run == 200


def test_an_interrupted_ordered_job_leaves_whole_lines_in_their_order(tmp_path: Path) -> None:
    steps = iter(range(1000))

    def interrupt() -> None:
        if next(steps) == 12:
            raise KeyboardInterrupt

    job, output = ordered(tmp_path, 200)
    with pytest.raises(KeyboardInterrupt), job:
        job.run(FakeLLM(width=16, before_step=interrupt), Stopping(0), Progress(io.StringIO()))
    raw = output.read_bytes()
    ids = [json.loads(line)["id"] for line in raw.splitlines()]
    assert raw.endswith(b"\n") and ids == sorted(ids) and 0 < len(ids) < 200


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_answers_wait_for_their_turn(tmp_path: Path, suffix: str) -> None:
    output = OrderedOutput(tmp_path / f"out.jsonl{suffix}", max_bytes_in_memory=1)
    output.begin()
    for number in range(5):
        output.expect(number)
    for number in (2, 1, 4, 0):
        output.append(number, None, {"id": number})
    output.close()
    raw = (tmp_path / f"out.jsonl{suffix}").read_bytes()
    lines = (gzip.decompress(raw) if suffix else raw).splitlines()
    assert [json.loads(line)["id"] for line in lines] == [0, 1, 2, 4]


def test_an_answer_that_can_t_be_kept_beside_has_a_type_of_ours(tmp_path: Path) -> None:
    output = OrderedOutput(tmp_path / "out.jsonl", max_bytes_in_memory=1)
    output.begin()
    output.expect(0)
    with files_of_at_most(100):
        with pytest.raises(FastDecodeError, match=r"out\.jsonl: File too large") as caught:
            output.append(1, None, {"text": "x" * 1000})
        output.close()
    assert caught.value.code == "output_failed"
    assert (tmp_path / "out.jsonl").read_text() == ""


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_full_disk_is_said(tmp_path: Path, suffix: str) -> None:
    full = tmp_path / f"full{suffix}"
    full.symlink_to("/dev/full")
    job, _ = ordered(tmp_path, 20, full)
    with pytest.raises(FastDecodeError, match="No space left") as failed, job:
        job.run(FakeLLM(), Stopping(0), Progress(io.StringIO()))
    assert failed.value.code == "output_failed"


def test_the_hard_link_of_an_input_is_the_input(
    tmp_path: Path, make_job: Callable[..., Job]
) -> None:
    job = make_job()
    os.link(job.input, job.output)
    before = job.input.read_bytes()
    for begin in ("new", "resume", "overwrite"):
        with pytest.raises(ConfigError, match="same file"):
            job.open(begin)
    with pytest.raises(ConfigError, match="same file"):
        check_paths(job.input, output=tmp_path / "other", summary=job.output)
    assert job.input.read_bytes() == before


def test_pipes_that_nobody_is_at_the_other_end_of_are_not_waited_for(tmp_path: Path) -> None:
    pipe, source = tmp_path / "pipe", tmp_path / "in"
    os.mkfifo(pipe)
    source.write_text("{}\n")
    with pytest.raises(ConfigError, match="not a file"):
        check_paths(pipe)
    for write in (lambda: open_output(pipe, "output"), lambda: write_json(pipe, {}, "summary")):
        with pytest.raises(ConfigError, match="a pipe that nobody reads"):
            write()


def test_a_pipe_that_is_read_is_written(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    job, _ = ordered(tmp_path, 3, pipe)
    with job:
        job.run(FakeLLM(), Stopping(0), Progress(io.StringIO()))
    assert os.read(reader, 1 << 16).count(b"\n") == 3
    os.close(reader)


@pytest.mark.parametrize("begin", ["new", "resume", "overwrite"])
def test_of_two_jobs_that_start_at_once_one_runs_and_the_manifest_is_its_own(
    make_job: Callable[..., Job], begin: str
) -> None:
    for round_ in range(8):
        job = make_job(str(round_))
        opened: list[BatchJob] = []
        refused: list[Exception] = []
        together = threading.Barrier(4)

        def start(
            seed: int,
            job: Job = job,
            opened: list[BatchJob] = opened,
            refused: list[Exception] = refused,
        ) -> None:
            together.wait(60)  # noqa: B023
            try:
                opened.append(job.open(begin, run_seed=seed))
            except ConfigError as error:
                refused.append(error)

        threads = [threading.Thread(target=start, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        (winner,) = opened
        assert len(refused) == 3 and {*map(type, refused)} == {ConfigError}
        with pytest.raises(ConfigError, match="another run is writing"):
            job.open("overwrite")
        manifest = json.loads(job.output.with_name("out.jsonl.manifest.json").read_text())
        assert winner._rules.run_seed == manifest["run_seed"]
        winner.__exit__(None, None, None)
        assert job.run(begin="resume").num_run == NUM_LINES


def test_progress_that_nobody_sees_ends_nothing() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    now, stream = [0.0], os.fdopen(writer, "w")
    with Progress(stream, clock=lambda: now[0]) as progress:
        progress.begin(3)
        now[0] = 100.0
        progress.update(done=1, num_failed=0, num_tokens=1, workers=(1, 1))
        assert "lines 1/3" in progress.line()
    with contextlib.suppress(OSError):
        stream.close()


@pytest.mark.parametrize("closing", ["2>&- >&-", *["2>&-", "2>/dev/full"] * TRIES_ALL])
def test_a_job_whose_stderr_is_closed_runs_to_its_end(closing: str, tmp_path: Path) -> None:
    """One with a tokenizer, which runs in a process of its own."""
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"id": 1, "prompt": "Who was it?", "max_tokens": 2}\n')
    code = "import sys; from fastdecode.cli.main import main; sys.exit(main(sys.argv[1:]))"
    words = ["generate", "--model", str(CHECKPOINT), "--kv-memory-gb", "0.01", "--r-threads", "1"]
    words += ["-i", str(source), "-o", str(output)]
    command = ["bash", "-c", f'exec "$@" {closing}', "bash", sys.executable, "-c", code, *words]
    done = subprocess.run(command, timeout=240)
    assert done.returncode == 0
    (answer,) = (json.loads(line) for line in output.read_text().splitlines())
    assert answer["id"] == 1
