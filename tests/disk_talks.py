"""Conversations in turns, all of them at once, that need more KV blocks than a
small memory holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from checkpoints import prompts

from fastdecode import LLM, SamplingParams
from fastdecode.core.sequence import CacheUse

Said: TypeAlias = "list[list[list[int]]]"
GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
NUM_CONVERSATIONS, NUM_ROUNDS = 5, 3
FIRST, LATER = (40, 70, 33, 52, 61), (3, 9, 1, 16, 7)
"""New tokens of each, in the first turn and in others."""
MOST_TALKS = 20


def talk(llm: LLM, name: str = "c", num_rounds: int = NUM_ROUNDS) -> Said:
    """What is said; the same whatever the conversations' ``name``."""
    names = [f"{name}{i}" for i in range(NUM_CONVERSATIONS)]
    said: Said = []
    for turn in range(num_rounds):
        new = prompts(LATER if turn else FIRST, seed=10 + turn)
        outputs = llm.generate(new, GREEDY, conversation_id=names)
        assert all(output.ok for output in outputs), outputs
        said += [[list(one.token_ids) for one in output.completions] for output in outputs]
    return said


def talk_in_turns(llm: LLM, num_rounds: int = NUM_ROUNDS, **params: Any) -> Said:
    """The same one after the other, as turns of requests that tell their whole
    history. ``params``: how it is drawn."""
    said: Said = []
    histories: list[list[int]] = [[] for _ in range(NUM_CONVERSATIONS)]
    drawn = SamplingParams(**{"temperature": 0, "max_tokens": 5, "ignore_eos": True, **params})
    for turn in range(num_rounds):
        new_tokens = prompts(LATER if turn else FIRST, seed=10 + turn)
        for history, new in zip(histories, new_tokens, strict=True):
            cache = CacheUse(turn=max(0, len(history) - 1) if drawn.n == 1 else None)
            history += new
            (output,) = llm.generate([history], drawn, cache=cache)
            assert output.ok, output
            said.append([list(one.token_ids) for one in output.completions])
            history += output.completions[0].token_ids
    return said


def until_some_are_fetched(llm: LLM, say: Callable[[], Said]) -> list[Said]:
    """What is said each time, until blocks have come back from the disk: it may
    still be writing the first ones while all is said for the first time."""
    said = [say()]
    while not llm.stats.tiers.num_fetched and len(said) < MOST_TALKS:
        said.append(say())
    return said
