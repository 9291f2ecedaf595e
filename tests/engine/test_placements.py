"""A request's tokens are those of one plain engine, wherever layers, heads and KV are.

``test_feature_pairs.py`` has each pair of features with a loss, and ``test_simulated_faults.py``
faults at random moments. Here are other families, other ways to run, and what ends an R-worker or
a job."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints import FEW_FAMILIES, prompts
from mixed_requests import OPTIONS, mixed_requests, plain, tokens
from trouble import Trouble, crash_after, give

from examples import TRIES_ALL
from fastdecode import LLM, SamplingParams
from fastdecode.core.errors import ConfigError, WorkerError
from fastdecode.core.sequence import PromptRequest
from sworker.worker import Pass, SWorker

Make = Callable[..., Path]

ON_DEVICE: dict[str, Any] = {"dtype": "float32", "kv_memory_gb": 0.01, "kv_placement": "gpu"}
STAGES: dict[str, Any] = {**OPTIONS, "pp": 3, "pp_layers": "1,1,1"}
STAGES_ON_DEVICES: dict[str, Any] = {**ON_DEVICE, "pp": 3, "pp_layers": "1,1,1"}
SWAPPED: dict[str, Any] = {**STAGES_ON_DEVICES, "kv_placement": "swap"}
HEADS: dict[str, Any] = {**OPTIONS, "r_partition": "heads"}
PARTS: dict[str, Any] = {**OPTIONS, "split_tokens": 16, "block_size": 16}


@pytest.fixture(scope="module")
def six_heads(tiny_checkpoint: Make) -> str:
    """Enough KV heads for three R-workers."""
    return str(tiny_checkpoint("llama", num_key_value_heads=6))


OF_FAMILIES: dict[str, dict[str, Any]] = {
    "stages": {**STAGES, "r_workers": 2, "lanes": 4, "prefill_chunk": 16},
    "stages' devices": {**STAGES_ON_DEVICES, "prefill_chunk": 16, "lanes": 4},
    "swapped": {**SWAPPED, "prefill_chunk": 16, "block_size": 16},
    "heads": {**HEADS, "r_workers": 2, "lanes": 2, "prefill_chunk": 8},
    "parts in stages": {**PARTS, **STAGES, "r_workers": 2, "lanes": 2},
}


@pytest.mark.parametrize("family", FEW_FAMILIES)
@pytest.mark.parametrize("way", OF_FAMILIES)
def test_every_familys_tokens(way: str, family: str, tiny_checkpoint: Make) -> None:
    path = str(tiny_checkpoint(family))
    with LLM(path, **OF_FAMILIES[way]) as llm:
        assert tokens(llm, mixed_requests()) == plain(path)
        assert tokens(llm, mixed_requests()) == plain(path)


KEPT: dict[str, Any] = {"prefix_cache": "on", "block_size": 16}
STEPS_OF_FEW: dict[str, Any] = {"lanes": 1, "max_num_sequences": 2, "max_step_tokens": 9}
LIMITED: dict[str, Any] = {"load_limit": 120, "length_quantile": 0.5, "block_size": 16}
WAYS: list[dict[str, Any]] = [
    {**STAGES, "r_workers": 2, "prefill_chunk": 7, "prompt_attention": "s", "lanes": 4},
    {**STAGES, **STEPS_OF_FEW},
    {**STAGES, **KEPT},
    {**STAGES, **LIMITED, "schedule": "stabilized"},
    {**STAGES_ON_DEVICES, **STEPS_OF_FEW},
    {**STAGES_ON_DEVICES, **KEPT, "lanes": 3},
    {**STAGES_ON_DEVICES, "schedule": "synchronized", "lanes": 2, "prefill_chunk": 7},
    {**OPTIONS, **KEPT, "pp": 2, "pp_layers": "1,2", "prompt_pp": 3, "r_workers": 2, "lanes": 2},
    {**SWAPPED, **KEPT},
    {**SWAPPED, "prefix_cache": "off", "lanes": 5, "prefill_chunk": 7},
    {**SWAPPED, "max_num_sequences": 4, "max_step_tokens": 19},
    {**SWAPPED, "schedule": "synchronized", "lanes": 4},
    {**SWAPPED, "load_limit": 240, "prompt_pp": 1},
    {**PARTS, "r_workers": 3, "lanes": 2, "schedule": "stabilized", "prompt_attention": "r"},
]


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_ways_to_run(way: dict[str, Any], llama: str) -> None:
    with LLM(llama, **way) as llm:
        assert tokens(llm, mixed_requests()) == plain(llama)
        assert tokens(llm, mixed_requests()) == plain(llama)
        if way.get("prefix_cache") == "on":
            assert llm.stats.num_cached_prompt_tokens > 16


SMALL: dict[str, Any] = {"block_size": 16, "length_quantile": 0.5, "expected_output_tokens": 2}


@pytest.mark.parametrize(
    ("where", "kv_memory_gb"),
    [
        ({**STAGES, "lanes": 3}, 9.3e-5),
        ({**STAGES_ON_DEVICES, "lanes": 3}, 9.3e-5),
        (SWAPPED, 8e-5),
    ],
    ids=["stages", "devices", "swapped"],
)
def test_sequences_are_suspended_and_continue(
    where: dict[str, Any], kv_memory_gb: float, llama: str
) -> None:
    """Twelve sequences grow beyond what is reserved for them."""
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, stop_token_ids=[0])
    asked = [(prompt, params) for prompt in prompts((20,) * 12, seed=3)]
    with LLM(llama, **OPTIONS) as llm:
        alone = tokens(llm, asked)
    with LLM(llama, **{**where, **SMALL, "kv_memory_gb": kv_memory_gb}) as llm:
        assert tokens(llm, asked) == alone
        assert llm.stats.num_suspended > 0


@pytest.mark.parametrize(
    "where",
    [{**STAGES, "r_workers": 2, "lanes": 2}, {**STAGES_ON_DEVICES, "lanes": 2}, SWAPPED],
    ids=["stages", "devices", "swapped"],
)
def test_cancelled_requests_leave_nothing_behind(where: dict[str, Any], llama: str) -> None:
    with LLM(llama, **where) as llm:
        endless = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True, n=2)
        deltas = llm.deltas([PromptRequest("endless", prompts((30,))[0], endless)])
        assert next(deltas).finish_reason is None
        deltas.close()
        assert tokens(llm, mixed_requests()) == plain(llama)
        figures = []
        llm.service.call(lambda running: figures.append(running.engine.figures()))
        assert {one.kv_blocks_used for one in figures[0].r_workers} == {0}


IN_CHUNKS: dict[str, Any] = {"r_workers": 2, "prefill_chunk": 16}
LOSSES: list[tuple[dict[str, Any], dict[str, int]]] = [
    ({**STAGES, **IN_CHUNKS, "lanes": 3}, {"s1-r1": 0}),
    ({**STAGES, **IN_CHUNKS, "lanes": 3}, {"s2-r0": 17}),
    ({**STAGES, **HEADS, **IN_CHUNKS, "r_workers": 3}, {"s1-r0": 0, "s1-r2": 15}),
    ({**HEADS, **IN_CHUNKS, "r_workers": 3, "lanes": 2}, {"r1": 33, "r2": 90}),
    ({**STAGES, **IN_CHUNKS, "r_workers": 1, "spare_r_workers": 1}, {"s1-r0": 9}),
    ({**STAGES, **PARTS, **IN_CHUNKS, "r_workers": 3}, {"s1-r1": 9}),
    ({**PARTS, **IN_CHUNKS, "r_workers": 3, "lanes": 2}, {"r0": 25, "r2": 40}),
]
MORE_LOSSES: list[tuple[dict[str, Any], dict[str, int]]] = [
    ({**STAGES, "lanes": 3}, {lost: after}) for lost in ("r1", "s1-r1") for after in (0, 3, 17, 40)
]


@pytest.mark.parametrize(("options", "lost"), LOSSES + MORE_LOSSES * TRIES_ALL, ids=str)
def test_lost_r_workers_of_a_stage_are_recovered(
    options: dict[str, Any], lost: dict[str, int], six_heads: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while prompts arrive: the first layers that it attends, or stores, are theirs."""
    crash_after(monkeypatch, lost)
    with LLM(six_heads, **{**IN_CHUNKS, **options}) as llm:
        assert tokens(llm, mixed_requests()) == plain(six_heads)
        assert llm.stats.num_recomputed > 0
        assert llm.stats.num_rejoined == options.get("spare_r_workers", 0)
        live, known = llm.snapshot().engine.workers
        if "r_partition" not in options:  # else those of later stages count together
            assert known - live == len(lost) - llm.stats.num_rejoined
        assert tokens(llm, mixed_requests()) == plain(six_heads)


