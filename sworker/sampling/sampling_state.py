"""What the sampler must remember of one sequence between steps. Nothing here is on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from fastdecode.core.errors import RequestError
from fastdecode.core.sequence import SamplingParams
from sworker.sampling.random_numbers import GAMMA, mix, mixed
from sworker.sampling.token_masks import BadWords, packed

_FEW_KEYS = 8  # up to this number, keys are made faster without arrays
_GAMMA = int(GAMMA)
_MASK = (1 << 64) - 1


@dataclass
class History:
    """Tokens as ``logits_processors`` are given them."""

    prompt: tuple[int, ...]
    output: list[int] = field(default_factory=list)


class Grammar(Protocol):
    """What a sequence's text must be, as the sampler sees it."""

    error: RequestError | None  # why it can't be followed; then its mask allows no token

    is_complete: bool  # nothing but EOS may follow

    def observe(self, token_id: int) -> None:
        """A token was appended to the output."""

    def mask(self) -> NDArray[np.int32]:
        """The tokens that may follow (``token_masks``)."""


class SamplingState:
    """One sequence as the sampler sees it: how to sample, how far it has come, which tokens it
    holds.

    Args:
        params: valid for this vocabulary (``validate_for_vocab``).
        seed: with ``sample_index`` and the number of tokens generated, all that random numbers
            depend on.
        prompt_token_ids: what the repetition penalty counts beside the output.
        eos_token_ids: any of them ends the sequence unless ``params.ignore_eos``.
        sample_index: which of the request's n completions this is.
        output_token_ids: tokens generated before a suspension; the next draw continues as if
            there had been none.
        bad_words: the tokens of each word that it must not generate.
    """

    __slots__ = (
        "_additive",
        "_additive_masked",
        "_bad_words",
        "_counts",
        "_observers",
        "allowed",
        "failure",
        "grammar",
        "history",
        "is_adjusted",
        "is_greedy",
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
        bad_words: Sequence[tuple[int, ...]] = (),
    ) -> None:
        self.grammar: Grammar | None = None
        """What its text must be, and has been so far; None: anything."""
        self.allowed: NDArray[np.int32] | None = None
        """``allowed_token_ids`` as a mask; None: all."""
        if params.allowed_token_ids is not None:
            self.allowed = packed(params.allowed_token_ids, vocab_size)
        self.history = History(tuple(prompt_token_ids)) if params.logits_processors else None
        self.failure: RequestError | None = None
        """Why there is no token: what a logits processor has raised, or that the
        grammar can't be followed."""
        self._bad_words = BadWords(bad_words) if any(len(x) > 1 for x in bad_words) else None
        self.params = params
        self.is_greedy = params.temperature == 0 or params.top_k == 1
        """The likeliest token is taken, whatever the random number."""
        self.vocab_size = vocab_size
        self.num_generated = 0
        self.stream = _stream_key(seed, sample_index)
        bias = dict(params.logit_bias)
        bias.update((word[0], -np.inf) for word in bad_words if len(word) == 1)
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
        self._observers: list[Callable[[int], None]] = []
        if self._bad_words is not None:
            self._observers.append(self._bad_words.observe)
        if self.history is not None:
            self._observers.append(self.history.output.append)
        if self._counts is not None:
            self._observers.append(self._counts.add)
        changes = self.history, self.allowed, self._additive, self._counts
        self.is_adjusted = (
            params.min_tokens > 0
            or bool(bad_words)
            or any(change is not None for change in changes)
        )
        """Its logits aren't taken as they are, even without a grammar."""
        for token in output_token_ids:
            self.observe(token)

    def mask(self) -> NDArray[np.int32] | None:
        """Wait for the mask of tokens that it may draw now (``token_masks``). None allows all."""
        if self.grammar is None:
            return self.allowed
        mask = self.grammar.mask()
        self.failure = self.failure or self.grammar.error
        return mask if self.allowed is None else mask & self.allowed

    @property
    def additive(self) -> tuple[NDArray[np.int64], NDArray[np.float32]] | None:
        """Token ids and what to add to their logits now: ``logit_bias``, and
        -inf for ids that ``min_tokens`` and ``bad_words`` mask."""
        additive = (
            self._additive_masked if self.num_generated < self.params.min_tokens else self._additive
        )
        out = [] if self._bad_words is None else self._bad_words.next_out
        if not out:
            return additive
        bias = {} if additive is None else dict(zip(*map(np.ndarray.tolist, additive), strict=True))
        return _as_arrays({**bias, **dict.fromkeys(out, -np.inf)})

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
        for observe in self._observers:
            observe(token_id)
        if self.grammar is not None:
            self.grammar.observe(token_id)


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


def draw_keys(states: Sequence[SamplingState]) -> NDArray[np.int64]:
    """One key a sequence, for the numbers of the draw that it is about to make
    (``random_numbers``). int64 [B], all 64 bits used.

    A function of (seed, sample index, number of tokens generated) alone."""
    if len(states) <= _FEW_KEYS:
        keys = [mixed(x.stream + (x.num_generated + 1) * _GAMMA & _MASK) for x in states]
        return np.array(keys, np.uint64).view(np.int64)
    streams = np.fromiter((state.stream for state in states), np.uint64, len(states))
    drawn = np.fromiter((state.num_generated for state in states), np.uint64, len(states))
    return mix((streams + (drawn + np.uint64(1)) * GAMMA).view(np.int64))


def _stream_key(seed: int, sample_index: int) -> int:
    key = mix((np.array([seed % (1 << 64)], np.uint64) + GAMMA).view(np.int64))
    index = np.array([sample_index + 1], np.uint64)
    return int(mix((key.view(np.uint64) + index * GAMMA).view(np.int64)).view(np.uint64)[0])


def _as_arrays(additive: dict[int, float]) -> tuple[NDArray[np.int64], NDArray[np.float32]] | None:
    if not additive:
        return None
    return np.fromiter(additive, np.int64), np.fromiter(additive.values(), np.float32)
