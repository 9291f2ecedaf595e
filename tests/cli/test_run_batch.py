"""``fastdecode run-batch`` as a user runs it: files, exit codes, interrupts,
kills, and the way back."""

from __future__ import annotations

import argparse
import contextlib
import gzip
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import pytest
from limited_steps import StepLimit

from examples import TRIES_ALL
from fastdecode.cli.jobs import _advise, resume_command
from fastdecode.cli.main import main
from fastdecode.jobs.job import JobResult
from fastdecode.wire.ranks import LAUNCH_LINE

# How often a running job is killed; more is a soak test.
NUM_KILLS = int(os.environ.get("FASTDECODE_TEST_KILLS", "20" if TRIES_ALL else "2"))


def line(custom_id: str, *, tokens: int = 6, **body: Any) -> str:
    asked = {"prompt": [5, 6, 7], "max_tokens": tokens, "ignore_eos": True, **body}
    request = {"custom_id": custom_id, "method": "POST", "url": "/v1/completions"}
    return json.dumps({**request, "body": {"return_token_ids": True, **asked}})


LINES = [line(f"id-{i}", prompt=[3 + i % 200] * (1 + i % 7), tokens=1 + i % 9) for i in range(40)]


class Command:
    """The command on one pair of files."""

    def __init__(self, directory: Path, model: Path) -> None:
        self.input, self.output = directory / "in.jsonl", directory / "out.jsonl"
        files = ["-i", str(self.input), "-o", str(self.output)]
        self._words = ["run-batch", "--model", str(model), *files]
        self._words += ["--dtype", "float32", "--kv-memory-gb", "0.01", "--r-threads", "1"]

    def write(self, lines: list[str]) -> None:
        self.input.write_text("\n".join(lines) + "\n")

    def run(self, *options: str) -> int:
        return main([*self._words, *options])

    def start(
        self, *options: str, limit: StepLimit | None = None, stdin: IO[bytes] | None = None
    ) -> subprocess.Popen[str]:
        code = "import sys; from fastdecode.cli.main import main; sys.exit(main(sys.argv[1:]))"
        fastdecode = [sys.executable, "-c", code] if limit is None else limit.fastdecode
        return subprocess.Popen(
            [*fastdecode, *self._words, *options],
            stdin=stdin,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    @property
    def num_answers(self) -> int:
        return self.output.read_bytes().count(b"\n") if self.output.exists() else 0

    @property
    def said(self) -> dict[str, Any]:
        """custom_id → tokens of its choices."""
        said = {}
        for text in self.output.read_text().splitlines():
            answer = json.loads(text)
            assert answer["custom_id"] not in said
            said[answer["custom_id"]] = [
                c["token_ids"] for c in answer["response"]["body"]["choices"]
            ]
        return said


@pytest.fixture
def command(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> Command:
    return Command(tmp_path, tiny_checkpoint("llama"))


def test_a_job_is_answered_and_isnt_done_twice(
    command: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command.write(LINES)
    summary, trace = tmp_path / "s.json", tmp_path / "t.json"
    assert command.run("--summary", str(summary), "--trace", str(trace), "--run-seed", "1") == 0
    told = capsys.readouterr().err
    assert "lines 40/40, 0 failed" in told
    assert "R-workers 1/1" in told
    assert set(command.said) == {f"id-{i}" for i in range(40)}
    assert [len(command.said[f"id-{i}"][0]) for i in range(9)] == list(range(1, 10))
    assert json.loads(summary.read_text())["requests"] == 40
    assert json.loads(trace.read_text())
    before = command.output.read_bytes()
    assert command.run() == 2
    assert "--resume" in capsys.readouterr().err
    assert command.run("--resume") == 0
    assert "nothing is left to do" in capsys.readouterr().err
    assert command.output.read_bytes() == before


def test_completions_equal_generates(
    command: Command, tmp_path: Path, tiny_checkpoint: Callable[..., Path]
) -> None:
    command.write([line("a", seed=3, n=2), line("b", prompt=[9], temperature=0)])
    assert command.run() == 0
    same = {"max_tokens": 6, "ignore_eos": True}
    simple = [
        {"id": "a", "prompt_token_ids": [5, 6, 7], **same, "seed": 3, "n": 2},
        {"id": "b", "prompt_token_ids": [9], **same, "temperature": 0},
    ]
    (tmp_path / "simple.jsonl").write_text("\n".join(map(json.dumps, simple)))
    files = ["-i", str(tmp_path / "simple.jsonl"), "-o", str(tmp_path / "simple-out.jsonl")]
    model = [str(tiny_checkpoint("llama")), "--dtype", "float32", "--kv-memory-gb", "0.01"]
    assert main(["generate", *model, *files]) == 0
    first, second = (
        json.loads(text) for text in (tmp_path / "simple-out.jsonl").read_text().splitlines()
    )
    said = {"a": [c["token_ids"] for c in first["completions"]], "b": [second["token_ids"]]}
    assert command.said == said


def test_failed_lines_are_told_and_can_be_retried(
    command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    command.write([*LINES[:2], line("long", prompt=[5] * 1000), line("bad", stream=True)])
    assert command.run() == 2
    assert "line 4 ('bad'): unsupported_field: stream is not supported" in capsys.readouterr().err
    assert not command.output.exists()
    assert command.run("--on-error", "skip") == 3
    assert "4 of 4 lines are answered" in (told := capsys.readouterr().err)
    assert "2 of them with an error" in told
    assert f"2 line(s) of {command.input} are bad and fail in every run" in told
    assert "--retry-errors" not in told
    codes = {
        json.loads(text)["response"]["status_code"]
        for text in command.output.read_text().splitlines()
    }
    assert codes == {200, 400}
    assert command.run("--on-error", "skip", "--resume", "--retry-errors") == 3
    assert command.num_answers == 4


def test_only_what_another_run_can_answer_is_to_be_run_again(
    capsys: pytest.CaptureFixture[str],
) -> None:
    args = argparse.Namespace(input=Path("in"), argv=["run-batch", "m"])
    _advise(JobResult(5, 5, 3, num_bad=2, num_run=5, num_run_failed=3), args)
    assert "the other failed lines again: fastdecode run-batch m --resume --retry-errors" in (
        capsys.readouterr().err
    )
    _advise(JobResult(2, 2, 1, num_run=1, num_run_failed=1, first_error="line 2: x"), args)
    told = capsys.readouterr().err
    assert "the failed lines again: " in told and "first error: line 2: x" in told
    assert "bad" not in told


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--retry-errors"], "--resume"),
        (["--sync-lines", "0"], "--sync-lines"),
        (["--temperature", "nan"], "temperature"),
        (["--run-seed", "-1"], "--run-seed"),
        (["--chat-template", "missing"], "missing"),
        (["--trace", "no/dir/t"], "no/dir/t"),
        (["--r-workers", "0"], "--r-workers"),
        (["--max-model-len", "100000"], "--max-model-len"),
    ],
)
def test_usage_errors_are_exit_code_2_and_leave_nothing(
    command: Command, options: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command.write(LINES[:1])
    assert command.run(*options) == 2
    assert named in (told := capsys.readouterr().err)
    assert "Traceback" not in told
    assert not list(command.output.parent.glob("out.jsonl*"))


def test_a_lost_worker_is_exit_code_4(
    command: Command, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from fastdecode.core.errors import WorkerError
    from fastdecode.engine.engine import Engine

    command.write(LINES)
    step, num_steps = Engine.step, iter(range(1000))

    def fail(engine: Engine) -> Any:
        if next(num_steps) == 4:
            raise WorkerError("R-worker r0 failed")
        return step(engine)

    monkeypatch.setattr(Engine, "step", fail)
    assert command.run("--run-seed", "1") == 4
    assert "to continue: fastdecode run-batch" in (told := capsys.readouterr().err)
    assert "R-worker r0 failed" in told
    monkeypatch.undo()
    assert 0 < command.num_answers < 40
    assert command.run("--run-seed", "1", "--resume") == 0
    assert len(command.said) == 40


def test_the_way_back_is_a_command_line() -> None:
    argv = ["run-batch", "-i", "a b", "--overwrite", "--n", "2"]
    assert resume_command(argv) == "fastdecode run-batch -i 'a b' --n 2 --resume"
    assert resume_command([*argv, "--resume", "--retry-errors"]) == resume_command(argv)
    launched = {LAUNCH_LINE: json.dumps(["launch", "--placement", "p.json", "--", *argv])}
    ours = [*argv, "--instances", "prefill:1,decode:1", "--exit-code-file", "/tmp/x"]
    assert resume_command(ours, launched) == (
        "fastdecode launch --placement p.json -- run-batch -i 'a b' --n 2 --resume"
    )


def _wait_for_answers(process: subprocess.Popen[str], command: Command, num_answers: int) -> None:
    deadline = time.monotonic() + 240
    while command.num_answers < num_answers and time.monotonic() < deadline:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.005)  # or a look at the file that it writes
            return


def _stop(process: subprocess.Popen[str], stop: signal.Signals, limit: StepLimit) -> None:
    """Ask a job to stop; it goes on once it has said that it will."""
    process.send_signal(stop)
    assert process.stderr is not None
    assert any("finishing requests" in line for line in process.stderr)  # reads no further
    limit.lift()


def test_killed_jobs_are_resumed_to_the_texts_of_an_undisturbed_one(
    command: Command, tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """Half of the lines are turns of conversations of twenty turns each. Kept
    blocks change nothing of it."""
    lines = []
    for i in range(400):
        whose = {"conversation_id": f"c{i % 20}"} if i % 2 else {}
        prompt = [3 + i % 200] * (1 + i % 7)
        lines.append(line(f"id-{i}", prompt=prompt, tokens=1 + i % 9, **whose))
    (tmp_path / "whole").mkdir()
    whole = Command(tmp_path / "whole", tiny_checkpoint("llama"))
    whole.write(lines)
    assert whole.run("--run-seed", "1") == 0
    command.write(lines)
    for kill in range(NUM_KILLS):
        process = command.start(
            "--resume", "--run-seed", "1", "--max-num-sequences", "4", "--prefix-cache", "on"
        )
        _wait_for_answers(process, command, command.num_answers + 1 + kill % 3)
        process.kill()
        process.communicate()
    assert command.num_answers >= NUM_KILLS
    assert command.run("--resume", "--run-seed", "1") == 0
    assert command.said == whole.said


def test_an_interrupt_finishes_what_runs_and_says_how_to_go_on(
    command: Command, limit: StepLimit
) -> None:
    command.write([line(f"id-{i}", tokens=3) for i in range(3000)])
    process = command.start("--max-num-sequences", "4", limit=limit)
    _wait_for_answers(process, command, 1)
    _stop(process, signal.SIGINT, limit)
    _, told = process.communicate(timeout=240)
    assert process.returncode == 130, told
    assert "to continue: fastdecode run-batch" in told
    assert 0 < len(command.said) < 3000


def test_a_job_of_standard_input_is_interrupted_and_goes_on(
    command: Command, monkeypatch: pytest.MonkeyPatch, limit: StepLimit
) -> None:
    """Compressed lines through a real pipe, a real signal, and the same lines again."""
    command.write([line(f"id-{i}", tokens=3) for i in range(600)])
    packed = command.input.with_name("packed.gz")
    packed.write_bytes(gzip.compress(command.input.read_bytes()))
    command.input = Path("-")
    words = ["--input", "-", "--max-num-sequences", "2"]
    with packed.open("rb") as fed:
        process = command.start(*words, limit=limit, stdin=fed)
        _wait_for_answers(process, command, 1)
        _stop(process, signal.SIGTERM, limit)
        _, told = process.communicate(timeout=240)
    assert process.returncode == 130, told
    assert "to continue, with the same lines on standard input: fastdecode run-batch" in told
    assert 0 < len(command.said) < 600
    with packed.open("rb") as fed:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(fed))
        assert command.run(*words, "--resume") == 0
    assert len(command.said) == 600


def test_a_links_target_is_written_and_nothing_but_files_is(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    requests, target, link, pipe = (
        tmp_path / name for name in ("in.jsonl", "target", "link", "pipe")
    )
    requests.write_text('{"id": "a", "prompt_token_ids": [5, 6], "max_tokens": 2}\n')
    link.symlink_to(target)
    os.mkfifo(pipe)
    for command in ("generate", "run-batch"):
        model = [str(tiny_checkpoint("llama")), "--kv-memory-gb", "0.01"]
        words = [command, *model, "-i", str(requests)]
        assert main([*words, "-o", str(link)]) == 0
        assert link.is_symlink() and target.read_text().count("\n") == 1
        target.unlink()
        assert main([*words, "-o", str(tmp_path)]) == 2
        assert "is a directory" in (told := capsys.readouterr().err) or "is not a file" in told
    assert main([*words, "-o", str(pipe)]) == 2
    assert "is not a file" in capsys.readouterr().err and pipe.is_fifo()
