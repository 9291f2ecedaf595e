"""Kept blocks are imported by key: a turn that one instance has decoded is reused where
the next prompt runs."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
from instance_runs import OPTIONS

from fastdecode import LLM, SamplingParams

KEPT: dict[str, Any] = {**OPTIONS, "prefix_cache": "on"}
NUM_TURNS, NUM_NEW, NUM_DRAWN = 3, 40, 80
PARAMS = [
    SamplingParams(temperature=0.9 * i, seed=i, max_tokens=NUM_DRAWN, ignore_eos=True)
    for i in range(2)
]


@pytest.fixture(scope="module")
def two(model: str) -> Iterator[LLM]:
    with LLM(model, instances=["prefill", "decode"], **KEPT) as llm:
        yield llm


@pytest.fixture(scope="module")
def one(model: str) -> Iterator[LLM]:
    with LLM(model, **KEPT) as llm:
        yield llm


def prompts() -> list[list[int]]:
    """What is new in each turn of a conversation."""
    chance = random.Random(4)
    return [[chance.randrange(5, 200) for _ in range(NUM_NEW)] for _ in range(NUM_TURNS)]


def talk(llm: LLM, name: str) -> list[tuple[int, ...]]:
    """The tokens of all turns of two conversations."""
    said = []
    for new in prompts():
        outputs = llm.generate([new, new[::-1]], PARAMS, conversation_id=[name, f"{name}'s other"])
        assert all(output.ok for output in outputs), outputs
        said += [output.completions[0].token_ids for output in outputs]
    return said


def test_turns_are_reused_where_the_next_prompt_runs(one: LLM, two: LLM) -> None:
    expected, before = talk(one, "a"), two.stats.num_prompt_tokens
    assert talk(two, "a") == expected
    # Of each turn its own tokens, and the last one of the answer before.
    num_new = 2 * (NUM_TURNS * NUM_NEW + NUM_TURNS - 1)
    num_run = two.stats.num_prompt_tokens - before
    assert num_run <= 1.1 * num_new, "what another instance had kept was run again"
    assert two.stats.num_failed_fetches == 0


def test_what_is_not_kept_any_more_runs_again(one: LLM, two: LLM) -> None:
    """The instance that had it says so, and isn't asked for it again."""
    expected = talk(one, "b")
    prompt = prompts()[0]
    first = two.generate([prompt], PARAMS[:1], conversation_id=["b"])[0]
    chance = random.Random(9)
    others = [[chance.randrange(5, 200) for _ in range(60)] for _ in range(300)]
    two.generate(others, SamplingParams(max_tokens=2))  # which takes all room
    second = two.generate([prompts()[1]], PARAMS[:1], conversation_id=["b"])[0]
    said = [output.completions[0].token_ids for output in (first, second)]
    assert said == expected[0:4:2]


def test_a_prefix_comes_back_however_it_was_made(one: LLM, two: LLM) -> None:
    """No conversation: a prompt that begins with what others have said."""
    chance = random.Random(7)
    begin = [chance.randrange(5, 200) for _ in range(50)]
    greedy = SamplingParams(temperature=0, max_tokens=NUM_DRAWN, ignore_eos=True)
    answer = two.generate([begin], greedy)[0].completions[0].token_ids
    prompt = [*begin, *answer, 7, 8, 9]
    before = two.stats.num_prompt_tokens
    assert (
        two.generate([prompt], greedy)[0].completions[0].token_ids
        == one.generate([prompt], greedy)[0].completions[0].token_ids
    )
    assert two.stats.num_prompt_tokens - before <= 2 * OPTIONS["block_size"] + 3
