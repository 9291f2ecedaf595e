"""What running sequences have to do with kept blocks."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from fastdecode.core.holders import HolderId, Part, Residence


@dataclass(eq=False)
class KeptPart:
    """A part of a running sequence. Its full blocks are kept, as far as they
    have been looked at; but not those whose key is another block's already."""

    part: Part
    end: int | None
    """The first token of the next part; None: it is the last one."""
    names: list[bytes | None] = field(default_factory=list)
    """Of the blocks that were looked at: its key, if it is kept by it."""
    behind: list[bytes] = field(default_factory=list)
    """Of the blocks behind its gap: all are kept. None once that is filled."""
    first_behind: int = 0
    """The first of those."""
    tail: bytes | None = None
    """The kept block that is copied when the sequence's first token is run."""
    is_turns_tail: bool = False
    """That block is the end of the turn before this one: it isn't full."""
    is_lost: bool = False
    """Its holder is."""

    @property
    def holder(self) -> HolderId:
        return self.part.holder

    @property
    def keys(self) -> list[bytes]:
        """Of all kept blocks that it uses, in the order of its tokens."""
        keys = [name for name in self.names if name is not None] + self.behind
        return keys if self.tail is None else [*keys, self.tail]

    @property
    def num_shared(self) -> int:
        """Of its blocks, those that are kept."""
        return sum(name is not None for name in self.names) + len(self.behind)

    def start_with(self, keys: Seq[bytes], gap: range, *, has_copy: bool) -> None:
        """It starts with these kept blocks.

        Args:
            gap: blocks that aren't there, with some of those behind them.
            has_copy: the last is to be copied.
        """
        split = gap.start if gap else len(keys)
        self.names, self.behind = list(keys[:split]), list(keys[split:])
        self.first_behind = gap.stop
        if has_copy:
            self.tail = self.behind.pop() if self.behind else keys[-1]
            del self.names[len(keys) - 1 :]

    def next_blocks(self, num_full: int) -> range:
        """Blocks that haven't been looked at, of as many full ones; those
        before a gap first."""
        first = len(self.names)
        if self.behind and num_full > self.first_behind:
            if first < self.first_behind:
                return range(first, self.first_behind)
            self.names += self.behind
            first, self.behind = len(self.names), []
        return range(first, max(first, num_full))

    def num_full(self, num_cached: int, block_size: int) -> int:
        """Of its blocks those that are full, when so many tokens of the
        sequence are cached."""
        end = num_cached if self.end is None else min(num_cached, self.end)
        return max(0, end - self.part.first_token) // block_size


@dataclass(eq=False)
class Sharing:
    """A running sequence that shares its blocks."""

    parts: list[KeptPart]
    coming: set[bytes] = field(default_factory=set)
    """Keys of the blocks that it is computing before it draws."""
    is_answered: bool = False
    """It is a turn of a conversation, and has come to its end."""

    @classmethod
    def of(cls, residence: Residence) -> Sharing:
        """Of one that uses no kept blocks yet."""
        ends = [part.first_token for part in residence.parts[1:]]
        return cls(
            [KeptPart(part, end) for part, end in zip(residence.parts, [*ends, None], strict=True)]
        )
