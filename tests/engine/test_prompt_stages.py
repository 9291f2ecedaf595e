"""Stages that run prompts only, as threads: a request's tokens are those of one
stage, and no step that decodes has a prompt's rows."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from checkpoints import prompts
from mixed_requests import OPTIONS, mixed_requests, plain, tokens
from simulated_engines import ListeningLosses

from examples import TRIES_ALL
from fastdecode import LLM, SamplingParams
from fastdecode.core.errors import ConfigError
from fastdecode.core.sequence import PromptRequest
from fastdecode.engine.setup import reach
from fastdecode.engine.step.batch import StepBatch
from fastdecode.engine.step.torch_executor import TorchExecutor
from rworker.attention import AttentionExecutor

ON_DEVICES: list[dict[str, Any]] = [
    {"pp": 2, "prompt_pp": 2, "pp_layers": "1,2", "prefill_chunk": 7},
    {"kv_dtype": "int8", "prefill_chunk": 16},
]
MORE_ON_DEVICES: list[dict[str, Any]] = [
    {"kv_dtype": "bfloat16", "max_num_sequences": 2, "prefill_chunk": 5},
    {"kv_dtype": "int4", "prompt_pp": 2, "prefill_chunk": 16},
    {"pp": 3, "pp_layers": "1,1,1", "lanes": 2, "prefill_chunk": 16},
]


@pytest.mark.parametrize("way", ON_DEVICES + MORE_ON_DEVICES * TRIES_ALL, ids=str)
def test_prompts_go_to_the_devices_of_stages(
    way: dict[str, Any], llama: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No stage that decodes runs a prompt: all their K and V comes. A prompt that begins
    with kept blocks reads them."""
    stored = []
    compute = TorchExecutor.compute

    def counted(self: TorchExecutor, asked: Any) -> Any:
        stored.append(len(asked.k))
        return compute(self, asked)

    monkeypatch.setattr(TorchExecutor, "compute", counted)
    on_device = {"dtype": "float32", "device": "cpu", "kv_placement": "gpu", "kv_memory_gb": 0.01}
    shared = {**on_device, "kv_dtype": way.get("kv_dtype", "auto"), "block_size": 16}
    asked = mixed_requests()
    first = max((prompt for prompt, _ in asked), key=len)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    follow = [(first[:32] + prompts((9,))[0], params), (first, params)]
    with LLM(llama, **shared) as llm:
        expected = [tokens(llm, asked), tokens(llm, follow)]
    assert not stored
    with LLM(llama, **{**shared, "prompt_pp": 1, **way}) as llm:
        assert [tokens(llm, asked), tokens(llm, follow)] == expected
        assert sum(stored) >= 3 * sum(len(prompt) - 1 for prompt, _ in asked if len(prompt) > 2)


def test_ranks_of_a_job_do_not_reach_devices(llama: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reach, "has_stage_ranks", lambda resolved: True)
    with pytest.raises(ConfigError, match=r"prompt_pp=1 with kv_placement='gpu' .* without mpirun"):
        LLM(llama, kv_placement="gpu", device="cpu", kv_memory_gb=0.01, prompt_pp=1)


@pytest.mark.parametrize("kv_dtype", ["int8", *["bfloat16"] * TRIES_ALL])
def test_prompts_see_what_is_cached_of_them(kv_dtype: str, llama: str) -> None:
    """K and V are rounded before a prompt attends to them, wherever it is cut."""
    narrow = {**OPTIONS, "kv_dtype": kv_dtype}
    with LLM(llama, **narrow, prompt_attention="s") as llm:
        expected = tokens(llm, mixed_requests())
    with LLM(llama, **narrow, prompt_pp=2, prefill_chunk=16) as llm:
        assert tokens(llm, mixed_requests()) == expected


