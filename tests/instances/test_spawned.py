"""Prefill and decode instances that one call starts: the tokens are those of one engine,
whatever happens on the way, and no process is left."""

from __future__ import annotations

import contextlib
import os
import random
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from instance_processes import assert_all_is_free
from instance_runs import OPTIONS, assert_alike, params, prompts, requests_of, tokens
from news import WAIT_S, NewsLLM
from trouble import crash_in_spawned

from examples import examples
from fastdecode import LLM, SamplingParams
from fastdecode.core.delta import DeltaQueue
from fastdecode.core.errors import ConfigError
from fastdecode.core.sequence import Request
from fastdecode.engine.instances import cluster
from fastdecode.engine.stats import EngineStats
from fastdecode.wire.ranks import without_launcher

BOTH = {"instances": ["prefill", "decode"]}


@pytest.fixture(scope="module")
def four(model: str) -> Iterator[NewsLLM]:
    with NewsLLM(
        model, instances=["prefill", "prefill", "decode", "decode"], r_workers=2, **OPTIONS
    ) as llm:
        yield llm


def processes(parent: int | None = None) -> list[psutil.Process]:
    """Return the instances that a process has started, in their order."""
    every = psutil.Process(parent).children()
    found = [each for each in every if any("serve_spawned" in x for x in each.cmdline())]
    return sorted(found, key=lambda each: each.pid)


def test_tokens_are_those_of_one_engine(one: LLM, four: NewsLLM) -> None:
    asked, how = prompts(24), params(24, n=3)
    assert_alike(four.generate(asked, how), one.generate(asked, how))
    assert four.stats.num_recomputed == 0
    assert_all_is_free(four)
    names = [f"R-worker {name}-r{i}" for name in ("p0", "p1", "d0", "d1") for i in range(2)]
    figures = four._running.engine.figures
    assert four.until(lambda: [each.name for each in figures().r_workers] == names)


def test_whoever_is_cancelled_at_any_stage_leaves_nothing(four: NewsLLM) -> None:
    rng, number = random.Random(8), examples(1000, 8)
    reader = DeltaQueue()
    asked, how = prompts(number, seed=8), params(number, seed=8)
    waiting = {}
    for i, (prompt, sampling) in enumerate(zip(asked, how, strict=True)):
        request = Request(f"c{i}", tuple(prompt), sampling, sampling.max_tokens or 1, seed=i)
        four.service.submit([request], reader)
        waiting[f"c{i}"] = rng.random()
        if rng.random() < 0.3:
            for delta in reader.take(0.01):
                if delta.error is not None or delta.finish_reason is not None:
                    waiting.pop(delta.request_id, None)
        for name in [name for name in waiting if rng.random() < 0.2]:
            four.service.cancel(name)
    for name in list(waiting):
        four.service.cancel(name)
    drained = four.service.when_drained()
    drained.get(timeout=WAIT_S)
    assert_all_is_free(four)


@pytest.mark.parametrize("lost", [0, 1])
def test_who_is_lost_is_gone_on_without(model: str, one: LLM, lost: int) -> None:
    """0 prefills, 1 decodes."""
    asked, how = prompts(20, seed=12), params(20, seed=12, n=2)
    before = processes()
    with NewsLLM(model, instances=["prefill", "decode", "decode"], **OPTIONS) as llm:
        started = [each for each in processes() if each not in before]
        assert len(started) == 3
        ticks = iter(range(1 << 20))

        def kill_one() -> None:
            if next(ticks) == 0:
                started[lost].kill()

        outputs = {o.request_id: o for o in llm.stream(requests_of(asked, how), kill_one)}
        # Those of tokens that were run again are rounded otherwise, too.
        assert tokens([outputs[str(i)] for i in range(20)]) == tokens(one.generate(asked, how))
        assert not any(output.error for output in outputs.values())
        clients = llm._running.engine.clients
        assert llm.until(lambda: clients[lost].broken is not None)
        assert [x.broken is not None for x in clients] == [index == lost for index in range(3)]
    assert not psutil.wait_procs(started, WAIT_S)[1]
    assert processes() == before


def test_one_that_hangs_is_killed_at_the_end(
    model: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cluster, "CLOSING_S", 0.5)
    before = processes()
    llm = LLM(model, **BOTH, **OPTIONS)
    hung = [each for each in processes() if each not in before]
    hung[0].suspend()
    llm.close()
    assert "has not stopped within" in caplog.text
    assert processes() == before


PARENT = """
import sys
from fastdecode import LLM
with LLM(sys.argv[1], instances=["prefill", "decode"], kv_memory_gb=0.004, r_threads=1):
    print("ready", flush=True)
    sys.stdin.read()
"""


