"""Prefill and decode instances in one process: the tokens are those of one
engine, whatever happens on the way."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from instance_runs import OPTIONS, assert_alike, params, prompts, requests_of, tokens
from news import NewsLLM

from examples import examples
from fastdecode import LLM, SamplingParams
from fastdecode.cli.main import main
from fastdecode.core.delta import DeltaQueue, OutputFold
from fastdecode.core.errors import ConfigError
from fastdecode.core.sequence import Request, RequestOutput
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
    """Of its instances; prefill instances come first."""
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


@pytest.mark.parametrize("n", [1, 3])
def test_tokens_are_those_of_one_engine(one: LLM, four: NewsLLM, n: int) -> None:
    asked, how = prompts(24), params(24, n=n)
    assert_alike(four.generate(asked, how), one.generate(asked, how))
    assert four.stats.num_recomputed == 0
    assert_nothing_is_left(four)
    names = [f"R-worker {name}-r{i}" for name in ("d0", "d1", "p0", "p1") for i in range(2)]
    figures = four._running.engine.figures
    assert four.until(lambda: [each.name for each in figures().r_workers] == names)


def test_deltas_come_once_and_in_order(one: LLM, four: LLM) -> None:
    asked, how = prompts(8, seed=9), params(8, seed=9, n=2)
    folds = [OutputFold(str(i), None, tuple(prompt), 2) for i, prompt in enumerate(asked)]
    outputs: dict[str, RequestOutput] = {}
    for delta in four.deltas(requests_of(asked, how)):
        output = folds[int(delta.request_id)].add(delta)
        if output is not None:
            outputs[delta.request_id] = output
    assert_alike([outputs[str(i)] for i in range(8)], one.generate(asked, how))


def test_a_burst_waits_and_nothing_is_recomputed(model: str, one: LLM) -> None:
    """300 prompts, a buffer for about 20, decode room for about 10."""
    asked = prompts(300, seed=6)
    how = [SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)] * 300
    longest = 71  # tokens: five blocks
    block_bytes = one.facts.num_kv_blocks and 0.004e9 / one.facts.num_kv_blocks
    few = {**OPTIONS, "kv_memory_gb": 10 * -(-longest // 16) * block_bytes / 1e9}
    with LLM(model, instances=["prefill", "decode"], **few) as llm:
        outputs = llm.generate(asked, how)
        assert_alike(outputs, one.generate(asked, how))
        assert llm.stats.num_recomputed == llm.stats.num_suspended == 0
        assert llm._running.engine.num_handed_over == 300
        assert_nothing_is_left(llm)


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
    drained = four.service._loop.when_drained()
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
            service._loop.when_drained().get(timeout=WAIT_S)  # all that was asked before is done
        broken = [service.snapshot().error is not None for service in services(llm)]
        assert broken == [index == lost for index in range(3)]


def _fail(running: Any) -> None:
    raise ConfigError("it is broken by a test")


@pytest.mark.parametrize("options", [{"r_partition": "heads"}, {"split_tokens": 16}], ids=str)
def test_r_workers_may_share_out_what_they_have(
    model: str, one: LLM, options: dict[str, Any]
) -> None:
    asked, how = prompts(8, seed=5), params(8, seed=5, n=2)
    with LLM(model, **BOTH, r_workers=2, **options, **OPTIONS) as llm:
        assert tokens(llm.generate(asked, how)) == tokens(one.generate(asked, how))
        assert llm.stats.num_recomputed == 0 and llm.stats.fetched_bytes > 0


def test_layers_may_be_on_stages(model: str, one: LLM) -> None:
    """A prompt's K and V come from the R-workers of every stage."""
    asked, how = prompts(12, seed=15), params(12, seed=15, n=2)
    with LLM(model, **BOTH, r_workers=2, pp=2, **OPTIONS) as llm:
        for _ in range(2):
            assert_alike(llm.generate(asked, how), one.generate(asked, how))
        assert llm.stats.num_recomputed == llm._running.engine.num_failed_fetches == 0
        assert llm.stats.fetched_bytes > 0
        assert_nothing_is_left(llm)


