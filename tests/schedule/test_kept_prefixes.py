"""What a controller knows of tokens that instances have run."""

from __future__ import annotations

import random
from collections.abc import Sequence

from fastdecode.schedule.kept_prefixes import BlockChain, KeptPrefixes

SIZE = 4


def chain(token_ids: Sequence[int], salt: str = "") -> BlockChain:
    return BlockChain.of(token_ids, salt, SIZE)


def test_the_longest_prefix_of_any_instance() -> None:
    prefixes = KeptPrefixes()
    prefixes.note(chain(range(10)), 0)
    prefixes.note(chain(range(7)), 1)
    asked = list(range(20))
    assert prefixes.kept(chain(asked)) == {0: 10, 1: 7}
    assert prefixes.kept(chain(asked, "another")) == {}
    assert prefixes.kept(chain([9, *asked])) == {}
    assert prefixes.kept(chain([*range(9), 77, 78]))[0] == 8, "another tail"
    assert set(prefixes.kept(chain(asked[:8])).values()) == {7}, "the last token has to run"
    prefixes.forget(chain(asked), 0)
    assert prefixes.kept(chain(asked)) == {1: 7}


def test_keys_go_on_from_those_that_are_hashed() -> None:
    """As if all were hashed at once, wherever the first part ends."""
    for first in range(11):
        begun = chain(range(first))
        assert begun.then(range(first, 14)) == chain(range(14))
        assert begun.then(()) == begun and len(begun.keys) == first // SIZE


def test_against_plain_lists() -> None:
    chance = random.Random(3)
    prefixes, noted = KeptPrefixes(), []
    for _ in range(300):
        tokens = [chance.randrange(2) for _ in range(chance.randrange(1, 14))]
        instance = chance.randrange(3)
        prefixes.note(chain(tokens), instance)
        noted.append((tokens, instance))
        asked = [chance.randrange(2) for _ in range(14)]
        kept = prefixes.kept(chain(asked))
        for who in range(3):
            shared = [_shared(asked, tokens) for tokens, other in noted if other == who]
            assert kept.get(who, 0) <= max(shared, default=0), "nobody has run that"
            assert kept.get(who, 0) >= max(shared, default=0) // SIZE * SIZE


def _shared(one: list[int], other: list[int]) -> int:
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
