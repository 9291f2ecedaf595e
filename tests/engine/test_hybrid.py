"""KV on both sides: the same tokens as on either, wherever a sequence is, whoever is lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checkpoints import prompts
from trouble import crash_after

from fastdecode import LLM, SamplingParams
from fastdecode.core.holders import HolderId, SequenceId
from fastdecode.core.sequence import Request, Sequence
from fastdecode.schedule.hybrid.control import Rule
from fastdecode.schedule.hybrid.forecast import Costs, Course, Known, Layout
from fastdecode.schedule.times import MeasuredTimes

SHARED: dict[str, Any] = {"dtype": "float32", "r_threads": 1, "block_size": 16}
HYBRID: dict[str, Any] = {"kv_placement": "hybrid", "r_workers": 2, "kv_memory_gb": 0.002}
# Room for three short sequences or so.
SMALL: dict[str, Any] = {"device_kv_gb": 0.0001}

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
FORKED = SamplingParams(temperature=0.9, seed=5, max_tokens=20, n=3, ignore_eos=True)
ASKED = prompts([3, 30, 11, 1, 19, 8, 5, 40, 22], seed=2)
PARAMS = [GREEDY] * 5 + [FORKED] * 2 + [GREEDY] * 2

Tokens = list[list[tuple[int, ...]]]


def tokens(llm: LLM) -> Tokens:
    outputs = llm.generate(ASKED, PARAMS)
    return [[c.token_ids for c in output.completions] for output in outputs]


def always(layout: Layout) -> Rule:
    """Whoever waits goes to R-workers."""

    def rule(known: Known, now: Course, costs: Costs, error: float) -> Course:
        return Course(layout, len(known.waiting))

    return rule


def restless() -> Rule:
    courses = [Course(layout, 2) for layout in (Layout.MIXED, Layout.SPLIT)]

    def rule(known: Known, now: Course, costs: Costs, error: float) -> Course:
        courses.append(courses.pop(0))
        return courses[0]

    return rule


def steps_of(llm: LLM) -> Counter[str]:
    assert llm.stats.hybrid is not None
    return llm.stats.hybrid.steps


def hybrid(path: Path | str, rule: Rule, **options: Any) -> LLM:
    """With whatever the rule says, from the first step on."""
    given = {**SHARED, **HYBRID, **SMALL, **options}
    llm = LLM(str(path), times=MeasuredTimes(min_observed=1), **given)
    control = llm._running.engine._lifecycle.scheduler.hybrid
    assert control is not None
    control._options = replace(control._options, rule=rule)
    control._clock = lambda: 0.0  # asking takes no time: it may be asked again at once
    return llm


@pytest.fixture(scope="module")
def expected(tiny_checkpoint: Callable[..., Path]) -> Callable[[str], Tokens]:
    found: dict[str, Tokens] = {}

    def of(family: str) -> Tokens:
        if family not in found:
            path = str(tiny_checkpoint(family))
            with LLM(path, kv_memory_gb=0.01, **SHARED) as llm:
                found[family] = tokens(llm)
            with LLM(path, kv_placement="gpu", kv_memory_gb=0.01, **SHARED) as llm:
                assert tokens(llm) == found[family]
        return found[family]

    return of


@pytest.mark.parametrize("layout", Layout)
def test_equal_tokens_in_all_lanes(
    layout: Layout, expected: Callable[[str], Tokens], llama: str
) -> None:
    with hybrid(llama, always(layout)) as llm:
        assert tokens(llm) == expected("llama")
        assert steps_of(llm)[layout.value] > 0


@pytest.mark.parametrize("family", ["gemma2", "bloom"])
def test_equal_tokens_of_all_families(
    family: str, expected: Callable[[str], Tokens], tiny_checkpoint: Callable[..., Path]
) -> None:
    with hybrid(tiny_checkpoint(family), restless()) as llm:
        assert tokens(llm) == expected(family)
        assert len(steps_of(llm)) > 1


@pytest.mark.parametrize(
    "options",
    [
        {"prefill_chunk": 7},
        {"prefill_chunk": 7, "prompt_attention": "s", "max_step_tokens": 25, "r_workers": 3},
        {"length_quantile": 0.3, "max_num_sequences": 6},
        {"max_num_sequences": 4, "device_kv_gb": 0.00005},
    ],
    ids=["chunks", "chunks-s", "suspended", "few"],
)
def test_equal_tokens_however_they_come(
    options: dict[str, Any], expected: Callable[[str], Tokens], llama: str
) -> None:
    max_step_tokens = {"max_num_sequences": 16} if "max_step_tokens" in options else {}
    with hybrid(llama, restless(), **max_step_tokens, **options) as llm:
        assert tokens(llm) == expected("llama")
        assert len(steps_of(llm)) > 1


@pytest.mark.parametrize("more", [{}, {"cache_disk_gb": 0.001}], ids=["memory", "disk"])
def test_kept_blocks_are_found_on_either_side(
    more: dict[str, Any], expected: Callable[[str], Tokens], llama: str, tmp_path: Path
) -> None:
    """What the device had no room for is found on R-workers when the device has room."""
    options = {"prefix_cache": "on", **more, **({"cache_disk": str(tmp_path)} if more else {})}
    asked = prompts([40] * 8, seed=7)
    with hybrid(llama, always(Layout.SPLIT), **options) as llm:
        first = llm.generate(asked, GREEDY)
        away = [i for i, prompt in enumerate(asked) if _is_kept_away_alone(llm, prompt)]
        assert away and steps_of(llm)["split-1"] > 0
        before, num_alone = llm.stats.num_cached_prompt_tokens, steps_of(llm)["R-only"]
        (again,) = llm.generate([asked[away[0]]], GREEDY)
        assert again.completions == first[away[0]].completions
        assert steps_of(llm)["R-only"] > num_alone
        assert llm.stats.num_cached_prompt_tokens - before == 32
        assert [x.completions for x in llm.generate(asked, GREEDY)] == [
            x.completions for x in first
        ]
        assert tokens(llm) == expected("llama")


def _is_kept_away_alone(llm: LLM, prompt: list[int]) -> bool:
    """Whether R-workers have kept blocks of it, and the device none."""
    scheduler = llm._running.engine._lifecycle.scheduler
    request = Request("look", tuple(prompt), GREEDY, 24, seed=0)
    looked = Sequence(SequenceId(-1), request, 0)
    found = scheduler.ledger.cache.reuses(looked, (len(prompt) + 24,))
    holders = {reuse.holders[0] for reuse in found}
    scheduler.ledger.cache.chains.end(looked)
    return bool(holders) and scheduler.hybrid._device not in holders


def test_what_fits_on_the_device_sends_no_r_worker_a_step(
    monkeypatch: pytest.MonkeyPatch, expected: Callable[[str], Tokens], llama: str
) -> None:
    crash_after(monkeypatch, {"r0": 0, "r1": 0})  # at the first layer that they attend
    with hybrid(llama, always(Layout.SPLIT), device_kv_gb=0.01) as llm:
        assert tokens(llm) == expected("llama")
        assert set(steps_of(llm)) == {"gpu-only"}
        engine = llm.snapshot().engine
        assert engine.num_live_r_workers == engine.num_r_workers == 2


@pytest.mark.parametrize(
    ("layout", "crashes"),
    [
        (Layout.SPLIT, {"r0": 9}),
        (Layout.SPLIT, {"r0": 9, "r1": 30}),
        (Layout.MIXED, {"r0": 9, "r1": 30}),
    ],
)
def test_a_lost_r_worker_never_disturbs_those_at_home(
    crashes: dict[str, int],
    layout: Layout,
    monkeypatch: pytest.MonkeyPatch,
    expected: Callable[[str], Tokens],
    llama: str,
) -> None:
    crash_after(monkeypatch, crashes)
    with hybrid(llama, always(layout)) as llm:
        assert tokens(llm) == expected("llama")
        engine = llm.snapshot().engine
        assert engine.num_r_workers - engine.num_live_r_workers == len(crashes)
        # Some began at home, and none of those was recomputed.
        assert 0 < llm.stats.num_recomputed < sum(p.n for p in PARAMS) - 1
        assert tokens(llm) == expected("llama")


@pytest.mark.parametrize(("kv_dtype", "room_gb"), [("int8", 0.00004), ("int4", 0.00003)])
def test_quantised_everybody_has_the_tokens_of_its_side(
    kv_dtype: str, room_gb: float, llama: str
) -> None:
    """R-workers round queries, the device doesn't (``test_paged``)."""
    of_side = []
    for placement in ("r", "gpu"):
        options = {**SHARED, "kv_placement": placement, "kv_dtype": kv_dtype, "kv_memory_gb": 0.01}
        with LLM(llama, **options) as llm:
            of_side.append(tokens(llm))
    with hybrid(llama, always(Layout.SPLIT), kv_dtype=kv_dtype, device_kv_gb=room_gb) as llm:
        found = tokens(llm)
        assert steps_of(llm)["split-1"] > 0
    for at_r_workers, at_home, mine in zip(*of_side, found, strict=True):
        assert all(
            one in (away, home) for one, away, home in zip(mine, at_r_workers, at_home, strict=True)
        )


