"""Does it pay to keep only two microbatches' KV on the device, and the others'
in host memory? (DéjàVu, appendix G.1.)

Swapping makes room for microbatches of 2B sequences instead of B, at the same
time t for a token. A token then takes as long as bringing the microbatch's KV
back takes, where that is longer: ``transfer(i) = i·B·C / bandwidth`` at i
cached tokens. It pays if

    2·N·t >= Σ max(t, transfer(i))

The paper prints B in the transfer, and a sum over i = p … p+N, one term more
than there are tokens. What moves is the KV of 2B sequences, at p+1 … p+N cached
tokens. Both are shown, and the two readings between them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

from cost_model.numbers import exact, whole_number

MAX_TOKENS = 10_000_000
MAX_SEQUENCES = 1 << 20

PRINTED = "B, N+1 terms"
CORRECTED = "2B, N terms"


@dataclass(frozen=True)
class Reading:
    """One way to read the inequality."""

    name: str
    swapped_s: Fraction
    """The right-hand side: tokens of a microbatch of 2B, swapped."""
    pays: bool


class Swapping:
    """Microbatches of ``batch`` sequences, or swapped ones of twice as many.

    Args:
        kv_kb: K and V of one token and sequence on a stage, in 1000 bytes.
        bandwidth_gb: from the host's memory, in 10⁹ bytes a second.

    Raises:
        ConfigError: a number makes no sense; names it.
    """

    def __init__(
        self,
        prompt_tokens: int,
        tokens: int,
        token_time: float,
        batch: int,
        kv_kb: float,
        bandwidth_gb: float,
    ) -> None:
        self.prompt_tokens = whole_number("prompt_tokens", prompt_tokens, 0, MAX_TOKENS)
        self.tokens = whole_number("tokens", tokens, 1, MAX_TOKENS)
        self.token_s = exact("token_time", token_time)
        self.batch = whole_number("batch", batch, 1, MAX_SEQUENCES)
        self.token_bytes = exact("kv_kb", kv_kb) * 1000
        self.bytes_per_s = exact("bandwidth_gb", bandwidth_gb) * 10**9

    @property
    def unswapped_s(self) -> Fraction:
        """The left-hand side: tokens of two microbatches of B, one after the other."""
        return 2 * self.tokens * self.token_s

    def crossover(self, factor: int = 1) -> Fraction:
        """Cached tokens at which bringing back takes as long as a token.

        Args:
            factor: 1: KV of B sequences; 2: of 2B.
        """
        return self.token_s * self.bytes_per_s / (factor * self.batch * self.token_bytes)

    def swapped_s(self, factor: int, first: int) -> Fraction:
        """The sum over i from ``first`` to prompt and tokens, KV of ``factor``·B
        sequences at a time."""
        last = self.prompt_tokens + self.tokens
        slow_from = max(first, math.floor(self.crossover(factor)) + 1)
        if slow_from > last:
            return (last - first + 1) * self.token_s
        quick_s = (slow_from - first) * self.token_s
        steps = Fraction((slow_from + last) * (last - slow_from + 1), 2)
        return quick_s + steps * factor * self.batch * self.token_bytes / self.bytes_per_s

    def readings(self) -> list[Reading]:
        """As printed, the two between, and corrected, in this order."""
        p = self.prompt_tokens
        read = []
        for name, factor, first in (
            (PRINTED, 1, p),
            ("B, N terms", 1, p + 1),
            ("2B, N+1 terms", 2, p),
            (CORRECTED, 2, p + 1),
        ):
            swapped_s = self.swapped_s(factor, first)
            read.append(Reading(name, swapped_s, self.unswapped_s >= swapped_s))
        return read
