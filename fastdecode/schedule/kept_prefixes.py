"""Which instances have run which tokens, as far as their controller knows: K and V of
these may still be kept there, for requests that begin alike.

Blocks are known by their keys (``fastdecode.core.model.block_keys``), and what was run
behind the last full block by its tokens. An instance may have given them up meanwhile: it
says so when it is asked for them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from fastdecode.core.model.block_keys import block_keys, root_key

_MOST_BLOCKS: Final = 1 << 16
"""That are remembered: of a million tokens or more."""


@dataclass
class _Block:
    """Of whom a block is known, and what each has run last behind it."""

    tails: dict[int, tuple[int, ...]] = field(default_factory=dict)


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
        self._blocks: OrderedDict[bytes, _Block] = OrderedDict()

    def note(self, run: BlockChain, instance: int) -> None:
        """An instance has run these tokens."""
        for key in run.keys:
            block = self._blocks.setdefault(key, _Block())
            block.tails.setdefault(instance, ())
            self._blocks.move_to_end(key)
        if run.keys:
            tail = run.token_ids[len(run.keys) * run.size :]
            self._blocks[run.keys[-1]].tails[instance] = tail
        while len(self._blocks) > _MOST_BLOCKS:
            self._blocks.popitem(last=False)

    def forget(self, run: BlockChain, instance: int) -> None:
        """An instance does not keep these tokens any more."""
        for key in run.keys:
            if (block := self._blocks.get(key)) is not None:
                block.tails.pop(instance, None)

    def kept(self, prompt: BlockChain) -> dict[int, int]:
        """How many of a prompt's first tokens each instance may keep, but for the last
        token, which has to run."""
        found = dict[int, int]()
        for place in reversed(range(len(prompt.keys))):
            block = self._blocks.get(prompt.keys[place])
            for instance, tail in block.tails.items() if block is not None else ():
                end = (place + 1) * prompt.size
                if tail and prompt.token_ids[end : end + len(tail)] == tail:
                    end += len(tail)
                found.setdefault(instance, min(end, len(prompt.token_ids) - 1))
        return found
