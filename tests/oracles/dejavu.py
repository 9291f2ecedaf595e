"""The tables of DéjàVu's paper (arXiv 2403.01876), and what follows from published inputs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from cost_model.disaggregate import StageMemory, Streaming

PROMPT_TOKENS, TOTAL_TOKENS = 1000, 2000
MICROBATCHES = (2, 4, 8, 16, 32)
"""What the paper's simulator tries."""


class Row(NamedTuple):
    """The best configurations found for so many machines: stages, microbatch."""

    machines: int
    one_pipeline: tuple[int, int]
    data_parallel: tuple[int, int, int] | None = None  # pipelines, stages, microbatch
    prompts: tuple[int, int] | None = None
    tokens: tuple[int, int] | None = None


@dataclass(frozen=True)
class PaperTable:
    """One of the tables 2 to 5."""

    number: int
    model: str
    model_gb: float
    kv_gb_per_token: float  # both as in the authors' simulate_all.py
    machine_gb: int
    rows: tuple[Row, ...]

    def memory(self, stages: int, size: int, prompt: int, output: int) -> StageMemory:
        """Layers are taken to be divisible, as in the authors' simulator: a stage is one."""
        kv_gb, weights_gb = self.kv_gb_per_token * size / stages, self.model_gb / stages
        return StageMemory(stages, weights_gb, kv_gb * prompt, kv_gb * output, self.machine_gb)

    def largest_microbatch(self, stages: int, tokens: int = TOTAL_TOKENS) -> int | None:
        """Of those that were tried, the largest that fits. None: none does."""
        fitting = [size for size in MICROBATCHES if self.fits((stages, size), tokens)]
        return max(fitting, default=None)

    def fits(self, configuration: tuple[int, int], tokens: int) -> bool:
        """Prompt stages hold a microbatch, stages of tokens as many as there are stages."""
        stages, size = configuration
        memory = self.memory(stages, size, PROMPT_TOKENS, tokens - PROMPT_TOKENS)
        return memory.fits(stages, tokens=tokens != PROMPT_TOKENS)

    @property
    def begins_where_something_fits(self) -> bool:
        first = self.rows[0].machines
        before = [self.largest_microbatch(stages) for stages in range(1, first)]
        return self.largest_microbatch(first) is not None and not any(before)

    def configurations(self) -> Iterator[tuple[tuple[int, int], int]]:
        """All that were published: stages and microbatch, and for how many tokens."""
        for row in self.rows:
            yield row.one_pipeline, TOTAL_TOKENS
            if row.data_parallel is not None:
                yield row.data_parallel[1:], TOTAL_TOKENS
            if row.prompts is not None and row.tokens is not None:
                yield row.prompts, PROMPT_TOKENS
                yield row.tokens, TOTAL_TOKENS

    def prompt_share(self, least_machines: int) -> tuple[Fraction, Fraction] | None:
        """The shares f of machines for prompts with which ``round(D·f)`` is the
        split of every row from so many machines on; None: no share does."""
        low, high = Fraction(0), Fraction(1)
        for row in self.rows:
            if row.prompts is not None and row.machines >= least_machines:
                low = max(low, (row.prompts[0] - Fraction(1, 2)) / row.machines)
                high = min(high, (row.prompts[0] + Fraction(1, 2)) / row.machines)
        return (low, high) if low < high else None


TABLES = (
    PaperTable(2, "OPT-66B", 132, 0.00236, 160, (
        Row(1, (1, 4)),
        Row(2, (2, 16), (2, 1, 4), (1, 4), (1, 4)),
        Row(4, (4, 16), (2, 2, 16), (2, 2), (2, 2)),
        Row(6, (6, 16), (3, 2, 16), (2, 16), (4, 16)),
        Row(8, (8, 16), (2, 4, 16), (3, 16), (5, 16)),
        Row(10, (10, 16), (5, 2, 16), (4, 16), (6, 16)),
        Row(12, (12, 16), (3, 4, 16), (5, 16), (7, 16)),
        Row(14, (14, 16), (7, 2, 16), (5, 16), (9, 16)),
        Row(16, (16, 8), (4, 4, 16), (6, 16), (10, 16)),
    )),
    PaperTable(3, "OPT-66B", 132, 0.00236, 320, (
        Row(1, (1, 32)),
        Row(2, (2, 32), (2, 1, 32), (1, 32), (1, 32)),
        Row(4, (4, 16), (4, 1, 32), (2, 32), (2, 32)),
        Row(6, (6, 32), (6, 1, 32), (3, 32), (3, 32)),
        Row(8, (8, 16), (8, 1, 32), (4, 32), (4, 32)),
        Row(10, (10, 32), (10, 1, 32), (5, 32), (5, 32)),
        Row(12, (12, 16), (12, 1, 32), (6, 32), (6, 32)),
        Row(14, (14, 32), (14, 1, 32), (7, 32), (7, 32)),
        Row(16, (16, 8), (16, 1, 32), (8, 32), (8, 32)),
    )),
    PaperTable(4, "OPT-30B", 60, 0.001375, 64, (
        Row(2, (2, 8)),
        Row(4, (4, 16), (2, 2, 8), (2, 8), (2, 8)),
        Row(6, (6, 16), (3, 2, 8), (2, 16), (4, 16)),
        Row(8, (8, 16), (2, 4, 16), (3, 16), (5, 16)),
        Row(10, (10, 16), (5, 2, 8), (4, 16), (6, 16)),
        Row(12, (12, 16), (3, 4, 16), (5, 16), (7, 16)),
        Row(14, (14, 16), (7, 2, 8), (6, 16), (8, 16)),
        Row(16, (16, 8), (4, 4, 16), (7, 16), (9, 16)),
    )),
    PaperTable(5, "BLOOM-176B", 352, 0.004, 320, (
        Row(2, (2, 16)),
        Row(4, (4, 16), (2, 2, 16), (2, 16), (2, 16)),
        Row(6, (6, 32), (3, 2, 16), (3, 16), (3, 16)),
        Row(8, (8, 16), (2, 4, 16), (4, 16), (4, 16)),
        Row(10, (10, 32), (5, 2, 16), (5, 16), (5, 16)),
        Row(12, (12, 16), (6, 2, 16), (6, 32), (6, 32)),
        Row(14, (14, 32), (7, 2, 16), (8, 32), (6, 32)),
        Row(16, (16, 8), (4, 4, 16), (10, 32), (6, 32)),
    )),
)  # fmt: skip

TABLE_6_KV_GB, TABLE_6_PROMPT_S, TABLE_6_MACHINES = 10.7, 3.1, 7
TABLE_6 = (
    (100, 0.856, 0.0),
    (80, 1.07, 0.0),
    (60, 1.43, 0.0),
    (40, 2.14, 0.0),
    (20, 4.28, 1.18),
    (10, 8.56, 5.46),
    (1, 85.6, 82.5),
)
"""Bandwidth in Gbit/s; transfer and extra time in seconds."""


def table_6_row(bandwidth_gbps: float) -> tuple[float, float, float]:
    """Transfer, extra time, and m."""
    took_s = TABLE_6_KV_GB * 8 / bandwidth_gbps
    factor = Streaming(TABLE_6_KV_GB, bandwidth_gbps).overhead(TABLE_6_PROMPT_S)
    return took_s, (factor - 1) * TABLE_6_PROMPT_S, factor
