"""The S-part of a model on a device, measured: the S-worker alone, then inside the engine that it works in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import psutil
import torch

from fastdecode.core.config import EngineConfig
from fastdecode.core.machine import available_cores, this_machine
from fastdecode.core.measurement import ModelShape, Point, SProfile, Timing
from fastdecode.engine.launch import RunningEngine, resolve
from fastdecode.engine.steady import SteadySteps, time_steady_steps
from sworker.measure import SPartTimes, measure_s_part
from sworker.weights import load_model, load_spec
from sworker.worker import SWorker

# The engine's own share is measured with short contexts, so that little but it is left beside the S-part.
HOST_CONTEXT_TOKENS = 48
LEAST_S = 1e-7
"""A share that comes out below this is noise."""


@dataclass(frozen=True)
class SEffort:
    """How much to measure."""

    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    prompts: tuple[int, ...] = (16, 64, 256, 1024)
    repeats: int = 9


def calibrate_s(config: EngineConfig, effort: SEffort, tell: Callable[[str], None]) -> SProfile:
    """Measure T(B), the rest of a step, prompts, and the engine's own share.

    Args:
        config: model, device and dtypes; its R-workers do the attention while the engine is measured.
        tell: told what is being done, one line at a time.

    Raises:
        ConfigError, ModelError: an option or the model directory is bad.
    """
    spec = load_spec(config.model)
    resolved = resolve(config, spec, num_cores=available_cores(), free_bytes=psutil.virtual_memory().available)
    dtype: torch.dtype = getattr(torch, resolved.dtype.value)
    tell(f"loading {config.model}")
    _, model = load_model(config.model, device=resolved.device, dtype=dtype)
    tell(f"S-part: {len(effort.batches)} batch sizes, {len(effort.prompts)} prompt lengths, {effort.repeats} repeats")
    times = measure_s_part(
        SWorker(spec, model, resolved.device), effort.batches, effort.prompts, repeats=effort.repeats
    )
    del model
    tell("the engine's own share of a step")
    host = _measure_host(config, spec.num_layers, times, effort)
    on_gpu = resolved.device.type == "cuda"
    return SProfile(
        machine=this_machine(
            torch.cuda.get_device_name(resolved.device) if on_gpu else "cpu", ("torch", "numpy", "fastdecode")
        ),
        model=spec.name,
        shape=ModelShape.of(spec),
        dtype=resolved.dtype.value,
        device_memory_bytes=_device_memory_bytes(resolved.device),
        layer=times.layer,
        head=times.head,
        host=host,
        prefill=times.prefill,
    )


def _device_memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return int(psutil.virtual_memory().total)


def _measure_host(config: EngineConfig, num_layers: int, times: SPartTimes, effort: SEffort) -> tuple[Point, ...]:
    """What a real step takes beyond its S-part and its R-part, over the same batches."""
    one_lane = replace(config, lanes=1, schedule="greedy", max_num_sequences=max(effort.batches), max_step_tokens=None)
    running = RunningEngine(one_lane)
    try:
        context = min(HOST_CONTEXT_TOKENS, running.resolved.max_model_len // 4)
        steps = [time_steady_steps(running, batch, context, effort.repeats) for batch in effort.batches]
    finally:
        running.close()
    return tuple(_host_share(*item, num_layers) for item in zip(steps, times.layer, times.head, strict=True))


def _host_share(steps: SteadySteps, layer: Point, head: Point, num_layers: int) -> Point:
    s_part_s = num_layers * layer.timing.median_s + head.timing.median_s
    beyond = [step_s - r_s - s_part_s for step_s, r_s in zip(steps.step_s, steps.r_compute_s, strict=True)]
    return Point(steps.batch, Timing(tuple(max(LEAST_S, seconds) for seconds in beyond)))
