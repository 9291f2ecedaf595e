"""A batch job that goes on: after a kill at any byte, after errors, and when it may not."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from batch_jobs import LINES, NUM_LINES, Job
from fake_llm import FakeLLM, model_dir

from fastdecode.core.errors import CapacityError, ConfigError, FastDecodeError, RequestError
from fastdecode.core.sequence import PromptRequest
from fastdecode.jobs import journal


def test_a_run_torn_at_any_byte_is_resumed_to_the_same_texts(make_job: Callable[..., Job]) -> None:
    whole = make_job("whole", LINES[:4])
    whole.run(run_seed=7)
    manifest = (whole.output.parent / "out.jsonl.manifest.json").read_bytes()
    raw = whole.output.read_bytes()
    job = make_job("torn", LINES[:4])
    for size in range(0, len(raw), 31):
        for tail in (b"", b"\0" * 13):
            job.output.write_bytes(raw[:size] + tail)
            (job.output.parent / "out.jsonl.manifest.json").write_bytes(manifest)
            job.run(begin="resume", llm=(llm := FakeLLM()))
            assert job.said == whole.said
            kept = raw[:size].count(b"\n")
            assert job.output.read_bytes().splitlines()[:kept] == raw.splitlines()[:kept]
            assert llm.num_served == 4 - kept


def _run_until_killed(job: Job, num_bytes: int) -> None:
    """In a child process: run, and die by SIGKILL when so many bytes of the
    output are written, even within a line."""
    written = 0

    def write_all(fd: int, data: bytes) -> None:
        nonlocal written
        if written + len(data) >= num_bytes:
            os.write(fd, data[: num_bytes - written])
            os.kill(os.getpid(), signal.SIGKILL)
        written += os.write(fd, data)

    journal.write_whole = write_all
    job.run(begin="resume", run_seed=7)


def test_killed_fifty_times_at_random_bytes_nothing_is_lost_or_doubled(
    make_job: Callable[..., Job],
) -> None:
    whole = make_job("whole")
    whole.run(run_seed=7)
    size = whole.output.stat().st_size
    chance = random.Random(5)
    num_kills = 0
    for round_ in range(10):
        job = make_job(str(round_))
        for _ in range(5):
            pid = os.fork()
            if pid == 0:
                _run_until_killed(job, chance.randrange(1, size // 5))
                os._exit(0)
            _, status = os.waitpid(pid, 0)
            num_kills += os.WIFSIGNALED(status)
        result = job.run(begin="resume", run_seed=7)
        assert (result.num_done, result.num_failed) == (NUM_LINES, 0)
        assert job.said == whole.said
    assert num_kills >= 45


def test_an_output_is_neither_overwritten_nor_gone_on_with_unasked(
    make_job: Callable[..., Job],
) -> None:
    job = make_job()
    job.run()
    before = job.output.read_bytes()
    with pytest.raises(ConfigError, match="--resume"):
        job.open()
    assert job.output.read_bytes() == before
    with job.open("resume") as opened:
        assert opened.num_pending == 0
    assert job.output.read_bytes() == before
    assert job.run(begin="overwrite").num_run == NUM_LINES
    assert job.output.read_bytes() != before


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"pp": 2}, None),
        ({"replicas": 1}, None),
        ({"prefix_cache": "off"}, "prefix_cache is off"),
        ({}, None),
    ],
    ids=str,
)
def test_a_resumed_job_says_why_it_finds_no_kv_at_addresses(
    make_job: Callable[..., Job], options: dict[str, Any], reason: str | None
) -> None:
    job = make_job()
    engine = {"r_worker_addresses": ("tcp://127.0.0.1:5600", "tcp://127.0.0.1:5601"), **options}
    job.open(engine=engine).__exit__(None, None, None)
    assert not any("without KV" in text for text in job.told)
    job.open("resume", engine=engine).__exit__(None, None, None)
    told = [text for text in job.told if "resuming without KV of the run before" in text]
    assert [str(reason) in text for text in told] == ([] if reason is None else [True])


def test_resume_without_an_output_begins_one(make_job: Callable[..., Job]) -> None:
    job = make_job()
    assert job.run(begin="resume").num_run == NUM_LINES
    # A run that ended before its first answer leaves nothing to protect.
    early = make_job("early")
    early.open().__exit__(None, None, None)
    assert early.output.read_bytes() == b""
    assert early.run().num_run == NUM_LINES


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"sampling": {"temperature": 0.5}}, "sampling temperature: nothing then, 0.5 now"),
        ({"run_seed": 8}, "run_seed: 7 then, 8 now"),
        ({"max_model_len": 64}, "max_model_len: 128 then, 64 now"),
        ({"lines": LINES[1:]}, "the input file has changed"),
        ({"weights": True}, "the model's model.safetensors has changed"),
        ({"version": True}, "version"),
        ({"dtype": True}, "dtype"),
    ],
)
def test_a_mismatched_resume_is_refused_and_says_what_differs(
    make_job: Callable[..., Job], tmp_path: Path, change: dict[str, Any], named: str
) -> None:
    job = make_job()
    job.run(run_seed=7)
    before = job.output.read_bytes()
    options = {**change}
    if "lines" in options:
        job.write(options.pop("lines"))
    if options.pop("weights", False):
        job.model = model_dir(tmp_path)
        weights = job.model / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    for field in ("version", "dtype"):
        if options.pop(field, False):
            path = job.output.with_name("out.jsonl.manifest.json")
            path.write_text(json.dumps({**json.loads(path.read_text()), field: "other"}))
    with pytest.raises(ConfigError) as caught:
        job.open("resume", **options)
    assert named in str(caught.value)
    assert job.output.read_bytes() == before


def test_a_resume_without_its_manifest_is_refused(make_job: Callable[..., Job]) -> None:
    job = make_job()
    job.run()
    path = job.output.with_name("out.jsonl.manifest.json")
    for content in (
        b"{",
        b"[]",
        b'{"format": "another"}',
        path.read_bytes().replace(b'"created": "20', b'"created": "x'),
    ):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match="manifest"):
            job.open("resume")
    path.unlink()
    with pytest.raises(ConfigError, match="manifest"):
        job.open("resume")


def test_an_output_that_somebody_changed_is_refused(make_job: Callable[..., Job]) -> None:
    job = make_job()
    job.run()
    raw = job.output.read_bytes().splitlines(keepends=True)
    number = job.answers[-1]["id"].rpartition("_")[2].encode() + b'"'
    cases = {
        "line 4 of .* is not an answer": [*raw[:3], b"half a li\n", *raw[3:]],
        "second time": [*raw, raw[0]],
        "is not an answer of the run": [raw[0].replace(b"batch_req_", b"batch_req_0"), *raw[1:]],
        "1 of .* is not an answer of the run": [b'{"id": "batch_req_x"}\n', *raw],
        "answers line 31 ": [*raw[:-1], raw[-1].replace(b"_" + number, b'_31"', 1)],
        "not in shard 1/1": [*raw[:-1], raw[-1].replace(b"_" + number, b'_%d"' % 10**15, 1)],
    }
    for problem, lines in cases.items():
        job.output.write_bytes(b"".join(lines))
        with pytest.raises(ConfigError, match=problem):
            job.open("resume")
        assert job.output.read_bytes() == b"".join(lines)


def test_errors_stay_until_they_are_to_be_retried(make_job: Callable[..., Job]) -> None:
    def fail(request: PromptRequest) -> FastDecodeError | None:
        place = int(request.request_id.split(".")[0])
        kinds = [CapacityError("no room"), RequestError("bad", code="bad"), None]
        return kinds[place % 3] if place < 7 else None

    job, good = make_job("job"), make_job("good")
    good.run(run_seed=7)
    result = job.run(FakeLLM(fail=fail), run_seed=7)
    assert (result.num_done, result.num_failed) == (NUM_LINES, 4)
    statuses = sorted(answer["response"]["status_code"] for answer in job.answers)
    assert statuses == [200] * 26 + [400] * 2 + [503] * 2
    with pytest.raises(ConfigError, match="--retry-errors"):
        job.open(retry_errors=True)
    assert job.run(begin="resume").num_run == 0
    result = job.run(begin="resume", retry_errors=True)
    assert (result.num_run, result.num_done, result.num_failed) == (4, NUM_LINES, 0)
    assert job.said == good.said
    assert not list(job.output.parent.glob("*.tmp"))


def test_a_retry_that_is_killed_keeps_the_good_answers(
    make_job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job()
    job.run(
        FakeLLM(fail=lambda request: RequestError("x") if request.request_id == "3.0" else None)
    )
    before = job.output.read_bytes()

    def crash(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", crash)
    with pytest.raises(KeyboardInterrupt):
        job.open("resume", retry_errors=True)
    monkeypatch.undo()
    assert job.output.read_bytes() == before
    assert job.run(begin="resume", retry_errors=True).num_run == 1
