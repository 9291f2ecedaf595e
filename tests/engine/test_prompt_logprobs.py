"""Log-probabilities of prompts, against transformers, wherever prompts are run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from checkpoints import oracle, prompts
from simulated_engines import SimulatedCluster

pytest.importorskip("zmq")

from fastdecode import LLM, SamplingParams
from fastdecode.core.errors import ConfigError, RequestError
from fastdecode.core.sequence import PromptRequest, RequestOutput
from fastdecode.engine.checker import RequestChecker
from fastdecode.text.codec import TextCodec

OPTIONS: dict[str, Any] = {
    "dtype": "float32", "r_threads": 1, "kv_memory_gb": 0.004, "block_size": 16, "r_workers": 3,
    "prefix_cache": "on", "prefill_chunk": 16, "device": "cpu",
}  # fmt: skip
WAYS: dict[str, dict[str, Any]] = {
    "chunks": {},
    "R-workers attend prompts": {"prompt_attention": "r"},
    "stages": {"pp": 2},
    "three stages": {"pp": 3, "lanes": 2},
    "prompt stages": {"prompt_pp": 1, "prefix_cache": "auto"},
    "replicas": {"replicas": 1, "prefix_cache": "auto"},
    "heads": {"r_partition": "heads"},
    "instances": {"instances": ["prefill", "decode"]},
    "device KV": {"kv_placement": "gpu"},
    "hybrid KV": {"kv_placement": "hybrid", "device_kv_gb": 0.00006, "prefix_cache": "auto"},
}
LOST = "chunks", "stages", "replicas"
"""Ways in which an R-worker is lost while prompts run, too."""


@pytest.fixture(scope="module")
def model(tiny_checkpoint: Callable[..., Path]) -> Path:
    return tiny_checkpoint("llama", num_key_value_heads=6)


def _ask(llm: LLM) -> list[RequestOutput]:
    """Some want it, one of them of two completions, one has a prompt of one token; the
    first two are run before, so that kept blocks could be reused."""
    asked = prompts((40, 21, 1, 33), seed=1)
    others = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    llm.generate(asked[:2], others)
    wants = [
        SamplingParams(max_tokens=5, ignore_eos=True, temperature=0, prompt_logprobs=count, n=n)
        for count, n in ((3, 1), (0, 2), (2, 1))
    ]
    return llm.generate(asked, [*wants, others])


def _check(outputs: list[RequestOutput], model: Path) -> None:
    for output, count in zip(outputs, (3, 0, 2), strict=False):
        assert output.error is None and output.num_cached_tokens == 0
        prompt, steps = output.prompt_token_ids, output.prompt_logprobs
        assert steps is not None and len(steps) == len(prompt) and steps[0] is None
        if len(prompt) == 1:
            continue
        expected = oracle(model).logits(prompt).double().log_softmax(-1)[:-1]
        for step, token, row in zip(steps[1:], prompt[1:], expected, strict=True):
            assert step is not None and step.token_id == token
            assert step.logprob == pytest.approx(row[token].item(), abs=1e-4)
            assert abs(step.rank - 1 - int((row > row[token]).sum())) <= 1  # near-ties
            likely = torch.tensor([value for _, value in step.top], dtype=torch.float64)
            assert torch.allclose(likely, row.topk(count).values, atol=1e-4)
            assert step[token].logprob == step.logprob  # vLLM's shape: a mapping by token
    assert outputs[3].prompt_logprobs is None


@pytest.mark.parametrize("way", WAYS)
def test_a_prompts_logprobs_are_transformers(way: str, model: Path) -> None:
    options = {**OPTIONS, **WAYS[way]}
    if options.get("kv_placement") == "gpu":
        options = {k: v for k, v in options.items() if k not in ("r_workers", "r_threads")}
    with LLM(str(model), **options) as llm:
        _check(_ask(llm), model)


@pytest.mark.parametrize("way", LOST)
def test_a_loss_in_the_middle_of_a_prompt_changes_nothing(
    way: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompt is run again, and what was known of it stays."""
    lost = SimulatedCluster(monkeypatch, (0, 1), 4)
    with LLM(str(model), **{**OPTIONS, **WAYS[way]}) as llm:
        _check(_ask(llm), model)
    assert lost.num_lost == 1


def test_a_prefill_instance_that_is_lost_changes_nothing(model: Path) -> None:
    with LLM(str(model), **{**OPTIONS, **WAYS["instances"]}) as llm:
        min(psutil.Process().children(), key=lambda child: child.create_time()).kill()
        _check(_ask(llm), model)
        assert [each.broken is not None for each in llm._running.engine.clients] == [True, False]


def test_a_conversations_turn_has_none(model: Path) -> None:
    with LLM(str(model), **OPTIONS) as llm:
        (output,) = llm.generate([[5, 6]], SamplingParams(max_tokens=2), conversation_id="c")
        assert output.ok
        with pytest.raises((RequestError, ConfigError), match="prompt_logprobs"):
            llm.generate([[5]], SamplingParams(prompt_logprobs=1), conversation_id="c")


def test_how_many_is_checked() -> None:
    with pytest.raises(RequestError, match="prompt_logprobs"):
        SamplingParams(prompt_logprobs=-1)


@pytest.mark.parametrize(
    ("count", "num_tokens", "mend"),
    [(20, 100_000, "give 19 or less, or shorten the prompt"), (0, 2_000_001, "shorten the prompt")],
)
def test_more_logprobs_than_a_message_takes_are_refused(
    count: int, num_tokens: int, mend: str
) -> None:
    checker = RequestChecker(TextCodec(None), 400, 1 << 22)
    params = SamplingParams(prompt_logprobs=count)
    with pytest.raises(RequestError, match=f"2000000 at most: {mend}") as caught:
        checker.check(PromptRequest("r", [1], params), (1,) * num_tokens)
    assert caught.value.code == "invalid_sampling_params"
    fits = (1,) * (2_000_000 // (1 + count))
    assert checker.check(PromptRequest("r", [1], params), fits).prompt_token_ids == fits
