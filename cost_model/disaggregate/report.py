"""Answers as text or JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from fractions import Fraction
from typing import Any

from cost_model.disaggregate.compare import Simulated
from cost_model.disaggregate.memory import StageMemory
from cost_model.disaggregate.split import Disaggregation, Split
from cost_model.disaggregate.swap import CORRECTED, PRINTED, Swapping
from cost_model.printing import picked, table
from cost_model.quantities import counted, round_to, seconds_text


def split_as_json(
    asked: Disaggregation, best: Sequence[Split], memory: StageMemory | None
) -> dict[str, Any]:
    """Seconds and machines; None where there is no such number."""
    first = best[0] if best else None
    needs = "layers min_prompt_machines min_token_machines equation_2 equation_3"
    return {
        "format": "fastdecode.plan.disaggregate",
        "version": 1,
        **picked(asked, "machines tokens prompt_s token_s overhead colocated_s"),
        "continuous": {
            "prompt_machines": asked.continuous_prompt_machines,
            "token_machines": asked.continuous_token_machines,
            "interval_s": asked.continuous_s,
            "wins": asked.continuous_wins,
            "break_even_prompt_over_token": asked.break_even_ratio,
        },
        "splits": [(split.prompt_machines, split.token_machines) for split in best],
        "interval_s": first and first.interval_s,
        "wins": first is not None and asked.wins(first),
        "memory": memory and picked(memory, needs),
    }


def split_as_text(asked: Disaggregation, best: Sequence[Split], memory: StageMemory | None) -> str:
    lines = [
        f"{counted(asked.machines, 'machine')}; as stages of one pipeline they take "
        f"{_seconds(asked.prompt_s)} for a prompt and {_seconds(asked.token_s)} for a token;",
        f"{counted(asked.tokens, 'token')} a microbatch; streaming K and V makes prompts "
        f"{_short(asked.overhead)} times as long",
        "",
        f"  One pipeline    {_seconds(asked.colocated_s)} a microbatch (eq. 4)",
        *_best_lines(asked, best),
        *_continuous_lines(asked),
    ]
    if memory is not None:
        lines += _memory_lines(memory, best, asked.machines)
    return "\n".join([*lines, "", f"  Verdict         {_split_verdict(asked, best)}"])


def _best_lines(asked: Disaggregation, best: Sequence[Split]) -> list[str]:
    if not best:
        return ["  Split           none: see the verdict"]
    lines = []
    for index, split in enumerate(best):
        head = "Split" if index == 0 else "or as well"
        bound = "prompts" if _prompts_bind(asked, split) else "tokens"
        lines.append(
            f"  {head:<15} {split.prompt_machines} for prompts, {split.token_machines} for tokens: "
            f"{_seconds(split.interval_s)} a microbatch, as fast as {bound} go"
        )
    return lines


def _prompts_bind(asked: Disaggregation, split: Split) -> bool:
    prompts_s = asked.overhead * asked.machines * asked.prompt_s / split.prompt_machines
    return prompts_s == split.interval_s


def _continuous_lines(asked: Disaggregation) -> list[str]:
    ratio = asked.break_even_ratio
    pays = (
        "which can't pay: streaming takes too long (m is not below 2 - 1/D)"
        if ratio is None
        else f"which pays where a prompt takes over {_short(ratio)} times a token; it takes "
        f"{_short(asked.prompt_s / asked.token_s)} times"
    )
    return [
        f"  In parts        {_short(asked.continuous_prompt_machines)} for prompts, "
        f"{_short(asked.continuous_token_machines)} for tokens: {_seconds(asked.continuous_s)} a "
        f"microbatch (eq. 6, 7),",
        f"                  {pays} (eq. 5)",
    ]


def _memory_lines(memory: StageMemory, best: Sequence[Split], machines: int) -> list[str]:
    prompts, tokens = memory.min_prompt_machines, memory.min_token_machines
    printed = memory.equation_3
    lines = [
        f"  Memory          prompts need {_at_least(prompts)} (eq. 2: {memory.equation_2}), tokens "
        f"{_at_least(tokens)} (eq. 3: {'none fits' if printed is None else printed})"
    ]
    too_full = [
        count
        for count in range(tokens or machines, min(machines, memory.layers))
        if not memory.tokens_fit(count)
    ]
    if too_full and best:
        shown = ", ".join(map(str, too_full[:8])) + (" …" if len(too_full) > 8 else "")
        lines.append(
            f"                  tokens don't fit on {shown}: a stage more, a microbatch more"
        )
    return lines


def _at_least(machines: int | None) -> str:
    return "more than any machines" if machines is None else counted(machines, "machine")


def _split_verdict(asked: Disaggregation, best: Sequence[Split]) -> str:
    if asked.machines == 1:
        return "one pipeline: one machine can't be split"
    if not best:
        return (
            f"nothing fits: {counted(asked.machines, 'machine')} can't hold prompts and tokens "
            "apart; take more machines, more memory, or smaller microbatches"
        )
    if asked.wins(best[0]):
        gain = asked.colocated_s / best[0].interval_s
        return f"disaggregate: {_short(gain)} times the throughput of one pipeline"
    loss = best[0].interval_s / asked.colocated_s
    also = "; only parts of machines would win" if asked.continuous_wins else ""
    return f"one pipeline: the best split takes {_short(loss)} times as long{also}"


def swap_as_json(asked: Swapping) -> dict[str, Any]:
    return {
        "format": "fastdecode.plan.swap",
        "version": 1,
        **picked(asked, "prompt_tokens tokens batch unswapped_s"),
        "readings": [
            {"reading": each.name, **picked(each, "swapped_s pays")} for each in asked.readings()
        ],
        "crossover_tokens": asked.crossover(),
        "crossover_tokens_2b": asked.crossover(2),
    }


_READ = {PRINTED: "  <- as the paper prints it", CORRECTED: "  <- what really moves"}


def swap_as_text(asked: Swapping) -> str:
    readings = {each.name: each for each in asked.readings()}
    truth = readings[CORRECTED]
    width = max(map(len, readings))
    lines = [
        f"microbatches of {2 * asked.batch} sequences, swapped, instead of {asked.batch}: "
        f"{counted(asked.tokens, 'token')} after {asked.prompt_tokens:,} of prompt",
        "",
        f"  Without swapping  {_seconds(asked.unswapped_s)} for two microbatches of {asked.batch}",
        *(
            f"  Swapped, {each.name:<{width}}  {_seconds(each.swapped_s)}: "
            f"{'pays' if each.pays else 'does not pay'}{_READ.get(each.name, '')}"
            for each in readings.values()
        ),
        f"  Crossover         bringing KV back takes as long as a token from "
        f"{_short(asked.crossover(2))} cached tokens on ({_short(asked.crossover())} with KV of "
        f"{asked.batch})",
        "",
        f"  Verdict           {_swap_verdict(asked, truth.swapped_s, truth.pays)}",
    ]
    if len({each.pays for each in readings.values()}) > 1:
        lines.append(
            "                    readings of the inequality differ; this is the corrected one"
        )
    return "\n".join(lines)


def _swap_verdict(asked: Swapping, swapped_s: Fraction, pays: bool) -> str:
    if pays:
        return f"swap: {_short(asked.unswapped_s / swapped_s)} times the tokens a second"
    return f"don't swap: tokens take {_short(swapped_s / asked.unswapped_s)} times as long"


def pipelines_as_json(
    rows: Sequence[tuple[int, dict[str, Simulated | None]]], price: float | None
) -> Any:
    """``rows``: machines, and the best of each kind."""
    return {
        "format": "fastdecode.plan.pipelines",
        "version": 1,
        "machines": [
            {"machines": machines}
            | {kind: _simulated_as_json(found, price) for kind, found in best.items()}
            for machines, best in rows
        ],
    }


def _simulated_as_json(found: Simulated | None, price: float | None) -> dict[str, Any] | None:
    if found is None:
        return None
    fields = {**asdict(found.layout), **asdict(found), "cost": cost(found, price)}
    return {name: value for name, value in fields.items() if name not in ("kind", "layout")}


def cost(found: Simulated, price: float | None) -> float | None:
    """Of all machines until the end; ``price``: of one, an hour."""
    if price is None:
        return None
    return found.makespan_s / 3600 * found.layout.machines * price


def pipelines_as_text(
    rows: Sequence[tuple[int, dict[str, Simulated | None]]], price: float | None
) -> str:
    heads = ["machines", "kind", "stages, microbatch", "makespan", "s/token", "busy"]
    heads += [] if price is None else ["cost"]
    lines = [
        _row(machines, kind, each, price) for machines, best in rows for kind, each in best.items()
    ]
    return "\n".join(table(heads, lines, left=range(len(heads)), indent=0))


def _row(machines: int, kind: str, found: Simulated | None, price: float | None) -> tuple[str, ...]:
    if found is None:
        return (str(machines), kind, "nothing fits")
    cells = (
        str(machines),
        kind,
        str(found.layout),
        seconds_text(found.makespan_s),
        seconds_text(found.token_latency_s),
        f"{found.busy_share:.0%}",
    )
    paid = cost(found, price)
    return cells if paid is None else (*cells, f"{round_to(paid, 3):g}")


def _seconds(value: Fraction) -> str:
    return seconds_text(float(value))


def _short(value: Fraction) -> str:
    return f"{round_to(float(value), 3):g}"
