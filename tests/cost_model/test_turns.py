"""Turns over tiers, on worked logs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_model.turns import TierSimulator, TracedTurn, read_turns
from fastdecode.cli.main import main
from fastdecode.core.errors import ConfigError
from fastdecode.schedule.cache.retention import FLAT_TO_HALF, POLICIES, policy_of

Event = tuple[float, str, int, int]


def played(
    events: list[Event], policy: str, slots: int, lower: int, size: int = 1, threshold: float = 0.25
) -> TierSimulator:
    tiers = TierSimulator(policy_of(policy, size), slots, lower, size, threshold, FLAT_TO_HALF)
    for now_s, name, prompt, output in events:
        tiers.run(TracedTurn(name, prompt, output, now_s))
    return tiers


def test_the_conversation_idle_for_longest_moves_its_end_down() -> None:
    events: list[Event] = [(0, "A", 24, 8), (10, "B", 12, 4), (20, "C", 4, 4)]
    tiers = played(events, "lru", 64, 1 << 20, size=8)
    assert tiers.rows == [
        [0, "run", "A", 0, 0, 24, 8],
        [10, "run", "B", 0, 0, 12, 4],
        [20, "run", "C", 0, 0, 4, 4],
        [20, "swap_out", "A", 8],
    ]


def test_who_returns_brings_up_what_was_moved_down() -> None:
    events: list[Event] = [
        (0, "A", 200, 56), (10, "B", 100, 28), (20, "C", 310, 90), (30, "D", 200, 56),
        (40, "A", 20, 44),
    ]  # fmt: skip
    tiers = played(events, "lru", 1024, 2048, size=64)
    assert tiers.rows == [
        [0, "run", "A", 0, 0, 200, 56],
        [10, "run", "B", 0, 0, 100, 28],
        [20, "run", "C", 0, 0, 310, 90],
        [20, "swap_out", "A", 64],
        [30, "run", "D", 0, 0, 200, 56],
        *[[30, "swap_out", "A", 64]] * 3,
        [30, "swap_out", "B", 64],
        [40, "run", "A", 256, 0, 20, 44],
        [40, "swap_out", "B", 64],
        [40, "swap_out", "C", 16],
        *[[40, "swap_out", "C", 64]] * 3,
    ]
    final = {name: tiers.tokens_of(name) for name in "ABCD"}
    assert final == {"A": (320, 0, 0), "B": (0, 128, 0), "C": (192, 208, 0), "D": (256, 0, 0)}


def test_a_full_lower_tier_drops_blocks_and_turns_recompute_them() -> None:
    events: list[Event] = [(0, "A", 24, 8), (10, "B", 12, 4), (20, "C", 4, 4), (30, "B", 8, 4)]
    tiers = played([*events, (40, "A", 1, 1)], "lru", 64, 12, size=4)
    rows = [row for row in tiers.rows if row[0] >= 20]
    assert rows == [
        [20, "run", "C", 0, 0, 4, 4],
        *[[20, "swap_out", "A", 4]] * 2,
        [30, "run", "B", 0, 0, 8, 4],
        [30, "swap_out", "A", 4],
        *[[30, "drop", "A", 4], [30, "swap_out", "A", 4]] * 2,
        [40, "run", "A", 12, 8, 1, 1],
        *[[40, "swap_out", "C", 4]] * 2,
        [40, "swap_out", "B", 4],
        *[[40, "drop", "C", 4], [40, "swap_out", "B", 4]] * 2,
        *[[40, "drop", "B", 4], [40, "swap_out", "B", 4]],
    ]


@given(
    st.lists(st.tuples(st.sampled_from("ABCD"), st.integers(1, 9), st.integers(1, 9)), max_size=25),
    st.sampled_from(POLICIES),
    st.integers(0, 40),
    st.integers(1, 4),
)
def test_every_token_is_somewhere_and_no_tier_holds_more_than_it_can(
    turns: list[tuple[str, int, int]], policy: str, lower: int, size: int
) -> None:
    tiers = TierSimulator(policy_of(policy, size), 4000, lower, size, 0.99, FLAT_TO_HALF)
    tokens: dict[str, int] = {}
    for now_s, (name, prompt, output) in enumerate(turns):
        tiers.run(TracedTurn(name, prompt, output, now_s))
        tokens[name] = tokens.get(name, 0) + prompt + output
        found = {each: tiers.tokens_of(each) for each in tokens}
        assert {each: sum(parts) for each, parts in found.items()} == tokens
        assert sum(parts[1] for parts in found.values()) <= lower
        assert sum(parts[0] for parts in found.values()) <= 40 + size * len(tokens)
    totals = tiers.totals
    run = [row for row in tiers.rows if row[1] == "run"]
    assert totals.num_recomputed == sum(row[4] for row in run) and totals.hit_share <= 1


def test_the_command_tells_rows_and_totals(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "turns.jsonl"
    turns = [("A", 24, 8, 0), ("B", 12, 4, 10), ("C", 4, 4, 20)]
    names = ("conversation", "num_prompt_tokens", "num_output_tokens", "arrival_s")
    trace.write_text(
        "".join(json.dumps(dict(zip(names, turn, strict=True))) + "\n" for turn in turns)
    )
    line = ["simulate", "--trace", str(trace), "--instant", "--kv-tokens", "64"]
    line += ["--block-size", "1", "--lower-kv-tokens", "64", "--json"]
    assert main([*line, "--cache-policy", "lru"]) == 0
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert told["lru"]["rows"][-1] == [20, "swap_out", "A", 1]
    assert main(line) == 0
    assert list(json.loads(capsys.readouterr().out)) == list(POLICIES)
    assert main(line[:-1]) == 0
    assert "retention" in capsys.readouterr().out
    assert main([*line, "--cache-policy", "size-idle"]) == 2
    assert "Choose from retention, lru" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "line 1: Input data was truncated"),
        ('{"conversation": 3}', "got `int` - at `$.conversation`"),
        ('{"conversation": ""}', "at `$.conversation`"),
        ('{"conversation": "a", "num_prompt_tokens": 0}', "at `$.num_prompt_tokens`"),
        ('{"conversation": "a", "who": 1}', "unknown field `who`"),
        ("", "holds no turns"),
    ],
)
def test_lines_that_are_no_turns_are_named(tmp_path: Path, line: str, reason: str) -> None:
    path = tmp_path / "turns.jsonl"
    path.write_text(line)
    with pytest.raises(ConfigError, match=re.escape(reason)):
        read_turns(path)


def test_a_conversation_beyond_the_upper_tier_is_refused() -> None:
    with pytest.raises(ConfigError, match="kv_tokens"):
        played([(0, "A", 60, 8)], "lru", 64, 0)
