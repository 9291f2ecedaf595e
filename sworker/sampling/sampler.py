"""Batched sampling: logits of a running batch in, one token a row out.

A row's token depends on that row alone, to the bit: nothing is summed in an order that could
change with the batch. Probabilities become **fixed-point weights** (``exp`` scaled by a power of
two and rounded to whole numbers), so that every sum (the mass, the running sums of top-p, the
groups' sums) is exact, in whatever order a device adds.

top-k, top-p and min-p each end at an edge, a logit, and all tokens down to the highest edge are
kept, with those tied with it. Then kept tokens race: the weight of each is divided by a separate
random number, groups first.

The last bits of logits differ with the way a model is run (chunks, parts, lanes). A draw changes
only where its two best are as close as that, or where a token that wins the race was within that
of the edge less the tie. What was measured, and the alternatives: docs/sampling.md."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastdecode.core.errors import RequestError
from fastdecode.core.sequence import TokenLogprob
from sworker.buffers import Fetched
from sworker.sampling.penalties import adjust, to_device
from sworker.sampling.sampling_state import SamplingState as SamplingState
from sworker.sampling.weights import (
    FEW_ELEMENTS,
    controls_of,
    draw_few,
    draw_truncated,
    draw_whole,
    greatest_of,
    logprobs_of,
)

NON_FINITE = "non_finite_logits"  # the error code of a row that holds NaN or Inf


class SampledToken(NamedTuple):
    """What one row gave: a token, or the error that this row alone met. A tuple,
    since there are many in every step."""

    token_id: int  # -1 if there is an error
    logprob: TokenLogprob | None = None  # None unless the request asked for logprobs
    error: RequestError | None = None


def sampled_token(
    state: SamplingState, token: int, greatest: float, logprobs: list[float] | None
) -> SampledToken:
    """Of one row.

    Args:
        greatest: of its logits; not finite if there is nothing to draw from.
        logprobs: the token's, its rank, then ids of the likeliest, then theirs;
            None: the request doesn't ask for them.
    """
    if state.failure is not None:
        return SampledToken(-1, error=state.failure)
    if not math.isfinite(greatest):
        return SampledToken(-1, error=_row_error(greatest, state.num_generated))
    if logprobs is None:
        return SampledToken(token)
    return SampledToken(token, token_logprob(token, logprobs, state.params.logprobs or 0))


def token_logprob(token: int, numbers: Sequence[float], wanted: int) -> TokenLogprob:
    """From the token's logprob, its rank, then ids of the likeliest, then theirs, of
    which so many are wanted."""
    count = (len(numbers) - 2) // 2
    wanted = min(count, wanted)
    ids, values = numbers[2 : 2 + wanted], numbers[2 + count : 2 + count + wanted]
    # A masked token isn't likely, however few others there are.
    top = tuple((int(i), value) for i, value in zip(ids, values, strict=True) if value > -math.inf)
    return TokenLogprob(token, numbers[0], top, int(numbers[1]))


def _row_error(greatest: float, num_generated: int) -> RequestError:
    if greatest == -math.inf:
        return RequestError(
            f"after {num_generated} generated tokens every token is masked: min_tokens, "
            "allowed_token_ids, bad_words and structured_outputs together forbid all that the "
            "model could say; lower min_tokens, allow more tokens, or give fewer stop_token_ids "
            "or bad_words",
            code="no_token_left",
        )
    return RequestError(
        f"the model's logits hold NaN or Inf after {num_generated} generated tokens: the weights "
        "are damaged or overflow their dtype; try dtype float32 or bfloat16",
        code=NON_FINITE,
    )


SHORT_LIST = 1024
"""Likeliest tokens that a truncated row looks at first: sorting 1,024 of 128k costs a twentieth
of sorting all. A row that needs more (a nearly flat distribution under top-p, or a greater top-k)
is drawn again from the whole row, with the result that drawing from the whole row gives."""

MAX_BLOCK_ELEMENTS = 1 << 24
"""Rows are worked on so many logits at a time: 64 MiB for each temporary."""

MAX_CPU_BLOCK_ELEMENTS = 1 << 20
"""The same on a CPU, where temporaries of 4 MiB stay in its caches."""


class Drawing:
    """Tokens that are drawn on a device, and on their way to the host; see ``draw``.

    Args:
        logits: adjusted, [B, V].
        short_list: likeliest tokens that truncated rows look at.
    """

    def __init__(
        self,
        logits: Tensor,
        states: Sequence[SamplingState],
        short_list: int,
        fetch: Callable[[Tensor], Fetched],
    ) -> None:
        self._logits, self._states, self._fetch = logits, states, fetch
        is_few = logits.numel() <= FEW_ELEMENTS
        greatest, self.tokens = logits.max(dim=-1) if is_few else greatest_of(logits)  # [B], [B]
        """``tokens``: on the device; of a row that met an error, any; -1: the short list
        wasn't enough to draw it."""
        drawn = [row for row, state in enumerate(states) if not state.is_greedy]
        self.is_sure = not drawn or _draw_rows(
            logits, states, drawn, short_list, greatest, self.tokens
        )
        """True if no row can need a second pass: ``tokens`` are what ``result`` will say."""
        # Float64: the tokens [B], the greatest logits [B], then blocks of logprobs, flat.
        packed = torch.stack([self.tokens.double(), greatest.double()]).view(-1)
        asking = [row for row, state in enumerate(states) if state.params.logprobs is not None]
        self._blocks: tuple[tuple[NDArray[np.int64], int], ...] = ()
        """Rows that ask for logprobs [m], and how many numbers each has."""
        if asking:
            found, self._blocks = _logprobs(logits, states, asking, greatest, self.tokens)
            packed = torch.cat([packed, *found])
        self.fetched: Final = fetch(packed)
        """What was drawn, on its way to the host."""

    def result(self) -> list[SampledToken]:
        """Return a token or an error for each row. Wait for the device if there is something to
        wait for; only rows that outran ``SHORT_LIST`` take a second pass."""
        self.fetched.wait()
        numbers, num_rows = self.fetched.host.tolist(), len(self._states)
        tokens, tops = numbers[:num_rows], numbers[num_rows : 2 * num_rows]
        are_plain = not self._blocks and min(tokens) >= 0 and all(map(math.isfinite, tops))
        if are_plain and not [True for state in self._states if state.failure is not None]:
            # Without a call in Python for each.
            return [tuple.__new__(SampledToken, (int(token), None, None)) for token in tokens]
        logprobs: dict[int, list[float]] = {}
        first = 2 * num_rows
        for rows, width in self._blocks:
            for row in rows.tolist():
                logprobs[row] = numbers[first : first + width]
                first += width
        again = [row for row in range(num_rows) if tokens[row] < 0 and math.isfinite(tops[row])]
        results = [
            sampled_token(state, int(token), top, logprobs.get(row))
            for row, (state, token, top) in enumerate(zip(self._states, tokens, tops, strict=True))
        ]
        if again:
            logits, states = self._logits, [self._states[row] for row in again]
            chosen = logits[to_device(np.array(again), logits.device)]
            redone = Drawing(chosen, states, logits.shape[1], self._fetch).result()
            for row, result in zip(again, redone, strict=True):
                results[row] = result
        return results


