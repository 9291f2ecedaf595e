"""The inputs of a plan, one by one: value, where it comes from, and how far to trust it."""

from __future__ import annotations

from dataclasses import dataclass

from cost_model.hardware import Cpu, Gpu, Nic
from cost_model.plans.question import Goal, Setup
from cost_model.predict import System
from cost_model.quantities import bytes_text, rate_text, seconds_text
from cost_model.stages import Provenance
from cost_model.workload import TokenCosts, WeightBytes


@dataclass(frozen=True)
class Input:
    """One input of a plan."""

    name: str
    value: str
    provenance: Provenance
    source: str


def inputs_of(setup: Setup, goal: Goal, system: System, lane_batch: int) -> tuple[Input, ...]:
    """Everything that the plan hangs on. T(B) is given at ``lane_batch``."""
    return (
        *_model_inputs(setup, system, lane_batch),
        *_gpu_inputs(setup, system, lane_batch),
        *_cpu_inputs(setup, system),
        *_network_inputs(setup, system),
        *_transport_inputs(system),
        _goal_input(
            "headroom", f"{goal.headroom:.0%} on the R-part", goal.headroom == Goal().headroom
        ),
        _goal_input("gain left out", f"{goal.gain:.0%} of the most", goal.min_gain is None),
    )


def _goal_input(name: str, value: str, is_default: bool) -> Input:
    return Input(name, value, Provenance.DEFAULT if is_default else Provenance.GIVEN, "")


def about_weights(setup: Setup) -> str:
    """The dtype of weights in memory, and what they take on disk if that is less."""
    quantisation = setup.spec.quantisation
    if quantisation is None:
        return str(setup.dtype)
    if setup.keeps_quantised:
        return f"kept as {quantisation.name}, which FastDecode doesn't do yet: it decodes them"
    on_disk = TokenCosts(
        setup.spec, setup.dtype, setup.kv_dtype, WeightBytes.kept(setup.spec, setup.dtype)
    ).weight_bytes
    return (
        f"{quantisation.name} on disk, {bytes_text(on_disk)}; decoded to {setup.dtype} while they "
        "are loaded"
    )


def _expert_inputs(system: System, lane_batch: int) -> tuple[Input, ...]:
    moe = system.costs.spec.moe
    if moe is None:
        return ()
    return (
        Input(
            "experts",
            f"{moe.experts_hit(lane_batch):.0f} of {moe.num_experts} read by a lane",
            Provenance.GIVEN,
            f"{moe.top_k} a token, {lane_batch:,} tokens in a lane, if routing is even; every lane "
            "reads them again",
        ),
    )


def _model_inputs(setup: Setup, system: System, lane_batch: int) -> tuple[Input, ...]:
    costs, workload = system.costs, setup.workload
    attended = system.attended_tokens
    spread = (
        "load-stabilised: outputs of running sequences are spread evenly"
        if workload.start_interval_steps == 1
        else f"sequences start every {workload.start_interval_steps} steps"
    )
    return (
        Input(
            "weights",
            bytes_text(costs.weight_bytes),
            Provenance.GIVEN,
            f"config of {setup.spec.name}, {about_weights(setup)}",
        ),
        *_expert_inputs(system, lane_batch),
        Input(
            "KV cache",
            f"{bytes_text(costs.kv_bytes)} a token",
            Provenance.GIVEN,
            f"config, {setup.kv_dtype}",
        ),
        Input(
            "wire",
            f"{bytes_text(costs.num_layers * (costs.out_bytes + costs.back_bytes))} a token",
            Provenance.GIVEN,
            f"q, k, v out and o back in {setup.dtype}, all layers",
        ),
        Input("attended", f"{rate_text(attended)} tokens a sequence", Provenance.GIVEN, spread),
    )


