"""R-workers of a pipeline's stages: what one has lost, its neighbour in the same
stage has, and the other stages forget what didn't count."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from checkpoints import prompts
from replica_jobs import GREEDY, Tokens, run
from trouble import Trouble, crash_after, give

from examples import TRIES_ALL
from fastdecode import LLM
from fastdecode.core.errors import WorkerError
from fastdecode.core.sequence import RequestOutput
from fastdecode.engine.fleet.ring import USABLE
from fastdecode.wire.waiting import look_until_found

Losses = dict[str, int]
ONE: list[Losses] = [{"s1-r1": 30}, *[{"r1": 30}, {"s1-r0": 9}, {"r0": 25}] * TRIES_ALL]
TWO: list[Losses] = [{"r0": 30, "s1-r1": 36}, *[{"r0": 30, "s1-r0": 30}] * TRIES_ALL]
"""Layers that R-workers attend before they are lost. Column w is R-worker w of each stage."""


@pytest.mark.parametrize("lost", ONE + TWO, ids=str)
def test_a_column_goes_on_from_the_replicas_of_the_stages_that_lost_it(
    lost: Losses, llama: str, expected: Tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    crash_after(monkeypatch, lost)
    tokens, stats = run(llama, pp=2)
    assert tokens == expected
    assert stats.replicas is not None and stats.num_recomputed == 0
    assert 1 <= len(stats.replicas.failovers) <= len(lost)
    assert stats.resumed.num_tokens > 0


def test_others_start_on_a_column_that_goes_on_where_there_is_no_other(
    llama: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each stage has lost an R-worker, of different columns."""
    crash_after(monkeypatch, {"r0": 20, "s1-r1": 26})
    options = {"dtype": "float32", "kv_memory_gb": 0.01, "r_threads": 1}
    with LLM(llama, **options, pp=2, r_workers=2, replicas=1) as llm:
        first, second = ([o.completions[0].token_ids for o in answers(llm)] for _ in range(2))
        assert first == second and all(len(tokens) == 24 for tokens in first)
        assert llm.stats.replicas is not None and len(llm.stats.replicas.failovers) == 2


def test_a_standby_r_worker_joins_once_nothing_is_left_of_what_was_taken_over(
    llama: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then every cache has a replica again: the next loss costs no recomputation."""
    other = Trouble(1 << 30)
    give(monkeypatch, {"s1-r1": lambda: Trouble(20), "r0": lambda: other})
    options = {"dtype": "float32", "kv_memory_gb": 0.01, "r_threads": 1, "spare_r_workers": 1}
    with LLM(llama, **options, pp=2, r_workers=2, replicas=1) as llm:
        first = [output.completions[0].token_ids for output in answers(llm)]
        assert look_until_found(lambda: is_protected(llm), 30.0)
        assert llm.stats.num_rejoined == 1
        other._left = 20
        assert [output.completions[0].token_ids for output in answers(llm)] == first
        assert llm.stats.replicas is not None
        assert (len(llm.stats.replicas.failovers), llm.stats.num_recomputed) == (2, 0)


def test_rings_close_without_a_member_that_a_given_up_column_loses_later(
    llama: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It kept a neighbour's replica, which is kept elsewhere then."""
    crash_after(monkeypatch, {"r1": 20})
    options = {"dtype": "float32", "kv_memory_gb": 0.01, "r_threads": 1}

    def lose(engine: Any) -> None:
        members = engine._fleet.members
        members.lose(members.member(1, 1), WorkerError("it left"))

    with LLM(llama, **options, pp=2, r_workers=3, replicas=1) as llm:
        answers(llm)
        assert look_until_found(lambda: is_protected(llm), 30.0)
        in_engine(llm, lose)
        assert look_until_found(lambda: is_protected(llm), 30.0)


def is_protected(llm: LLM) -> bool | None:
    """True: rings have no lost R-workers, and all others have replicas in every stage."""

    def look(engine: Any) -> bool:
        engine.look()
        is_lost = engine._fleet.members.is_lost
        states = [x for each in engine._recovery._replicas.rings for x in each.ring.states.items()]
        return all(state in USABLE and not is_lost(holder) for holder, state in states)

    return in_engine(llm, look) or None


def in_engine(llm: LLM, ask: Callable[[Any], Any]) -> Any:
    """The answer of an engine, in its thread."""
    found: list[Any] = []
    has_looked = threading.Event()

    def look(running: Any) -> None:
        found.append(ask(running.engine))
        has_looked.set()

    llm.service.look(look)
    assert has_looked.wait(30.0), "the engine's thread hangs"
    return found[0]


def answers(llm: LLM) -> list[RequestOutput]:
    outputs = llm.generate(prompts([3, 30, 11, 1], seed=2), GREEDY)
    assert all(output.ok for output in outputs), outputs
    return outputs
