"""Jobs whose lines are compressed, come from standard input, or are shared among several jobs."""

from __future__ import annotations

import gzip
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from batch_jobs import LINES, NUM_LINES, Job
from fake_llm import FakeLLM

from fastdecode.cli.main import main
from fastdecode.core.errors import ConfigError
from fastdecode.jobs.lines import Shard
from fastdecode.jobs.manifest import Manifest
from fastdecode.jobs.merging import merge

MakeJob = Callable[..., Job]


class Stopped(Exception):  # noqa: N818  (it isn't an error)
    """Of a job in its middle."""


def _stop_after(steps: int) -> FakeLLM:
    left = iter(range(steps))

    def step() -> None:
        if next(left, None) is None:
            raise Stopped

    return FakeLLM(before_step=step)


def _feed(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    """Have standard input be a pipe with a file's bytes."""
    out, into = os.pipe()
    os.write(into, path.read_bytes())
    os.close(into)
    monkeypatch.setattr(sys, "stdin", os.fdopen(out, "r"))


def test_a_compressed_input_is_the_same_input(make_job: MakeJob) -> None:
    plain, packed = make_job("plain"), make_job("packed")
    plain.run(run_seed=7)
    packed.input.write_bytes(gzip.compress(packed.input.read_bytes()))
    with pytest.raises(Stopped):
        packed.run(llm=_stop_after(9), run_seed=7)
    assert 0 < len(packed.said) < NUM_LINES
    packed.input.write_bytes(gzip.decompress(packed.input.read_bytes()))
    packed.run(begin="resume")
    assert packed.said == plain.said


def test_a_damaged_compressed_input_is_refused(make_job: MakeJob) -> None:
    job = make_job()
    whole = gzip.compress(job.input.read_bytes())
    for damaged in (whole[:-9], whole[:40] + b"\0\0\0\0" + whole[44:]):
        job.input.write_bytes(damaged)
        with pytest.raises(ConfigError, match=r"in\.jsonl is a damaged gzip file"):
            job.run()
        assert not job.output.exists()


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_a_job_of_standard_input_is_resumed_with_the_same_lines(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch, pack: Callable[[bytes], bytes]
) -> None:
    whole, job = make_job("whole"), make_job()
    whole.run(run_seed=7)
    fed = job.input
    fed.write_bytes(pack(fed.read_bytes()))
    job.input = Path("-")
    _feed(monkeypatch, fed)
    with pytest.raises(Stopped):
        job.run(llm=_stop_after(9), run_seed=7)
    fed.write_text(LINES[0])
    _feed(monkeypatch, fed)
    with pytest.raises(ConfigError, match="input file has changed"):
        job.run(begin="resume")
    fed.write_bytes(whole.input.read_bytes())
    _feed(monkeypatch, fed)
    job.run(begin="resume")
    assert job.said == whole.said
    assert "checking standard input" in job.told
    assert sorted(path.name for path in job.output.parent.iterdir()) == [
        "in.jsonl", "out.jsonl", "out.jsonl.manifest.json",
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["-", "out.jsonl.gz"])
def test_an_output_that_cant_be_resumed_is_refused(make_job: MakeJob, name: str) -> None:
    job = make_job()
    job.output = Path(name) if name == "-" else job.output.with_name(name)
    with pytest.raises(ConfigError, match="can't be resumed"):
        job.run()


# --- shards
# ------------------------------------------------------------------------------


def _shards(make_job: MakeJob, count: int, lines: list[str] = LINES) -> list[Job]:
    """The jobs of an array, of which none has run."""
    jobs = [make_job(f"shard{i}", lines) for i in range(1, count + 1)]
    for job in jobs:
        job.input = jobs[0].input
    return jobs


def _simple(number: int) -> str:
    return json.dumps({"id": f'"{number}', "prompt_token_ids": [number], "max_tokens": 3})


@pytest.mark.parametrize(
    "lines",
    [[*LINES[:5], "", *LINES[5:]], [_simple(i) for i in range(17)]],
    ids=["openai", "simple"],
)
def test_shards_together_answer_each_line_once(
    make_job: MakeJob, tmp_path: Path, lines: list[str]
) -> None:
    whole, jobs = make_job("whole", lines), _shards(make_job, 3, lines)
    whole.run(run_seed=7)
    with pytest.raises(Stopped):
        jobs[0].run(llm=_stop_after(4), shard="1/3", run_seed=7)
    jobs[0].run(begin="resume", shard="1/3")
    for i in (2, 3):
        jobs[i - 1].run(shard=f"{i}/3", run_seed=7)
    merged = tmp_path / "all.jsonl"
    found = merge([job.output for job in reversed(jobs)], merged)
    num_lines = len(list(filter(None, lines)))
    assert (found.num_answers, found.num_failed, found.num_missing) == (num_lines, 0, 0)
    first = merge([jobs[0].output], tmp_path / "first.jsonl", partial=True)
    assert (first.num_missing, first.missing_shards) == (0, 2)
    merge([whole.output], tmp_path / "whole.jsonl")
    assert _contents(merged) == _contents(tmp_path / "whole.jsonl")
    ids = [_id(json.loads(line)) for line in filter(None, lines)]
    assert [_id(answer) for answer in _contents(merged)] == ids


def _id(line: dict[str, Any]) -> Any:
    return line.get("custom_id", line.get("id"))


def _contents(path: Path) -> list[dict[str, Any]]:
    """Answers without what differs from run to run."""
    answers = [json.loads(line) for line in path.read_text().splitlines()]
    for answer in answers:
        if "response" in answer:
            del answer["id"], answer["response"]["request_id"], answer["response"]["body"]["id"]
            del answer["response"]["body"]["created"]
    return answers


def test_a_shard_goes_on_as_that_shard_only(make_job: MakeJob) -> None:
    (job, _) = _shards(make_job, 2)
    with pytest.raises(Stopped):
        job.run(llm=_stop_after(4), shard="1/2")
    with pytest.raises(ConfigError, match="shard: '1/2' then, '2/2' now"):
        job.run(begin="resume", shard="2/2")


def test_a_bad_line_stops_every_shard(make_job: MakeJob) -> None:
    (job, _) = _shards(make_job, 2, [*LINES[:3], LINES[0]])
    with pytest.raises(ConfigError, match="line 4: duplicate_custom_id"):
        job.run(shard="1/2")
    job.run(shard="1/2", on_error="skip")
    assert set(job.said) == {"id-0", "id-2"}


def test_conversations_are_not_parted(make_job: MakeJob) -> None:
    turn = json.loads(LINES[0])
    turn["body"] |= {"conversation_id": "c", "n": 1}
    job = make_job("turns", [json.dumps(turn)])
    with pytest.raises(ConfigError, match="--shard 1/2 would part"):
        job.run(shard="1/2")


def test_what_isnt_whole_is_merged_only_if_that_is_wanted(
    make_job: MakeJob, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs, merged = _shards(make_job, 2), str(tmp_path / "all.jsonl.gz")
    words = ["merge", "-o", merged, str(jobs[0].output)]
    jobs[0].run(shard="1/2")
    assert main(words) == 2 and "1 shard(s) are missing: 2/2" in capsys.readouterr().err
    with pytest.raises(Stopped):
        jobs[1].run(llm=_stop_after(6), shard="2/2")
    raw = jobs[1].output.read_bytes()
    jobs[1].output.write_bytes(raw[:-7])
    both = [*words, str(jobs[1].output)]
    assert main(both) == 2 and "lines have no answer yet" in capsys.readouterr().err
    assert not Path(merged).exists()
    assert main([*both, "--partial"]) == 3
    num = len(gzip.decompress(Path(merged).read_bytes()).splitlines())
    assert num == 15 + raw.count(b"\n") - 1
    assert f"{num} answers are in" in capsys.readouterr().err


def test_outputs_that_dont_belong_together_are_not_merged(
    make_job: MakeJob, tmp_path: Path
) -> None:
    jobs, other = _shards(make_job, 2), make_job("other", LINES[:4])
    for i, job in enumerate(jobs, start=1):
        job.run(shard=f"{i}/2", run_seed=i)
    other.run(shard="2/2")
    merged = tmp_path / "all"
    with pytest.raises(ConfigError, match="not of one job:\n  the input file has changed"):
        merge([jobs[0].output, other.output], merged)
    with pytest.raises(ConfigError, match="are both shard 1/2"):
        merge([jobs[0].output, jobs[0].output], merged)
    jobs[1].output.write_bytes(b"{}\n" + jobs[1].output.read_bytes())
    with pytest.raises(ConfigError, match=r"line 1 of .* is not an answer of the run"):
        merge([job.output for job in jobs], merged)
    answers = jobs[0].output.read_bytes().splitlines(keepends=True)
    jobs[0].output.write_bytes(b"".join([*answers[:-1], answers[0]]))
    with pytest.raises(ConfigError, match=r"line \d+ is answered twice"):
        merge([jobs[0].output], merged, partial=True)


@pytest.mark.parametrize(
    ("number", "why"),
    [
        (2, "answers line 2 of the input, which is not in shard 1/2"),
        (7, "answers line 7 of the input, which is not in shard 1/2"),
        (0, "answers line 0 of the input"),
        (10**20, "answers line 100000000000000000000 of the input"),
    ],
)
def test_an_answer_of_another_line_is_refused(
    make_job: MakeJob, tmp_path: Path, number: int, why: str
) -> None:
    jobs = _shards(make_job, 2, [_simple(i) for i in range(5)])
    for i, job in enumerate(jobs, start=1):
        job.run(shard=f"{i}/2")
    answers = [json.loads(raw) for raw in jobs[0].output.read_bytes().splitlines()]
    answers[0]["line"] = number  # as many answers as before
    jobs[0].output.write_text("".join(json.dumps(answer) + "\n" for answer in answers))
    for partial in (False, True):
        with pytest.raises(ConfigError, match=why):
            merge([job.output for job in jobs], tmp_path / "all.jsonl", partial=partial)


def test_more_answers_than_lines_are_refused(make_job: MakeJob, tmp_path: Path) -> None:
    (job,) = _shards(make_job, 1, [_simple(0), "", _simple(2)])
    job.run()
    answer = json.loads(job.output.read_bytes().splitlines()[0]) | {"line": 2}
    with job.output.open("a") as file:
        file.write(json.dumps(answer) + "\n")
    with pytest.raises(ConfigError, match="has 3 answers for 2 lines"):
        merge([job.output], tmp_path / "all.jsonl")


@pytest.mark.parametrize("name", ["all.jsonl", "all.jsonl.gz"])
@pytest.mark.parametrize("becomes", ["shorter", "directory"])
def test_an_output_that_cant_be_read_leaves_the_joined_file_as_it_was(
    make_job: MakeJob, tmp_path: Path, name: str, becomes: str
) -> None:
    (job,) = _shards(make_job, 1, [_simple(i) for i in range(3)])
    job.run()
    merged = tmp_path / "joined" / name
    merged.parent.mkdir()
    merged.write_bytes(b"before")

    def damage(share: float, num_lines: int) -> None:
        if becomes == "shorter":
            os.truncate(job.output, job.output.stat().st_size - 5)
        else:
            job.output.unlink()
            job.output.mkdir()

    with pytest.raises(ConfigError, match=r"can't read the answers in .*out\.jsonl"):
        merge([job.output], merged, damage)
    assert [path.name for path in merged.parent.iterdir()] == [name]
    assert merged.read_bytes() == b"before"


def test_the_joined_file_replaces_no_input(
    make_job: MakeJob, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (job,) = _shards(make_job, 1, LINES[:3])
    job.run()
    link, manifest = tmp_path / "link.jsonl", Manifest.path_for(job.output)
    os.link(job.output, link)
    before = job.output.read_bytes(), manifest.read_bytes()
    part = tmp_path / "other.jsonl.part"
    os.link(job.output, part)
    for target in (job.output, link, manifest, part.with_suffix("")):
        assert main(["merge", "-o", str(target), str(job.output)]) == 2
        assert "is an input and the output" in capsys.readouterr().err
        assert (job.output.read_bytes(), manifest.read_bytes()) == before


@pytest.mark.parametrize("text", ["0/2", "3/2", "2", "a/b", "1/", "/2", "1/2/3", "-1/2"])
def test_a_shard_is_two_numbers(text: str) -> None:
    with pytest.raises(ConfigError, match="is not I/N"):
        Shard.of(text)
