"""Models whose every layer has a sliding window: who goes on sees only the last
tokens. KV blocks that lie before those are **unseen**."""

from __future__ import annotations

from collections.abc import Reversible
from dataclasses import dataclass

from fastdecode.core.spec import first_seen
from fastdecode.schedule.cache.blocks import Block, Index


@dataclass(frozen=True)
class Window:
    """What is seen of a sequence, by blocks.

    Args:
        num_tokens: that the layer sees which sees most; None: all.
        block_size: tokens in a block.
    """

    num_tokens: int | None
    block_size: int

    def num_unseen(self, num_past: int) -> int:
        """Blocks of which nobody sees anything who goes on behind so many tokens."""
        return first_seen(num_past, self.num_tokens) // self.block_size

    def unseen_tokens(self, num_past: int) -> int:
        """The tokens of those blocks."""
        return self.num_unseen(num_past) * self.block_size


def drop_unseen(
    index: Index, keys: Reversible[bytes], num_past: int, window: Window
) -> list[bytes]:
    """Of blocks of a sequence that runs no more give up those that nobody sees
    who goes on behind its last token, nor anybody else who is known of.

    Others are known of that use a block, share it as conversations, or have
    gone on from it otherwise: where prompts parted once they will again, and
    what such a one saw stays.

    Args:
        keys: of the sequence's kept blocks, in the order of its tokens.
        num_past: its tokens.

    Returns:
        What was given up. What is just being moved is so when it has come.
    """
    end = window.unseen_tokens(num_past)
    if not end:
        return []
    gone: list[Block] = []
    seen_from = end  # by those that parted from the sequence
    for key in reversed(keys):
        block = index.get(key)
        if block is None or block.num_tokens > end or block.num_users or block.num_leases:
            continue
        if block.has_branches:
            seen_from = min(seen_from, window.unseen_tokens(block.num_tokens))
        if block.has_branches or block.num_tokens > seen_from:
            continue
        if block.job is not None:
            index.make_void([key])
        elif block.is_idle:
            gone.append(block)
    return index.forget(gone)
