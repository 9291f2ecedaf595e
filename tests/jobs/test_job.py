"""The batch job around a model that only hashes: nothing is lost or doubled,
whatever ends a run."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from batch_jobs import LINES, NUM_LINES, Job, openai
from fake_llm import FakeLLM

from fastdecode.core.errors import ConfigError, FastDecodeError, RequestError, WorkerError
from fastdecode.core.sequence import PromptRequest
from fastdecode.jobs import journal
from fastdecode.jobs.stopping import Stopping, stop_signals


def test_answers_come_as_they_finish_and_each_once(make_job: Callable[..., Job]) -> None:
    job = make_job()
    result = job.run(llm := FakeLLM(width=4))
    assert (result.num_done, result.num_failed, result.num_lines) == (NUM_LINES, 0, NUM_LINES)
    assert set(job.said) == {f"id-{i}" for i in range(NUM_LINES)}
    order = [answer["custom_id"] for answer in job.answers]
    assert order != sorted(order, key=lambda i: int(i[3:]))
    assert llm.most_taken == 8
    assert [len(said) for said in (job.said[f"id-{i}"] for i in range(3))] == [1, 2, 3]  # type: ignore[arg-type]


def test_seeds_come_from_the_run_and_the_id_alone(make_job: Callable[..., Job]) -> None:
    job = make_job("1")
    again = make_job("2")
    other = make_job("3")
    backwards = make_job("4", LINES[::-1])
    job.run(run_seed=7)
    again.run(run_seed=7, llm=FakeLLM(width=2))
    other.run(run_seed=8)
    backwards.run(run_seed=7)
    assert job.said == again.said == backwards.said
    assert job.said != other.said
    # Equal prompts under different ids don't say the same.
    same = make_job("5", [openai(str(i)) for i in range(20)])
    same.run(run_seed=7)
    assert len({str(said) for said in same.said.values()}) > 10


def test_prompts_of_a_line_have_seeds_of_their_own_unless_the_line_says_one(
    make_job: Callable[..., Job],
) -> None:
    job = make_job(
        lines=[openai("own", prompt=[[5]] * 6), openai("said", prompt=[[5]] * 6, seed=3)]
    )
    job.run(run_seed=7)
    assert len({str(tokens) for tokens in job.said["own"]}) > 1  # type: ignore[attr-defined]
    assert len({str(tokens) for tokens in job.said["said"]}) == 1  # type: ignore[attr-defined]
    (answer,) = (a for a in job.answers if a["custom_id"] == "own")
    body = answer["response"]["body"]
    assert [choice["index"] for choice in body["choices"]] == list(range(6))
    assert body["usage"].pop("prompt_tokens_details") == {"cached_tokens": 0}
    assert body["usage"] == {"prompt_tokens": 6, "completion_tokens": 6, "total_tokens": 12}


def test_lines_that_workers_were_lost_with_are_left_for_later(make_job: Callable[..., Job]) -> None:
    job, whole = make_job("job"), make_job("whole")
    whole.run(run_seed=7)
    llm = FakeLLM(
        fail=lambda request: WorkerError("no room left") if request.request_id == "5.0" else None
    )
    result = job.run(llm, run_seed=7)
    assert isinstance(result.lost, WorkerError)
    assert (result.num_done, result.num_failed) == (NUM_LINES - 1, 0)

    steps = iter(range(100))

    def lose_all() -> None:
        llm.num_live_r_workers = 0 if next(steps) == 3 else 2

    job = make_job("all")
    llm = FakeLLM(before_step=lose_all)
    result = job.run(llm, run_seed=7)
    assert result.lost is not None
    assert 0 < result.num_done < NUM_LINES
    result = job.run(begin="resume", run_seed=7)
    assert result.lost is None
    assert job.said == whole.said


def test_the_first_interrupt_finishes_what_runs_and_the_second_does_not(
    make_job: Callable[..., Job],
) -> None:
    whole = make_job("whole")
    whole.run(run_seed=7)
    for num_asks, served in ((1, range(5, 13)), (2, range(1, 13))):
        job = make_job(str(num_asks))
        stopping = Stopping(60)
        steps = iter(range(1000))

        def ask(
            stopping: Stopping = stopping, num_asks: int = num_asks, steps: Any = steps
        ) -> None:
            if next(steps) == 3:
                for _ in range(num_asks):
                    stopping.ask()

        result = job.run(llm := FakeLLM(width=4, before_step=ask), stopping, run_seed=7)
        assert result.interrupted
        assert result.num_done == len(job.answers) in served
        if num_asks == 1:
            assert llm.num_served >= 4  # all that ran
        result = job.run(begin="resume", run_seed=7)
        assert not result.interrupted
        assert job.said == whole.said


def test_the_grace_ends_and_a_third_interrupt_leaves_at_once() -> None:
    now, left = [0.0], []
    stopping = Stopping(10, clock=lambda: now[0], leave=left.append)
    assert (stopping.wanted, stopping.now) == (False, False)
    stopping.ask()
    assert (stopping.wanted, stopping.now) == (True, False)
    now[0] = 10.0
    assert stopping.now
    stopping.ask()
    assert left == []
    stopping.ask()
    assert left == [130]


def test_without_grace_the_first_interrupt_is_as_good_as_the_second() -> None:
    left: list[int] = []
    stopping = Stopping(0, leave=left.append)
    assert "stopping after this step" in stopping.ask()
    assert (stopping.wanted, stopping.now, left) == (True, True, [])
    stopping.ask()
    assert left == [130]


CAUGHT_IN_TIME = """
import signal, sys
from fastdecode.core.host.processes import interrupt
signal.signal(signal.SIGTERM, interrupt)
try:
    exec("signal.raise_signal(signal.SIGTERM)")
