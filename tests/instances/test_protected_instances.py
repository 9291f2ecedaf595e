"""Instances whose own R-workers protect each other: with replicas, with a standby, and
with a disk for kept blocks."""

from __future__ import annotations

import contextlib
import os
import random
import signal
from pathlib import Path

import pytest
from instance_processes import SILENCE_S, assert_all_is_free, controller, instance, ready
from instance_runs import params, prompts, tokens
from trouble import crash_after
from zmq_r_workers import at, r_workers

from examples import TRIES_ALL, examples
from fastdecode import LLM, SamplingParams
from fastdecode.engine.instances.local_instances import LocalHub

FEW = {"dtype": "float32", "block_size": 16, "kv_memory_gb": 0.02}


def each_stats(llm: LLM, number: int):  # type: ignore[no-untyped-def]
    """Of one instance; prefill instances come first."""
    hub = llm._running._hub
    assert isinstance(hub, LocalHub)
    return hub.services[number]._loop.owned.served.engine.stats


@pytest.mark.parametrize("seed", range(examples(6, share=2)))
def test_a_replica_takes_over_inside_an_instance(
    model: str, one: LLM, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever in a run an R-worker crashes, and whichever: the prompts that were
    fetched have a replica, too."""
    chance = random.Random(seed)
    asked, how = prompts(16, seed=81), params(16, seed=81, n=2)
    lost = chance.choice(["p0-r0", "p0-r1", "d0-r0", "d0-r1"])
    crash_after(monkeypatch, {lost: chance.randint(1, 60)})
    with LLM(model, instances=["prefill", "decode"], r_workers=2, replicas=1, **FEW) as llm:
        outputs = llm.generate(asked, how)
        assert not any(output.error for output in outputs)
        assert tokens(outputs) == tokens(one.generate(asked, how))
        assert llm.stats.num_handed_over > 0


def test_what_was_fetched_is_not_run_again(
    model: str, one: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, how = prompts(16, seed=82), params(16, seed=82)
    crash_after(monkeypatch, {"d0-r0": 40})
    with LLM(model, instances=["prefill", "decode"], r_workers=2, replicas=1, **FEW) as llm:
        assert tokens(llm.generate(asked, how)) == tokens(one.generate(asked, how))
        decode = each_stats(llm, 1)
        assert len(decode.replicas.failovers) == 1
        assert decode.resumed.num_sequences > 0
        assert decode.resumed.num_tokens > decode.resumed.num_tokens_lost


def test_a_standby_joins_inside_an_instance(
    model: str, one: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, how = prompts(16, seed=83), params(16, seed=83)
    crash_after(monkeypatch, {"d0-r0": 30})
    with LLM(model, instances=["prefill", "decode"], r_workers=3, spare_r_workers=1, **FEW) as llm:
        _run_until_joined(llm, 1, asked, how, tokens(one.generate(asked, how)))


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
    model: str, one: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What its instance exports after the loss is fetched, not run again."""
    asked, how = prompts(16, seed=86), params(16, seed=86)
    crash_after(monkeypatch, {"p0-s1-r0": 2})
    options = {**FEW, "r_workers": 1, "spare_r_workers": 1, "pp": 2}
    with LLM(model, instances=["prefill", "decode"], **options) as llm:
        expected = tokens(one.generate(asked, how))
        _run_until_joined(llm, 0, asked, how, expected)
        before = llm._running.engine.num_failed_fetches
        assert tokens(llm.generate(asked, how)) == expected
        assert llm._running.engine.num_failed_fetches == before


def test_blocks_of_an_instance_go_to_its_disk(model: str, one: LLM, tmp_path: Path) -> None:
    """The memory has room for two prompts or so."""
    chance = random.Random(84)
    talks = [[chance.randrange(2, 200) for _ in range(96)] for _ in range(12)]
    how = [SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)] * len(talks)
    few = {**FEW, "kv_memory_gb": 0.0008, "cache_disk": str(tmp_path), "cache_disk_gb": 0.05}
    with LLM(model, instances=["prefill", "decode"], **few) as llm:
        for _ in range(5):
            assert tokens(llm.generate(talks, how)) == tokens(one.generate(talks, how))
        prefill, decode = each_stats(llm, 0), each_stats(llm, 1)
    assert prefill.tiers.num_stored > 0
    assert decode.tiers.num_slots > 0


@pytest.mark.parametrize(
    "trouble", [signal.SIGSTOP, *[signal.SIGKILL] * TRIES_ALL], ids=lambda x: x.name
)
def test_replicas_of_an_instance_at_an_address(
    model: str, one: LLM, trouble: signal.Signals
) -> None:
    """Its R-workers are processes: one is lost, and the instance goes on with its
    requests. No other instance decodes, so none could have taken them."""
    asked, how = prompts(24, seed=85), params(24, seed=85, n=2)
    expected = tokens(one.generate(asked, how))
    options = ("--keep-serving", "--silence-s", str(SILENCE_S))
    few = ("--dtype", "float32", "--block-size", "16", "--replicas", "1")
    with contextlib.ExitStack() as stack:
        pytest.importorskip("zmq", reason="needs pyzmq: pip install pyzmq")
        workers, addresses = stack.enter_context(r_workers("*", "*", options=options))
        own = (*few, "--worker-silence-s", str(SILENCE_S), *at(addresses))
        jobs = [
            stack.enter_context(instance(model, "prefill")),
            stack.enter_context(instance(model, "decode", engine=own)),
        ]
        llm = stack.enter_context(controller(model, [ready(job, "") for job in jobs]))
        assert tokens(llm.generate(asked, how)) == expected
        os.kill(workers[0].pid, trouble)
        outputs = llm.generate(asked, how)
        assert not any(output.error for output in outputs) and tokens(outputs) == expected
        assert_all_is_free(llm)
        assert llm.stats.num_moved == 0
