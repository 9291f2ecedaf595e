"""Prefill and decode instances in one process: the tokens are those of one
engine, whatever happens on the way."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from instance_runs import OPTIONS, assert_alike, params, prompts, requests_of, tokens
from news import NewsLLM
from trouble import crash_after

from examples import examples
from fastdecode import LLM, SamplingParams
from fastdecode.core.delta import DeltaQueue
from fastdecode.core.errors import ConfigError
from fastdecode.core.sequence import Request
from fastdecode.engine.instances import local_instances
from fastdecode.engine.instances.local_instances import LocalHub
from fastdecode.engine.service import EngineService
from fastdecode.engine.setup.launch import RunningEngine
from fastdecode.schedule.life.lifecycle import Lifecycle

BOTH = {"instances": ["prefill", "decode"]}
WAIT_S = 120.0


@pytest.fixture(scope="module")
def four(model: str) -> Iterator[NewsLLM]:
    with NewsLLM(
        model, instances=["prefill", "prefill", "decode", "decode"], r_workers=2, **OPTIONS
    ) as llm:
        yield llm


def services(llm: LLM) -> Sequence[EngineService[RunningEngine]]:
    """Return the services of all instances, prefill instances first."""
    hub = llm._running._hub
    assert isinstance(hub, LocalHub)
    return hub.services


def assert_nothing_is_left(llm: LLM) -> None:
    """No instance has a sequence, a block, or an offer."""
    controller = llm._running.engine
    routed_requests, dispatcher = controller.routed_requests, controller.router.dispatcher
    assert not (routed_requests.by_request or routed_requests.by_run or routed_requests.by_job)
    assert not dispatcher.num_waiting and not dispatcher.num_offered
    assert not any(queue.num_tokens for queue in dispatcher.prefill)
    assert not any(room.num_tokens or room.num_sequences for room in dispatcher.decode)
    end_s = time.monotonic() + WAIT_S
    for each in services(llm):
        while not _is_idle(each):  # what the controller has cancelled may be on its way
            assert time.monotonic() < end_s
        each.call(_check_empty)


def _is_idle(service: EngineService[RunningEngine]) -> bool:
    def look(running: RunningEngine) -> None:
        lifecycle = running.engine._lifecycle
        has_any = lifecycle.sequences.by_sequence or lifecycle.handing.has_exported
        found.append(not (has_any or running.engine.has_work))

    found: list[bool] = []
    service.call(look)
    return found == [True]


def _check_empty(running: Any) -> None:
    lifecycle: Lifecycle = running.engine._lifecycle
    lifecycle.check_invariants()
    assert not lifecycle.sequences.by_sequence and not lifecycle.handing.has_exported
    ledger = lifecycle.scheduler.ledger
    for holder in ledger.holders.open:
        assert ledger.free_blocks(holder) == ledger.capacity.blocks(holder)


def test_tokens_are_those_of_one_engine(one: LLM, four: NewsLLM) -> None:
    asked, how = prompts(24), params(24, n=3)
    assert_alike(four.generate(asked, how), one.generate(asked, how))
    assert four.stats.num_recomputed == 0
    assert_nothing_is_left(four)
    names = [f"R-worker {name}-r{i}" for name in ("d0", "d1", "p0", "p1") for i in range(2)]
    figures = four._running.engine.figures
    assert four.until(lambda: [each.name for each in figures().r_workers] == names)


def test_whoever_is_cancelled_at_any_stage_leaves_nothing(four: LLM) -> None:
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
    assert_nothing_is_left(four)


@pytest.mark.parametrize("lost", [0, 1])
def test_who_is_lost_is_gone_on_without(model: str, one: LLM, lost: int) -> None:
    """0 prefills, 1 decodes."""
    asked, how = prompts(20, seed=12), params(20, seed=12, n=2)
    with LLM(model, instances=["prefill", "decode", "decode"], **OPTIONS) as llm:
        ticks = iter(range(1 << 20))

        def break_one() -> None:
            if next(ticks) == 0:
                services(llm)[lost].look(_fail)

        outputs = {o.request_id: o for o in llm.stream(requests_of(asked, how), break_one)}
        # Those of tokens that were run again are rounded otherwise, too.
        assert tokens([outputs[str(i)] for i in range(20)]) == tokens(one.generate(asked, how))
        assert not any(output.error for output in outputs.values())
        for service in services(llm):
            service.when_drained().get(timeout=WAIT_S)  # all that was asked before is done
        broken = [service.snapshot().error is not None for service in services(llm)]
        assert broken == [index == lost for index in range(3)]


def _fail(running: Any) -> None:
    raise ConfigError("it is broken by a test")


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
    with LLM(model, **{**OPTIONS, **BOTH, **options}) as llm:
        for _ in range(2):
            assert tokens(llm.generate(asked, how)) == tokens(one.generate(asked, how))
        assert llm.stats.num_recomputed == llm._running.engine.num_failed_fetches == 0
        assert llm.stats.fetched_bytes > 0
        if "cache_memory_gb" not in options:
            assert_nothing_is_left(llm)


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


def test_an_instance_that_hangs_is_left_with_a_warning(
    model: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(local_instances, "CLOSING_S", 0.1)
    llm, free = LLM(model, **BOTH, **OPTIONS), threading.Event()
    hung, other = services(llm)
    hung.look(lambda running: free.wait(WAIT_S) and None)
    llm.close()
    assert "has not stopped within" in caplog.text
    free.set()
    for service in (hung, other):
        service.close()
    assert {service.snapshot().state for service in (hung, other)} == {"closed"}


FEW = {"dtype": "float32", "block_size": 16, "kv_memory_gb": 0.02}


def each_stats(llm: LLM, number: int):  # type: ignore[no-untyped-def]
    """Return the figures of one instance; prefill instances come first."""
    hub = llm._running._hub
    assert isinstance(hub, LocalHub)
    return hub.services[number].served.engine.stats


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
