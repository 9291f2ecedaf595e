"""What the sampler must remember of one sequence between steps. NumPy only:
nothing here is on the device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fastdecode.core.sequence import SamplingParams

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
"""SplitMix64's increment: 2^64 / golden ratio, made odd."""


class SamplingState:
    """One sequence as the sampler sees it: how to sample, how far it has come,
    which tokens it holds.

    Args:
        params: valid for this vocabulary (``validate_for_vocab``).
        seed: names the stream of random numbers, together with
            ``sample_index``.
        prompt_token_ids: what the repetition penalty counts beside the output.
        eos_token_ids: any of them ends the sequence unless
            ``params.ignore_eos``.
        vocab_size: width of the logits.
        sample_index: which of the request's n completions this is.
        output_token_ids: tokens generated before a suspension; the next draw
            goes on as if there had been none.
    """

    __slots__ = (
        "_additive",
        "_additive_masked",
        "_counts",
        "num_generated",
        "params",
        "stream",
        "vocab_size",
    )

    def __init__(
        self,
        params: SamplingParams,
        seed: int,
        prompt_token_ids: Sequence[int],
        eos_token_ids: Sequence[int],
        vocab_size: int,
        sample_index: int = 0,
        output_token_ids: Sequence[int] = (),
    ) -> None:
        self.params = params
        self.vocab_size = vocab_size
        self.num_generated = 0
        self.stream = _stream_key(seed, sample_index)
        bias = dict(params.logit_bias)
        self._additive = _as_arrays(bias)
        self._additive_masked = None
        if params.min_tokens:
            stops = {*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)}
            bias.update((token, -np.inf) for token in stops if token < vocab_size)
            self._additive_masked = _as_arrays(bias)
        self._counts: _TokenCounts | None = None
        if params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty:
            # Only the repetition penalty looks at the prompt.
            self._counts = _TokenCounts(prompt_token_ids if params.repetition_penalty != 1 else ())
        for token in output_token_ids:
            self.observe(token)

    @property
    def is_greedy(self) -> bool:
        """The likeliest token is taken, whatever the random number."""
        return self.params.temperature == 0 or self.params.top_k == 1

    @property
    def additive(self) -> tuple[NDArray[np.int64], NDArray[np.float32]] | None:
        """Token ids and what to add to their logits now: ``logit_bias``, and
        -inf for ids that ``min_tokens`` masks."""
        return (
            self._additive_masked if self.num_generated < self.params.min_tokens else self._additive
        )

    @property
    def penalised(self) -> tuple[NDArray[np.int64], NDArray[np.float32]] | None:
        """Token ids that a penalty looks at, and how often each occurs in the
        output (0: in the prompt alone)."""
        if self._counts is None or self._counts.size == 0:
            return None
        return self._counts.ids, self._counts.counts

    def observe(self, token_id: int) -> None:
        """A token was appended to the output."""
        self.num_generated += 1
        if self._counts is not None:
            self._counts.add(token_id)


class _TokenCounts:
    """How often each token occurs in the output, sparse, as arrays that grow by doubling."""

    def __init__(self, prompt_token_ids: Sequence[int]) -> None:
        seen = np.unique(np.asarray(prompt_token_ids, dtype=np.int64))
        self.size = len(seen)
        self._ids = np.zeros(max(16, 2 * self.size), np.int64)
        self._ids[: self.size] = seen
        self._counts = np.zeros(len(self._ids), np.float32)
        self._slots = {int(token): slot for slot, token in enumerate(seen)}

    @property
    def ids(self) -> NDArray[np.int64]:
        return self._ids[: self.size]

    @property
    def counts(self) -> NDArray[np.float32]:
        return self._counts[: self.size]

    def add(self, token_id: int) -> None:
        slot = self._slots.setdefault(token_id, self.size)
        if slot == self.size:
            if slot == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._ids[slot] = token_id
            self.size += 1
        self._counts[slot] += 1


def uniforms(states: Sequence[SamplingState]) -> NDArray[np.float64]:
    """One number in [0, 1) a sequence, for the draw it is about to make.
    float64 [B], multiples of 2^-53.

    Counter-based: a pure function of (seed, sample index, number of tokens
    generated), so a draw is the same whatever else is in the batch, on
    whichever device, and when it is made again after a suspension. The function
    is SplitMix64 (Steele, Lea & Flood, "Fast splittable pseudorandom number
    generators", OOPSLA 2014) whose state is a hash of the seed and the sample
    index. Philox would serve too, at five times the operations a number.
    """
    streams = np.fromiter((state.stream for state in states), np.uint64, len(states))
    drawn = np.fromiter((state.num_generated for state in states), np.uint64, len(states))
    return (_mix(streams + (drawn + np.uint64(1)) * _GAMMA) >> np.uint64(11)) * 2.0**-53


def _stream_key(seed: int, sample_index: int) -> int:
    key = _mix(np.array([seed % (1 << 64)], np.uint64) + _GAMMA)
    return int(_mix(key + np.array([sample_index + 1], np.uint64) * _GAMMA)[0])


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's output function, a bijection on 64 bits."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _as_arrays(additive: dict[int, float]) -> tuple[NDArray[np.int64], NDArray[np.float32]] | None:
    if not additive:
        return None
    return np.fromiter(additive, np.int64), np.fromiter(additive.values(), np.float32)
