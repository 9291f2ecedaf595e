"""Measurement of a model's S-part on a device: the S-worker alone, then inside an engine."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace

import psutil
import torch

from fastdecode.core.config.engine import EngineConfig
from fastdecode.core.host.machine import this_machine
from fastdecode.core.measurement import ModelShape, Point, SProfile, Timing
from fastdecode.core.model.checkpoint import open_checkpoint
from fastdecode.engine.setup.devices import describe_device
from fastdecode.engine.setup.launch import RunningEngine
from fastdecode.engine.setup.resolve import resolve_for_this_host
from fastdecode.engine.setup.s_worker import make_s_worker
from fastdecode.measure.steady import time_prompt, time_steady_steps
from sworker.dtypes import torch_dtype
from sworker.load.weights import load_model
from sworker.measure import COLD, WARM_UP, measure_s_part

# Whole steps are measured with short contexts, so that R-workers, which are not counted, take
# little of them.
STEP_CONTEXT_TOKENS = 48


@dataclass(frozen=True)
class SEffort:
    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    prompts: tuple[int, ...] = (16, 64, 256, 1024)
    repeats: int = 9


def calibrate_s(config: EngineConfig, effort: SEffort, tell: Callable[[str], None]) -> SProfile:
    """Measure T(B), the rest of the S-part, prompts, and whole steps in the engine."""
    checkpoint = open_checkpoint(config.model, config.s_part.load_format)
    max_len = config.s_part.max_model_len
    spec = checkpoint.spec(max_model_len=max_len)
    resolved = resolve_for_this_host(config, spec)
    dtype = torch_dtype(resolved.dtype)
    tell(f"loading {config.model} on {describe_device(resolved.device, resolved.free)}")
    _, model = load_model(checkpoint, device=resolved.device, dtype=dtype, max_model_len=max_len)
    tell(
        f"S-part: {len(effort.batches)} batch sizes, {len(effort.prompts)} prompt lengths, "
        f"{effort.repeats} repeats"
    )
    s_worker = make_s_worker(spec, model, resolved)
    prompts = () if resolved.prompts_on_r else effort.prompts
    times = measure_s_part(s_worker, effort.batches, prompts, repeats=effort.repeats)
    del s_worker, model
    beside = ", and prompts, which R-workers attend" if resolved.prompts_on_r else ""
    tell(f"whole steps in the engine{beside}")
    step, prefill = _measure_in_engine(config, effort)
    name, memory_bytes = "cpu", psutil.virtual_memory().total
    if resolved.device.type == "cuda":
        name = torch.cuda.get_device_name(resolved.device)
        memory_bytes = torch.cuda.get_device_properties(resolved.device).total_memory
    return SProfile(
        machine=this_machine(name, ("torch", "numpy", "fastdecode")),
        model=spec.name,
        shape=ModelShape.of(spec),
        dtype=resolved.dtype.value,
        device_memory_bytes=int(memory_bytes),
        layer=times.layer,
        head=times.head,
        step=step,
        prefill=prefill if resolved.prompts_on_r else times.prefill,
        prompt_attention="r" if resolved.prompts_on_r else "s",
    )


def _measure_in_engine(
    config: EngineConfig, effort: SEffort
) -> tuple[tuple[Point, ...], tuple[Point, ...]]:
    """Return the times of steps without the R-workers' compute, and of prompts that R-workers
    attend, with it."""
    most = max(effort.batches)
    batching = replace(
        config.batching, lanes=1, schedule="greedy", max_num_sequences=most, max_step_tokens=None
    )
    # Everything is run as if it had never been run before.
    one_lane = replace(config, batching=batching, cache=replace(config.cache, prefix_cache="off"))
    with contextlib.closing(RunningEngine(one_lane)) as running:
        context = min(STEP_CONTEXT_TOKENS, running.resolved.max_model_len // 4)
        time_steady_steps(running, effort.batches[0], context, COLD)
        steps = [
            time_steady_steps(running, batch, context, effort.repeats) for batch in effort.batches
        ]
        resolved, prompts = running.resolved, []
        for num_tokens in effort.prompts if resolved.prompts_on_r else ():
            if num_tokens < resolved.max_model_len:
                times = [time_prompt(running, num_tokens) for _ in range(WARM_UP + effort.repeats)]
                prompts.append(Point(num_tokens, Timing(tuple(times[WARM_UP:]))))
    return tuple(Point(each.batch, Timing(each.without_r_s)) for each in steps), tuple(prompts)