except KeyboardInterrupt:
    sys.exit(7)
"""


def test_a_signal_that_was_ignored_goes_on_being_ignored() -> None:
    """As SIGINT is where a script runs a command in the background."""
    asked: list[int] = []
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    on_term = signal.getsignal(signal.SIGTERM)
    try:
        with stop_signals(lambda number, _: asked.append(number)):
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
                os.kill(os.getpid(), number)
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    assert asked == [signal.SIGTERM, signal.SIGUSR1]
    assert signal.getsignal(signal.SIGTERM) is on_term


def test_an_interrupt_that_was_caught_is_not_how_the_process_ends(tmp_path: Path) -> None:
    """CPython remembers a KeyboardInterrupt that left an ``exec`` of text, as
    imports have it, and ends a process run by ``-m`` by SIGINT."""
    (tmp_path / "caught.py").write_text(CAUGHT_IN_TIME)
    path = os.pathsep.join([str(tmp_path), *sys.path])
    environ = {**os.environ, "PYTHONPATH": path}
    ended = subprocess.run([sys.executable, "-m", "caught"], env=environ, timeout=60)
    assert ended.returncode == 7


def test_an_interrupt_that_comes_too_late_is_none(make_job: Callable[..., Job]) -> None:
    stopping = Stopping(60)
    job = make_job(lines=LINES[:2])
    result = job.run(
        FakeLLM(before_step=lambda: stopping.ask() if not stopping.wanted else None), stopping
    )
    assert not result.interrupted
    assert result.num_done == 2


def test_a_full_disk_ends_the_run_and_loses_nothing(
    make_job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, job = make_job("whole"), make_job("job")
    whole.run(run_seed=7)
    room = [whole.output.stat().st_size // 2]

    def write_all(fd: int, data: bytes) -> None:
        num = os.write(fd, data[: room[0]])
        room[0] -= num
        if num < len(data):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(journal, "write_whole", write_all)
    with pytest.raises(FastDecodeError, match=r"No space left.*--resume") as caught:
        job.run(run_seed=7)
    assert caught.value.code == "output_failed"
    monkeypatch.undo()
    job.run(begin="resume", run_seed=7)
    assert job.said == whole.said
    assert any("cut off" in text for text in job.told)


def test_an_input_that_changes_under_the_run_is_told(make_job: Callable[..., Job]) -> None:
    # More than is read at once.
    job = make_job(lines=[openai(f"id-{i}", user="x" * 4000) for i in range(NUM_LINES)])

    def change() -> None:
        job.input.write_text(job.input.read_text().replace("id-29", "id-77"))

    with pytest.raises(ConfigError, match="was changed while it was read"):
        job.run(FakeLLM(before_step=change))


def test_bad_lines_keep_a_job_from_starting_unless_they_are_to_be_answered(
    make_job: Callable[..., Job],
) -> None:
    bad = [
        "{oops",
        "[1]",
        openai("id-1"),
        openai(7),
        openai("st", stream=True),
        '{"custom_id": "x"}',
    ]
    job = make_job(lines=[*LINES[:3], "", *bad, *LINES[3:6]])
    with pytest.raises(ConfigError) as caught:
        job.open()
    text = str(caught.value)
    assert caught.value.code == "invalid_input"
    assert "6 of the 12 lines" in text
    for number, code in {
        5: "invalid_json_line",
        7: "duplicate_custom_id",
        8: "invalid_custom_id",
    }.items():
        assert f"line {number}" in text
        assert code in text
    assert not job.output.exists()
    result = job.run(on_error="skip")
    assert (result.num_done, result.num_failed) == (12, 6)
    errors = {}
    for answer in job.answers:
        if answer["response"]["status_code"] == 400:
            assert answer["error"] is None
            errors[int(answer["id"].rsplit("_")[-1])] = answer["response"]["body"]["error"]["code"]
    assert errors == {
        5: "invalid_json_line", 6: "invalid_json_line", 7: "duplicate_custom_id",
        8: "invalid_custom_id", 9: "unsupported_field", 10: "invalid_method",
    }  # fmt: skip
    assert job.run(begin="resume", on_error="skip").num_run == 0


def test_one_bad_prompt_fails_its_line_once(make_job: Callable[..., Job]) -> None:
    def fail(request: PromptRequest) -> FastDecodeError | None:
        return (
            RequestError("too long", code="prompt_too_long")
            if list(request.prompt) == [9]
            else None
        )

    job = make_job(lines=[openai("a", prompt=[[1], [9], [2], [9]]), openai("b", prompt=[[1], [2]])])
    result = job.run(FakeLLM(fail=fail))
    assert (result.num_done, result.num_failed) == (2, 1)
    assert job.said["a"] == "prompt_too_long"


def test_simple_lines_are_answered_as_generate_does_with_their_line(
    make_job: Callable[..., Job],
) -> None:
    lines = [json.dumps({"id": i, "prompt_token_ids": [i], "n": 1 + i}) for i in range(1, 4)]
    job = make_job(lines=[*lines, '{"id": 9, "prompt": 5}', "oops"])
    job.run(on_error="skip", sampling={"temperature": 0})
    answers = {answer["line"]: answer for answer in job.answers}
    assert set(answers[1]) == {"id", "line", "completions", "usage"}
    assert answers[1]["id"] == 1
    assert answers[4]["error"]["code"] == "invalid_prompt"
    assert answers[5] == {"id": None, "line": 5, "error": answers[5]["error"]}
    assert job.run(begin="resume", on_error="skip", sampling={"temperature": 0}).num_run == 0
    assert (
        job.run(
            begin="resume", retry_errors=True, on_error="skip", sampling={"temperature": 0}
        ).num_run
        == 2
    )


def test_memory_doesnt_grow_with_the_lines(make_job: Callable[..., Job]) -> None:
    job = make_job(lines=[openai(f"id-{i}", prompt=[i % 50]) for i in range(4000)])
    held: dict[int, int] = {}

    def look() -> None:
        for mark in (500, 3900):
            if mark not in held and llm.num_served >= mark:
                gc.collect()  # what Python keeps of freed objects for the next ones, too
                held[mark] = tracemalloc.get_traced_memory()[0]

    llm = FakeLLM(before_step=look)
    tracemalloc.start()
    try:
        job.run(llm)
    finally:
        tracemalloc.stop()
    assert held[3900] - held[500] < 20_000


def test_an_empty_file_is_no_work(make_job: Callable[..., Job]) -> None:
    job = make_job(lines=[])
    assert job.run().num_lines == 0
    assert job.output.read_bytes() == b""


def test_answers_are_synced_by_number_and_by_time(tmp_path: Path) -> None:
    now = [0.0]
    out = journal.Journal(tmp_path / "o", sync_lines=3, sync_s=5, clock=lambda: now[0])
    for _ in range(7):
        out.append(0, None, {})
    assert out.num_syncs == 2
    now[0] = 4.9
    out.sync_if_due()
    assert out.num_syncs == 2
    now[0] = 5.0
    out.sync_if_due()
    out.sync_if_due()
    assert out.num_syncs == 3
    out.append(0, None, {"text": "\ud800 é"})
    out.close()
    assert out.num_syncs == 4
    assert json.loads((tmp_path / "o").read_bytes().splitlines()[-1]) == {"text": "\ud800 é"}


@pytest.mark.parametrize(
    "bad", [{"sync_lines": 0}, {"sync_s": -1.0}, {"run_seed": -1}, {"run_seed": 1 << 63}]
)
def test_bad_options_are_named(make_job: Callable[..., Job], bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(bad))):
        make_job().open(**bad)