def draw(
    logits: Tensor,
    states: Sequence[SamplingState],
    fetch: Callable[[Tensor], Fetched] = Fetched,
) -> Drawing:
    """Draw the next token of every row. The order of operations is
    ``SamplingParams``'s. Never waits for the device.

    A row whose logits hold a NaN or +Inf, or nothing but -Inf, gives a
    ``SampledToken`` with an ``error``; no other row notices. The states are
    only read: call ``observe`` with the tokens that are kept.

    Args:
        logits: float32 [B, V], B >= 1, on any device. Bias and penalties are
            applied **in place**.
        fetch: takes what was drawn to the host, in one copy.
    """
    assert logits.dtype == torch.float32 and logits.dim() == 2 and len(states) == logits.shape[0]
    assert {state.vocab_size for state in states} == {logits.shape[1]}
    # A list: a generator would be entered once a row.
    if [True for state in states if state.is_adjusted or state.grammar is not None]:
        adjust(logits, states)
    return Drawing(logits, states, SHORT_LIST, fetch)


def sample(logits: Tensor, states: Sequence[SamplingState]) -> list[SampledToken]:
    """``draw``, and wait: one result a row, in order."""
    return draw(logits, states).result() if states else []


def _draw_rows(
    logits: Tensor,
    states: Sequence[SamplingState],
    drawn: Sequence[int],
    short_list: int,
    greatest: Tensor,
    tokens: Tensor,
) -> bool:
    """Draw rows that aren't greedy.

    Args:
        drawn: Their numbers.
        greatest: [B] greatest logit of each row of the batch.
        tokens: [B] what is drawn is put here.

    Returns:
        True if the short list is enough for each of them, whatever its logits.
    """
    vocab_size, device = logits.shape[1], logits.device
    params = [states[row].params for row in drawn]
    is_truncated = np.array([bool(x.top_k) or x.top_p < 1 for x in params])
    rows_drawn = np.array(drawn, np.int64)
    whole, truncated = rows_drawn[~is_truncated], rows_drawn[is_truncated]
    is_few = device.type == "cpu" and logits.numel() <= FEW_ELEMENTS
    for rows in _blocks(whole, vocab_size, device):
        at = _index(rows, device)
        drawn_from = [states[row] for row in rows.tolist()]
        if is_few and not any(state.params.min_p for state in drawn_from):
            tokens[at] = draw_few(logits[at], greatest[at, None], drawn_from)
        else:
            controls = controls_of(states, rows, device)
            tokens[at] = draw_whole(logits[at], greatest[at, None], controls)
    for rows in _blocks(truncated, vocab_size, device):
        at = _index(rows, device)
        most = max(states[row].params.top_k or vocab_size for row in rows)
        columns = min(short_list, vocab_size, most)  # no more than any row needs
        controls = controls_of(states, rows, device)
        tokens[at] = draw_truncated(logits[at], greatest[at, None], controls, columns)
    if short_list >= vocab_size:
        return True
    return all(0 < states[row].params.top_k <= short_list for row in truncated.tolist())


