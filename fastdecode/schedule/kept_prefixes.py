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
"""Blocks of one engine that are remembered: a million tokens or more."""


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
        """Return the chain of these tokens under a salt."""
        return cls(root_key(salt), block_size).then(token_ids)

    def then(self, token_ids: Sequence[int]) -> BlockChain:
        """Return the chain with more tokens behind it."""
        every = (*self.token_ids, *token_ids)
        parent = self.keys[-1] if self.keys else self.root
        more = block_keys(parent, every[len(self.keys) * self.size :], self.size)
        return BlockChain(self.root, self.size, every, (*self.keys, *more))


_Kept: TypeAlias = tuple[tuple[KVSource, ...], tuple[int, ...]]
"""Where a block may be read, and the tokens of a block behind it that is not full."""


class KeptPrefixes:
    """See the module."""

    def __init__(self) -> None:
        self._blocks: dict[tuple[int, int], OrderedDict[bytes, _Kept]] = {}
        """Blocks by key, the latest last, of each instance and right to read them."""

    def note(self, run: BlockChain, instance: int, sources: tuple[KVSource, ...]) -> None:
        """Note where an instance has run these tokens."""
        sources = tuple([replace(source, is_held=False) for source in sources])
        num_tokens = num_offered(sources)
        keys = run.keys[: num_tokens // run.size]
        if not keys:
            return
        blocks = self._blocks.setdefault((instance, sources[0].reading), OrderedDict())
        for key in keys:
            blocks[key] = sources, ()
            blocks.move_to_end(key)
        blocks[keys[-1]] = sources, run.token_ids[len(keys) * run.size : num_tokens]
        while len(blocks) > _MOST_BLOCKS:
            blocks.popitem(last=False)

    def forget(self, reading: int) -> None:
        """Forget what an engine keeps, by the right to read it."""
        self._blocks = {of: kept for of, kept in self._blocks.items() if of[1] != reading}

    def forget_lost(self, instance: int) -> None:
        """Forget what a lost instance has kept."""
        self._blocks = {of: kept for of, kept in self._blocks.items() if of[0] != instance}

    def kept(self, prompt: BlockChain) -> dict[int, tuple[KVSource, ...]]:
        """Return where each instance may keep a prompt's first blocks, but for the last token,
        which has to run."""
        found = dict[int, tuple[KVSource, ...]]()
        most = (len(prompt.token_ids) - 1) // prompt.size
        for (instance, _), blocks in self._blocks.items():
            count = next((i for i in range(most, 0, -1) if prompt.keys[i - 1] in blocks), 0)
            if count:
                sources, tail = blocks[prompt.keys[count - 1]]
                end = count * prompt.size
                has_tail = prompt.token_ids[end:-1][: len(tail)] == tail
                found[instance] = of_first_tokens(sources, end + len(tail) * has_tail)
        return found