@pytest.mark.parametrize(
    ("options", "lost", "reason"),
    [
        ({"pp": 2, "lanes": 3}, {"s1-r0": 9}, "stage 1"),
        ({"pp": 2, "r_workers": 2, "r_partition": "heads"}, {"s1-r0": 5, "s1-r1": 5}, "stage 1"),
        ({"pp": 2, "spare_r_workers": 1}, {"r0": 9, "r1": 30}, "no more memory"),
        ({"pp": 2, "spare_r_workers": 1}, {"s1-r0": 9, "s1-r1": 30}, "stage 1"),
    ],
    ids=str,
)
def test_a_stage_without_r_workers_ends_the_job_at_once(
    options: dict[str, Any],
    lost: dict[str, int],
    reason: str,
    llama: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A standby replaces the lost R-worker. When it is lost, too, no request waits for another
    one until a timeout is over."""
    crash_after(monkeypatch, lost)
    with LLM(llama, **OPTIONS, **options, worker_timeout_s=3600.0) as llm:
        outputs = llm.generate(prompts((5, 9)), SamplingParams(max_tokens=50, ignore_eos=True))
        assert not any(output.ok for output in outputs)
        assert all(reason in str(output.error) for output in outputs)
        assert llm.stats.num_rejoined == options.get("spare_r_workers", 0)


def test_a_hung_r_worker_is_given_up(llama: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others may be slow on a busy machine: it has three seconds."""
    woken = threading.Event()

    def hang() -> None:
        assert woken.wait(60)

    give(monkeypatch, {"r1": lambda: Trouble(13, hang)})
    try:
        with LLM(llama, **OPTIONS, r_workers=3, worker_timeout_s=3.0) as llm:
            assert tokens(llm, mixed_requests()) == plain(llama)
            engine = llm.snapshot().engine
            assert engine.num_live_r_workers == 2 and engine.has_hung_r_workers
            assert llm.stats.num_recomputed > 0
    finally:
        woken.set()


def test_when_all_are_lost_every_request_says_so(
    llama: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for what was done by then."""
    crash_after(monkeypatch, {"r0": 20, "r1": 20})
    short, long = (SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (2, 24))
    with LLM(llama, **OPTIONS, r_workers=2) as llm:
        outputs = llm.generate(prompts([3, 4, 5], seed=2), [short, long, long])
        assert outputs[0].ok
        for output in outputs[1:]:
            assert isinstance(output.error, WorkerError)
            assert "no more memory" in str(output.error)
        (later,) = llm.generate([[5]], short)  # it takes no more requests, and says why
        assert isinstance(later.error, WorkerError)


def test_a_stage_that_breaks_down_ends_the_job_by_name(
    llama: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = SWorker.begin

    def broken(self: SWorker, *args: Any) -> Pass:
        if threading.current_thread().name == "stage 1":
            raise RuntimeError("the lights went out")
        return begin(self, *args)

    monkeypatch.setattr(SWorker, "begin", broken)
    with LLM(llama, **OPTIONS, pp=2) as llm:
        (output,) = llm.generate(prompts((5,)), SamplingParams(max_tokens=5))
        assert output.error is not None
        assert "stage 1" in output.error.message
        assert "the lights went out" in output.error.message


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"pp": 2, "r_worker_addresses": ("tcp://127.0.0.1:5555",)}, "a multiple of 2"),
        ({"pp": 2, "tp": 2}, "needs an MPI launcher: mpirun -n 4 "),
        ({"pp": 2, "pp_layers": "1,2,3"}, "pp_layers"),
        ({"pp": 2, "pp_layers": "all"}, "pp_layers"),
        ({"pp": 2, "pp_layers": "1,1"}, "pp_layers"),
        ({"prompt_pp": 4}, "prompt_pp=4.* 3 layers"),
        ({**SWAPPED, "pp": 2, "pp_layers": None}, "raise pp=2"),
        ({**SWAPPED, "lanes": 2}, "raise lanes=2"),
        ({**SWAPPED, "kv_memory_gb": 1e5}, "3 lanes in each of 3 stages"),
        ({"split_tokens": 100}, "not a multiple of block_size=64: take 128"),
        ({"split_tokens": 0}, "split_tokens=0"),
        ({"device_kv_gb": 1.0}, "needs kv_placement='hybrid'"),
        ({"r_partition": "heads", "r_workers": 4}, "4 R-workers"),
    ],
    ids=str,
)
def test_what_does_not_fit_together_is_refused_by_name(
    options: dict[str, Any], reason: str, llama: str
) -> None:
    """``core/test_features.py`` has pairs of features."""
    with pytest.raises(ConfigError, match=reason):
        LLM(llama, **options)
