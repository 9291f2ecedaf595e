"""``--kv-placement auto``: where the KV cache goes, by the rule of ``fastdecode size``."""

from __future__ import annotations

from dataclasses import dataclass, replace

from cost_model.hardware import Hardware
from cost_model.plans.placement import assumed_r_worker, gpu_like, placement_rates, ranking
from cost_model.plans.question import Setup
from cost_model.printing import rate_text
from cost_model.workload import Workload
from fastdecode.core.config.engine import EngineConfig
from fastdecode.core.dtype import DType
from fastdecode.core.errors import ConfigError
from fastdecode.core.model.identity import Identity
from fastdecode.core.model.spec import ModelSpec
from fastdecode.engine.setup.memory import CUDA_RESERVE_BYTES, FreeMemory

_USUAL_TOKENS = 1024
"""Of a prompt, and of what follows, unless the model or the user says otherwise."""
_NAMES = {"r": "R-workers", "gpu": "the GPU alone", "hybrid": "both sides"}


@dataclass(frozen=True)
class PlacementHost:
    """What placements are compared on.

    Args:
        num_r_workers: that are asked for; 0: none.
        is_here: whether they are threads of this process.
    """

    free: FreeMemory
    num_r_workers: int
    is_here: bool


def place(
    config: EngineConfig, spec: ModelSpec, identity: Identity, machine: PlacementHost | None
) -> tuple[EngineConfig, str]:
    """Settle ``kv_placement``. Return the options, and why, for people (empty if it was asked for).

    Args:
        machine: None if the S-part is on a CPU, or other options are for R-workers alone.
    """
    if config.r_part.kv_placement != "auto":
        return config, ""
    if machine is None:
        return _with(config, "r"), ""
    rates = _rates(config, spec, identity, machine)
    for placement in ranking(rates):
        if placement == "gpu" and machine.num_r_workers:
            continue  # with nothing to add, both sides are the GPU alone
        try:
            return _with(config, placement), _why(placement, rates, machine)
        except ConfigError:  # an option that was given is not for this placement
            continue
    return _with(config, "r"), ""


def _with(config: EngineConfig, placement: str) -> EngineConfig:
    """Raises ConfigError: another option isn't for it."""
    return replace(config, r_part=replace(config.r_part, kv_placement=placement))


def _rates(
    config: EngineConfig, spec: ModelSpec, identity: Identity, machine: PlacementHost
) -> dict[str, float]:
    hardware, free = Hardware.load(), machine.free
    assert free.device_bytes is not None
    used = free.device_total_bytes - free.device_bytes + CUDA_RESERVE_BYTES
    usable = config.s_part.gpu_memory_fraction - used / free.device_total_bytes
    gpu, _ = gpu_like(free.device_name, free.device_total_bytes, usable, hardware)
    cpu, nic = assumed_r_worker(hardware, is_here=machine.is_here)
    # The data file has 16-bit rates only; memory is what float32 needs most of.
    is_wide = identity.dtype is DType.FLOAT32 or gpu.bf16_flops_per_s is None
    dtype = DType.FLOAT16 if is_wide else identity.dtype
    setup = Setup(spec, dtype, identity.kv_dtype.value, gpu, cpu, nic, _workload(config, identity))
    # Threads of this process share its sockets: count them as one.
    sockets = min(1, machine.num_r_workers) if machine.is_here else machine.num_r_workers
    return placement_rates(setup.system(), sockets, config.batching.max_num_sequences)


def _workload(config: EngineConfig, identity: Identity) -> Workload:
    most = identity.max_model_len
    expected = config.batching.expected_output_tokens or _USUAL_TOKENS
    output = min(expected, max(1, most // 2))
    return Workload(min(_USUAL_TOKENS, most - output), output)


def _why(placement: str, rates: dict[str, float], machine: PlacementHost) -> str:
    listed = ", ".join(f"{_NAMES[each]} {rate_text(rates[each])} tokens/s" for each in rates)
    by = "" if machine.free.device_name else ", of a GPU that is not known"
    return f"KV cache on {_NAMES[placement]} (--kv-placement auto; estimated{by}: {listed})"
