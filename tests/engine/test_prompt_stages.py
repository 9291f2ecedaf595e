"""Stages that run prompts only, as threads: a request's tokens are those of one
stage, and no step that decodes has a prompt's rows."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints import FEW_FAMILIES, prompts
from mixed_requests import OPTIONS, mixed_requests, tokens
from simulated_engines import ListeningLosses
from trouble import crash_after

from examples import TRIES_ALL
from fastdecode import LLM, SamplingParams
from fastdecode.core.errors import ConfigError
from fastdecode.core.sequence import PromptRequest
from fastdecode.engine.setup import reach
from fastdecode.engine.step.layout import StepBatch
from fastdecode.engine.step.torch_executor import TorchExecutor
from rworker.attention import AttentionExecutor
from sworker.worker import Pass, SWorker

Make = Callable[..., Path]

SHAPES = [(p, t) for p in (1, 2, 3) for t in (1, 2, 3)]


@pytest.fixture(scope="module")
def llama(tiny_checkpoint: Make) -> str:
    return str(tiny_checkpoint("llama"))


@pytest.fixture(scope="module")
def expected(llama: str) -> list[list[tuple[int, ...]]]:
    with LLM(llama, **OPTIONS) as llm:
        return tokens(llm, mixed_requests())


def even(num_stages: int) -> str | None:
    return None if num_stages == 1 else ",".join(["1"] * (num_stages - 1) + [str(4 - num_stages)])


@pytest.mark.parametrize("family", FEW_FAMILIES)
def test_every_familys_tokens(family: str, tiny_checkpoint: Make) -> None:
    path, asked = str(tiny_checkpoint(family)), mixed_requests()
    with LLM(path, **OPTIONS) as llm:
        expected = tokens(llm, asked)
    with LLM(path, **OPTIONS, prompt_pp=2, prefill_chunk=16) as llm:
        assert tokens(llm, asked) == expected


@pytest.mark.parametrize(("num_prompt_stages", "num_token_stages"), SHAPES)
def test_stages_of_both_kinds_are_any_number(
    num_prompt_stages: int, num_token_stages: int, llama: str, expected: Any
) -> None:
    """In three layers: each kind's are cut where the other's aren't."""
    shape = {"prompt_pp": num_prompt_stages, "pp": num_token_stages}
    cut = {"pp_layers": even(num_token_stages)} if num_token_stages > 1 else {}
    with LLM(llama, **OPTIONS, **shape, **cut, r_workers=2, prefill_chunk=16) as llm:
        assert tokens(llm, mixed_requests()) == expected


WAYS: list[dict[str, Any]] = [
    {"r_workers": 2, "prefill_chunk": 7, "lanes": 4},
    {"lanes": 1, "max_num_sequences": 2, "max_step_tokens": 9},
    {"lanes": 2, "prefill_chunk": 2, "block_size": 16},
    {"kv_dtype": "float32", "lanes": 3, "prefill_chunk": 39},
]


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_ways_to_run_them(way: dict[str, Any], llama: str, expected: Any) -> None:
    with LLM(llama, **OPTIONS, pp=2, prompt_pp=2, **way) as llm:
        assert tokens(llm, mixed_requests()) == expected
        assert tokens(llm, mixed_requests()) == expected


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


