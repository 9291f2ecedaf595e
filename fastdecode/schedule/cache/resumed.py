"""What holders have kept of sequences whose S-worker was lost, as kept blocks."""

from __future__ import annotations

from collections.abc import Mapping

from fastdecode.core.holders import Part, PartId
from fastdecode.core.resuming import HeldSequence
from fastdecode.schedule.cache.prefix_cache import PrefixCache


def keep_held(
    cache: PrefixCache, held: HeldSequence, counts: Mapping[Part, int]
) -> dict[PartId, bytes]:
    """Have blocks kept of parts that are open, and are to be closed then.

    Args:
        counts: tokens of its parts that are there, in their order; of those
            that aren't, nothing.

    Returns:
        Of parts that end in a block that isn't full, and is kept: its key.
    """
    tails: dict[PartId, bytes] = {}
    num_there = held.parts[0].first_token if held.parts else 0  # nobody sees what is before
    for part, count in counts.items():
        if part.first_token == num_there:  # else nobody can start with it
            key = _keep_part(cache, held, part, count)
            num_there += count
            if key is not None:
                tails[part.part_id] = key
    return tails


def _keep_part(cache: PrefixCache, held: HeldSequence, part: Part, count: int) -> bytes | None:
    """One part, of which so many tokens are there; as above."""
    stock, size = cache.stock, cache.block_size
    end = part.first_token + count
    keys = cache.chains.of_tokens(held.token_ids[:end], held.salt)
    first, num_full = part.first_token // size, end // size
    names = [x for x in stock.keep(part, 0, keys[first:num_full], None) if x is not None]
    stock[part.holder].want(names)  # a sequence will start with them
    stock.release(part.holder, names, for_good=False)
    # A sibling copies the last block when it appends its first own token.
    is_shared = held.num_siblings > 1 and end <= held.num_prompt_tokens
    if end % size == 0 or is_shared:
        return None
    before = keys[num_full - 1] if num_full else None
    stock.keep_tail(part, keys[-1], before if num_full > first else None, end)
    cache.turns.ends.setdefault(before, set()).add(end)
    return stock.take_tail(part.part_id)
