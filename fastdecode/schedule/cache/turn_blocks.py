"""What turns of conversations keep: also their last block, which isn't full."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Final

from fastdecode.core.sequence import Sequence
from fastdecode.schedule.cache.chains import Chains
from fastdecode.schedule.cache.parts import Sharing
from fastdecode.schedule.cache.stock import Stock


class TurnBlocks:
    """Of all conversations. A turn that comes to its end keeps all that it has
    come to, and has a lease on it, which ends with the next turn; what the turn
    before had kept of its own is of no use any more.

    Args:
        chains: keys of what sequences fill.
        stock: what is kept where.
        block_size: tokens in a block.
    """

    def __init__(self, chains: Chains, stock: Stock, block_size: int) -> None:
        self._chains = chains
        self._stock = stock
        self._block_size = block_size
        self.ends: Final[dict[bytes | None, set[int]]] = {}
        """Where other chains end in blocks that aren't full: the key of the
        block before, and how many tokens there are in all."""

    def ends_of(self, sequence: Sequence) -> set[int]:
        """Tokens with which a chain that a sequence may start with can end in a
        block that isn't full."""
        ends = {sequence.request.cache.turn or 0}
        if self.ends:
            ends.update(*(self.ends.get(key, ()) for key in (None, *self._chains.keys(sequence))))
        num_tokens, size = len(sequence.token_ids), self._block_size
        return {end for end in ends if end % size and end < num_tokens}

    def end(self, sequence: Sequence, sharing: Sharing) -> None:
        """A turn that was answered runs no more: what it has come to is kept, to
        the last token."""
        self._end_the_one_before(sequence, sharing)
        self._keep_tail(sequence, sharing)

    def _end_the_one_before(self, sequence: Sequence, sharing: Sharing) -> None:
        size, turn = self._block_size, sequence.request.cache.turn
        for part in sharing.parts:
            index = self._stock[part.holder]
            index.want(part.keys)
            if part.is_turns_tail and part.tail is not None:
                index.make_void([part.tail])
            elif turn and turn % size == 0:
                index.end_turn(self._chains.keys(sequence, turn // size)[-1])

    def _keep_tail(self, sequence: Sequence, sharing: Sharing) -> None:
        last, num_tokens, size = sharing.parts[-1], sequence.num_cached, self._block_size
        if num_tokens <= last.part.first_token or last.is_lost:
            return
        keys = self._chains.with_tail(sequence, num_tokens)
        own = keys[last.part.first_token // size :]
        if num_tokens % size:
            before = own[-2] if len(own) > 1 else None
            self._stock.keep_tail(last.part, own[-1], before, num_tokens)
        else:
            del own[-1]  # no tokens, no block
        index = self._stock[last.holder]
        if own[-1] in index:
            index.lease(own[-1])

    def end_conversation(self, token_ids: Seq[int], salt: str) -> None:
        """Nobody goes on with a conversation, the last of whose tokens was never
        run: what of its blocks is idle, and no other's, is kept no more."""
        keys = self._chains.of_tokens(token_ids[:-1], salt)
        for holder in self._stock.holders if keys else ():
            self._stock[holder].end_turn(keys[-1])
            self._stock.drop(holder, keys)
