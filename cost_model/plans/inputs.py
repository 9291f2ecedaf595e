"""The inputs of a plan, one by one: value, where it comes from, and how far to trust it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from cost_model.hardware import Cpu, Efficiency, Gpu, Nic
from cost_model.plans.question import Goal, Setup
from cost_model.predict import System
from cost_model.quantities import bytes_text, rate_text, seconds_text
from cost_model.stages import Provenance
from cost_model.workload import TokenCosts, WeightBytes

_GIVEN, _DEFAULT = Provenance.GIVEN, Provenance.DEFAULT


@dataclass(frozen=True)
class Input:
    name: str
    value: str
    provenance: Provenance
    source: str


def inputs_of(setup: Setup, goal: Goal, system: System, lane_batch: int) -> tuple[Input, ...]:
    """Everything that the plan depends on. T(B) is given at ``lane_batch``."""
    return (
        *_model_inputs(setup, system, lane_batch),
        *_gpu_inputs(setup, system, lane_batch),
        *_cpu_inputs(setup, system),
        *_network_inputs(setup, system),
        *_transport_inputs(system),
        *_goal_inputs(goal),
    )


def _goal_inputs(goal: Goal) -> Iterator[Input]:
    headroom = _DEFAULT if goal.headroom == Goal().headroom else _GIVEN
    yield Input("headroom", f"{goal.headroom:.0%} on the R-part", headroom, "")
    gain = _DEFAULT if goal.min_gain is None else _GIVEN
    yield Input("gain left out", f"{goal.gain:.0%} of the most", gain, "")


def about_weights(setup: Setup) -> str:
    """The dtype of weights in memory, and what they take on disk if that is less."""
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
    is_given = setup.memory_bytes_per_socket is not None
    provenance, source = (_GIVEN, "") if is_given else (_DEFAULT, cpu.memory_source)
    yield Input("R-worker DRAM", memory, provenance, source)


def _transport_inputs(system: System) -> Iterator[Input]:
    transport = system.transport
    if transport.is_bounded:
        rate = f"{bytes_text(transport.thread_bytes_per_s)}/s a thread"
        value = f"{transport.name}, {rate}, {transport.num_threads} at most"
        yield Input("I/O threads", value, Provenance.MEASURED, transport.source)


def _network_inputs(setup: Setup, system: System) -> Iterator[Input]:
    link, nic = system.link, setup.nic
    ports = f"{setup.num_nics} x " if setup.num_nics > 1 else ""
    trip, message = seconds_text(link.round_trip_s), seconds_text(link.message_s)
    if not isinstance(nic, Nic):
        rate = f"{ports}{bytes_text(link.bytes_per_s)}/s each way"
        for name, value in (("network", rate), ("round trip", trip), ("message", message)):
            yield Input(name, value, link.provenance, link.source)
        return
    line, line_s = nic.line_efficiency, bytes_text(nic.line_bits_per_s / 8)
    rate = f"{ports}{line.value:.0%} of {line_s}/s each way"
    yield Input("network", rate, link.provenance, f"{nic.source}; {line.source}")
    yield Input("round trip", trip, _DEFAULT, nic.round_trip_source)
    yield Input("message", f"{message} an R-worker", _DEFAULT, nic.message_source)