ON_A_DEVICE = {"kv_placement": "gpu", "device": "cpu", "r_threads": None}


@pytest.mark.parametrize("where", [{"pp": 2, "r_workers": 2}, ON_A_DEVICE], ids=str)
def test_prompts_may_run_on_stages_of_their_own(
    model: str, one: LLM, where: dict[str, Any]
) -> None:
    """Others fetch what prompt stages have written."""
    asked, how = prompts(8, seed=17), params(8, seed=17, n=2)
    with LLM(model, **{**OPTIONS, **BOTH, "prompt_pp": 1, **where}) as llm:
        for _ in range(2):
            assert_alike(llm.generate(asked, how), one.generate(asked, how))
        assert llm.stats.num_recomputed == llm._running.engine.num_failed_fetches == 0
        assert llm.stats.fetched_bytes > 0
        assert_nothing_is_left(llm)


@pytest.mark.parametrize("more", [{}, {"cache_memory_gb": 0.01, "prefix_cache": "on"}], ids=str)
def test_kv_may_be_on_the_device_of_each(model: str, one: LLM, more: dict[str, Any]) -> None:
    asked, how = prompts(16, seed=7), params(16, seed=7, n=2)
    options = {**OPTIONS, "kv_placement": "gpu", "device": "cpu", **more}
    del options["r_threads"]
    with LLM(model, instances=["prefill", "decode", "decode"], **options) as llm:
        assert_alike(llm.generate(asked, how), one.generate(asked, how))
        assert llm.stats.num_recomputed == 0 and llm.stats.fetched_bytes > 0
        assert llm.facts.num_r_workers == 0
        if not more:
            assert_nothing_is_left(llm)


def test_kv_may_be_on_both_sides_of_each(model: str, one: LLM) -> None:
    """The device has room for one of a prompt's two sequences: the other does not wait for
    it, which is not fetched before both have run."""
    asked, how = prompts(16, seed=7), params(16, seed=7, n=2)
    options = {**OPTIONS, "kv_placement": "hybrid", "device": "cpu", "device_kv_gb": 0.00004}
    with LLM(model, **BOTH, r_workers=2, **options) as llm:
        assert_alike(llm.generate(asked, how), one.generate(asked, how))
        assert llm.stats.num_recomputed == llm._running.engine.num_failed_fetches == 0
        assert llm.stats.fetched_bytes > 0
        sides = [each._loop.owned.served.engine.stats.hybrid.steps for each in services(llm)]
        assert any(set(steps) - {"gpu-only"} for steps in sides), sides
        assert_nothing_is_left(llm)


def test_by_its_command(model: str, one: LLM, tmp_path: Path) -> None:
    lines = [{"id": str(i), "prompt_token_ids": ids} for i, ids in enumerate(prompts(5, seed=2))]
    asked, told, summary = (tmp_path / name for name in ("in.jsonl", "out.jsonl", "summary.json"))
    asked.write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = [
        *("generate", "--model", model, "--input", str(asked), "--output", str(told)),
        *("--summary", str(summary), "--instances", "prefill,decode"),
        *("--dtype", "float32", "--temperature", "0", "--max-tokens", "5", "--ignore-eos"),
        *("--kv-memory-gb", "0.004", "--r-threads", "1", "--block-size", "16"),
    ]
    assert main(words) == 0
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    outputs = one.generate(prompts(5, seed=2), params)
    answers = [json.loads(line) for line in told.read_text().splitlines()]
    assert [tuple(answer["token_ids"]) for answer in answers] == [
        output.completions[0].token_ids for output in outputs
    ]
    counted = json.loads(summary.read_text())["instances"]
    assert (counted["handed_over"], counted["moved"]) == (5, 0)
    assert counted["fetched_bytes"] > 0


def test_what_instances_are_not_there_with_is_refused_by_name(model: str) -> None:
    for options, named in (
        ({"instances": ["prefill"]}, "none of these instances decodes"),
        ({**BOTH, "pp": 2, "r_partition": "heads"}, "r_partition"),
    ):
        with pytest.raises(ConfigError, match=named):
            LLM(model, **options)


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
