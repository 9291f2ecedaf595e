"""Instances whose own R-workers protect each other: with replicas, with a standby, and
with a disk for kept blocks."""

from __future__ import annotations

import pytest
from instance_runs import params, prompts, tokens
from trouble import crash_after

from fastdecode import LLM, SamplingParams
from fastdecode.engine.instances.local_instances import LocalHub

FEW = {"dtype": "float32", "block_size": 16, "kv_memory_gb": 0.02}


def each_stats(llm: LLM, number: int):  # type: ignore[no-untyped-def]
    """Of one instance; prefill instances come first."""
    hub = llm._running._hub
    assert isinstance(hub, LocalHub)
    return hub.services[number]._loop.owned.served.engine.stats


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
