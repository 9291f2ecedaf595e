"""A plan for people, as text, and for machines, as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from cost_model.plans.constraints import Constraint
from cost_model.plans.hybrid import Hybrid
from cost_model.plans.inputs import about_weights, inputs_of
from cost_model.plans.search import Plan
from cost_model.plans.size import Headline, Job, Sizing
from cost_model.printing import json_tree, labelled, paragraph, picked, table
from cost_model.quantities import bytes_text, counted, rate_text, round_to, seconds_text

FORMAT = "fastdecode.plan"
VERSION = 1
_ANSWER = (
    "feasible headline most_tokens_per_s in_the_way over_sockets what_ifs gpu_only hybrid verdict "
    "cost job"
)
_PLAN = (
    "batch lanes lane_batch sockets spare_sockets hosts sockets_per_host kv_bytes "
    "kv_bytes_per_host s_memory_bytes load_limit_tokens constraints expected fast slow"
)


def as_text(sizing: Sizing, *, explain: bool = False) -> str:
    """The whole answer. ``explain`` adds the numbers behind every constraint
    and the source of every input."""
    parts = [_question(sizing), _answer(sizing)]
    if sizing.plan is not None:
        parts += [_constraints(sizing.plan, explain), _over_sockets(sizing), _what_ifs(sizing)]
    parts.append(_inputs(sizing, explain))
    if explain:
        parts.append(_rules(sizing))
    return "\n\n".join(parts)


def as_json(sizing: Sizing) -> dict[str, Any]:
    """The same, for machines: units in the names, null where there is none."""
    setup, goal, plan, system = sizing.setup, sizing.goal, sizing.plan, sizing.system
    quantisation, lane_batch = setup.spec.quantisation, 1 if plan is None else plan.lane_batch
    question = {
        "model": setup.spec.name,
        **picked(setup, "dtype kv_dtype keeps_quantised num_gpus num_nics"),
        "quantised": quantisation and quantisation.name,
        "gpu": system.s.name,
        "cpu": system.r.name,
        "nic": system.link.name,
        **asdict(setup.workload),
        **asdict(goal),
    }
    tree = {
        "format": FORMAT,
        "version": VERSION,
        "question": question,
        **picked(sizing, _ANSWER),
        "plan": plan and {**picked(plan, _PLAN), "binding": plan.binding.name},
        "kv_placement": sizing.placement,
        "nearest": sizing.nearest or None,
        "inputs": inputs_of(setup, goal, system, lane_batch),
    }
    printed: dict[str, Any] = json_tree(tree)
    return printed


# --- text
# ------------------------------------------------------------------------------


def _question(sizing: Sizing) -> str:
    setup, goal, workload = sizing.setup, sizing.goal, sizing.setup.workload
    hit = f" ({workload.prefix_hit:.0%} in the prefix cache)" if workload.prefix_hit else ""
    prompt = f"prompts of {workload.prompt_tokens:,}{hit} and " if workload.prompt_tokens else ""
    asked = [f"{prompt}{workload.output_tokens:,} output tokens a sequence"]
    if goal.latency_s is not None:
        asked.append(f"at most {seconds_text(goal.latency_s)} a sequence")
    if goal.tpot_s is not None:
        asked.append(f"at most {seconds_text(goal.tpot_s)} a token")
    if goal.survive:
        asked.append(f"{counted(goal.survive, 'R-worker')} may be lost")
    if goal.replicas:
        asked.append("every KV cache kept twice")
    gpus = sizing.system.s.name if setup.num_gpus > 1 else f"one {sizing.system.s.name}"
    weights = ""
    if setup.spec.quantisation is not None:
        taken = bytes_text(sizing.system.costs.weight_bytes)
        lines = paragraph(f"weights take {taken}: {about_weights(setup)}")
        weights = "".join(f"\n{line}" for line in lines)
    return (
        f"{setup.spec.name} ({setup.dtype}, KV cache {setup.kv_dtype}) on {gpus}, "
        f"R-workers on {sizing.system.r.name}, {sizing.system.link.name}\n{', '.join(asked)}"
        f"{weights}"
    )


def _answer(sizing: Sizing) -> str:
    plan = sizing.plan
    rows: list[tuple[str, str]] = []
    if not sizing.feasible:
        names = ", ".join(row.name for row in sizing.in_the_way)
        rows.append(("Infeasible", f"no batch keeps every promise. In the way: {names}"))
        rows += [("", f"{row.name}: {row.detail}. {_mend(row)}") for row in sizing.in_the_way]
        rows.append(("Nearest", sizing.nearest))
    if sizing.headline is not None:
        rows.append(("Headline", _headline(sizing.headline)))
    if sizing.job is not None:
        rows.append(("Job", _job(sizing, sizing.job)))
    if plan is not None:
        rows += _plan_rows(sizing, plan)
    alone = "can't run this: no room for one sequence beside the weights, or not fast enough"
    if sizing.gpu_only is not None:
        gpu = sizing.gpu_only
        alone = (
            f"{rate_text(gpu.tokens_per_s)} tokens/s, {seconds_text(gpu.tpot_s)} a token, "
            f"{counted(gpu.batch, 'sequence')} at once ({gpu.limit} allows no more)"
        )
    rows.append(("GPU alone", alone))
    if sizing.hybrid is not None:
        rows.append(("Both sides", _hybrid(sizing.hybrid)))
    if sizing.verdict is not None:
        rows.append(("Verdict", f"{_verdict(sizing)}: {sizing.verdict.reason}"))
    return "\n".join(labelled(rows))


def _headline(headline: Headline) -> str:
    where = {
        "gpu": "the GPU alone",
        "r": f"KV caches on {counted(headline.sockets, 'R-worker socket')}",
        "hybrid": f"KV caches on both sides, {counted(headline.sockets, 'socket')} beside the GPU",
    }[headline.kv_placement]
    return f"{rate_text(headline.tokens_per_s)} tokens/s: {where}"


def _job(sizing: Sizing, job: Job) -> str:
    money = ""
    if job.money is not None and sizing.cost is not None:
        money = f", {round_to(job.money, 3):,g} {sizing.cost.currency}"
    energy = "" if job.kwh is None else f", {round_to(job.kwh, 3):,g} kWh at rated power"
    requests = counted(sizing.goal.requests or 0, "request")
    return f"{requests}: {round_to(job.hours, 3):,g} hours{energy}{money}"


def _hybrid(hybrid: Hybrid) -> str:
    """KV on both sides, beside the other two."""
    if not hybrid.away:
        return (
            f"with {counted(hybrid.sockets, 'socket')} (--kv-placement hybrid), R-workers add "
            "nothing to the GPU alone"
        )
    assert hybrid.away_tpot_s is not None
    return (
        f"{rate_text(hybrid.tokens_per_s)} tokens/s with {counted(hybrid.sockets, 'socket')} "
        f"(--kv-placement hybrid): {counted(hybrid.home, 'sequence')} on the GPU, "
        f"{seconds_text(hybrid.home_tpot_s)} a token, and {hybrid.away:,} on R-workers, "
        f"{seconds_text(hybrid.away_tpot_s)} a token ({hybrid.layout})"
    )


def _mend(row: Constraint) -> str:
    return f"Would help: {row.mend}" if row.mend else ""


def _verdict(sizing: Sizing) -> str:
    verdict = sizing.verdict
    assert verdict is not None
    # Sockets that are at hand cost nothing more.
    is_bought = sizing.cost is None and sizing.goal.max_sockets is None
    if not verdict.offload:
        return "don't offload"
    depends = is_bought and verdict.break_even_socket_price < 1.0
    return "offload, if sockets are cheap enough" if depends else "offload"


def _plan_rows(sizing: Sizing, plan: Plan) -> Iterator[tuple[str, str]]:
    expected, fast, slow = plan.expected, plan.fast, plan.slow
    spare = f", {plan.spare_sockets} of them spare" if plan.spare_sockets else ""
    lanes = f"{counted(plan.lanes, 'lane')} of {plan.lane_batch:,}"
    yield (
        "R-workers" if sizing.feasible else "It would be",
        f"{counted(plan.sockets, 'socket')} on {counted(plan.hosts, 'host')}{spare}; "
        f"{counted(plan.batch, 'sequence')} at once, in {lanes}",
    )
    rates = f"{rate_text(slow.tokens_per_s)} to {rate_text(fast.tokens_per_s)}"
    tpots = f"{seconds_text(fast.tpot_s)} to {seconds_text(slow.tpot_s)}"
    yield (
        "Expected",
        f"{rate_text(expected.tokens_per_s)} tokens/s ({rates}), {seconds_text(expected.tpot_s)} a "
        f"token ({tpots}), {seconds_text(expected.latency_s)} a sequence",
    )
    yield (
        "Busy",
        f"GPU {expected.s_utilisation:.0%}, R-workers {expected.r_utilisation:.0%}, S-worker's "
        f"network {expected.network_utilisation:.0%}",
    )
    yield (
        "Memory",
        f"{bytes_text(plan.kv_bytes_per_host)} of KV cache a host; "
        f"{bytes_text(plan.s_memory_bytes)} of {bytes_text(sizing.system.s.usable_memory_bytes)} "
        "usable on the GPU side",
    )
    if sizing.cost is not None:
        cost, alone = sizing.cost, ""
        if cost.gpu_only_per_million_tokens is not None:
            alone = f"; the GPU alone {round_to(cost.gpu_only_per_million_tokens, 3):g}"
        yield (
            "Cost",
            f"{round_to(cost.per_million_tokens, 3):g} {cost.currency} a million tokens "
            f"({round_to(cost.per_hour, 3):g} an hour){alone}",
        )


def _constraints(plan: Plan, explain: bool) -> str:
    binding = plan.binding
    lines = ["Sockets that each constraint asks for, on its own"]
    for row in plan.constraints:
        mark = "  <- binds" if row is binding else ""
        asks = f"{row.min_sockets:,}" if row.min_sockets else "met"
        lines.append(f"  {row.name:<16} {asks:>7}{mark}")
        if explain:
            lines += paragraph(row.detail, indent=6)
    return "\n".join(lines)


def _over_sockets(sizing: Sizing) -> str:
    assert sizing.plan is not None
    header = ("sockets", "tokens/s", "a token", "GPU busy", "R busy", "limit")
    rows = [
        (
            f"{'*' if step.sockets == sizing.plan.sockets else ''}{step.sockets:,}",
            rate_text(step.tokens_per_s),
            seconds_text(step.tpot_s),
            f"{step.s_utilisation:.0%}",
            f"{step.r_utilisation:.0%}",
            step.limit,
        )
        for step in sizing.over_sockets
    ]
    title = f"Over sockets, with {counted(sizing.plan.batch, 'sequence')} at once (* the plan)"
    return "\n".join([title, *table(header, rows, left=(5,))])


def _what_ifs(sizing: Sizing) -> str:
    rows = []
    for row in sizing.what_ifs:
        cells = ("-", "-", "-")
        if row.tokens_per_s is not None and row.tpot_s is not None:
            sockets = f"{row.sockets:,}" if row.sockets else "none"
            cells = (sockets, rate_text(row.tokens_per_s), seconds_text(row.tpot_s))
        rows.append((row.change, *cells, row.note))
    header = ("change", "sockets", "tokens/s", "a token", "")
    return "\n".join(["What if", *table(header, rows, left=(0, 4))])


def _inputs(sizing: Sizing, explain: bool) -> str:
    lane_batch = 1 if sizing.plan is None else sizing.plan.lane_batch
    inputs = inputs_of(sizing.setup, sizing.goal, sizing.system, lane_batch)
    lines = ["Inputs" if explain else "Inputs (--explain shows every source)"]
    for row in inputs:
        lines.append(f"  {row.name:<14} {row.value:<38} {row.provenance}")
        if explain and row.source:
            lines += paragraph(row.source, indent=6)
    return "\n".join(lines)


def _rules(sizing: Sizing) -> str:
    goal = sizing.goal
    rules = (
        "A step takes layers x max(lanes x S, lanes x messages, lanes x I/O, lanes x out, lanes "
        "x R, lanes x back, S + messages + out + R + back + latency): each resource serves the "
        "lanes in turn, and no lane overtakes itself.",
        f"The batch is the smallest, and the sockets are the fewest, that give all but "
        f"{goal.gain:.0%} of the tokens/s that any batch gives; more sequences at once are taken "
        "if they save a fifth of the sockets.",
        "Room for a whole sequence is set aside when it starts; a sequence lives on one R-worker.",
        "The range in brackets has every input better, or worse, than thought by its own relative "
        "error at once.",
        "The GPU alone is taken at its best: attention at full bandwidth, no memory lost to "
        "paging.",
    )
    lines = ["Rules"]
    for rule in rules:
        lines += paragraph(rule, indent=2, bullet="- ")
    return "\n".join(lines)
