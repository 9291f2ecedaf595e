"""What tests of instances ask, and what they compare."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from fastdecode import SamplingParams
from fastdecode.core.config.instances import InstanceRole
from fastdecode.core.sequence import PromptRequest, RequestOutput

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "r_threads": 1,
    "kv_memory_gb": 0.004,
    "block_size": 16,
    "prefix_cache": "off",
}


def prompts(count: int, seed: int = 3) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(5, 200) for _ in range(rng.randint(1, 60))] for _ in range(count)]


def params(count: int, seed: int = 4, n: int = 1) -> list[SamplingParams]:
    rng = random.Random(seed)
    return [
        SamplingParams(
            temperature=rng.choice([0.0, 1.0]),
            seed=rng.randrange(1 << 30),
            max_tokens=rng.choice([1, 2, 9, 23]),
            n=n,
            logprobs=rng.choice([None, 2]),
            frequency_penalty=rng.choice([0.0, 0.5]),
            ignore_eos=rng.random() < 0.5,
        )
        for _ in range(count)
    ]


def requests_of(asked: list[list[int]], how: list[SamplingParams]) -> Iterator[PromptRequest]:
    for i, (prompt, sampling) in enumerate(zip(asked, how, strict=True)):
        yield PromptRequest(str(i), prompt, sampling)


def tokens(outputs: list[RequestOutput]) -> list[Any]:
    """Their log-probabilities are rounded otherwise where parts are merged."""
    return [[each.token_ids for each in output.completions] for output in outputs]


def answers(outputs: list[RequestOutput]) -> list[Any]:
    """All but their log-probabilities, which are rounded otherwise in other batches."""
    return [
        (output.error, [(x.text, x.token_ids, x.finish_reason) for x in output.completions])
        for output in outputs
    ]


def assert_alike(outputs: list[RequestOutput], expected: list[RequestOutput]) -> None:
    """Answers are equal, and log-probabilities but for their last bits."""
    assert answers(outputs) == answers(expected)
    assert _logprobs(outputs) == pytest.approx(_logprobs(expected), abs=1e-4)


def _logprobs(outputs: list[RequestOutput]) -> list[float]:
    drawn = [y for output in outputs for x in output.completions for y in x.logprobs or ()]
    return [logprob for one in drawn for logprob in (one.logprob, *(each for _, each in one.top))]


def role_turns(names: Sequence[str]) -> Iterator[tuple[str, InstanceRole]]:
    """Gives one instance after the other another role, for ever; some run prompts at
    any time, and some decode."""
    roles, num = list(InstanceRole), len(names)
    for i in itertools.count():
        yield names[i % num], roles[(i + i // num) % len(roles)]
