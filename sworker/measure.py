"""Measures the S-part of a model on its device: one layer over batch sizes, the rest of a step,
and whole prompts.

Attention is left out of decode steps, where it isn't the S-worker's, and is part of the prompts,
which are asked for where it is. What the model computes from doesn't matter here: tokens are
drawn, attention's output is zeros."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fastdecode.core.clock import Clock
from fastdecode.core.measurement import Point, Timing
from fastdecode.core.sequence import SamplingParams
from sworker.model.skeleton import forward
from sworker.prefill import local_causal_attention
from sworker.sampling.sampler import SamplingState
from sworker.worker import SWorker

WARM_UP = 2
COLD = 16
"""Steps of the first size that are run before it is measured: some of them choose kernels and
start threads, and take up to 20 times as long."""
POSITION = 128  # position of every decoded token; any will do


@dataclass(frozen=True)
class SPartTimes:
    """As the fields of the same names in ``fastdecode.core.measurement.SProfile``."""

    layer: tuple[Point, ...]
    head: tuple[Point, ...]
    prefill: tuple[Point, ...]


def measure_s_part(
    worker: SWorker,
    batches: Sequence[int],
    prompts: Sequence[int],
    *,
    repeats: int,
    clock: Clock = time.perf_counter,
) -> SPartTimes:
    """Time the S-part.

    Args:
        batches: tokens of a decode step.
        prompts: tokens of a prompt that the S-worker attends; those beyond the
            model's limit are left out.
        repeats: of each size, after ``WARM_UP``, and ``COLD`` steps before the first.
    """
    rng = np.random.default_rng(0)
    layer, head = [], []
    for _ in range(COLD):
        _time_step(worker, batches[0], rng, clock)
    for batch in batches:
        per_layer, rest = [], []
        for _ in range(WARM_UP + repeats):
            layers_s, rest_s = _time_step(worker, batch, rng, clock)
            per_layer.append(layers_s / worker.spec.num_layers)
            rest.append(rest_s)
        layer.append(Point(batch, Timing(tuple(per_layer[WARM_UP:]))))
        head.append(Point(batch, Timing(tuple(rest[WARM_UP:]))))
    prefill = []
    for num_tokens in prompts:
        if num_tokens <= worker.spec.max_model_len:
            seconds = [
                _time_prompt(worker, num_tokens, rng, clock) for _ in range(WARM_UP + repeats)
            ]
            prefill.append(Point(num_tokens, Timing(tuple(seconds[WARM_UP:]))))
    return SPartTimes(tuple(layer), tuple(head), tuple(prefill))


def _time_step(
    worker: SWorker, batch: int, rng: np.random.Generator, clock: Clock
) -> tuple[float, float]:
    """(seconds of all layers, seconds of embedding, logits and greedy sampling)
    of one decode step."""
    spec = worker.spec
    token_ids = rng.integers(0, spec.vocab_size, batch)
    positions = np.full(batch, min(POSITION, spec.max_model_len - 1), np.int64)
    rows = torch.from_numpy(np.stack((token_ids, positions)))
    states = [_greedy(spec.vocab_size) for _ in range(batch)]
    times = [_now(worker, clock)]
    with torch.inference_mode():
        worker.model.embed(*rows.to(worker.device))
    times.append(_now(worker, clock))
    step = worker.begin(rows)
    o = torch.zeros_like(step.q)
    while step.advance(o):
        pass
    times.append(_now(worker, clock))
    worker.sample(step.logits(np.arange(batch)), states)
    times.append(_now(worker, clock))
    embed_s, pass_s, sample_s = np.diff(times).tolist()
    return max(pass_s - embed_s, 1e-9), embed_s + sample_s


def _time_prompt(worker: SWorker, num_tokens: int, rng: np.random.Generator, clock: Clock) -> float:
    """Seconds of one prompt through all layers, attention included."""
    spec = worker.spec
    token_ids = torch.from_numpy(rng.integers(0, spec.vocab_size, num_tokens)).to(worker.device)
    positions = torch.arange(num_tokens, device=worker.device)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        o, _ = local_causal_attention(q, k, v, (0,), spec.attention[layer], want_lse=False)
        return o

    started = _now(worker, clock)
    with torch.inference_mode():
        forward(worker.model, token_ids, positions, attend)
    return _now(worker, clock) - started


def _greedy(vocab_size: int) -> SamplingState:
    return SamplingState(
        params=SamplingParams(),
        seed=0,
        prompt_token_ids=(0,),
        eos_token_ids=(),
        vocab_size=vocab_size,
        sample_index=0,
    )


def _now(worker: SWorker, clock: Clock) -> float:
    """The time when the device has done everything so far."""
    if worker.device.type == "cuda":
        torch.cuda.synchronize(worker.device)
    return clock()