def test_they_end_with_a_parent_that_is_killed(model: str) -> None:
    command = [sys.executable, "-c", PARENT, model]
    environ = {**without_launcher(os.environ), "PYTHONPATH": os.pathsep.join(sys.path)}
    with (
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ
        ) as parent,
        contextlib.ExitStack() as stack,
    ):
        assert parent.stdout is not None and parent.stdout.readline() == b"ready\n"
        files = []
        for each in processes(parent.pid):
            files.append(os.pidfd_open(each.pid))
            stack.callback(os.close, files[-1])
        assert len(files) == 2
        parent.send_signal(signal.SIGKILL)
        for file in files:
            assert select.select([file], [], [], WAIT_S)[0], "an instance lives on"


def test_what_keeps_one_from_starting_is_said_here(model: str) -> None:
    before = processes()
    with pytest.raises(ConfigError, match="cache_disk='/proc/none'"):
        LLM(model, **BOTH, **OPTIONS, cache_disk="/proc/none", cache_disk_gb=0.001)
    assert processes() == before


ON_A_DEVICE = {"kv_placement": "gpu", "device": "cpu", "r_threads": None}
ON_BOTH_SIDES = {"kv_placement": "hybrid", "device": "cpu", "device_kv_gb": 0.00004}


@pytest.mark.parametrize(
    "options",
    [
        {"r_workers": 2, "split_tokens": 16},
        {"r_workers": 2, "pp": 2, "prompt_pp": 1},
        {**ON_A_DEVICE, "cache_memory_gb": 0.01, "prefix_cache": "on"},
        {**ON_BOTH_SIDES, "r_workers": 2},
    ],
    ids=str,
)
def test_prompts_are_fetched_wherever_kv_is(model: str, one: LLM, options: dict[str, Any]) -> None:
    """``test_feature_pairs.py`` combines instances with every feature."""
    asked, how = prompts(12, seed=7), params(12, seed=7, n=2)
    with NewsLLM(model, **{**OPTIONS, **BOTH, **options}) as llm:
        for _ in range(2):
            assert tokens(llm.generate(asked, how)) == tokens(one.generate(asked, how))
        assert llm.stats.num_recomputed == llm._running.engine.counts.num_failed_fetches == 0
        assert llm.stats.fetched_bytes > 0
        if "cache_memory_gb" not in options:
            assert_all_is_free(llm)


def test_a_prompt_that_windows_see_in_part_is_fetched_whole(
    tiny_checkpoint: Callable[..., Path],
) -> None:
    """The prefix cache has all of it, and one instance alone would need its end."""
    path = str(tiny_checkpoint("mistral", sliding_window=32))
    chance = random.Random(91)
    asked = [[chance.randrange(5, 200) for _ in range(chance.randint(100, 160))] for _ in range(6)]
    how = [SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)] * len(asked)
    with LLM(path, **OPTIONS) as one:
        expected = tokens(one.generate(asked, how))
    with LLM(path, **BOTH, **{**OPTIONS, "prefix_cache": "on"}) as llm:
        for _ in range(2):
            assert tokens(llm.generate(asked, how)) == expected
        assert llm.stats.num_cached_prompt_tokens > 300 and llm.stats.num_failed_fetches == 0


FEW = {"dtype": "float32", "block_size": 16, "kv_memory_gb": 0.02}


def each_stats(llm: LLM, number: int) -> EngineStats:
    """Return the figures of one instance."""
    stats: EngineStats = llm._running.engine.clients[number].stats
    return stats


def test_what_was_fetched_is_not_run_again(
    model: str, one: LLM, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked, how = prompts(16, seed=82), params(16, seed=82)
    crash_in_spawned(monkeypatch, {"d0-r0": 40}, tmp_path / "lost")
    with LLM(model, instances=["prefill", "decode"], r_workers=2, replicas=1, **FEW) as llm:
        assert tokens(llm.generate(asked, how)) == tokens(one.generate(asked, how))
        decode = each_stats(llm, 1)
        assert decode.resumed.num_sequences > 0
        assert decode.resumed.num_tokens > decode.resumed.num_tokens_lost


def _run_until_joined(
    llm: LLM, instance: int, asked: list[list[int]], how: list[SamplingParams], expected: object
) -> None:
    """The same requests again and again: a standby may be greeted when they are over."""
    for _ in range(20):
        assert tokens(llm.generate(asked, how)) == expected
        if each_stats(llm, instance).num_rejoined:
            break
    assert each_stats(llm, instance).num_rejoined == 1


def test_a_standby_of_a_later_stage_is_read_by_its_own_address(
    model: str, one: LLM, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What its instance exports after the loss is fetched, not run again."""
    asked, how = prompts(16, seed=86), params(16, seed=86)
    crash_in_spawned(monkeypatch, {"p0-s1-r0": 2}, tmp_path / "lost")
    options = {**FEW, "r_workers": 1, "spare_r_workers": 1, "pp": 2}
    with LLM(model, instances=["prefill", "decode"], **options) as llm:
        expected = tokens(one.generate(asked, how))
        _run_until_joined(llm, 0, asked, how, expected)
        before = llm._running.engine.counts.num_failed_fetches
        assert tokens(llm.generate(asked, how)) == expected
        assert llm._running.engine.counts.num_failed_fetches == before
