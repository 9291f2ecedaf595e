"""Machines for prompts and machines for tokens (DéjàVu, section 4.2.1 and
appendix D).

D machines run a microbatch's prompt in Y seconds and each of its N tokens in t
seconds, times of a stage where all D are one pipeline. The time between two
microbatches that leave the pipelines, in the long run, is

* one pipeline for both (eq. 4): ``(D-1)(Y-t)/D + Y + N·t``
* D_p machines for prompts, D_t for tokens: ``max(m·D·Y/D_p, N·D·t/D_t)``

where m >= 1 is how much longer prompts take because their K and V have to be
streamed to the token machines. Machines are whole: the split is found by trying
all of them, and what the paper's equations give for parts of machines is shown
beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from cost_model.disaggregate.memory import StageMemory
from cost_model.numbers import exact, whole_number

MAX_MACHINES = 10_000
MAX_TOKENS = 10_000_000


def streaming_overhead(transfer_s: Fraction, prompt_time: float) -> Fraction:
    """m, of a transfer of K and V. Layers are streamed while later ones run: only
    what takes longer than the prompt counts. (Appendix H.4 has the ratio alone, which
    is below 1 on fast networks.)"""
    return max(Fraction(1), transfer_s / exact("prompt_time", prompt_time))


def transfer_s(kv_gb: float, bandwidth_gbps: float) -> Fraction:
    """Seconds that K and V of a microbatch's prompt take from one prompt stage.

    Args:
        kv_gb: of the largest stage, in 10⁹ bytes; stages send at the same time.
        bandwidth_gbps: of a machine's port, in 10⁹ bits a second.
    """
    return exact("kv_gb", kv_gb) * 8 / exact("bandwidth_gbps", bandwidth_gbps)


@dataclass(frozen=True)
class Split:
    prompt_machines: int
    token_machines: int
    interval_s: Fraction
    """Between microbatches that leave the pipelines."""


class Disaggregation:
    """The question: D machines, and what a microbatch asks of them.

    Args:
        machines: D.
        prompt_time: Y, seconds of a stage for a microbatch's prompt.
        token_time: t, seconds of a stage for one token of a microbatch.
        tokens: N, that a microbatch generates.
        overhead: m, at least 1.

    Raises:
        ConfigError: a number makes no sense; names it.
    """

    def __init__(
        self,
        machines: int,
        prompt_time: float,
        token_time: float,
        tokens: int,
        overhead: float | Fraction = 1,
    ) -> None:
        self.machines = whole_number("machines", machines, 1, MAX_MACHINES)
        self.tokens = whole_number("tokens", tokens, 1, MAX_TOKENS)
        self.prompt_s = exact("prompt_time", prompt_time)
        self.token_s = exact("token_time", token_time)
        self.overhead = exact("overhead", overhead, least=1.0, above=False)

    @property
    def colocated_s(self) -> Fraction:
        """Equation 4: one pipeline for both."""
        bubbles_s = (self.machines - 1) * (self.prompt_s - self.token_s) / self.machines
        return bubbles_s + self.prompt_s + self.tokens * self.token_s

    def interval_s(self, prompt_machines: int, token_machines: int) -> Fraction:
        prompts_s = self.overhead * self.machines * self.prompt_s / prompt_machines
        tokens_s = self.tokens * self.machines * self.token_s / token_machines
        return max(prompts_s, tokens_s)

    @property
    def continuous_s(self) -> Fraction:
        """If machines could be cut in parts."""
        return self.overhead * self.prompt_s + self.tokens * self.token_s

    @property
    def continuous_token_machines(self) -> Fraction:
        """Equation 6."""
        return self.machines * self.tokens * self.token_s / self.continuous_s

    @property
    def continuous_prompt_machines(self) -> Fraction:
        """Equation 7."""
        return self.machines - self.continuous_token_machines

    @property
    def continuous_wins(self) -> bool:
        return self.continuous_s < self.colocated_s

    @property
    def break_even_ratio(self) -> Fraction | None:
        """Equation 5: parts of machines win where Y/t is above this. None:
        nowhere, since m isn't below 2 - 1/D. (The paper says m < 2, which is
        too wide.)"""
        denominator = self.machines * (2 - self.overhead) - 1
        return Fraction(self.machines - 1) / denominator if denominator > 0 else None

    def splits(self, memory: StageMemory | None = None) -> list[Split]:
        """All that fit, by machines for prompts. ``memory``: what a stage must hold;
        None: anything fits."""
        found = []
        for prompt_machines in range(1, self.machines):
            token_machines = self.machines - prompt_machines
            if memory is None or memory.fits(prompt_machines, token_machines):
                interval_s = self.interval_s(prompt_machines, token_machines)
                found.append(Split(prompt_machines, token_machines, interval_s))
        return found

    def best(self, memory: StageMemory | None = None) -> list[Split]:
        """The splits that none is better than: one, several that tie, or none if
        nothing fits."""
        splits = self.splits(memory)
        least_s = min((split.interval_s for split in splits), default=None)
        return [split for split in splits if split.interval_s == least_s]

    def wins(self, split: Split) -> bool:
        """Strictly better than one pipeline for both."""
        return split.interval_s < self.colocated_s
