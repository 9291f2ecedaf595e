"""Which instances have run which tokens, and where their blocks may be read.

Blocks are known by their keys (``fastdecode.core.model.block_keys``). An instance may have evicted
them meanwhile.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from fastdecode.core.holders import KVSource
from fastdecode.core.model.block_keys import block_keys, root_key

_MOST_BLOCKS: Final = 1 << 16
"""Blocks that are remembered: of a million tokens or more."""


@dataclass(frozen=True)
class BlockChain:
    """Tokens, and the keys of the full blocks among them, which are hashed once.

    Args:
        root: the parent of the first block.
        size: tokens in a block.
    """

    root: bytes
    size: int
    token_ids: tuple[int, ...] = ()
    keys: tuple[bytes, ...] = ()

    @classmethod
    def of(cls, token_ids: Sequence[int], salt: str, block_size: int) -> BlockChain:
        """Those of a salt."""
        return cls(root_key(salt), block_size).then(token_ids)

    def then(self, token_ids: Sequence[int]) -> BlockChain:
        """These, and more behind them."""
        every = (*self.token_ids, *token_ids)
        parent = self.keys[-1] if self.keys else self.root
        more = block_keys(parent, every[len(self.keys) * self.size :], self.size)
        return BlockChain(self.root, self.size, every, (*self.keys, *more))


class KeptPrefixes:
    """See the module."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[bytes, dict[int, tuple[KVSource, ...]]] = OrderedDict()

    def note(self, run: BlockChain, instance: int, sources: tuple[KVSource, ...]) -> None:
        """Note where an instance has run these tokens."""
        if not sources:
            return
        for key in run.keys:
            self._blocks.setdefault(key, {})[instance] = sources
            self._blocks.move_to_end(key)
        while len(self._blocks) > _MOST_BLOCKS:
            self._blocks.popitem(last=False)

    def kept(self, prompt: BlockChain) -> dict[int, tuple[KVSource, ...]]:
        """Return where each instance may keep a prompt's first blocks, but for the last token,
        which has to run."""
        found = dict[int, tuple[KVSource, ...]]()
        for place in reversed(range((len(prompt.token_ids) - 1) // prompt.size)):
            for instance, sources in self._blocks.get(prompt.keys[place], {}).items():
                if instance not in found:
                    found[instance] = _first_tokens(sources, (place + 1) * prompt.size)
        return found


def _first_tokens(sources: tuple[KVSource, ...], num_tokens: int) -> tuple[KVSource, ...]:
    return tuple(
        replace(x, num_tokens=min(x.end, num_tokens) - x.first_token, is_held=False)
        for x in sources
        if x.first_token < num_tokens
    )
