"""Long sequences as parts on several R-workers (``--split-tokens``): the tokens
of whole ones, whatever the parts."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import oracle, prompts
from trouble import crash_after, give
from values import replace

from examples import TRIES_ALL
from fastdecode import LLM, SamplingParams
from fastdecode.core.errors import CapacityError, WorkerError
from fastdecode.wire.messages import AttendResult
from rworker.attention import AttentionExecutor
from rworker.blocks.kv_store import KVStore
from rworker.instructions import Compute

GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=1)
FORKED = SamplingParams(temperature=0.9, seed=5, max_tokens=30, n=3, ignore_eos=True)
PROMPT_LENGTHS = (1, 90, 7, 130, 16, 33)
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "r_threads": 1,
    "kv_memory_gb": 0.01,
    "block_size": 16,
}


def asked() -> list[list[int]]:
    return prompts(PROMPT_LENGTHS, seed=7)


WAYS = [
    (3, 32, 512, 1, "s"),
    (3, 32, 6, 2, "s"),
    (2, 16, 23, 2, "s"),
    (3, 32, 512, 2, "r"),
    (1, 48, 10, 1, "r"),
]
FAMILIES = ("llama", "gemma2", "bloom")
# Each family has prompts on both sides, whole ones and chunks, and both numbers of lanes.
TRIED = [
    *(("llama", *WAYS[way]) for way in (0, 2, 4)),
    *(("gemma2", *WAYS[way]) for way in (1, 3, 4)),
    *(("bloom", *WAYS[way]) for way in (0, 1, 3)),
]
MORE_TRIED = [(x, *way) for x in FAMILIES for way in WAYS if (x, *way) not in TRIED]


@pytest.mark.parametrize(
    ("family", "r_workers", "split_tokens", "prefill_chunk", "lanes", "prompt_attention"),
    TRIED + MORE_TRIED * TRIES_ALL,
)
def test_greedy_tokens_and_logprobs_equal_transformers(
    family: str,
    r_workers: int,
    split_tokens: int,
    prefill_chunk: int,
    lanes: int,
    prompt_attention: str,
    tiny_checkpoint: Callable[..., Path],
) -> None:
    """Positions: RoPE, windows shorter than a part and alternating with full attention, ALiBi."""
    path = tiny_checkpoint(family)
    transformer = oracle(path)
    how = {
        "r_workers": r_workers,
        "prefill_chunk": prefill_chunk,
        "lanes": lanes,
        "prompt_attention": prompt_attention,
    }
    with LLM(str(path), **OPTIONS, **how, split_tokens=split_tokens) as llm:
        outputs = llm.generate(asked(), GREEDY)
    for prompt, output in zip(asked(), outputs, strict=True):
        tokens, _ = transformer.greedy(prompt, 40)
        logprobs = transformer.logits([*prompt, *tokens])[len(prompt) - 1 : -1].log_softmax(-1)
        assert output.error is None
        assert list(output.completions[0].token_ids) == tokens
        found = torch.tensor([step.logprob for step in output.completions[0].logprobs or ()])
        torch.testing.assert_close(found, logprobs[range(len(tokens)), tokens], atol=1e-4, rtol=0)


def run(path: Path | str, **how: Any) -> tuple[list[list[tuple[int, ...]]], LLM]:
    """Everybody's tokens, forks among them, and the closed LLM."""
    with LLM(str(path), **{**OPTIONS, "prefill_chunk": 20, **how}) as llm:
        outputs = llm.generate(
            asked() + prompts([60, 5], seed=3), [GREEDY] * len(PROMPT_LENGTHS) + [FORKED] * 2
        )
        assert [output.error for output in outputs] == [None] * len(outputs)
        return [[c.token_ids for c in output.completions] for output in outputs], llm


@cache
def whole(path: Path | str) -> list[list[tuple[int, ...]]]:
    """Everybody's tokens from one R-worker that has whole sequences."""
    return run(path)[0]


def test_a_context_that_no_r_worker_could_hold_alone(llama: str) -> None:
    expected = whole(llama)
    small = {"kv_memory_gb": 80e-6, "r_workers": 3}
    with LLM(llama, **{**OPTIONS, **small}) as llm:
        assert llm.facts.num_kv_blocks * 16 < 3 * 130
        (output,) = llm.generate([asked()[3]], GREEDY)
        assert isinstance(output.error, CapacityError) and "split_tokens" in str(output.error)
    tokens, _ = run(llama, split_tokens=32, **small)
    assert tokens == expected
    with LLM(llama, **{**OPTIONS, **small}, split_tokens=32) as llm:
        (output,) = llm.generate(prompts([300], seed=1), GREEDY)
        assert isinstance(
            output.error, CapacityError
        ) and "R-workers together have room for" in str(output.error)


class Talkative(AttentionExecutor):
    """Says more than it was asked."""

    def compute(self, compute: Compute) -> AttendResult:
        result = super().compute(compute)
        return replace(result, lse=np.zeros((3, 1), np.float32)) if result.lse is None else result


def test_an_lse_that_was_not_asked_costs_the_r_worker_alone(
    monkeypatch: pytest.MonkeyPatch, llama: str, caplog: pytest.LogCaptureFixture
) -> None:
    expected = whole(llama)
    give(monkeypatch, {"r1": lambda: Talkative(num_threads=1)})
    tokens, llm = run(llama, r_workers=3, split_tokens=64)
    assert tokens == expected
    assert (
        llm.snapshot().engine.num_live_r_workers == 2
        and "lse of shape (3, 1), where none was asked" in caplog.text
    )


def test_who_no_longer_fits_after_a_loss_says_so(
    monkeypatch: pytest.MonkeyPatch, llama: str
) -> None:
    crash_after(monkeypatch, {"r1": 30})
    how = {**OPTIONS, "kv_memory_gb": 80e-6, "r_workers": 2, "split_tokens": 32}
    with LLM(llama, **how) as llm:
        long, short = llm.generate([asked()[3], asked()[4]], GREEDY)
    assert isinstance(long.error, WorkerError) and "was lost" in str(long.error)
    assert short.ok


@pytest.mark.parametrize("lanes", [1, 2])
def test_a_part_that_is_refused_makes_its_sequence_wait(
    lanes: int, monkeypatch: pytest.MonkeyPatch, llama: str
) -> None:
    """It gives back what the other R-workers had accepted."""
    expected, refused, really_open = whole(llama), [], KVStore.open

    def open_one(store: KVStore, sequence_id: int, num_reserved: int) -> None:
        if store.tables.row_of:
            refused.append(sequence_id)
            raise CapacityError("no room for a second sequence")
        really_open(store, sequence_id, num_reserved)

    monkeypatch.setattr(KVStore, "open", open_one)
    assert run(llama, r_workers=3, split_tokens=64, lanes=lanes)[0] == expected
    assert refused


def test_a_refusal_names_the_request_its_part_and_the_r_worker(
    monkeypatch: pytest.MonkeyPatch, llama: str
) -> None:
    really_open = KVStore.open

    def open_all_but_the_second(store: KVStore, part_id: int, num_reserved: int) -> None:
        really_open(store, part_id, 1 << 20 if part_id == 1 else num_reserved)

    monkeypatch.setattr(KVStore, "open", open_all_but_the_second)
    with LLM(llama, **OPTIONS, r_workers=2, split_tokens=64) as llm:
        (output,) = llm.generate([asked()[1]], GREEDY)
    assert isinstance(output.error, CapacityError) and output.error.code == "exceeds_capacity"
    named = rf"R-worker r1 refused part 2 of request {output.request_id}: room for {1 << 20} tokens"
    assert re.match(named, str(output.error))
