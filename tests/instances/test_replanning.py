"""Roles that a running controller looks at again: its instances' totals and its
requests are what they are judged by, and changes reach them while they run."""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from instance_runs import OPTIONS, answers, assert_alike, params, prompts, requests_of, role_turns

from cost_model.goodput.replanning import JudgedRoles, RoleQuestion, Roles, WatchRules, to_json
from fastdecode import LLM
from fastdecode.cli.main import main
from fastdecode.core.errors import ConfigError
from fastdecode.engine.instances import replanning

SLO = "ttft=5s,tpot=1s"
FOUR = ["prefill", "prefill", "decode", "decode"]
WAIT_S = 120.0


def test_roles_flip_under_load(model: str, one: LLM) -> None:
    """Requests come until roles have changed five times."""
    turns, ticks, rounds = role_turns(["p0", "d0", "p1", "d1"]), itertools.count(), 0
    asked, how = prompts(40, seed=31), params(40, seed=31, n=2)
    expected = answers(one.generate(asked, how))
    with LLM(model, instances=FOUR, replan_slo=SLO, **OPTIONS) as llm:

        def tick() -> None:
            if next(ticks) % 8 == 7:
                name, role = next(turns)
                llm.service.look(lambda running: running.engine.set_role(name, role))

        while rounds < 2 or llm.stats.num_role_changes < 5:
            rounds += 1
            outputs = {o.request_id: o for o in llm.stream(requests_of(asked, how), tick)}
            assert answers([outputs[str(i)] for i in range(40)]) == expected
        assert llm.stats.num_moved == 0


class Planned:
    """In the place of ``Planner``: keeps the question, and gives the answer that a test wants."""

    def __init__(self, best: Roles, gain: float) -> None:
        self.asked: list[RoleQuestion] = []
        self._best, self._gain = best, gain
        self.is_over = False

    def __call__(self) -> Planned:
        return self

    def ask(self, question: RoleQuestion) -> None:
        self.asked.append(question)
        self.is_over = True

    def take(self) -> JudgedRoles:
        self.is_over = False
        return JudgedRoles(self.asked[-1].present, 1.0, self._best, 2.0, self._gain, 1)

    def close(self) -> None:
        """Nothing is open."""


def watched(
    model: str,
    monkeypatch: pytest.MonkeyPatch,
    planned: Planned,
    told: list[str],
    is_done: Callable[[], object],
) -> tuple[list[Any], int, dict[str, Any]]:
    """Put two prefill and two decode instances under load until roles were looked at.
    Return what they answer then, how often roles changed, and the instances' roles."""
    monkeypatch.setattr(replanning, "Planner", planned)
    monkeypatch.setattr(replanning, "LOOKS_EVERY_S", 0.05)
    monkeypatch.setattr(replanning, "WatchRules", partial(WatchRules, window_s=1.0))
    asked, how = prompts(60, seed=5), params(60, seed=5)
    end_s = time.monotonic() + WAIT_S
    with LLM(model, instances=FOUR, replan_slo=SLO, progress=told.append, **OPTIONS) as llm:
        while not is_done():
            assert time.monotonic() < end_s, "nobody looks at roles"
            llm.generate(asked, how)
        found = llm.generate(asked, how)
        roles = {x.name: x.role for x in llm._running.engine.clients}
        return found, llm.stats.num_role_changes, roles


def looks(told: list[str]) -> int:
    """Return how often roles were looked at."""
    return sum("come, " in line for line in told)


