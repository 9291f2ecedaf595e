"""Pipeline stages as threads: a request's tokens are those of one stage, whatever
becomes of R-workers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints import FAMILIES, FEW_FAMILIES, prompts
from mixed_requests import OPTIONS, mixed_requests, tokens
from torch import Tensor
from trouble import crash_after
from zmq_r_workers import r_workers

from examples import TRIES_ALL
from fastdecode import LLM, SamplingParams
from fastdecode.core.errors import ConfigError
from fastdecode.core.sequence import PromptRequest
from sworker.worker import Pass, SWorker

Make = Callable[..., Path]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_familys_tokens(family: str, tiny_checkpoint: Make) -> None:
    path, asked = str(tiny_checkpoint(family)), mixed_requests()
    with LLM(path, **OPTIONS) as llm:
        expected = tokens(llm, asked)
    with LLM(path, **OPTIONS, pp=2, prefill_chunk=16, lanes=2) as llm:
        assert tokens(llm, asked) == expected
    with LLM(path, **OPTIONS, pp=3, pp_layers="1,1,1", r_workers=2, lanes=4) as llm:
        assert tokens(llm, asked) == expected


ON_DEVICE: dict[str, Any] = {
    "dtype": "float32",
    "kv_memory_gb": 0.01,
    "kv_placement": "gpu",
    "pp_layers": "1,1,1",
}


@pytest.mark.parametrize("family", FEW_FAMILIES)
def test_every_familys_tokens_with_kv_on_each_stages_device(
    family: str, tiny_checkpoint: Make
) -> None:
    path, asked = str(tiny_checkpoint(family)), mixed_requests()
    with LLM(path, **OPTIONS) as llm:
        expected = tokens(llm, asked)
    with LLM(path, **ON_DEVICE, pp=3, prefill_chunk=16, lanes=4) as llm:
        assert tokens(llm, asked) == expected
        assert tokens(llm, asked) == expected


@pytest.fixture(scope="module")
def llama(tiny_checkpoint: Make) -> str:
    return str(tiny_checkpoint("llama"))


@pytest.fixture(scope="module")
def expected(llama: str) -> list[list[tuple[int, ...]]]:
    with LLM(llama, **OPTIONS) as llm:
        return tokens(llm, mixed_requests())


WAYS: list[dict[str, Any]] = [
    {"r_workers": 2, "prefill_chunk": 7, "prompt_attention": "s", "lanes": 4},
    {"lanes": 1, "max_num_sequences": 2, "max_step_tokens": 9},
    {"prefix_cache": "on", "block_size": 16},
    {"schedule": "stabilized", "load_limit": 120, "length_quantile": 0.5, "block_size": 16},
]


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_ways_to_run_stages(way: dict[str, Any], llama: str, expected: Any) -> None:
    with LLM(llama, **OPTIONS, pp=2, **way) as llm:
        assert tokens(llm, mixed_requests()) == expected
        assert tokens(llm, mixed_requests()) == expected
        if way.get("prefix_cache") == "on":
            assert llm.stats.num_cached_prompt_tokens > 16


DEVICE_WAYS: list[dict[str, Any]] = [
    {"prefix_cache": "on", "block_size": 16, "lanes": 3},
    {"lanes": 1, "max_num_sequences": 2, "max_step_tokens": 9},
    {"schedule": "stabilized", "load_limit": 180, "lanes": 3},
    {"schedule": "synchronized", "lanes": 2, "prefill_chunk": 7},
]


@pytest.mark.parametrize("way", DEVICE_WAYS, ids=str)
def test_ways_to_run_stages_with_kv_on_their_devices(
    way: dict[str, Any], llama: str, expected: Any
) -> None:
    with LLM(llama, **ON_DEVICE, pp=3, **way) as llm:
        assert tokens(llm, mixed_requests()) == expected
        assert tokens(llm, mixed_requests()) == expected
        if way.get("prefix_cache") == "on":
            assert llm.stats.num_cached_prompt_tokens > 16


ON_R_WORKERS = {**OPTIONS, "pp_layers": "1,1,1"}


@pytest.mark.parametrize("where", [ON_R_WORKERS, ON_DEVICE], ids=["r", "gpu"])
def test_sequences_are_suspended_and_go_on(where: dict[str, Any], llama: str) -> None:
    """Twelve sequences grow beyond what is reserved for them."""
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, stop_token_ids=[0])
    asked = [(prompt, params) for prompt in prompts((20,) * 12, seed=3)]
    with LLM(llama, **OPTIONS) as llm:
        alone = tokens(llm, asked)
    small = {**where, "kv_memory_gb": 9.3e-5, "block_size": 16, "length_quantile": 0.5}
    few = {"expected_output_tokens": 2}
    with LLM(llama, **small, **few, pp=3, lanes=3) as llm:
        assert tokens(llm, asked) == alone
        assert llm.stats.num_suspended > 0


PLACES: list[dict[str, Any]] = [
    {**OPTIONS, "pp": 2, "r_workers": 2, "lanes": 2},
    {**ON_DEVICE, "pp": 3, "lanes": 2},
]


@pytest.mark.parametrize("options", PLACES, ids=["r", "gpu"])
def test_cancelled_requests_leave_nothing_behind(
    options: dict[str, Any], llama: str, expected: Any
) -> None:
    with LLM(llama, **options) as llm:
        endless = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True, n=2)
        deltas = llm.deltas([PromptRequest("endless", prompts((30,))[0], endless)])
        assert next(deltas).finish_reason is None
        deltas.close()
        assert tokens(llm, mixed_requests()) == expected
        figures = []
        llm.service.call(lambda running: figures.append(running.engine.figures()))
        assert {one.kv_blocks_used for one in figures[0].r_workers} == {0}


LOSSES = [("r1", 3), ("s1-r1", 0), ("s2-r0", 17)]
MORE_LOSSES = [("r1", 0), ("r1", 17), ("s1-r1", 3), ("s1-r1", 17), ("s2-r0", 0), ("s2-r0", 3)]


@pytest.mark.parametrize(("lost", "after"), LOSSES + MORE_LOSSES * TRIES_ALL)
def test_a_lost_r_worker_of_any_stage_is_recovered(
    lost: str, after: int, llama: str, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while prompts arrive: the first layers that it attends are theirs."""
    crash_after(monkeypatch, {lost: after})
    with LLM(
        llama, **OPTIONS, pp=3, pp_layers="1,1,1", r_workers=2, prefill_chunk=16, lanes=3
    ) as llm:
        assert tokens(llm, mixed_requests()) == expected
        assert llm.stats.num_recomputed > 0
        assert llm.snapshot().engine.workers == (5, 6)  # of all stages
        assert tokens(llm, mixed_requests()) == expected