def _gpu_inputs(setup: Setup, system: System, lane_batch: int) -> tuple[Input, ...]:
    s, gpu = system.s, setup.gpu
    t_of_b = Input(
        "T(B)", f"{seconds_text(s.t_of_b(lane_batch))} at B = {lane_batch}", s.provenance, s.source
    )
    if not isinstance(gpu, Gpu):
        memory = Input(
            "GPU memory",
            bytes_text(gpu.device_memory_bytes),
            Provenance.MEASURED,
            gpu.machine.device,
        )
        return t_of_b, memory
    return (
        t_of_b,
        Input(
            "GPU compute",
            f"{gpu.compute_efficiency.value:.0%} of {gpu.flops_per_s(setup.dtype) / 1e12:g} "
            "TFLOP/s",
            Provenance.DEFAULT,
            gpu.compute_efficiency.source,
        ),
        Input(
            "GPU bandwidth",
            f"{gpu.memory_efficiency.value:.0%} of {bytes_text(gpu.memory_bytes_per_s)}/s",
            Provenance.DEFAULT,
            gpu.memory_efficiency.source,
        ),
        Input(
            "GPU memory",
            f"{gpu.memory_usable.value:.0%} of {bytes_text(setup.num_gpus * gpu.memory_bytes)}",
            Provenance.DATASHEET,
            "what the driver reports",
        ),
    )


def _cpu_inputs(setup: Setup, system: System) -> tuple[Input, ...]:
    r, cpu = system.r, setup.cpu
    r_of_token = Input(
        "R", f"{seconds_text(r.token_s)} a token, layer and socket", r.provenance, r.source
    )
    if not isinstance(cpu, Cpu):
        memory = Input(
            "R-worker DRAM",
            bytes_text(r.capacity_bytes),
            Provenance.MEASURED,
            "the profile's KV cache",
        )
        return r_of_token, memory
    ceiling = cpu.read_efficiency.value * cpu.attention_efficiency.value
    given = setup.memory_bytes_per_socket is not None
    return (
        r_of_token,
        Input(
            "CPU bandwidth",
            f"{ceiling:.0%} of {bytes_text(cpu.memory_bytes_per_s)}/s",
            Provenance.DEFAULT,
            f"{cpu.read_efficiency.value:g}: {cpu.read_efficiency.source}; "
            f"{cpu.attention_efficiency.value:g}: "
            f"{cpu.attention_efficiency.source}",
        ),
        Input(
            "CPU compute",
            f"{cpu.compute_efficiency.value:.0%} of {cpu.fp32_flops_per_s / 1e12:.3g} TFLOP/s",
            Provenance.DEFAULT,
            cpu.compute_efficiency.source,
        ),
        Input(
            "R-worker DRAM",
            f"{cpu.memory_usable.value:.0%} of {bytes_text(r.memory_bytes)} a socket",
            Provenance.GIVEN if given else Provenance.DEFAULT,
            "" if given else cpu.memory_source,
        ),
    )


def _transport_inputs(system: System) -> tuple[Input, ...]:
    transport = system.transport
    if not transport.is_bounded:
        return ()
    rate = f"{bytes_text(transport.thread_bytes_per_s)}/s a thread, {transport.num_threads} at most"
    value = f"{transport.name}, {rate}"
    return (Input("I/O threads", value, Provenance.MEASURED, transport.source),)


def _network_inputs(setup: Setup, system: System) -> tuple[Input, ...]:
    link, nic = system.link, setup.nic
    ports = f"{setup.num_nics} x " if setup.num_nics > 1 else ""
    if not isinstance(nic, Nic):
        return (
            Input(
                "network",
                f"{ports}{bytes_text(link.bytes_per_s)}/s each way",
                link.provenance,
                link.source,
            ),
            Input("round trip", seconds_text(link.round_trip_s), link.provenance, link.source),
            Input("message", seconds_text(link.message_s), link.provenance, link.source),
        )
    return (
        Input(
            "network",
            f"{ports}{nic.line_efficiency.value:.0%} of {bytes_text(nic.line_bits_per_s / 8)}/s "
            "each way",
            link.provenance,
            f"{nic.source}; {nic.line_efficiency.source}",
        ),
        Input(
            "round trip", seconds_text(link.round_trip_s), Provenance.DEFAULT, nic.round_trip_source
        ),
        Input(
            "message",
            f"{seconds_text(link.message_s)} an R-worker",
            Provenance.DEFAULT,
            nic.message_source,
        ),
    )
