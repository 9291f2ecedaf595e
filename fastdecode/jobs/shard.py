"""A part of a job's lines, for job arrays: each of several jobs answers its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from fastdecode.core.errors import ConfigError

MAX_SHARDS = 1 << 20


@dataclass(frozen=True)
class Shard:
    """Lines ``index``, ``index + count``, … of a file, whose first line is 1."""

    index: int = 1
    count: int = 1

    @classmethod
    def of(cls, text: str) -> Shard:
        """Return the shard of ``2/8``. Raises: ConfigError: If the text isn't a shard."""
        index, slash, count = text.partition("/")
        numbers = index.isdecimal() and count.isdecimal() and slash == "/"
        if not numbers or not 1 <= int(index) <= int(count) <= MAX_SHARDS:
            raise ConfigError(
                f"--shard {text!r} is not I/N with 1 <= I <= N <= {MAX_SHARDS}: "
                "give 1/8, 2/8, ... 8/8 to the eight jobs of an array"
            )
        return cls(int(index), int(count))

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    def __contains__(self, number: int) -> bool:
        return number % self.count == self.index % self.count


WHOLE: Final = Shard()
