"""States of sequences whose next token is drawn."""

from __future__ import annotations

from fastdecode.core.sequence import SamplingParams
from sworker.sampling.sampler import SamplingState

V = 61
EOS = (3, 60)


def make_state(
    params: SamplingParams,
    seed: int = 0,
    prompt: tuple[int, ...] = (),
    output: tuple[int, ...] = (),
    vocab: int = V,
) -> SamplingState:
    return SamplingState(params, seed, prompt, EOS, vocab, 0, output)
