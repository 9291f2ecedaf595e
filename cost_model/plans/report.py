"""A plan as text and as JSON. Every input has its value, its source and its provenance."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from cost_model.hardware import Cpu, Efficiency, Gpu, Nic
from cost_model.plans.placement import GpuOnly, Hybrid
from cost_model.plans.question import Goal, Setup
from cost_model.plans.search import Plan
from cost_model.plans.size import Headline, Sizing, Verdict
from cost_model.predict import StepPrediction, System
from cost_model.printing import (
    bytes_text,
    counted,
    json_tree,
    labelled,
    paragraph,
    picked,
    rate_text,
    round_to,
    seconds_text,
    table,
)
from cost_model.stages import Provenance
from cost_model.workload import TokenCosts, WeightBytes

FORMAT = "fastdecode.plan"
VERSION = 1
_ANSWER = (
    "feasible headline most_tokens_per_s in_the_way over_sockets what_ifs gpu_only hybrid verdict "
    "cost job served"
)
_PLAN = (
    "batch lanes lane_batch sockets spare_sockets hosts sockets_per_host kv_bytes "
    "kv_bytes_per_host s_memory_bytes load_limit_tokens constraints expected fast slow"
)


def as_text(sizing: Sizing, *, explain: bool = False) -> str:
    """Return the answer for people. ``explain`` adds the numbers behind every constraint and the
    source of every input."""
    parts = [_question(sizing), _answer(sizing)]
    if sizing.plan is not None:
        headline = sizing.headline
        if headline is None or headline.kv_placement != "r":
            parts.append(f"With every KV cache on R-workers: {_pace(sizing.plan.expected)}")
        parts += [_constraints(sizing.plan, explain), _over_sockets(sizing), _what_ifs(sizing)]
    parts.append(_inputs(sizing, explain))
    return "\n\n".join(parts)


def as_json(sizing: Sizing) -> dict[str, Any]:
    """Return the answer for machines: units in the names, null where there is none."""
    setup, goal, plan, system = sizing.setup, sizing.goal, sizing.plan, sizing.system
    quantisation = setup.spec.quantisation
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
        "inputs": tuple(inputs_of(sizing)),
    }
    printed: dict[str, Any] = json_tree(tree)
    return printed


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
    if setup.is_without_gpu:
        gpus = "no GPU: S-worker"
    weights = ""
    if setup.spec.quantisation is not None:
        taken = bytes_text(sizing.system.costs.weight_bytes)
        lines = paragraph(f"weights take {taken}: {about_weights(setup)}")
        weights = "".join(f"\n{line}" for line in lines)
    workers = "and R-workers" if setup.is_without_gpu else "R-workers"
    return (
        f"{setup.spec.name} ({setup.dtype}, KV cache {setup.kv_dtype}) on {gpus}, {workers} on "
        f"{sizing.system.r.name}, {sizing.system.link.name}\n{', '.join(asked)}{weights}"
    )


def _answer(sizing: Sizing) -> str:
    rows: list[tuple[str, str]] = []
    if not sizing.feasible:
        names = ", ".join(row.name for row in sizing.in_the_way)
        no_batch = f"no batch on R-workers keeps every promise. In the way: {names}"
        rows.append(("Infeasible", no_batch))
        rows += [
            ("", f"{row.name}: {row.detail}{row.mend and f'. Would help: {row.mend}'}")
            for row in sizing.in_the_way
        ]
        rows.append(("Nearest", sizing.nearest))
    headline, where, gpu = sizing.headline, None, sizing.setup.s_part_word
    if headline is not None:
        where, sockets = headline.kv_placement, counted(headline.sockets, "socket")
        words = {
            "gpu": f"the {gpu} alone",
            "r": f"KV caches on R-workers, {sockets}",
            "hybrid": f"KV caches on both sides, {sockets} beside the {gpu}",
        }[where]
        rows.append(("Headline", f"{rate_text(headline.tokens_per_s)} tokens/s: {words}"))
        rows += _details(sizing, headline)
    if sizing.plan is not None and where != "r":
        label = "R-workers" if sizing.feasible else "It would be"
        rows.append((label, f"{_pace(sizing.plan.expected)}: {_plan(sizing.plan)}"))
    alone, both = sizing.gpu_only, sizing.hybrid
    label = "CPU alone" if sizing.setup.is_without_gpu else "GPU alone"
    if alone is None:
        cannot = "can't run this: no room for one sequence beside the weights, or not fast enough"
        rows.append((label, cannot))
    elif where != "gpu":
        rows.append((label, f"{_pace(alone)}, {_gpu_only(sizing, alone)}"))
    if both is not None and where != "hybrid":
        sockets = counted(both.sockets, "socket")
        nothing = f"(--kv-placement hybrid), R-workers add nothing to the {gpu} alone"
        words = f"with {sockets} {nothing}"
        if both.away:
            words = (
                f"{rate_text(both.tokens_per_s)} tokens/s with {sockets}: {_sides(sizing, both)}"
            )
        rows.append(("Both sides", words))
    if sizing.verdict is not None:
        rows.append(("Verdict", _verdict(sizing, sizing.verdict)))
    return "\n".join(labelled(rows))


def _details(sizing: Sizing, headline: Headline) -> Iterator[tuple[str, str]]:
    goal, served, queue_s = sizing.goal, sizing.served, 0.0
    if served is not None:
        queue_s = served.queue_s
        users = counted(served.users, "user") + (" who asks" if served.users == 1 else " who ask")
        pause = f"{seconds_text(served.think_s)} after an answer" if served.think_s else "at once"
        queue = f"; each waits {seconds_text(queue_s)} for its start" if queue_s > 0.01 else ""
        yield (
            "Users",
            f"{users} again {pause}: {rate_text(served.requests_per_s)} requests/s, "
            f"{counted(served.running, 'sequence')} in flight{queue}",
        )
    job = sizing.job
    if job is not None:
        words = f"{counted(goal.requests or 0, 'request')}: {round_to(job.hours, 3):,g} hours"
        if job.kwh is not None:
            words += f", {round_to(job.kwh, 3):,g} kWh at rated power"
        if job.money is not None and sizing.cost is not None:
            words += f", {round_to(job.money, 3):,g} {sizing.cost.currency}"
        yield ("Job", words)
    plan, alone, both = sizing.plan, sizing.gpu_only, sizing.hybrid
    placement = headline.kv_placement
    if placement == "r" and plan is not None:
        yield ("R-workers", _plan(plan))
    elif placement == "gpu" and alone is not None:
        yield ("Sequences", _gpu_only(sizing, alone))
    elif both is not None:
        yield ("Sequences", _sides(sizing, both))
    slow, fast = headline.slow, headline.fast
    rates = f"{rate_text(slow.tokens_per_s)} to {rate_text(fast.tokens_per_s)}"
    tpots = f"{seconds_text(fast.tpot_s)} to {seconds_text(slow.tpot_s)}"
    yield (
        "Expected",
        f"{rate_text(headline.tokens_per_s)} tokens/s ({rates}), {seconds_text(headline.tpot_s)} a "
        f"token ({tpots}), the first after {seconds_text(headline.ttft_s + queue_s)}, "
        f"{seconds_text(headline.latency_s + queue_s)} a sequence",
    )
    if placement == "r" and plan is not None:
        yield from _plan_rows(sizing, plan)
    cost, beside = sizing.cost, ""
    if cost is not None:
        if cost.gpu_only_per_million_tokens is not None and placement != "gpu":
            own = round_to(cost.gpu_only_per_million_tokens, 3)
            beside = f"; the {sizing.setup.s_part_word} alone {own:g}"
        yield (
            "Cost",
            f"{round_to(cost.per_million_tokens, 3):g} {cost.currency} a million tokens "
            f"({round_to(cost.per_hour, 3):g} an hour){beside}",
        )


def _pace(placed: StepPrediction | GpuOnly) -> str:
    return f"{rate_text(placed.tokens_per_s)} tokens/s, {seconds_text(placed.tpot_s)} a token"


def _gpu_only(sizing: Sizing, alone: GpuOnly) -> str:
    if alone.limit == "gain":
        return f"{counted(alone.batch, 'sequence')} at once (more add less than a tenth)"
    limit = "--users" if sizing.goal.users and alone.limit == "--batch" else alone.limit
    return f"{counted(alone.batch, 'sequence')} at once ({limit} allows no more)"


def _plan(plan: Plan) -> str:
    spare = f", {plan.spare_sockets} of them spare" if plan.spare_sockets else ""
    upto = "" if plan.batch == plan.lanes * plan.lane_batch else "up to "
    return (
        f"{counted(plan.sockets, 'socket')} on {counted(plan.hosts, 'host')}{spare}; "
        f"{counted(plan.batch, 'sequence')} at once, in {counted(plan.lanes, 'lane')} of "
        f"{upto}{plan.lane_batch:,}"
    )


def _sides(sizing: Sizing, both: Hybrid) -> str:
    assert both.away_tpot_s is not None
    return (
        f"{counted(both.home, 'sequence')} on the {sizing.setup.s_part_word}, "
        f"{seconds_text(both.home_tpot_s)} a token, and {both.away:,} on R-workers, "
        f"{seconds_text(both.away_tpot_s)} a token ({both.layout}, --kv-placement hybrid)"
    )


def _verdict(sizing: Sizing, verdict: Verdict) -> str:
    # Sockets that are at hand cost nothing more.
    is_owned = sizing.goal.max_sockets is not None or sizing.setup.is_without_gpu
    is_bought = sizing.cost is None and not is_owned
    answer = "offload" if verdict.offload else "don't offload"
    rival, beside = verdict.rival, ""
    if rival is not None and rival.tokens_per_s is not None and rival.tpot_s is not None:
        answer += ", unless FP8 will do" if verdict.offload else ""
        beside = (
            f". The strongest rival, {rival.change} (another engine), gives "
            f"{rate_text(rival.tokens_per_s)} tokens/s at {seconds_text(rival.tpot_s)} a token"
        )
    elif verdict.offload and is_bought and verdict.break_even_socket_price < 1.0:
        answer += ", if sockets are cheap enough"
    return f"{answer}: {verdict.reason}{beside}"


def _plan_rows(sizing: Sizing, plan: Plan) -> Iterator[tuple[str, str]]:
    expected, gpu = plan.expected, sizing.setup.s_part_word
    yield (
        "Busy",
        f"{gpu} {expected.s_utilisation:.0%}, R-workers {expected.r_utilisation:.0%}, S-worker's "
        f"network {expected.network_utilisation:.0%}",
    )
    yield (
        "Memory",
        f"{bytes_text(plan.kv_bytes_per_host)} of KV cache a host; "
        f"{bytes_text(plan.s_memory_bytes)} of {bytes_text(sizing.system.s.usable_memory_bytes)} "
        f"usable on the {'S-worker' if sizing.setup.is_without_gpu else 'GPU'} side",
    )


def _constraints(plan: Plan, explain: bool) -> str:
    binding = plan.binding
    lines = ["Sockets that each constraint asks for, on its own"]
    for row in plan.constraints:
        mark = "  <- binds" if row is binding else ""
        asks = f"{row.min_sockets:,}" if row.min_sockets else "met"
        lines.append(f"  {row.name:<16} {asks:>7}{mark}")
        if explain:
            lines += paragraph(row.detail, " " * 6)
    return "\n".join(lines)


def _over_sockets(sizing: Sizing) -> str:
    assert sizing.plan is not None
    header = ("sockets", "tokens/s", "a token", "S busy", "R busy", "limit")
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
    lines = ["Inputs" if explain else "Inputs (--explain shows every source)"]
    for row in inputs_of(sizing):
        lines.append(f"  {row.name:<14} {row.value:<38} {row.provenance}")
        if explain and row.source:
            lines += paragraph(row.source, " " * 6)
    return "\n".join(lines)


_GIVEN, _DEFAULT = Provenance.GIVEN, Provenance.DEFAULT


@dataclass(frozen=True)
class Input:
    name: str
    value: str
    provenance: Provenance
    source: str


def inputs_of(sizing: Sizing) -> Iterator[Input]:
    """Yield everything that the plan depends on. T(B) is given at its batch of a lane."""
    setup, goal, system = sizing.setup, sizing.goal, sizing.system
    lane_batch = 1 if sizing.plan is None else sizing.plan.lane_batch
    yield from _model_inputs(setup, system, lane_batch)
    yield from _gpu_inputs(setup, system, lane_batch)
    yield from _cpu_inputs(setup, system)
    yield from _network_inputs(setup, system)
    headroom = _DEFAULT if goal.headroom == Goal().headroom else _GIVEN
    yield Input("headroom", f"{goal.headroom:.0%} on the R-part", headroom, "")
    gain = _DEFAULT if goal.min_gain is None else _GIVEN
    yield Input("gain left out", f"{goal.gain:.0%} of the most", gain, "")


def about_weights(setup: Setup) -> str:
    """Return the dtype of weights in memory, and what they take on disk if that is less."""
    quantisation = setup.spec.quantisation
    if quantisation is None:
        return str(setup.dtype)
    if setup.keeps_quantised:
        return f"kept as {quantisation.name}, which FastDecode doesn't do yet: it decodes them"
    kept = WeightBytes.kept(setup.spec, setup.dtype)
    on_disk = TokenCosts(setup.spec, setup.dtype, setup.kv_dtype, kept).weight_bytes
    return (
        f"{quantisation.name} on disk, {bytes_text(on_disk)}; decoded to {setup.dtype} while they "
        "are loaded"
    )


def _model_inputs(setup: Setup, system: System, lane_batch: int) -> Iterator[Input]:
    costs, interval = system.costs, setup.workload.start_interval_steps
    config = f"config of {setup.spec.name}, {about_weights(setup)}"
    yield Input("weights", bytes_text(costs.weight_bytes), _GIVEN, config)
    moe = costs.spec.moe
    if moe is not None:
        read = f"{moe.experts_hit(lane_batch):.0f} of {moe.num_experts} read by a lane"
        routed = (
            f"{moe.top_k} a token, {lane_batch:,} tokens in a lane, if routing is even; every lane "
            "reads them again"
        )
        yield Input("experts", read, _GIVEN, routed)
    kv, wire = costs.kv_bytes, costs.num_layers * (costs.out_bytes + costs.back_bytes)
    yield Input("KV cache", f"{bytes_text(kv)} a token", _GIVEN, f"config, {setup.kv_dtype}")
    sent = f"q, k, v out and o back in {setup.dtype}, all layers"
    yield Input("wire", f"{bytes_text(wire)} a token", _GIVEN, sent)
    spread = f"sequences start every {interval} steps"
    if interval == 1:
        spread = "load-stabilised: outputs of running sequences are spread evenly"
    attended = f"{rate_text(system.attended_tokens)} tokens a sequence"
    yield Input("attended", attended, _GIVEN, spread)


def _part(name: str, efficiency: Efficiency, peak: str) -> Input:
    return Input(name, f"{efficiency.value:.0%} of {peak}", _DEFAULT, efficiency.source)


def _gpu_inputs(setup: Setup, system: System, lane_batch: int) -> Iterator[Input]:
    s, gpu = system.s, setup.gpu
    t_of_b = f"{seconds_text(s.t_of_b(lane_batch))} at B = {lane_batch}"
    yield Input("T(B)", t_of_b, s.provenance, s.source)
    if not isinstance(gpu, Gpu):
        memory = bytes_text(gpu.device_memory_bytes)
        yield Input("GPU memory", memory, Provenance.MEASURED, gpu.machine.device)
        return
    where = "S" if setup.is_without_gpu else "GPU"
    peak = f"{gpu.flops_per_s(setup.dtype) / 1e12:g} TFLOP/s"
    yield _part(f"{where} compute", gpu.compute_efficiency, peak)
    bandwidth = f"{bytes_text(gpu.memory_bytes_per_s)}/s"
    yield _part(f"{where} bandwidth", gpu.memory_efficiency, bandwidth)
    memory = f"{gpu.memory_usable.value:.0%} of {bytes_text(setup.num_gpus * gpu.memory_bytes)}"
    yield Input(f"{where} memory", memory, Provenance.DATASHEET, "what the driver reports")


def _cpu_inputs(setup: Setup, system: System) -> Iterator[Input]:
    r, cpu = system.r, setup.cpu
    token_s = f"{seconds_text(r.token_s)} a token, layer and socket"
    yield Input("R", token_s, r.provenance, r.source)
    if not isinstance(cpu, Cpu):
        capacity = bytes_text(r.capacity_bytes)
        yield Input("R-worker DRAM", capacity, Provenance.MEASURED, "the profile's KV cache")
        return
    read, attention = cpu.read_efficiency, cpu.attention_efficiency
    both = Efficiency(
        read.value * attention.value,
        f"{read.value:g}: {read.source}; {attention.value:g}: {attention.source}",
    )
    yield _part("CPU bandwidth", both, f"{bytes_text(cpu.memory_bytes_per_s)}/s")
    peak = f"{cpu.fp32_flops_per_s / 1e12:.3g} TFLOP/s"
    attention = cpu.attention_peak(system.costs.kv_dtype, system.costs.group)
    yield _part("CPU compute", attention, peak)
    memory = f"{cpu.memory_usable.value:.0%} of {bytes_text(r.memory_bytes)} a socket"
    is_given = setup.dram_gb is not None
    provenance, source = (_GIVEN, "") if is_given else (_DEFAULT, cpu.memory_source)
    yield Input("R-worker DRAM", memory, provenance, source)


def _network_inputs(setup: Setup, system: System) -> Iterator[Input]:
    link, nic, transport = system.link, setup.nic, system.transport
    ports = f"{setup.num_nics} x " if setup.num_nics > 1 else ""
    trip, message = seconds_text(link.round_trip_s), seconds_text(link.message_s)
    if isinstance(nic, Nic):
        line, line_s = nic.line_efficiency, bytes_text(nic.line_bits_per_s / 8)
        rate = f"{ports}{line.value:.0%} of {line_s}/s each way"
        yield Input("network", rate, link.provenance, f"{nic.source}; {line.source}")
        yield Input("round trip", trip, _DEFAULT, nic.round_trip_source)
        yield Input("message", f"{message} an R-worker", _DEFAULT, nic.message_source)
    else:
        rate = f"{ports}{bytes_text(link.bytes_per_s)}/s each way"
        for name, value in (("network", rate), ("round trip", trip), ("message", message)):
            yield Input(name, value, link.provenance, link.source)
    if transport.is_bounded:
        rate = f"{bytes_text(transport.thread_bytes_per_s)}/s a thread"
        value = f"{transport.name}, {rate}, {transport.num_threads} at most"
        yield Input("I/O threads", value, Provenance.MEASURED, transport.source)
