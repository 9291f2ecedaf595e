"""The tables of DéjàVu's paper (arXiv 2403.01876), and what can be had of them
from published inputs. ``PYTHONPATH=tests python -m oracles.dejavu`` prints the table
of docs/design/disaggregation.md."""

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
    data_parallel: tuple[int, int, int] | None = None
    """Pipelines, stages, microbatch."""
    prompts: tuple[int, int] | None = None
    tokens: tuple[int, int] | None = None


@dataclass(frozen=True)
class PaperTable:
    """One of the tables 2 to 5."""

    number: int
    model: str
    model_gb: float
    kv_gb_per_token: float
    """Both as in the authors' simulate_all.py."""
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
        return memory.prompts_fit(stages) if tokens == PROMPT_TOKENS else memory.tokens_fit(stages)

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


@dataclass(frozen=True)
class Compared:
    """A line of the table in the docs."""

    what: str
    published: str
    here: str
    has_input: bool
    """The paper, or its public code, says what this follows from."""
    reproduced: str

    def __str__(self) -> str:
        cells = (self.what, self.published, self.here, "yes" if self.has_input else "no")
        return "| " + " | ".join((*cells, self.reproduced)) + " |"


def compared() -> list[Compared]:
    """Every published figure that follows from something."""
    return [*_table_6(), *_microbatches(), *_splits(), *_not_had()]


def table_text() -> str:
    heads = ("figure", "published", "here", "published input?", "reproduced?")
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    return "\n".join([*lines, *map(str, compared())])


def table_6_row(bandwidth_gbps: float) -> tuple[float, float, float]:
    """Transfer, extra time, and m."""
    took_s = TABLE_6_KV_GB * 8 / bandwidth_gbps
    factor = Streaming(TABLE_6_KV_GB, bandwidth_gbps).overhead(TABLE_6_PROMPT_S)
    return took_s, (factor - 1) * TABLE_6_PROMPT_S, factor


def _table_6() -> Iterator[Compared]:
    # 70 layers of 14336, K and V, 16 bits; 8 sequences of 1000 tokens; 3 prompt stages.
    share_gb = 70 * 14336 * 2 * 2 * 8 * PROMPT_TOKENS / 3 / 1e9
    yield Compared(
        "Table 6: K and V of a microbatch, one of three prompt stages' share",
        "10.7 GB",
        f"{share_gb:.3f} GB",
        True,
        _yes(abs(share_gb - TABLE_6_KV_GB) < 0.05),
    )
    for bandwidth, transfer, extra in TABLE_6:
        took_s, extra_s, factor = table_6_row(bandwidth)
        same = f"{took_s:.3g}" == f"{transfer:.3g}" and abs(extra_s - extra) < 0.011
        yield Compared(
            f"Table 6: transfer and extra time at {bandwidth} Gbit/s",
            f"{transfer:g} s, {extra:g} s",
            f"{took_s:.3g} s, {extra_s:.3g} s (m = {factor:.3g})",
            True,
            _yes(same),
        )


def _microbatches() -> Iterator[Compared]:
    for table in TABLES:
        published = list(table.configurations())
        fitting = sum(table.fits(*each) for each in published)
        stages = (1, 2, 4, 8, 16)
        largest = ", ".join(f"{table.largest_microbatch(each) or 'none'}" for each in stages)
        yield Compared(
            f"Table {table.number}: microbatches of {table.model} in {table.machine_gb} GB",
            f"{len(published)} configurations, from {_first_machines(table)} on",
            f"{fitting} of them fit; at most {largest} sequences on 1, 2, 4, 8, 16 stages",
            True,
            _yes(fitting == len(published) and _first_fits(table)),
        )


def _first_machines(table: PaperTable) -> str:
    first = table.rows[0].machines
    return "1 machine" if first == 1 else f"{first} machines"


def _first_fits(table: PaperTable) -> bool:
    """The table begins where something fits."""
    first = table.rows[0].machines
    before = [table.largest_microbatch(stages) for stages in range(1, first)]
    return table.largest_microbatch(first) is not None and not any(before)


def _splits() -> Iterator[Compared]:
    for table in TABLES:
        share = table.prompt_share(6)
        splits = ", ".join(
            f"{row.prompts[0]}+{row.tokens[0]}"
            for row in table.rows
            if row.prompts is not None and row.tokens is not None and row.machines >= 6
        )
        here = "no one share gives them all: memory and microbatch change with it"
        if share is not None:
            here = f"round(D·f) for every f in {float(share[0]):.3f} … {float(share[1]):.3f}"
        yield Compared(
            f"Table {table.number}: splits from 6 machines on",
            splits,
            here,
            False,
            "inferred: one share gives them all" if share is not None else "no",
        )


def _not_had() -> Iterator[Compared]:
    yield Compared(
        "Recovery: 1.54 times faster (abstract) of 1.91 and 1.24 times slower", "1.54",
        f"{1.91 / 1.24:.2f}", True, "yes",
    )  # fmt: skip
    for what in (
        "Table 6: latency a token",
        "Figures 16 to 19: makespans and costs (2.29, 4.2 and 2.22 times)",
        "Figures 20, 21: early stops, microbatch sizes",
    ):
        yield Compared(what, "in the paper", "-", False, "no: trace and profile were not published")


def _yes(same: bool) -> str:
    return "yes" if same else "NO"


if __name__ == "__main__":
    print(table_text())
