"""What empty holders could hold: in which parts sequences are stored, and blocks of each holder."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from fastdecode.core.errors import CapacityError, Given
from fastdecode.core.holders import HolderId
from fastdecode.schedule.holder_states import HolderStates


@dataclass(frozen=True)
class PartShape:
    """How sequences are stored: in blocks and, where they are long, in parts."""

    block_size: int
    part_tokens: int | None = None
    """Tokens of every part but a sequence's last, a multiple of ``block_size``. None if every
    sequence is whole."""

    def blocks_for(self, num_tokens: int) -> int:
        """Count the blocks that cached tokens fill. A sequence always takes one."""
        return max(1, -(-num_tokens // self.block_size))

    def sizes(self, num_tokens: int) -> tuple[int, ...]:
        """Return the tokens of each part of a sequence. A whole sequence is one part."""
        if self.part_tokens is None or num_tokens <= self.part_tokens:
            return (num_tokens,)
        num_full, rest = divmod(num_tokens, self.part_tokens)
        return (self.part_tokens,) * num_full + ((rest,) if rest else ())

    def most_blocks(self, capacities: Seq[int]) -> int:
        """Count the blocks of the longest sequence that empty holders of these blocks hold,
        in full parts and a last one in the largest room that these leave."""
        if self.part_tokens is None:
            return max(capacities, default=0)
        full = self.part_tokens // self.block_size
        rests = (c % full for c in capacities)
        return sum(c // full for c in capacities) * full + max(rests, default=0)

    def most_parts(self, capacities: Seq[int], max_closed_parts: int) -> int:
        """Count the parts of a sequence at most: the closed ones that holders may have, and one."""
        if self.part_tokens is None:
            return 1
        full = self.part_tokens // self.block_size
        return sum(min(c // full, max_closed_parts) for c in capacities) + 1


class Capacity:
    """Blocks of all holders, also of lost ones.

    Args:
        holders: their states.
        blocks: blocks of each holder.
        shape: how sequences are stored on them.
        max_closed_parts: most closed parts, all but the last of each sequence, on one holder.
        device: a holder of whole sequences only. None if there is none.
    """

    def __init__(
        self,
        holders: HolderStates,
        blocks: tuple[int, ...],
        shape: PartShape,
        max_closed_parts: int,
        device: HolderId | None = None,
    ) -> None:
        self._device = device
        self._holders = holders
        self._blocks = list(blocks)
        self._shape = shape
        self._max_closed_parts = max_closed_parts

    def blocks(self, holder: HolderId) -> int:
        """Return the blocks that a holder has, or had."""
        return self._blocks[holder]

    def tokens(self, holder: HolderId) -> int:
        return self._blocks[holder] * self._shape.block_size

    def regain(self, holder: HolderId, num_blocks: int) -> None:
        self._blocks[holder] = num_blocks

    def is_possible(self, num_tokens: int) -> bool:
        """Return True if empty holders could hold a sequence. Lost ones count if they return."""
        try:
            self.check_possible(num_tokens)
        except CapacityError:
            return False
        return True

    def check_possible(self, num_tokens: int) -> None:
        """Raise CapacityError unless ``is_possible``."""
        shape, holders = self._shape, self._holders
        sizes = shape.sizes(num_tokens)
        no_part = self._device if len(sizes) > 1 else None
        to_be = {*holders.served, *holders.returning} - {no_part}
        present = [self._blocks[x] for x in sorted(to_be)]
        most = shape.most_blocks(present)
        if shape.blocks_for(num_tokens) > most:
            if shape.part_tokens is None:
                who = "the largest R-worker has"
                more = "or let several hold parts of it", "; not with heads shared out"
            else:
                who = f"in parts of {shape.part_tokens} tokens R-workers together have room for"
                more = "or take smaller parts", ""
            raise CapacityError(
                f"the prompt and max_tokens may fill {num_tokens} cached tokens "
                f"({shape.blocks_for(num_tokens)} KV blocks), but {who} {most} blocks "
                f"({most * shape.block_size} tokens): shorten one of the two, give R-workers "
                "more memory (",
                Given("kv_memory_gb"),
                f"), {more[0]} (",
                Given("split_tokens"),
                f"{more[1]})",
                code="exceeds_capacity",
            )
        most_parts = shape.most_parts(present, self._max_closed_parts)
        if len(sizes) > most_parts:
            raise CapacityError(
                f"the sequence may grow to {num_tokens} cached tokens, {len(sizes)} parts of "
                f"{sizes[0]}, but its queries can go to {most_parts} parts at most: lower "
                "max_tokens, or let parts be longer (",
                Given("split_tokens"),
                ")",
                code="too_many_parts",
            )