def test_kv_goes_straight_to_the_r_workers_that_keep_it(
    llama: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each layer of each prompt token once, and nothing is attended for them."""
    stored: dict[str, int] = {}
    compute = AttentionExecutor.compute
    lock = threading.Lock()

    def watched(self: AttentionExecutor, asked: Any) -> Any:
        if asked.plan.num_queries == 0:
            with lock:
                name = threading.current_thread().name
                stored[name] = stored.get(name, 0) + len(asked.k)
        return compute(self, asked)

    monkeypatch.setattr(AttentionExecutor, "compute", watched)
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    with LLM(llama, **OPTIONS, prompt_pp=2, pp=2, pp_layers="1,2", prefill_chunk=16) as llm:
        tokens(llm, [(prompt, params) for prompt in prompts((20, 40))])
    assert stored == {"rworker-r0": 60, "rworker-s1-r0": 120}


def test_what_is_cancelled_in_the_middle_of_its_prompt_leaves_nothing_behind(
    llama: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"pp": 2, "prompt_pp": 2, "r_workers": 2, "lanes": 2, "prefill_chunk": 4}
    build, cut = StepBatch.build, []

    def cancelling(chunks: Any, *args: Any, **kwargs: Any) -> StepBatch:
        for chunk in chunks:
            name = chunk.sequence.request.request_id
            if name.startswith("gone") and chunk.first > 8:
                cut.append(name)
                llm.service.cancel(name)
        return build(chunks, *args, **kwargs)

    with LLM(llama, **OPTIONS, **options) as llm:
        monkeypatch.setattr(StepBatch, "build", cancelling)
        params = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True, n=2)
        gone = [PromptRequest(f"gone-{i}", p, params) for i, p in enumerate(prompts((40,) * 4))]
        for delta in llm.deltas(gone):
            assert delta.error is not None and delta.error.code == "cancelled"
        assert {*cut} == {one.request_id for one in gone}
        assert tokens(llm, mixed_requests()) == plain(llama)
        figures = []
        llm.service.call(lambda running: figures.append(running.engine.figures()))
        assert [one.kv_blocks_used for one in figures[0].r_workers] == [0, 0]


@pytest.mark.parametrize(
    ("kv_dtype", "shape"),
    [
        ("auto", {"prompt_pp": 2, "pp": 2, "pp_layers": "1,2", "r_workers": 2}),
        ("auto", {"prompt_pp": 1}),
        ("bfloat16", {"prompt_pp": 2}),
        ("int8", {"prompt_pp": 2}),
        ("int4", {"prompt_pp": 2}),
    ],
)
def test_a_prompt_goes_on_behind_kept_blocks(
    kv_dtype: str, shape: dict[str, Any], llama: str
) -> None:
    """K and V of these are fetched, and seen as the cache holds them."""
    first, *rest = prompts((50, 20, 9, 1))
    follow = [first[:32] + rest[0], first[:48] + rest[1], first[:32] + rest[2], first]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    narrow = {**OPTIONS, "kv_dtype": kv_dtype, "block_size": 16}
    asked = [[(first, params)], [(prompt, params) for prompt in follow]]
    with LLM(llama, **narrow, prompt_attention="s", prefix_cache="off") as llm:
        expected = [tokens(llm, one) for one in asked]
    with LLM(llama, **narrow, **shape, prefill_chunk=16) as llm:
        assert [tokens(llm, one) for one in asked] == expected
        outputs = llm.generate(follow, params)
        assert [output.num_cached_tokens for output in outputs] == [48, 48, 32, 48]
        assert [[x.token_ids for x in each.completions] for each in outputs] == expected[1]


@pytest.mark.parametrize(("pp", "lost"), [(1, 0), (2, 1)])
def test_prompts_go_to_the_replacement_at_a_lost_r_workers_address(
    pp: int, lost: int, llama: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each stage has one R-worker: no other can keep the sequences."""
    cluster = ListeningLosses(monkeypatch, lost, after=25)
    addresses = tuple(f"tcp://127.0.0.1:{5600 + number}" for number in range(pp))
    options = {"dtype": "float32", "r_worker_addresses": addresses, "prefill_chunk": 16}
    with LLM(llama, **options, pp=pp, prompt_pp=2) as llm:
        assert tokens(llm, mixed_requests()) == plain(llama)
        assert cluster.num_lost == llm.stats.num_rejoined == 1
        assert tokens(llm, mixed_requests()) == plain(llama)
