"""What a controller knows of tokens that instances have run."""

from __future__ import annotations

import random

from fastdecode.schedule.kept_prefixes import KeptPrefix, KeptPrefixes

SIZE = 4


def test_the_longest_prefix_of_any_instance() -> None:
    prefixes = KeptPrefixes(SIZE)
    prefixes.note(range(10), "", 0)
    prefixes.note(range(7), "", 1)
    asked = list(range(20))
    assert prefixes.longest(asked, "", (0, 1)) == KeptPrefix(0, 10)
    assert prefixes.longest(asked, "", (1,)) == KeptPrefix(1, 7)
    assert prefixes.longest(asked, "another", (0, 1)).num_tokens == 0
    assert prefixes.longest([9, *asked], "", (0, 1)).num_tokens == 0
    assert prefixes.longest([*range(9), 77, 78], "", (0, 1)).num_tokens == 8, "another tail"
    assert prefixes.longest(asked[:8], "", (0, 1)).num_tokens == 7, "the last token has to run"
    prefixes.forget(asked, "", 0)
    assert prefixes.longest(asked, "", (0, 1)) == KeptPrefix(1, 7)


def test_against_plain_lists() -> None:
    chance = random.Random(3)
    prefixes, noted = KeptPrefixes(SIZE), []
    for _ in range(300):
        tokens = [chance.randrange(2) for _ in range(chance.randrange(1, 14))]
        instance = chance.randrange(3)
        prefixes.note(tokens, "", instance)
        noted.append((tokens, instance))
        asked = [chance.randrange(2) for _ in range(14)]
        found = prefixes.longest(asked, "", (0, 1, 2))
        shared = [_shared(asked, tokens) for tokens, who in noted if who == found.instance]
        assert found.num_tokens <= max(shared, default=0), "nobody has run that"
        whole = max(_shared(asked, tokens) // SIZE * SIZE for tokens, _ in noted)
        assert found.num_tokens >= whole


def _shared(one: list[int], other: list[int]) -> int:
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
