"""Several ways side by side: hardware that one may buy, or arrangements of what one owns."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from cost_model.plans.question import MAX_SOCKETS, Goal, Prices, Setup, split_counts
from cost_model.plans.size import Headline, Job, Sizing, job
from cost_model.plans.stages import PlanOf, slowest_stage
from cost_model.printing import counted, labelled, rate_text, round_to, seconds_text, table
from fastdecode.core.errors import ConfigError, Given

MILLION = 1e6
SORTS: dict[str, Callable[[Choice], float]] = {
    "tokens": lambda choice: -choice.tokens_per_s,
    "cost": lambda choice: math.inf if choice.job.money is None else choice.job.money,
    "energy": lambda choice: math.inf if choice.job.kwh is None else choice.job.kwh,
}
_WHERE = {"gpu": "GPU", "r": "R-workers", "hybrid": "both"}


@dataclass(frozen=True)
class Choice:
    name: str
    headline: Headline
    copies: int
    num_stages: int
    job: Job
    """A million output tokens."""
    is_without_gpu: bool = False
    """Each S-worker takes a socket, too."""

    @property
    def tokens_per_s(self) -> float:
        return self.copies * self.headline.tokens_per_s

    @property
    def tpot_s(self) -> float:
        return self.num_stages * self.headline.tpot_s

    @property
    def systems(self) -> int:
        """Stages of all systems: what the headline's numbers count once each."""
        return self.copies * self.num_stages

    @property
    def sockets(self) -> int:
        return self.systems * (self.headline.sockets + self.is_without_gpu)

    @property
    def kv_placement(self) -> str:
        """Where the KV cache is, for people."""
        where = self.headline.kv_placement
        return "S-worker" if where == "gpu" and self.is_without_gpu else _WHERE[where]


@dataclass(frozen=True)
class Choices:
    found: list[Choice]
    left_out: Mapping[str, str]
    """Parts that can't run it, each with its constraint and the nearest number that can."""


def choose(
    setups: Iterable[tuple[str, Setup]],
    goal: Goal,
    plan: PlanOf,
    prices: Prices | None,
    by: str = "tokens",
) -> Choices:
    """Find the best answer of each part to one question, by one of ``SORTS``."""
    found, left_out = [], {}
    for name, setup in setups:
        try:
            sizing = plan(setup, goal)
        except ConfigError as error:  # such as a GPU that has no such dtype
            left_out[name] = error.message
            continue
        best = _best(name, sizing, prices, by)
        if isinstance(best, str):
            left_out[name] = best
        else:
            found.append(best)
    return Choices(found, left_out)


def arrange(
    setup: Setup, num_gpus: int, goal: Goal, plan: PlanOf, prices: Prices | None, by: str = "tokens"
) -> Choices:
    """Find what each way to use the GPUs and sockets at hand gives: systems side by side, stages,
    GPUs that share every layer. ``setup`` is one GPU's, ``by`` one of ``SORTS``."""
    if goal.max_sockets is None:
        raise ConfigError("the number of CPU sockets is missing. Give ", Given("max_sockets"))
    found, left_out = [], {}
    workers = [num_gpus]
    if setup.is_without_gpu:  # between which the sockets are shared out evenly
        workers = [n for n in range(1, goal.max_sockets + 1) if goal.max_sockets % n == 0]
    for tp, num_stages, copies in (way for n in workers for way in _arrangements(setup, n)):
        name, sockets = counted(copies, "system"), goal.max_sockets // copies
        name += f", tp {tp}" * (tp > 1) + f", pp {num_stages}" * (num_stages > 1)
        if setup.is_without_gpu:
            sockets -= num_stages  # those of the S-workers
        elif sockets < num_stages:
            left_out[name] = f"it needs {counted(copies * num_stages, 'socket')}"
            continue
        asked = replace(goal, max_sockets=max(sockets, num_stages))
        sizing = slowest_stage(replace(setup, num_gpus=tp), asked, num_stages, plan)
        best = _best(name, sizing, prices, by, copies, num_stages, sockets // num_stages)
        if isinstance(best, str):
            left_out[name] = ("of each stage: " if num_stages > 1 else "") + best
        else:
            found.append(best)
    return Choices(found, left_out)


def _arrangements(setup: Setup, gpus: int) -> Iterator[tuple[int, int, int]]:
    spec = setup.spec
    for tp in (1, *([] if setup.is_without_gpu else split_counts(spec, 1))):
        if gpus % tp:
            continue
        for num_stages in range(1, min(gpus // tp, spec.num_layers) + 1):
            if gpus // tp % num_stages == 0:
                yield tp, num_stages, gpus // tp // num_stages


def _best(
    name: str, sizing: Sizing, prices: Prices | None, by: str,
    copies: int = 1, num_stages: int = 1, most_sockets: int = MAX_SOCKETS,
) -> Choice | str:  # fmt: skip
    found = []
    placed = [each for each in sizing.headlines if each.sockets <= most_sockets]
    if by == "tokens" and placed:
        placed = [each for each in placed if each == sizing.preferred(placed)]
    for headline in placed:
        try:
            cost = job(sizing, headline, num_stages * MILLION, prices)
        except ConfigError:
            cost = job(sizing, headline, num_stages * MILLION, None)  # its price isn't given
        found.append(Choice(name, headline, copies, num_stages, cost, sizing.setup.is_without_gpu))
    why = f"{', '.join(row.name for row in sizing.in_the_way)}. Nearest: {sizing.nearest}"
    return next(iter(sort_choices(found, by)), why)


def sort_choices(found: Iterable[Choice], by: str) -> list[Choice]:
    return sorted(found, key=lambda choice: (SORTS[by](choice), -choice.tokens_per_s))


def choices_text(ways: Choices, title: str, prices: Prices | None) -> str:
    if not ways.found:
        width = max(map(len, ways.left_out), default=0)
        return "\n".join(
            [f"{title}: nothing runs it", *labelled(ways.left_out.items(), label_width=width)]
        )
    columns: list[tuple[str, Callable[[Choice], str]]] = [
        ("", lambda each: each.name),
        ("KV", lambda each: each.kv_placement),
        ("tokens/s", lambda each: rate_text(each.tokens_per_s)),
        ("a token", lambda each: seconds_text(each.tpot_s)),
        ("sequences", lambda each: f"{each.systems * each.headline.batch:,}"),
        ("sockets", lambda each: f"{each.sockets:,}"),
        ("kWh a million", lambda each: _number(each.job.kwh)),
    ]
    if prices is not None:
        money = f"{prices.currency} a million"
        columns.insert(-1, (money, lambda each: _number(each.job.money)))
    rows = [[cell(each) for _, cell in columns] for each in ways.found]
    lines = [title, *table([head for head, _ in columns], rows, left=(0, 1))]
    if ways.left_out:
        lines += labelled([("Left out", f"{', '.join(ways.left_out)}: none of them runs it")])
    return "\n".join(lines)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{round_to(value, 3):g}"
