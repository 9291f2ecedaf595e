"""What holders could hold if they were empty: the shapes in which sequences lie
on them, and how many blocks each has."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from fastdecode.core.errors import CapacityError, Given
from fastdecode.core.holders import HolderId
from fastdecode.schedule.holder_states import HolderStates


@dataclass(frozen=True)
class PartShape:
    """How sequences lie on holders: in blocks and, where they are long, in parts."""

    block_size: int
    """Tokens in a block."""
    part_tokens: int | None = None
    """Of every part but a sequence's last; a multiple of ``block_size``. None:
    every sequence is whole."""

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that a sequence of ``num_tokens`` cached tokens fills; a
        sequence always takes one."""
        return max(1, -(-num_tokens // self.block_size))

    def sizes(self, num_tokens: int) -> tuple[int, ...]:
        """Tokens of each part of a sequence of ``num_tokens``; a whole sequence is a part."""
        if self.part_tokens is None or num_tokens <= self.part_tokens:
            return (num_tokens,)
        num_full, rest = divmod(num_tokens, self.part_tokens)
        return (self.part_tokens,) * num_full + ((rest,) if rest else ())

    def most_blocks(self, capacities: Seq[int]) -> int:
        """Of the longest sequence that empty holders hold: as many full parts
        as there is room for, and a last one in the largest room that these
        leave.

        Args:
            capacities: blocks of each holder.
        """
        if self.part_tokens is None:
            return max(capacities, default=0)
        full = self.part_tokens // self.block_size
        rests = (c % full for c in capacities)
        return sum(c // full for c in capacities) * full + max(rests, default=0)

    def most_parts(self, capacities: Seq[int], max_closed_parts: int) -> int:
        """Of any sequence: as many closed ones as holders may have, and a last one."""
        if self.part_tokens is None:
            return 1
        full = self.part_tokens // self.block_size
        return sum(min(c // full, max_closed_parts) for c in capacities) + 1


class Capacity:
    """Of all holders, those that are lost included.

    Args:
        holders: their states.
        blocks: of each holder.
        shape: in which sequences lie on them.
        max_closed_parts: most closed parts, all but the last of each sequence,
            on one holder.
        device: a holder that has whole sequences only; None: there is none.
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
        """That a holder has, or had."""
        return self._blocks[holder]

    def tokens(self, holder: HolderId) -> int:
        """That fill them."""
        return self._blocks[holder] * self._shape.block_size

    def regain(self, holder: HolderId, num_blocks: int) -> None:
        """A replacement of a lost holder has so many blocks."""
        self._blocks[holder] = num_blocks

    def is_possible(self, num_tokens: int) -> bool:
        """Whether holders, were they empty, could hold a sequence of ``num_tokens``
        tokens: all but lost ones that may not come back."""
        try:
            self.check_possible(num_tokens)
        except CapacityError:
            return False
        return True

    def check_possible(self, num_tokens: int) -> None:
        """Raises CapacityError unless ``is_possible``."""
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
