"""Keys of the blocks that sequences fill, made as they are asked for."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from fastdecode.core.holders import SequenceId
from fastdecode.core.model.block_keys import block_keys, root_key, tail_key
from fastdecode.core.sequence import Sequence


class BlockHashes:
    """Of all sequences that aren't over.

    Args:
        identity: what K and V depend on beside tokens; None: no block has a
            key.
        block_size: tokens in a block.
    """

    def __init__(self, identity: str | None, block_size: int) -> None:
        self._identity = identity
        self._block_size = block_size
        self._keys: dict[SequenceId, list[bytes]] = {}

    @property
    def are_on(self) -> bool:
        """Whether any block has a key."""
        return self._identity is not None

    def is_shared(self, sequence: Sequence) -> bool:
        """Whether a sequence that starts leaves its blocks to others, and takes
        theirs."""
        return self.are_on and not sequence.request.cache.is_off

    def keys(self, sequence: Sequence, num_blocks: int | None = None) -> list[bytes]:
        """Of a sequence's first blocks; None: of all that its tokens fill."""
        if self._identity is None:
            return []
        chain = self._keys.setdefault(sequence.sequence_id, [])
        size = self._block_size
        if num_blocks is None:
            num_blocks = len(sequence.token_ids) // size
        if len(chain) < num_blocks:
            parent = chain[-1] if chain else root_key(self._identity, sequence.request.cache.salt)
            tokens = sequence.token_ids[len(chain) * size : num_blocks * size]
            chain += block_keys(parent, tokens, size)
        return chain[:num_blocks]

    def with_tail(self, sequence: Sequence, num_tokens: int) -> list[bytes]:
        """Keys of the blocks that so many leading tokens of a sequence fill, the
        last of which isn't full."""
        full = num_tokens // self._block_size
        keys = self.keys(sequence, full)
        parent = keys[-1] if keys else root_key(self._identity or "", sequence.request.cache.salt)
        return [*keys, tail_key(parent, sequence.token_ids[full * self._block_size : num_tokens])]

    def of_tokens(self, token_ids: Seq[int], salt: str) -> list[bytes]:
        """Keys of all blocks of tokens that are no sequence's, the last of which
        needn't be full."""
        if self._identity is None:
            return []
        size = self._block_size
        keys = block_keys(root_key(self._identity, salt), token_ids, size)
        if len(token_ids) % size:
            parent = keys[-1] if keys else root_key(self._identity, salt)
            keys.append(tail_key(parent, token_ids[len(keys) * size :]))
        return keys

    def is_over(self, sequence: Sequence) -> None:
        """Nobody asks for its blocks' keys any more."""
        self._keys.pop(sequence.sequence_id, None)
