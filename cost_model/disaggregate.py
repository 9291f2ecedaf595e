"""Pipelines of machines, by the closed forms of DéjàVu (arXiv 2403.01876): prompts and tokens
apart (section 4.2.1, appendix D), and swapped microbatches (appendix G.1).

D machines run a microbatch's prompt in Y seconds a stage and each of its N tokens in t seconds.
Microbatches leave the pipelines every

* ``(D-1)(Y-t)/D + Y + N·t`` seconds from one pipeline for both (eq. 4);
* ``max(m·D·Y/D_p, N·D·t/D_t)`` from D_p machines for prompts and D_t for tokens, where m >= 1 is
  how much longer prompts take because their K and V are streamed to the token machines.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from cost_model.numbers import at_most
from cost_model.printing import counted, labelled, picked, round_to, seconds_text
from fastdecode.core.config.options import REQUIRED, option

MAX_MACHINES = 10_000
MAX_LAYERS = 10_000
MAX_TOKENS = 10_000_000
MAX_SEQUENCES = 1 << 20
LARGEST, _LEAST = 1e15, 1e-15


def _positive(help: str, metavar: str, low: float = _LEAST) -> Any:
    return option(REQUIRED, help, low=low, high=LARGEST, metavar=metavar)


@dataclass(frozen=True)
class StageMemory:
    """A model of L layers on machines, in gigabytes.

    A prompt stage holds its layers' weights and one microbatch: ``P·(W + C) <= M``. Of d token
    stages, each holds ``⌈L/d⌉`` layers for d microbatches: ``⌈L/d⌉·(W + (C + K)·d) <= M``. Each
    machine more brings a microbatch more, so more machines may hold less.
    """

    layers: int = option(REQUIRED, "layers of the model", low=1, high=MAX_LAYERS, metavar="L")
    weights_gb: float = _positive("weights of one layer", "GB")
    prompt_kv_gb: float = _positive("K and V of one layer, for a microbatch's prompt", "GB", 0.0)
    token_kv_gb: float = _positive("K and V of one layer, for a microbatch's tokens", "GB", 0.0)
    memory_gb: float = _positive("memory of a machine", "GB")

    def fits(self, machines: int, *, tokens: bool) -> bool:
        """Return True if this many machines hold prompts (with ``tokens``: tokens)."""
        kv_gb = (self.prompt_kv_gb + self.token_kv_gb) * machines if tokens else self.prompt_kv_gb
        stage_gb = -(-self.layers // machines) * (self.weights_gb + kv_gb)
        return machines <= self.layers and at_most(stage_gb, self.memory_gb)

    def fewest(self, *, tokens: bool) -> int | None:
        """Return the fewest machines that hold prompts, or tokens. None if no number does."""
        counts = range(1, self.layers + 1)
        return next((n for n in counts if self.fits(n, tokens=tokens)), None)


@dataclass(frozen=True)
class Streaming:
    kv_gb: float = _positive(
        "in place of --overhead: K and V that the largest prompt stage sends", "GB"
    )
    bandwidth_gbps: float = _positive("of a machine's port, in 10^9 bits per second", "GBIT")

    def overhead(self, prompt_time: float) -> float:
        return max(1.0, self.kv_gb * 8 / self.bandwidth_gbps / prompt_time)


@dataclass(frozen=True)
class Split:
    prompt_machines: int
    token_machines: int
    interval_s: float
    """Time between microbatches that leave the pipelines."""


@dataclass(frozen=True)
class Disaggregation:
    machines: int = option(
        REQUIRED, "machines in all; without them, swapping alone", low=1, high=MAX_MACHINES,
        metavar="D",
    )  # fmt: skip
    prompt_time: float = _positive(
        "seconds of a stage for a microbatch's prompt, all machines in one pipeline", "S"
    )
    token_time: float = _positive("seconds of a stage for one token of a microbatch", "S")
    tokens: int = option(REQUIRED, "tokens that a microbatch generates", low=1, high=MAX_TOKENS)
    overhead: float = option(
        1.0, "prompts take this many times as long, by streaming K and V to the token machines",
        low=1.0, high=LARGEST, metavar="M",
    )  # fmt: skip
    memory: StageMemory | None = None
    """None if everything fits."""

    @property
    def colocated_s(self) -> float:
        """Seconds of one pipeline for both (eq. 4)."""
        bubbles_s = (self.machines - 1) * (self.prompt_time - self.token_time) / self.machines
        return bubbles_s + self.prompt_time + self.tokens * self.token_time

    @property
    def break_even_ratio(self) -> float | None:
        """Parts of machines win where Y/t is above this (eq. 5). None if m >= 2 - 1/D."""
        denominator = self.machines * (2 - self.overhead) - 1
        return (self.machines - 1) / denominator if denominator > 1e-9 else None

    def splits(self) -> Iterator[Split]:
        prompts_s = self.overhead * self.machines * self.prompt_time
        tokens_s = self.tokens * self.machines * self.token_time
        for few in range(1, self.machines):
            rest, memory = self.machines - few, self.memory
            if not memory or (memory.fits(few, tokens=False) and memory.fits(rest, tokens=True)):
                yield Split(few, rest, max(prompts_s / few, tokens_s / rest))

    @property
    def best(self) -> tuple[Split, ...]:
        """The splits that none is better than. Empty if nothing fits."""
        splits = tuple(self.splits())
        least_s = min((split.interval_s for split in splits), default=0.0)
        return tuple(split for split in splits if at_most(split.interval_s, least_s))

    @property
    def wins(self) -> bool:
        return any(not at_most(self.colocated_s, split.interval_s) for split in self.best)


@dataclass(frozen=True)
class Swapping:
    """Microbatches of B sequences, or swapped ones of 2B, whose KV the host's memory keeps.

    A token of a swapped microbatch takes as long as bringing back the KV of its 2B sequences
    takes, where that is longer. It pays if ``2·N·t >= Σ max(t, transfer(i))`` over the cached
    tokens i = p+1 … p+N. (The paper prints B, and one term more.)
    """

    prompt_tokens: int = option(REQUIRED, "of each sequence", low=0, high=MAX_TOKENS, metavar="P")
    tokens: int = option(REQUIRED, "that a microbatch generates", low=1, high=MAX_TOKENS)
    token_time: float = _positive("of a stage, for one token of a microbatch", "S")
    batch: int = option(
        REQUIRED, "sequences of a microbatch that fits without swapping", low=1,
        high=MAX_SEQUENCES, metavar="B",
    )  # fmt: skip
    kv_kb: float = _positive("K and V of a sequence's token on a stage, in 1000 bytes", "KB")
    bandwidth_gb: float = _positive("from host memory, in 10^9 bytes per second", "GB")

    @property
    def unswapped_s(self) -> float:
        return 2 * self.tokens * self.token_time

    @property
    def _cached_token_s(self) -> float:
        """Time to bring back one cached token of each sequence."""
        return 2 * self.batch * self.kv_kb * 1e3 / (self.bandwidth_gb * 1e9)

    @property
    def crossover_tokens(self) -> float:
        return self.token_time / self._cached_token_s

    @property
    def swapped_s(self) -> float:
        """Seconds of one microbatch of 2B."""
        first, last = self.prompt_tokens + 1, self.prompt_tokens + self.tokens
        slow = min(last + 1, max(first, math.floor(self.crossover_tokens) + 1))
        steps = (slow + last) * (last - slow + 1) / 2
        return (slow - first) * self.token_time + steps * self._cached_token_s

    @property
    def pays(self) -> bool:
        return at_most(self.swapped_s, self.unswapped_s)


def as_json(asked: Disaggregation | None, swap: Swapping | None) -> dict[str, Any]:
    tree: dict[str, Any] = {"format": "fastdecode.plan.disaggregate", "version": 2}
    if asked is not None:
        memory = asked.memory
        tree |= {
            "asked": asked,
            "one_pipeline_s": asked.colocated_s,
            "break_even_prompt_over_token": asked.break_even_ratio,
            "splits": asked.best,
            "wins": asked.wins,
            "min_prompt_machines": memory and memory.fewest(tokens=False),
            "min_token_machines": memory and memory.fewest(tokens=True),
        }
    if swap is not None:
        tree["swap"] = {
            "asked": swap,
            **picked(swap, "unswapped_s swapped_s crossover_tokens pays"),
        }
    return tree


def as_text(asked: Disaggregation | None, swap: Swapping | None) -> str:
    rows = [*(_split_rows(asked) if asked else ()), *(_swap_rows(swap) if swap else ())]
    return "\n".join(labelled(rows, label_width=14))


def _split_rows(asked: Disaggregation) -> Iterator[tuple[str, str]]:
    times = f"{seconds_text(asked.prompt_time)} a prompt, {seconds_text(asked.token_time)} a token"
    yield "Machines", f"{asked.machines:,}; as stages of one pipeline {times}"
    yield "One pipeline", f"{seconds_text(asked.colocated_s)} a microbatch"
    for split in asked.best:
        pace = f"{seconds_text(split.interval_s)} a microbatch"
        machines = f"{split.prompt_machines} for prompts, {split.token_machines} for tokens"
        options = f"--prompt-pp {split.prompt_machines} --pp {split.token_machines}"
        yield "Split", f"{machines}: {pace} ({options})"
    ratio, own = asked.break_even_ratio, _short(asked.prompt_time / asked.token_time)
    streaming = f"streaming K and V makes prompts {_short(asked.overhead)} times as long"
    pays = "too long to pay" if ratio is None else f"it pays above {_short(ratio)}"
    yield "Prompt/token", f"{own}; {streaming}: {pays}"
    if asked.memory is not None:
        fewest = (asked.memory.fewest(tokens=tokens) for tokens in (False, True))
        needs = ("more than any machines" if n is None else counted(n, "machine") for n in fewest)
        yield "Memory", "prompts need {}, tokens {}".format(*needs)
    yield "Verdict", _verdict(asked)


def _verdict(asked: Disaggregation) -> str:
    if asked.machines == 1:
        return "one pipeline: one machine can't be split"
    if not asked.best:
        return (
            f"nothing fits: {counted(asked.machines, 'machine')} can't hold prompts and tokens "
            "apart; take more machines, more memory, or smaller microbatches"
        )
    gain = asked.colocated_s / asked.best[0].interval_s
    if not asked.wins:
        return f"one pipeline: the best split takes {_short(1 / gain)} times as long"
    return f"disaggregate: {_short(gain)} times the throughput of one pipeline"


def _swap_rows(swap: Swapping) -> Iterator[tuple[str, str]]:
    yield (
        "Swap",
        f"{seconds_text(swap.swapped_s)} for a microbatch of {2 * swap.batch}, beside "
        f"{seconds_text(swap.unswapped_s)} for two of {swap.batch}; KV returns in time up to "
        f"{swap.crossover_tokens:.0f} cached tokens",
    )
    gain = swap.unswapped_s / swap.swapped_s
    words = f"don't swap: tokens take {_short(1 / gain)} times as long"
    yield "Swap verdict", f"swap: {_short(gain)} times the tokens a second" if swap.pays else words


def _short(value: float) -> str:
    return f"{round_to(value, 3):g}"
