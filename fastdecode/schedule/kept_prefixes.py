"""Which instances have run which tokens, and where their blocks may be read.

Blocks are known by their keys (``fastdecode.core.model.block_keys``), and what an instance keeps
behind the last full block by its tokens. It may have evicted them meanwhile.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

from fastdecode.core.holders import KVSource, num_offered, of_first_tokens
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


_Kept: TypeAlias = tuple[tuple[KVSource, ...], tuple[int, ...]]
"""Where a block may be read, and tokens behind it of which there is a block that is not full."""


class KeptPrefixes:
    """See the module."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[bytes, dict[int, _Kept]] = OrderedDict()

    def note(self, run: BlockChain, instance: int, sources: tuple[KVSource, ...]) -> None:
        """Note where an instance has run these tokens."""
        sources = tuple([replace(source, is_held=False) for source in sources])
        num_tokens = num_offered(sources)
        keys = run.keys[: num_tokens // run.size]
        for key in keys:
            self._blocks.setdefault(key, {})[instance] = sources, ()
            self._blocks.move_to_end(key)
        if keys:
            tail = run.token_ids[len(keys) * run.size : num_tokens]
            self._blocks[keys[-1]][instance] = sources, tail
        while len(self._blocks) > _MOST_BLOCKS:
            self._blocks.popitem(last=False)

    def forget(self, reading: int) -> None:
        """Forget what an engine keeps, by the right to read it."""
        for kept in self._blocks.values():
            for instance in [i for i, (found, _) in kept.items() if found[0].reading == reading]:
                del kept[instance]

    def forget_lost(self, instance: int) -> None:
        """Forget what a lost instance has kept."""
        for kept in self._blocks.values():
            kept.pop(instance, None)

    def kept(self, prompt: BlockChain) -> dict[int, tuple[KVSource, ...]]:
        """Return where each instance may keep a prompt's first blocks, but for the last token,
        which has to run."""
        found = dict[int, tuple[KVSource, ...]]()
        for place in reversed(range((len(prompt.token_ids) - 1) // prompt.size)):
            end = (place + 1) * prompt.size
            for instance, (sources, tail) in self._blocks.get(prompt.keys[place], {}).items():
                has_tail = prompt.token_ids[end:-1][: len(tail)] == tail
                num_tokens = end + len(tail) * has_tail
                found.setdefault(instance, of_first_tokens(sources, num_tokens))
        return found