def test_what_the_device_could_never_hold_goes_to_r_workers(
    expected: Callable[[str], Tokens], llama: str
) -> None:
    def never(known: Known, now: Course, costs: Costs, error: float) -> Course:
        return replace(now, num_away=0)

    with hybrid(llama, never, device_kv_gb=0.00003) as llm:
        assert tokens(llm) == expected("llama")
        assert set(steps_of(llm)) - {"gpu-only"}


@pytest.mark.parametrize("layout", [Layout.SPLIT, Layout.MIXED])
def test_a_sequence_in_parts_goes_to_r_workers(
    layout: Layout, expected: Callable[[str], Tokens], llama: str
) -> None:
    """The device would have room for it, and has none for a part."""
    with hybrid(llama, always(layout), split_tokens=32, device_kv_gb=0.001) as llm:
        assert tokens(llm) == expected("llama")
        assert set(steps_of(llm)) - {"gpu-only", "R-only"}, "both sides had some"
        ledger = llm._running.engine._lifecycle.scheduler.ledger
        blocks = [ledger.capacity.blocks(HolderId(i)) for i in range(3)]
        in_parts = sum(num // 2 * 32 for num in blocks[:2])  # of two blocks each
        assert ledger.capacity.is_possible(in_parts)
        assert not ledger.capacity.is_possible(in_parts + 32)
        assert blocks[2] >= 2, "though the device has room for one more"