def _logprobs(
    logits: Tensor,
    states: Sequence[SamplingState],
    asking: Sequence[int],
    greatest: Tensor,
    tokens: Tensor,
) -> tuple[list[Tensor], tuple[tuple[NDArray[np.int64], int], ...]]:
    """Of the rows that ask for them, in blocks, each flat; and which rows each block has,
    and how many columns."""
    vocab_size, pieces, blocks = logits.shape[1], [], []
    for rows in _blocks(np.array(asking, np.int64), vocab_size, logits.device):
        at = _index(rows, logits.device)
        count = min(vocab_size, max(states[row].params.logprobs or 0 for row in rows))
        found = logprobs_of(logits[at], greatest[at, None], tokens[at, None].clamp(min=0), count)
        pieces.append(found.view(-1))
        blocks.append((rows, found.shape[1]))
    return pieces, tuple(blocks)


def _index(rows: NDArray[np.int64], device: torch.device) -> slice | Tensor:
    """Return an index of these ascending rows: a slice, which copies nothing, of neighbours."""
    first, last = int(rows[0]), int(rows[-1])
    if last - first + 1 == len(rows):
        return slice(first, last + 1)
    return to_device(rows, device)


def _blocks(
    rows: NDArray[np.int64], vocab_size: int, device: torch.device
) -> Iterator[NDArray[np.int64]]:
    """Yield the rows of logits that are worked on together."""
    most = MAX_CPU_BLOCK_ELEMENTS if device.type == "cpu" else MAX_BLOCK_ELEMENTS
    size = max(1, most // vocab_size)
    for start in range(0, len(rows), size):
        yield rows[start : start + size]


@torch.inference_mode()
def prompt_logprobs(
    logits_of: Callable[[NDArray[np.int64]], Tensor],
    rows: NDArray[np.int64],
    tokens: NDArray[np.int64],
    count: int,
    vocab_size: int,
    device: torch.device,
) -> Tensor:
    """Return log-probabilities of a prompt's tokens, each after those before it, by the model's
    own distribution. Works on a bounded number of rows at a time.

    Args:
        logits_of: rows of a step [b] → float32 [b, V].
        rows: [P] whose logits.
        tokens: [P] what follows each in its prompt.

    Returns:
        float64 [P, 2 + 2 · count], on the device: see ``logprobs_of``.
    """
    found = []
    for block in _blocks(np.arange(len(rows)), vocab_size, device):
        logits = logits_of(rows[block])
        following = to_device(tokens[block], device)[:, None]
        greatest = logits.amax(dim=1, keepdim=True)
        found.append(logprobs_of(logits, greatest, following, min(count, vocab_size)))
    return torch.cat(found)
