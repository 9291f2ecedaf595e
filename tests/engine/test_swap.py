"""KV of lanes that is swapped (``--swap``): tokens are those of one stage, and
what is copied is what is needed, once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints import FAMILIES, prompts

from fastdecode import LLM, SamplingParams
from fastdecode.core.errors import ConfigError
from fastdecode.core.sequence import PromptRequest

Make = Callable[..., Path]
Tokens = list[list[tuple[int, ...]]]
ALONE: dict[str, Any] = {"dtype": "float32", "r_threads": 1, "kv_memory_gb": 0.01}
SWAPPED: dict[str, Any] = {
    "dtype": "float32", "kv_memory_gb": 0.01, "kv_placement": "gpu", "pp": 3,
    "pp_layers": "1,1,1", "swap": True,
}  # fmt: skip


def tokens(llm: LLM, asked: list[tuple[list[int], SamplingParams]]) -> Tokens:
    outputs = llm.generate([prompt for prompt, _ in asked], [params for _, params in asked])
    assert all(output.ok for output in outputs), outputs
    return [[completion.token_ids for completion in output.completions] for output in outputs]


def mixed_requests() -> list[tuple[list[int], SamplingParams]]:
    """Short and long, greedy and sampled, several completions of one prompt."""
    short, long, forked, middling, other = prompts((5, 40, 18, 23, 31))
    return [
        (short, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)),
        (long, SamplingParams(temperature=1.0, seed=4, max_tokens=9, ignore_eos=True)),
        (forked, SamplingParams(temperature=0.8, seed=5, top_p=0.9, max_tokens=8, n=7)),
        (middling, SamplingParams(temperature=0, max_tokens=15, repetition_penalty=1.2)),
        (other, SamplingParams(temperature=0, max_tokens=25, ignore_eos=True)),
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_familys_tokens(family: str, tiny_checkpoint: Make) -> None:
    path, asked = str(tiny_checkpoint(family)), mixed_requests()
    with LLM(path, **ALONE) as llm:
        expected = tokens(llm, asked)
    with LLM(path, **SWAPPED, prefill_chunk=16, block_size=16) as llm:
        assert tokens(llm, asked) == expected
        assert tokens(llm, asked) == expected


@pytest.fixture(scope="module")
def llama(tiny_checkpoint: Make) -> str:
    return str(tiny_checkpoint("llama"))


@pytest.fixture(scope="module")
def expected(llama: str) -> Tokens:
    with LLM(llama, **ALONE) as llm:
        return tokens(llm, mixed_requests())


WAYS: list[dict[str, Any]] = [
    {"prefix_cache": "on", "block_size": 16},
    {"prefix_cache": "off", "lanes": 5, "prefill_chunk": 7},
    {"max_num_sequences": 4, "max_step_tokens": 19},
    {"schedule": "synchronized", "lanes": 4},
]


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_ways_to_run(way: dict[str, Any], llama: str, expected: Tokens) -> None:
    with LLM(llama, **SWAPPED, **way) as llm:
        assert tokens(llm, mixed_requests()) == expected
        assert tokens(llm, mixed_requests()) == expected


def test_sequences_are_suspended_and_go_on(llama: str) -> None:
    """Twelve sequences grow beyond what is reserved for them in their lanes."""
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, stop_token_ids=[0])
    asked = [(prompt, params) for prompt in prompts((20,) * 12, seed=3)]
    with LLM(llama, **ALONE) as llm:
        alone = tokens(llm, asked)
    small = {"kv_memory_gb": 8e-5, "block_size": 16, "length_quantile": 0.5}
    with LLM(llama, **{**SWAPPED, **small}, expected_output_tokens=2) as llm:
        assert tokens(llm, asked) == alone
        assert llm.stats.num_suspended > 0


def test_cancelled_requests_leave_nothing_behind(llama: str, expected: Tokens) -> None:
    with LLM(llama, **SWAPPED) as llm:
        endless = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True, n=4)
        deltas = llm.deltas([PromptRequest("endless", prompts((30,))[0], endless)])
        assert next(deltas).finish_reason is None
        deltas.close()
        assert tokens(llm, mixed_requests()) == expected
        figures = []
        llm.service.call(lambda running: figures.append(running.engine.figures()))
        assert {one.kv_blocks_used for one in figures[0].r_workers} == {0}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"kv_placement": "r"}, "R-workers' is in the host's memory as it is"),
    ({"kv_placement": "auto"}, "R-workers' is in the host's memory as it is"),
    ({"pp": 2, "pp_layers": None}, "is all of it: raise pp=2"),
    ({"lanes": 2}, "is all of it: raise lanes=2"),
    ({"schedule": "stabilized"}, "schedule='stabilized'"),
    ({"load_limit": 100}, "load_limit"),
    ({"kv_memory_gb": 1e5}, "3 lanes in each of 3 stages"),
]


@pytest.mark.parametrize(("options", "says"), REFUSED, ids=str)
def test_refused_elsewhere(options: dict[str, Any], says: str, llama: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        LLM(llama, **{**SWAPPED, **options})
    assert says in refusal.value.message