def test_steps_are_of_one_kind(llama: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of one token, and a last one of a longer prompt, decode."""
    seen: list[tuple[int, int]] = []
    build = StepBatch.build

    def watched(*args: Any, **kwargs: Any) -> StepBatch:
        batch = build(*args, **kwargs)
        seen.append((batch.num_decoding, batch.num_prompt_tokens))
        return batch

    monkeypatch.setattr(StepBatch, "build", watched)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    asked = [(prompt, params) for prompt in prompts((1, 17, 33, 40, 2))]
    with LLM(llama, **OPTIONS) as llm:
        expected = tokens(llm, asked)
    seen.clear()
    with LLM(llama, **OPTIONS, prompt_pp=1, prefill_chunk=16) as llm:
        assert tokens(llm, asked) == expected
    assert not [both for both in seen if both[0] and both[1]]
    assert sum(num_prompt_tokens for _, num_prompt_tokens in seen) == 16 + 32 + 40 + 2


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


def test_sequences_wait_for_room_and_are_suspended(llama: str) -> None:
    """Twelve sequences in room for a few grow beyond what is reserved for them;
    what was lost of them runs as a prompt again."""
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, stop_token_ids=[0])
    asked = [(prompt, params) for prompt in prompts((20,) * 12, seed=3)]
    with LLM(llama, **OPTIONS) as llm:
        alone = tokens(llm, asked)
    small = {**OPTIONS, "kv_memory_gb": 9.3e-5, "block_size": 16, "length_quantile": 0.5}
    few = {"expected_output_tokens": 2}
    with LLM(llama, **small, **few, pp=3, pp_layers="1,1,1", prompt_pp=2, lanes=3) as llm:
        assert tokens(llm, asked) == alone
        assert llm.stats.num_suspended > 0


def test_what_is_cancelled_in_the_middle_of_its_prompt_leaves_nothing_behind(
    llama: str, expected: Any, monkeypatch: pytest.MonkeyPatch
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
        assert tokens(llm, mixed_requests()) == expected
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


LOSSES = [("r1", 3), ("s1-r1", 0)]
MORE_LOSSES = [("r1", 0), ("r1", 17), ("r1", 24), ("s1-r1", 3), ("s1-r1", 17), ("s1-r1", 40)]


@pytest.mark.parametrize(("lost", "after"), LOSSES + MORE_LOSSES * TRIES_ALL)
def test_a_lost_r_worker_is_recovered(
    lost: str, after: int, llama: str, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while prompts arrive: the first layers that it stores are theirs."""
    crash_after(monkeypatch, {lost: after})
    options = {"pp": 2, "prompt_pp": 3, "r_workers": 2, "prefill_chunk": 16, "lanes": 3}
    with LLM(llama, **OPTIONS, **options) as llm:
        assert tokens(llm, mixed_requests()) == expected
        assert llm.stats.num_recomputed > 0
        assert llm.snapshot().engine.workers == (3, 4)
        assert tokens(llm, mixed_requests()) == expected


KEPT_ELSEWHERE: list[tuple[str, int, dict[str, Any]]] = [
    ("s1-r0", 9, {"r_workers": 1, "spare_r_workers": 1}),
    ("s1-r1", 25, {"r_partition": "heads"}),
    ("s1-r1", 25, {"r_workers": 3, "split_tokens": 16, "block_size": 16}),
]
MORE_KEPT_ELSEWHERE: list[tuple[str, int, dict[str, Any]]] = [
    ("r1", 25, {"r_partition": "heads"}),
    ("s1-r0", 30, {"r_partition": "heads", "spare_r_workers": 1}),
]


@pytest.mark.parametrize(
    ("lost", "after", "others"), KEPT_ELSEWHERE + MORE_KEPT_ELSEWHERE * TRIES_ALL, ids=str
)
def test_prompts_go_to_the_r_workers_that_keep_the_layers_of_a_later_stage(
    lost: str,
    after: int,
    others: dict[str, Any],
    llama: str,
    expected: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A standby R-worker there, or the ones that are left and share the heads anew."""
    crash_after(monkeypatch, {lost: after})
    options = {"pp": 2, "prompt_pp": 1, "r_workers": 2, "prefill_chunk": 16, **others}
    with LLM(llama, **OPTIONS, **options) as llm:
        assert tokens(llm, mixed_requests()) == expected
        assert llm.stats.num_recomputed > 0
        assert tokens(llm, mixed_requests()) == expected


@pytest.mark.parametrize(("pp", "lost"), [(1, 0), (2, 1)])
def test_prompts_go_to_the_replacement_at_a_lost_r_workers_address(
    pp: int, lost: int, llama: str, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each stage has one R-worker: no other can keep the sequences."""
    cluster = ListeningLosses(monkeypatch, lost, after=25)
    addresses = tuple(f"tcp://127.0.0.1:{5600 + number}" for number in range(pp))
    options = {"dtype": "float32", "r_worker_addresses": addresses, "prefill_chunk": 16}
    with LLM(llama, **options, pp=pp, prompt_pp=2) as llm:
        assert tokens(llm, mixed_requests()) == expected
        assert cluster.num_lost == llm.stats.num_rejoined == 1
        assert tokens(llm, mixed_requests()) == expected


def test_a_prompt_stage_that_breaks_down_ends_the_job_by_name(
    llama: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = SWorker.begin

    def broken(self: SWorker, *args: Any) -> Pass:
        if threading.current_thread().name == "prompt stage 1":
            raise RuntimeError("the lights went out")
        return begin(self, *args)

    monkeypatch.setattr(SWorker, "begin", broken)
    with LLM(llama, **OPTIONS, pp=2, prompt_pp=2) as llm:
        (output,) = llm.generate(prompts((5,)), SamplingParams(max_tokens=5))
        assert output.error is not None
        assert "prompt stage 1" in output.error.message
        assert "the lights went out" in output.error.message


def test_what_isnt_there_with_prompt_stages_is_refused_by_name(llama: str) -> None:
    for options, named in (
        ({"r_partition": "heads", "replicas": 1}, "r_partition='heads' .* prompt_pp=1 and"),
        ({"kv_placement": "hybrid"}, "kv_placement"),
        ({"kv_placement": "gpu", "tp": 2}, "kv_placement='gpu'"),
        ({"kv_placement": "swap", "pp": 3, "tp": 2}, "kv_placement='swap'"),
        ({"prompt_attention": "r"}, "prompt_attention"),
        ({"prefill_chunk": 1}, "prefill_chunk"),
        ({"prompt_pp": 4}, "prompt_pp=4.* 3 layers"),
    ):
        with pytest.raises(ConfigError, match=named):
            LLM(llama, **{"prompt_pp": 1, **options})
