"""Measurement of a model's S-part on a device: the S-worker alone, then inside an engine.

Inside it, sequences of one length step together, each step timed, through ``submit`` and ``step``
as every caller uses them.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import psutil
import torch

from fastdecode.core.config.engine import EngineConfig
from fastdecode.core.delta import Delta, Listener
from fastdecode.core.errors import CapacityError, Given
from fastdecode.core.host.machine import this_machine
from fastdecode.core.measurement import ModelShape, Point, SProfile, Timing
from fastdecode.core.model.checkpoint import open_checkpoint
from fastdecode.core.sequence import Request, SamplingParams
from fastdecode.engine.engine import Engine
from fastdecode.engine.setup.devices import describe_device
from fastdecode.engine.setup.launch import RunningEngine
from fastdecode.engine.setup.resolve import resolve_for_this_host
from fastdecode.engine.setup.s_worker import make_s_worker
from sworker.dtypes import torch_dtype
from sworker.load.weights import load_model
from sworker.measure import COLD, WARM_UP, measure_s_part

# Whole steps are measured with short contexts, so that R-workers, which are not counted, take
# little of them.
STEP_CONTEXT_TOKENS = 48
WARM_UP_STEPS = 3


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


@dataclass(frozen=True)
class SteadySteps:
    """Decode steps of one batch, all lanes together."""

    batch: int
    mean_context_tokens: float
    """Cached tokens of a sequence, in the middle of the steps."""
    step_s: tuple[float, ...]
    """Seconds of each step: one token for every sequence."""
    r_compute_s: tuple[float, ...]
    """Seconds that the busiest R-worker computed in each step."""

    @property
    def without_r_s(self) -> tuple[float, ...]:
        return tuple(step - r for step, r in zip(self.step_s, self.r_compute_s, strict=True))


def time_steady_steps(
    running: RunningEngine, batch: int, context_tokens: int, num_steps: int
) -> SteadySteps:
    """Run prompts of about ``context_tokens`` random tokens, then time ``num_steps`` steps.

    Sampling is greedy, and EOS is ignored. The engine is empty before and after. Raises
    CapacityError: If the R-workers can't hold the whole batch at once."""
    engine, num_lanes = running.engine, running.resolved.schedule.num_lanes
    assert not engine.requests, "the engine is busy"
    prompt_len = max(1, context_tokens - WARM_UP_STEPS - num_steps // 2)
    # Sequences whose prompt ends early decode while the others' prompts run.
    budget = max(1, running.resolved.config.batching.step_tokens - batch)
    chunk = running.resolved.schedule.batching.chunk_tokens()
    prompt_steps = 2 * -(-batch * prompt_len // budget) + -(-prompt_len // chunk)
    max_tokens = prompt_steps + WARM_UP_STEPS + num_steps + 4
    over = _submit(running, _requests(running, batch, prompt_len, max_tokens))
    try:
        stats, steps, computes = engine.stats, [], []
        prompts_before, outputs_before = stats.num_prompt_tokens, stats.num_output_tokens
        while stats.num_prompt_tokens - prompts_before < batch * prompt_len:
            _step(engine)
            if over:
                raise CapacityError(
                    f"{batch} sequences of {prompt_len} tokens didn't run all at once: give the "
                    "R-workers more KV memory (",
                    Given("kv_memory_gb"),
                    "), or measure fewer or shorter ones",
                )
        num_generated = stats.num_output_tokens - outputs_before
        for _ in range(WARM_UP_STEPS + num_steps):
            r_before, started = stats.r_compute_s, time.perf_counter()
            for _ in range(num_lanes):
                _step(engine)
            steps.append(time.perf_counter() - started)
            computes.append(stats.r_compute_s - r_before)
    finally:
        cancel_all(engine)
    context = prompt_len + num_generated / batch + WARM_UP_STEPS + num_steps / 2
    timed = slice(WARM_UP_STEPS, None)
    return SteadySteps(batch, context, tuple(steps[timed]), tuple(computes[timed]))


def cancel_all(engine: Engine) -> None:
    """Cancel every unfinished request, and free its memory."""
    for request_id in engine.requests.ids:
        engine.cancel(request_id)
    while engine.broken is None and engine.has_work:
        engine.step()


def time_prompt(running: RunningEngine, num_tokens: int) -> float:
    """Return the seconds from submitting a prompt of random tokens to its first token."""
    assert not running.engine.requests, "the engine is busy"
    requests, started = _requests(running, 1, num_tokens, 1), time.perf_counter()
    over = _submit(running, requests)
    while running.engine.requests:
        _step(running.engine)
    for delta in over:
        if delta.error is not None:
            raise delta.error
    return time.perf_counter() - started


def _step(engine: Engine) -> None:
    engine.step()
    if engine.pause_s:
        time.sleep(engine.pause_s)


def _requests(running: RunningEngine, num: int, prompt_len: int, max_tokens: int) -> list[Request]:
    rng = np.random.default_rng(0)
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    prompts = [rng.integers(0, running.spec.vocab_size, prompt_len).tolist() for _ in range(num)]
    return [
        Request(f"steady-{index}", tuple(tokens), params, max_tokens, seed=index)
        for index, tokens in enumerate(prompts)
    ]


def _submit(running: RunningEngine, requests: list[Request]) -> list[Delta]:
    """Submit requests. Return a list to which ends of their sequences are added."""
    over: list[Delta] = []
    for request in requests:
        running.engine.submit(request, Listener(over.append, every_step=False))
    return over
