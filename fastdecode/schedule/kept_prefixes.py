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


class KeptPrefixes:
    """See the module.

    Args:
        block_size: tokens in a block.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._blocks: OrderedDict[bytes, _Block] = OrderedDict()

    def note(self, token_ids: Sequence[int], salt: str, instance: int) -> None:
        """An instance has run these tokens."""
        keys = self._keys(token_ids, salt)
        for key in keys:
            block = self._blocks.setdefault(key, _Block())
            block.tails.setdefault(instance, ())
            self._blocks.move_to_end(key)
        if keys:
            tail = tuple(token_ids[len(keys) * self._block_size :])
            self._blocks[keys[-1]].tails[instance] = tail
        while len(self._blocks) > _MOST_BLOCKS:
            self._blocks.popitem(last=False)

    def forget(self, token_ids: Sequence[int], salt: str, instance: int) -> None:
        """An instance does not keep these tokens any more."""
        for key in self._keys(token_ids, salt):
            if (block := self._blocks.get(key)) is not None:
                block.tails.pop(instance, None)

    def kept(self, token_ids: Sequence[int], salt: str) -> dict[int, int]:
        """Of a prompt: how many of its first tokens each instance may keep, but for the last
        token, which has to run."""
        keys, found = self._keys(token_ids, salt), dict[int, int]()
        for place in reversed(range(len(keys))):
            block = self._blocks.get(keys[place])
            for instance, tail in block.tails.items() if block is not None else ():
                end = (place + 1) * self._block_size
                if tail and tuple(token_ids[end : end + len(tail)]) == tail:
                    end += len(tail)
                found.setdefault(instance, min(end, len(token_ids) - 1))
        return found

    def _keys(self, token_ids: Sequence[int], salt: str) -> list[bytes]:
        return block_keys(root_key("", salt), token_ids, self._block_size)