def test_what_comes_is_judged_and_roles_are_changed(
    model: str, one: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    planned = Planned(Roles(3, 1), gain=0.5)
    found, _, roles = watched(model, monkeypatch, planned, told, lambda: looks(told) >= 2)
    assert_alike(found, one.generate(prompts(60, seed=5), params(60, seed=5)))
    asked = planned.asked[0]
    assert asked.present == Roles(2, 2) and asked.slo.ttft_s == 5.0
    times, profile = asked.profile.times, asked.profile
    assert times.prompt_s >= 0 and times.step_s + times.token_s + times.cached_s > 0
    assert profile.capacity_tokens > 0 and profile.max_sequences > 0
    lengths = {len(prompt) for prompt in prompts(60, seed=5)}
    assert {prompt for prompt, _ in asked.sample.lengths} <= lengths
    assert {output for _, output in asked.sample.lengths} <= set(range(1, 24))
    assert [role.value for role in roles.values()].count("prefill") == 3
    assert any("from now on" in line for line in told)


def test_nothing_changes_without_gain(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    planned = Planned(Roles(3, 1), 0.05)
    *_, roles = watched(model, monkeypatch, planned, told, lambda: looks(told))
    assert [role.value for role in roles.values()].count("prefill") == 2
    assert not any("better" in line or "from now on" in line for line in told)


class Unable(Planned):
    """No process can be started."""

    def ask(self, question: RoleQuestion) -> None:
        super().ask(question)
        raise OSError("too many processes")


def test_what_goes_wrong_with_looking_ends_nothing(
    model: str, one: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = Unable(Roles(3, 1), 0.5)
    found, num_changes, _ = watched(model, monkeypatch, planned, [], lambda: planned.asked)
    assert_alike(found, one.generate(prompts(60, seed=5), params(60, seed=5)))
    assert num_changes == 0


def test_options_come_from_the_command(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked, told = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    asked.write_text('{"id": "a", "prompt_token_ids": [5, 6, 7]}\n')
    words = ["--model", model, "--input", str(asked), "--output", str(told)]
    words += ["--replan-slo", "ttft=1s,tpot=1s"]
    for command in ("generate", "run-batch"):
        assert main([command, *words]) == 2
        assert "--replan-slo ttft=1s,tpot=1s changes roles of instances" in capsys.readouterr().err
    both = ["--instances", "prefill,decode", "--kv-memory-gb", "0.004"]
    assert main(["generate", *words, *both]) == 0
    assert told.read_text().count("\n") == 1


def test_a_planner_that_fails_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = question()
    one = replanning.Planner()
    for boot in ("print('no JSON')", "raise SystemExit(3)", "print('{}')"):
        monkeypatch.setattr(replanning, "_BOOT", boot)
        one.ask(asked)
        wait(one)
        assert one.take() is None and not one.is_over
    one.close()


def test_a_planner_answers_what_would_be_answered_here() -> None:
    asked = question()
    one = replanning.Planner()
    one.ask(asked)
    wait(one)
    assert one.take() == asked.answer()


def wait(one: replanning.Planner) -> None:
    assert one._process is not None
    one._process.wait(WAIT_S)
    assert one.is_over


ASKS = """
import sys
from cost_model.goodput.replanning import RoleQuestion, from_json
from fastdecode.engine.instances import replanning
replanning._BOOT = replanning._BOOT.replace("main()", "import threading; threading.Event().wait()")
one = replanning.Planner()
one.ask(from_json(sys.argv[1], RoleQuestion))
print(one._process.pid, flush=True)
sys.stdin.read()
"""


def test_a_planner_ends_with_its_controller() -> None:
    """Which is killed while it is being answered."""
    command = [sys.executable, "-c", ASKS, to_json(question())]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as controller:
        assert controller.stdout is not None
        pid = int(controller.stdout.readline())
        planning = os.pidfd_open(pid)
        try:
            assert not select.select([planning], [], [], 0.0)[0]
            controller.kill()
            assert select.select([planning], [], [], WAIT_S)[0], "the planner lives on"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.close(planning)


def question() -> RoleQuestion:
    from cost_model.goodput.replanning import InstanceProfile, LinearTimes, TrafficSample
    from cost_model.goodput.slo import Slo

    alike = InstanceProfile(LinearTimes(1e-3, 1e-4, 1e-7, 1e-4, 1e-6), 512, 10_000, 64)
    return RoleQuestion(
        alike, TrafficSample(5.0, 1.0, ((64, 16), (128, 8))), Slo(0.5, 0.05), Roles(1, 1)
    )


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"replan_slo": SLO}, "one engine"),
        ({"replan_slo": "5", "instances": ["prefill", "decode"]}, "ttft=400ms"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(
    model: str, options: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        LLM(model, **options)