def test_r_workers_at_addresses_are_each_stages_in_their_order(llama: str, expected: Any) -> None:
    with r_workers("*", "*") as (_, addresses):
        options = {"dtype": "float32", "r_worker_addresses": tuple(addresses)}
        with LLM(llama, **options, pp=2) as llm:
            assert tokens(llm, mixed_requests()) == expected
            assert llm.snapshot().engine.workers == (2, 2)


def test_a_stage_without_r_workers_ends_the_job(
    llama: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    crash_after(monkeypatch, {"s1-r0": 9})
    with LLM(llama, **OPTIONS, pp=2, lanes=3) as llm:  # R-workers are threads
        outputs = llm.generate(prompts((5, 9)), SamplingParams(max_tokens=50, ignore_eos=True))
        assert not any(output.ok for output in outputs)
        assert all("stage 1" in output.error.message for output in outputs)


@pytest.mark.parametrize("stage", ["", "s1-"])
def test_a_stage_without_standby_r_workers_ends_the_job_at_once(
    stage: str, llama: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The standby replaces the lost R-worker. When it is lost, too, no request waits for
    another one until a timeout is over."""
    crash_after(monkeypatch, {f"{stage}r0": 9, f"{stage}r1": 30})
    patient = {"spare_r_workers": 1, "worker_timeout_s": 3600.0}
    with LLM(llama, **OPTIONS, pp=2, **patient) as llm:
        outputs = llm.generate(prompts((5, 9)), SamplingParams(max_tokens=50, ignore_eos=True))
        assert not any(output.ok for output in outputs)
        assert llm.stats.num_rejoined == 1


def test_a_stage_that_breaks_down_ends_the_job_by_name(
    llama: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = SWorker.begin

    def broken(self: SWorker, rows: Tensor, lane: int, feed: Any, x: Tensor | None) -> Pass:
        if x is not None:
            raise RuntimeError("the lights went out")
        return begin(self, rows, lane, feed, x)

    monkeypatch.setattr(SWorker, "begin", broken)
    with LLM(llama, **OPTIONS, pp=2) as llm:
        (output,) = llm.generate(prompts((5,)), SamplingParams(max_tokens=5))
        assert output.error is not None
        assert "stage 1" in output.error.message
        assert "the lights went out" in output.error.message


def test_what_isnt_there_with_stages_is_refused_by_name(llama: str) -> None:
    for options, named in (
        ({"r_partition": "heads", "replicas": 1}, "r_partition"),
        ({"kv_placement": "hybrid"}, "kv_placement"),
        ({"r_worker_addresses": ("tcp://127.0.0.1:5555",)}, "a multiple of 2"),
        ({"tp": 2}, "needs an MPI launcher: mpirun -n 4 "),
        ({"pp_layers": "1,2,3"}, "pp_layers"),
        ({"pp_layers": "all"}, "pp_layers"),
        ({"pp_layers": "1,1"}, "pp_layers"),
    ):
        with pytest.raises(ConfigError, match=named):
            LLM(llama, pp=2, **options)
