"""Keys of the blocks that sequences fill, made as they are needed."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Final

from fastdecode.core.holders import SequenceId
from fastdecode.core.model.block_keys import block_keys, root_key, tail_key
from fastdecode.core.sequence import Sequence


class Chains:
    """Keys of all unfinished sequences' blocks. A token that is drawn and not known yet is part
    of no key.

    Args:
        block_size: tokens in a block.
        are_on: blocks may have keys.
        are_shared: sequences start with blocks that others have left. If False, only sequences
            that come from another engine, or go to one, have keys.
    """

    def __init__(self, block_size: int, *, are_on: bool, are_shared: bool = True) -> None:
        self.are_on: Final = are_on
        self._are_shared = are_on and are_shared
        self._block_size = block_size
        self._keys: dict[SequenceId, list[bytes]] = {}

    def is_shared(self, sequence: Sequence) -> bool:
        """Return True if a sequence starts with others' blocks, and leaves its own to them."""
        return self._are_shared and not sequence.request.cache.is_off

    def is_named(self, sequence: Sequence) -> bool:
        """Return True if a sequence's blocks have keys, which other engines may know."""
        request = sequence.request
        is_moved = self.are_on and (request.hands_over or bool(request.sources))
        return is_moved or self.is_shared(sequence)

    def keys(self, sequence: Sequence, num_blocks: int | None = None) -> list[bytes]:
        """Return the keys of a sequence's first blocks, or of all that its tokens fill."""
        if not self.are_on:
            return []
        chain = self._keys.setdefault(sequence.sequence_id, [])
        size, num_known = self._block_size, len(sequence.token_ids) - sequence.is_coming
        if num_blocks is None:
            num_blocks = num_known // size
        if len(chain) < num_blocks:
            assert num_blocks * size <= num_known, "a token of the block is not known"
            parent = chain[-1] if chain else root_key(sequence.request.cache.salt)
            chain += block_keys(
                parent, sequence.token_ids[len(chain) * size : num_blocks * size], size
            )
        return chain[:num_blocks]

    def with_tail(self, sequence: Sequence, num_tokens: int) -> list[bytes]:
        """Return the keys of the blocks that a sequence's first ``num_tokens`` tokens fill. The
        last one is not full."""
        full = num_tokens // self._block_size
        keys = self.keys(sequence, full)
        assert num_tokens <= len(sequence.token_ids) - sequence.is_coming
        parent = keys[-1] if keys else root_key(sequence.request.cache.salt)
        return [*keys, tail_key(parent, sequence.token_ids[full * self._block_size : num_tokens])]

    def of_tokens(self, token_ids: Seq[int], salt: str) -> list[bytes]:
        """Return the keys of all blocks of tokens, the last of which need not be full."""
        if not self.are_on:
            return []
        size = self._block_size
        keys = block_keys(root_key(salt), token_ids, size)
        if len(token_ids) % size:
            parent = keys[-1] if keys else root_key(salt)
            keys.append(tail_key(parent, token_ids[len(keys) * size :]))
        return keys

    def end(self, sequence: Sequence) -> None:
        """Forget a sequence's keys."""
        self._keys.pop(sequence.sequence_id, None)
