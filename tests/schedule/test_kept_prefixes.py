"""What a controller knows of tokens that instances have run."""

from __future__ import annotations

import random

from fastdecode.schedule.kept_prefixes import KeptPrefixes

SIZE = 4


def test_the_longest_prefix_of_any_instance() -> None:
    prefixes = KeptPrefixes(SIZE)
    prefixes.note(range(10), "", 0)
    prefixes.note(range(7), "", 1)
    asked = list(range(20))
    assert prefixes.kept(asked, "") == {0: 10, 1: 7}
    assert prefixes.kept(asked, "another") == {}
    assert prefixes.kept([9, *asked], "") == {}
    assert prefixes.kept([*range(9), 77, 78], "")[0] == 8, "another tail"
    assert set(prefixes.kept(asked[:8], "").values()) == {7}, "the last token has to run"
    prefixes.forget(asked, "", 0)
    assert prefixes.kept(asked, "") == {1: 7}


def test_against_plain_lists() -> None:
    chance = random.Random(3)
    prefixes, noted = KeptPrefixes(SIZE), []
    for _ in range(300):
        tokens = [chance.randrange(2) for _ in range(chance.randrange(1, 14))]
        instance = chance.randrange(3)
        prefixes.note(tokens, "", instance)
        noted.append((tokens, instance))
        asked = [chance.randrange(2) for _ in range(14)]
        kept = prefixes.kept(asked, "")
        for who in range(3):
            shared = [_shared(asked, tokens) for tokens, other in noted if other == who]
            assert kept.get(who, 0) <= max(shared, default=0), "nobody has run that"
            assert kept.get(who, 0) >= max(shared, default=0) // SIZE * SIZE


def _shared(one: list[int], other: list[int]) -> int:
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
