"""A steady decode batch: sequences of one length that all step together, each step timed.

``fastdecode calibrate`` and ``fastdecode bench`` measure the engine through its ``submit`` and
``step``, as every caller uses them.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from fastdecode.core.delta import Delta, Listener
from fastdecode.core.errors import CapacityError, Given
from fastdecode.core.sequence import Request, SamplingParams
from fastdecode.engine.engine import Engine
from fastdecode.engine.setup.launch import RunningEngine

WARM_UP_STEPS = 3


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

    Sampling is greedy, and EOS is ignored. The engine is empty before and after.

    Raises:
        CapacityError: If the R-workers can't hold the whole batch at once.
    """
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
    """Return the seconds from submitting a prompt of random tokens to its first token.

    Raises:
        CapacityError: If the R-workers can't hold the prompt.
    """
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
